"""Attention written out: two products, and between them scale, mask, softmax and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.masks import Visible, visible_of
from cudnn_ops.compiler.match import Bound, Cast, Number, OneOf, Op, Var, first_match, match
from cudnn_ops.compiler.nodes import value_of
from cudnn_ops.compiler.pattern import Found, Pattern, anything, is_tensor, shape_of, tensor
from cudnn_ops.compiler.patterns.attention import check_dtype, mask_options, note_of, unrepeated

#: A score this low has no weight beside any other.
_LOW = -1e4


def _is_last(dim: Any, node: fx.Node) -> bool:
    return dim in (-1, len(shape_of(node)) - 1)


def _is_float(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.is_floating_point()


_PRODUCT = Op("matmul", Var("query", is_tensor), Var("key", is_tensor))
_SCALED = Cast(
    OneOf(
        Op("mul", Cast(_PRODUCT), Number("factor")),
        Op("div", Cast(_PRODUCT), Number("divisor")),
        Op("mul", Cast(_PRODUCT), Cast(Var("factors", _is_float))),
        Cast(_PRODUCT),
    )
)
_MASKED = Cast(
    OneOf(
        Op("add", _SCALED, Cast(Var("bias", _is_float))),
        Op("masked_fill", _SCALED, Var("hidden"), Number("low")),
        Op("where", Var("seen"), _SCALED, Number("low")),
        Op("where", Var("hidden"), Number("low"), _SCALED),
        _SCALED,
    )
)
_WEIGHTS = Cast(Op("softmax", _MASKED, _is_last, dtype=anything, _stacklevel=anything))
_DROPPED = OneOf(
    Op("dropout", _WEIGHTS, Number("dropout"), lambda training, _: training is True),
    Op("dropout", _WEIGHTS, anything, False),
    Op("dropout", _WEIGHTS, Number(value=0.0), anything),
    _WEIGHTS,
)
_ATTENTION = Op("matmul", Cast(_DROPPED), Var("value", is_tensor))


def _is_last_but_one(dim: Any, node: fx.Node) -> bool:
    return dim in (-2, len(shape_of(node)) - 2)


_TRANSPOSED = OneOf(
    Op("transpose", Var("keys"), _is_last, _is_last_but_one),
    Op("transpose", Var("keys"), _is_last_but_one, _is_last),
)


class AttentionByMatmul(Pattern):
    """What transformers calls "eager" attention, and its like."""

    name = "attention_by_matmul"
    ends_in = frozenset({"matmul"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for bound in match(_ATTENTION, node):
            found = _found(node, bound)
            if found is not None:
                yield found
                return


def _found(node: fx.Node, bound: Bound) -> Found | None:
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    sizes = [shape_of(one) for one in (query, key, value)]
    if any(len(size) not in (3, 4) for size in sizes):
        return None
    low = bound.get("low", -math.inf)
    if low > _LOW or bound.get("divisor") == 0:
        return None
    check_dtype(query)
    factors = [bound["factors"]] if "factors" in bound else []
    if not all(_are_of_rows(one, query) for one in factors):
        return None
    nodes = list(bound.nodes)
    is_transposed = False
    # Heads that are repeated for groups of queries, where both keys and values are.
    if (plain := first_match(_TRANSPOSED, key)) is not None and len(key.users) == 1:
        heads = [unrepeated(one) for one in (plain["keys"], value)]
        if all(one is not None for one in heads):
            key, value = (one["heads"] for one in heads if one is not None)
            nodes += [*plain.nodes, *(n for one in heads if one is not None for n in one.nodes)]
            is_transposed = True
    mask, is_bias = _mask_of(bound)
    visible = Visible(rest=mask)
    if mask is not None:
        lengths = sizes[0][-2], sizes[2][-2]
        visible = visible_of(mask, *lengths, is_hidden="hidden" in bound) or visible
    parts = (mask, visible.rest, visible.lengths)
    masks = list(dict.fromkeys(part for part in parts if part is not None))
    scale = 1 / bound["divisor"] if "divisor" in bound else bound.get("factor", 1.0)
    dropout_p = float(bound.get("dropout", 0.0))
    has_rest, dtype = visible.rest is not None, tensor(query).dtype
    hides = "hidden" in bound

    def build(query: Any, key: Any, value: Any, *given: Any) -> Any:
        if factors:
            query = (query * given[0]).to(dtype)
        masks = given[len(factors) :]
        rest = masks[-1] if has_rest else None
        if has_rest and not is_bias:
            rest = _as_bias(rest, hides, low, dtype)
        return torch.ops.cudnn_ops.sdpa.default(
            query,
            key if is_transposed else key.transpose(-2, -1),
            value,
            rest,
            dropout_p,
            visible.is_causal,
            scale=scale,
            enable_gqa=is_transposed,
            **mask_options(visible, masks, sizes[2][-2]),
        )

    note = note_of(mask, visible, is_transposed)
    return Found(nodes, [node], [query, key, value, *factors, *masks], build, note)


def _are_of_rows(factors: fx.Node, query: fx.Node) -> bool:
    """Whether scores times these, such as one of each head (Swin V2), are queries times these."""
    sizes, rows = shape_of(factors), shape_of(query)
    return (
        1 < len(sizes) <= len(rows)
        and statically_known_true(sizes[-1] == 1)
        and all(
            statically_known_true(size == 1) or statically_known_true(size == row)
            for size, row in zip(reversed(sizes), reversed(rows), strict=False)
        )
    )


def _mask_of(bound: Bound) -> tuple[fx.Node | None, bool]:
    """The mask, and whether it is added to the scores."""
    for name in ("bias", "hidden", "seen"):
        if name in bound:
            return bound[name], name == "bias"
    return None, False


def _as_bias(mask: Any, hides: bool, low: float, dtype: torch.dtype) -> Any:
    """A mask that fills scores with ``low``, as what is added to them, or as what is seen.

    Where a query sees no key, equal scores give equal weights, and so must large sums.
    """
    if low == -math.inf:
        return ~mask if hides else mask
    wide = torch.float32 if dtype == torch.float16 else dtype
    hidden = mask if hides else ~mask
    return hidden.to(wide) * max(low, torch.finfo(wide).min)
