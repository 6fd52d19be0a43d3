"""``F.scaled_dot_product_attention``: masks become numbers, and heads are not repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cudnn_ops.compiler.masks import Visible, visible_of
from cudnn_ops.compiler.match import Bound, OneOf, Op, Var, first_match
from cudnn_ops.compiler.nodes import call_of, number_of, value_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, anything, shape_of

_ALL = slice(None, None, None)


def _is_group_index(index: Any, _: Any) -> bool:
    """``x[:, :, None]``, with more dimensions or not."""
    return (
        isinstance(index, tuple)
        and index[:3] == (_ALL, _ALL, None)
        and all(part in (_ALL, ...) for part in index[3:])
    )


def _is_heads(dim: Any, _: Any) -> bool:
    return dim in (1, -3)


#: Each head of the keys or values, as often as there are queries' heads for it.
_REPEATED = OneOf(
    Op(
        "reshape",
        Op(
            "expand",
            OneOf(Op("getitem", Var("heads"), _is_group_index), Op("unsqueeze", Var("heads"), 2)),
            anything,
        ),
        anything,
    ),
    Op("repeat_interleave", Var("heads"), anything, _is_heads),
)


class Attention(Pattern):
    """Calls of torch's function."""

    name = "attention"
    ends_in = frozenset({"scaled_dot_product_attention"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        call = call_of(node)
        assert call is not None
        query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
        check_dtype(query)
        nodes, heads = [node], []
        for repeated in (key, value):
            bound = unrepeated(repeated)
            heads.append(repeated if bound is None else bound["heads"])
            nodes += [] if bound is None else bound.nodes
        if shape_of(heads[0])[:-1] != shape_of(heads[1])[:-1]:
            nodes, heads = [node], [key, value]
        length, length_kv = shape_of(query)[-2], shape_of(key)[-2]
        visible = Visible(is_causal=bool(call["is_causal"]), rest=mask)
        if mask is not None and not call["is_causal"]:
            visible = visible_of(mask, length, length_kv) or visible
        scale, dropout_p = number_of(call["scale"]), number_of(call["dropout_p"])
        if dropout_p is None or (scale is None) != (call["scale"] is None):
            raise Refusal("scale or dropout_p is no number")
        is_grouped = call["enable_gqa"] or heads[0] is not key
        # The mask is read by the stock nodes, whether the replacement needs it or not.
        parts = (mask, visible.rest, visible.lengths)
        masks = list(dict.fromkeys(part for part in parts if part is not None))

        def build(query: Any, key: Any, value: Any, *masks: Any) -> Any:
            rest = masks[-1] if visible.rest is not None else None
            if rest is not None and visible.rest is not mask:
                rest = rest.contiguous()  # once for all layers, and not in each of them
            return torch.ops.cudnn_ops.sdpa.default(
                query,
                key,
                value,
                rest,
                dropout_p,
                visible.is_causal,
                scale=scale,
                enable_gqa=is_grouped,
                **mask_options(visible, masks, length_kv),
            )

        note = note_of(mask, visible, is_grouped)
        yield Found(nodes, [node], [query, *heads, *masks], build, note)


def note_of(mask: fx.Node | None, visible: Visible, is_grouped: bool) -> str:
    """What became of a mask, and of heads."""
    known = []
    if visible.is_causal:
        known.append("causal")
    if visible.window_size != (-1, -1):
        known.append(f"a window of {visible.window_size}")
    if visible.bottom_right:
        known.append("aligned at the last key")
    if visible.lengths is not None:
        known.append("lengths")
    if visible.rest is not None:
        known.append("a tensor" if visible.rest is mask else "a smaller tensor")
    if mask is None:
        return "grouped heads" if is_grouped else ""
    became = "its mask became " + (", ".join(known) or "nothing")
    return f"{became}; grouped heads" if is_grouped else became


def mask_options(visible: Visible, masks: Sequence[Any], length_kv: Any) -> dict[str, Any]:
    """The operator's arguments for what is known of the mask; the lengths are the last tensor."""
    options: dict[str, Any] = {
        "window_size": visible.window_size,
        "bottom_right": visible.bottom_right,
    }
    if visible.lengths is not None:
        # A length beyond the keys hides none of them.
        options["seq_lens_kv"] = masks[-1].flatten().clamp(0, length_kv).to(torch.int32)
    return options


def check_dtype(query: fx.Node) -> None:
    """CuDNN's attention is one of 16-bit numbers; on a CPU ours has all."""
    value = value_of(query)
    if value is not None and value.is_cuda and value.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(value.dtype).removeprefix("torch.")
        raise Refusal(f"on a GPU attention supports float16 and bfloat16, and this is {dtype}")


def unrepeated(node: fx.Node) -> Bound | None:
    """The heads that were repeated for groups of queries, if nothing else reads the copies."""
    bound = first_match(_REPEATED, node)
    if bound is None or any(len(one.users) > 1 for one in bound.nodes):
        return None
    before, after = shape_of(bound["heads"]), shape_of(node)
    if len(before) != 4 or len(after) != 4:
        return None
    (batch, heads, *rest), (new_batch, new_heads, *new_rest) = before, after
    is_grouped = heads > 0 and new_heads % heads == 0
    return bound if is_grouped and (batch, *rest) == (new_batch, *new_rest) else None
