"""``nn.MultiheadAttention``, a single call in Dynamo's graphs: without its copies.

Torch's function copies queries, keys and values to separate tensors before it attends, and has the
sequence before the batch. Ours reads them where the projection leaves them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from cudnn_ops.compiler.masks import Visible, visible_of
from cudnn_ops.compiler.nodes import Call, call_of, number_of
from cudnn_ops.compiler.pattern import Found, Inputs, Pattern, Refusal, shape_of, tensor
from cudnn_ops.compiler.patterns.attention import mask_options, note_of

_INPUTS = ("query", "key", "value")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_MASKS = ("rest", "key_padding_mask")
#: Masks are read by torch's function, whether ours needs them or not.
_TENSORS = (
    *(*_INPUTS, "in_proj_weight", *_SEPARATE, "in_proj_bias"),
    *("out_proj_weight", "out_proj_bias", "attn_mask", "key_padding_mask"),
)


class MultiHeadAttention(Pattern):
    """``F.multi_head_attention_forward`` by its projections and our attention.

    Its first result; the second one, the weights, must be asked for by nobody.
    """

    name = "multi_head_attention"
    ends_in = frozenset({"getitem"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        item = call_of(node)
        assert item is not None
        source = item["input"]
        call = call_of(source) if isinstance(source, fx.Node) else None
        if call is None or call.name != "multi_head_attention" or item["index"] != 0:
            return
        _check(call)
        dropout_p, visible = _dropout_of(call), _visible_of(call)
        tensors = {name: call[name] for name in _TENSORS}
        inputs = Inputs({**tensors, "rest": visible.rest, "lengths": visible.lengths})
        heads, length_kv = call["num_heads"], shape_of(call["key"])[0]
        width, is_separate = call["embed_dim_to_check"], call["use_separate_proj_weight"]
        # One product for all that is projected of one input, where the weights are one tensor.
        same = groupby(_INPUTS, lambda name: name if is_separate else call[name])
        together = [list(names) for _, names in same]
        masks = {name: one for name, one in inputs.tensors.items() if name in _MASKS}
        kinds = {name: tensor(one) for name, one in masks.items()}
        dtype = tensor(call["query"]).dtype

        def build(*given: Any) -> Any:
            named = inputs.named(given)
            if is_separate:
                named.pop("in_proj_weight", None)  # WavLM gives an empty one
            parts = [part for names in together for part in _projected(named, names, width, heads)]
            out = torch.ops.cudnn_ops.sdpa.default(
                *parts,
                _as_one(named, kinds, heads, dtype),
                dropout_p,
                visible.is_causal,
                **mask_options(visible, [named.get("lengths")], length_kv),
            )
            merged = out.transpose(1, 2).flatten(2)
            out = F.linear(merged, named["out_proj_weight"], named.get("out_proj_bias"))
            return out.transpose(0, 1)

        # Dynamo has nodes for the weights too, whether anything reads them in the end or not.
        weights = [user for user in source.users if user is not node]
        unread = [one for user in weights for one in _without_readers(user)]
        note = note_of(call["attn_mask"], visible, False)
        yield Found((source, *unread, node), [node], inputs.nodes, build, note)


def _without_readers(node: fx.Node) -> list[fx.Node]:
    """A node and all that is computed of it, where nothing comes of that; else nothing."""
    call = call_of(node)
    if call is None or call.in_place:
        return []
    behind = [_without_readers(user) for user in node.users]
    return [node, *(one for nodes in behind for one in nodes)] if all(behind) else []


def heads_of(projected: Any, parts: int, heads: int) -> list[Any]:
    """Each part of [B, S, parts * E] as [B, heads, S, D], views of it."""
    split = projected.unflatten(-1, (parts, heads, -1)).unbind(2)
    return [split[part].transpose(1, 2) for part in range(parts)]


def _projected(named: dict[str, Any], names: Sequence[str], width: int, heads: int) -> list[Any]:
    """Inputs that are one tensor, projected: each as [B, heads, S, D], views of one result."""
    x = named[names[0]].transpose(0, 1)  # [B, S, E]
    place, count = _INPUTS.index(names[0]), len(names)
    weight: Any = named.get("in_proj_weight")
    bias = named.get("in_proj_bias")
    if count < len(_INPUTS):
        rows = slice(place * width, (place + count) * width)
        weight = named[_SEPARATE[place]] if weight is None else weight[rows]
        bias = None if bias is None else bias[rows]
    return heads_of(F.linear(x, weight, bias), count, heads)


def _visible_of(call: Call) -> Visible:
    """What of the keys is seen by ``attn_mask``."""
    mask = call["attn_mask"]
    if mask is None:
        return Visible()
    # With this hint torch's function ignores the mask, unless it has another one or gives weights.
    if call["is_causal"] and call["key_padding_mask"] is None and not call["need_weights"]:
        return Visible(is_causal=True)
    lengths = shape_of(call["query"])[0], shape_of(call["key"])[0]
    is_known = len(shape_of(mask)) == 2
    hides = tensor(mask).dtype == torch.bool
    visible = visible_of(mask, *lengths, is_hidden=hides) if is_known else None
    return visible or Visible(rest=mask)


def _as_one(
    named: Mapping[str, Any], kinds: Mapping[str, Tensor], heads: int, dtype: torch.dtype
) -> Any:
    """Masks of which True hides a key, or that are added to the scores, as attention takes them."""
    masks = []
    for name, kind in kinds.items():
        mask = named[name]
        if name == "key_padding_mask":
            mask = mask[:, None, None]  # [B, S]
        elif kind.dim() == 3:
            mask = mask.unflatten(0, (-1, heads))  # [B * heads, L, S]
        masks.append((mask, kind.dtype == torch.bool))
    if not masks:
        return None
    if all(is_hidden for _, is_hidden in masks):
        return ~functools.reduce(operator.or_, (mask for mask, _ in masks))
    added = (
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf) if is_hidden else mask
        for mask, is_hidden in masks
    )
    return functools.reduce(operator.add, added)


def _dropout_of(call: Call) -> float:
    if not call["training"]:
        return 0.0
    dropout_p = number_of(call["dropout_p"])
    if dropout_p is None:
        raise Refusal("dropout_p is no number")
    return float(dropout_p)


def _check(call: Call) -> None:
    """What torch's function has beyond attention is left to it."""
    if len(shape_of(call["query"])) != 3:
        raise Refusal("there is no batch dimension")
    given = ("bias_k", "bias_v", "static_k", "static_v")
    if call["add_zero_attn"] or any(call[name] is not None for name in given):
        raise Refusal("keys or values are added or given")
    if call["embed_dim_to_check"] != shape_of(call["query"])[-1]:
        raise Refusal("embed_dim is not the size of the queries")
