"""Attention written out: two products, and between them scale, mask, softmax and dropout.

The products are matrix products or einsums, of which :mod:`.einsums` tells the dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.masks import Visible, visible_of
from cudnn_ops.compiler.match import (
    Bound,
    Cast,
    Expression,
    Named,
    Number,
    OneOf,
    Op,
    Text,
    Var,
    first_match,
    match,
)
from cudnn_ops.compiler.nodes import call_of, value_of
from cudnn_ops.compiler.pattern import Found, Pattern, anything, is_tensor, shape_of, tensor
from cudnn_ops.compiler.patterns.attention import check_dtype, mask_options, note_of, unrepeated
from cudnn_ops.compiler.patterns.einsums import (
    RESULTS,
    RESULTS_OF_VALUES,
    SCORES,
    Layout,
    are_in_order,
    layout_of,
    of_matmuls,
)

#: A score this low has no weight beside any other.
_LOW = -1e4
#: Of scores: heads, queries and keys.
_DIMS_OF_HEADS = 3


def _is_last(dim: Any, node: fx.Node) -> bool:
    return dim in (-1, len(shape_of(node)) - 1)


def _is_last_but_one(dim: Any, node: fx.Node) -> bool:
    return dim in (-2, len(shape_of(node)) - 2)


def _transposed(inner: Any) -> Expression:
    return OneOf(
        Op("transpose", inner, _is_last, _is_last_but_one),
        Op("transpose", inner, _is_last_but_one, _is_last),
    )


def _is_float(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.is_floating_point()


def _is_without_last(index: Any, node: fx.Node) -> bool:
    """``x[..., :-1]``, in whatever way."""
    if not isinstance(index, tuple) or index[-1] != slice(None, -1, None):
        return False
    is_whole = ... in index or len(index) == len(shape_of(node))
    return is_whole and all(part in (slice(None, None, None), ...) for part in index[:-1])


_BOTH = Var("query", is_tensor), Var("key", is_tensor)
_PRODUCT = OneOf(Op("matmul", *_BOTH), Op("einsum", Text("scores"), *_BOTH))
_SCALED = Cast(
    OneOf(
        Op("mul", Cast(_PRODUCT), Number("factor")),
        Op("div", Cast(_PRODUCT), Number("divisor")),
        Op("mul", Cast(_PRODUCT), Cast(Var("factors", _is_float))),
        Op("baddbmm", Var("unread", is_tensor), *_BOTH, 0, Number("factor")),
        Cast(_PRODUCT),
    )
)
_MASKED = Cast(
    OneOf(
        Op("add", _SCALED, Cast(Var("bias", _is_float))),
        Op("baddbmm", Var("bias", _is_float), *_BOTH, 1, Number("factor")),
        Op("masked_fill", _SCALED, Var("hidden"), Number("low")),
        Op("where", Var("seen"), _SCALED, Number("low")),
        Op("where", Var("hidden"), Number("low"), _SCALED),
        Op(
            "div", Op("add", Cast(_PRODUCT), Cast(Var("bias", _is_float))), Number("divisor of all")
        ),
        _SCALED,
    )
)
_SINKS = Op("expand", Named("column", Op("reshape", Var("sinks"), anything)), anything)
_LARGEST = OneOf(
    Op("getitem", Op("max", Var("logits"), _is_last, True), 0),
    Op("amax", Var("logits"), _is_last, True),
)


def _softmax(logits: Expression) -> Expression:
    """With or without the subtraction that it does by itself."""
    shifted = OneOf(Op("sub", Named("logits", logits), _LARGEST), logits)
    return Cast(Op("softmax", Cast(shifted), _is_last, dtype=anything, _stacklevel=anything))


_WEIGHTS = OneOf(
    Cast(Op("getitem", _softmax(Op("cat", [_MASKED, Cast(_SINKS)], _is_last)), _is_without_last)),
    _softmax(_MASKED),
)
_DROPPED = OneOf(
    Op("dropout", _WEIGHTS, Number("dropout"), lambda training, _: training is True),
    Op("dropout", _WEIGHTS, anything, False),
    Op("dropout", _WEIGHTS, Number(value=0.0), anything),
    _WEIGHTS,
)
_ATTENTION = OneOf(
    Op("matmul", Cast(_DROPPED), Var("value", is_tensor)),
    Op("einsum", Text("results"), Cast(_DROPPED), Var("value", is_tensor)),
    Op("einsum", Text("results of values"), Var("value", is_tensor), Cast(_DROPPED)),
    # Channels before rows, as in images.
    Op("matmul", Var("value", is_tensor), Named("turned", _transposed(Cast(_DROPPED)))),
)


_TRANSPOSED_KEYS = _transposed(Var("keys"))


class AttentionByMatmul(Pattern):
    """What transformers calls "eager" attention, and its like."""

    name = "attention_by_matmul"
    ends_in = frozenset({"matmul", "einsum"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for bound in match(_ATTENTION, node):
            found = _found(node, bound)
            if found is not None:
                yield found
                return


class _Operands(NamedTuple):
    """Queries, keys and values, before what attention does to them by itself.

    Attributes:
        nodes: what does it in the graph.
        is_grouped: whether keys and values have fewer heads.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    layout: Layout
    nodes: tuple[fx.Node, ...] = ()
    is_grouped: bool = False


def _found(node: fx.Node, bound: Bound) -> Found | None:
    operands = _operands(node, bound)
    low = bound.get("low", -math.inf)
    if operands is None or low > _LOW or 0 in _divisors(bound):
        return None
    query, key, value, layout, passed, is_grouped = operands
    check_dtype(query)
    others = {name: bound[name] for name in ("factors", "sinks", "unread") if name in bound}
    mask, is_bias = _mask_of(bound)
    is_of_scores = mask is not None or "factors" in others or "sinks" in others
    if is_of_scores and not layout.are_scores_in_order:
        return None
    if "factors" in others and not _are_of_rows(others["factors"], query):
        return None
    if "sinks" in others and not _are_of_heads(others["sinks"], bound["column"], query):
        return None
    length, length_kv = shape_of(query)[layout.query[-2]], shape_of(value)[layout.value[-2]]
    visible = Visible(rest=mask)
    if mask is not None:
        known = visible_of(mask, length, length_kv, is_hidden="hidden" in bound)
        # Lengths are of the batch, of which a mask may have several dimensions.
        visible = known if known and not (layout.batches and known.lengths) else visible
    if layout.batches and not (others.keys() <= {"unread"} and _has_batches(visible.rest, layout)):
        return None
    parts = (mask, visible.rest, visible.lengths)
    masks = list(dict.fromkeys(part for part in parts if part is not None))
    scale = bound.get("factor", 1.0) / math.prod(_divisors(bound))
    dropout_p = float(bound.get("dropout", 0.0))
    has_rest, dtype = visible.rest is not None, tensor(query).dtype
    hides, count = "hidden" in bound, len(masks)
    batches = len(shape_of(visible.rest)) - _DIMS_OF_HEADS if visible.rest is not None else 0

    def build(query: Any, key: Any, value: Any, *given: Any) -> Any:
        named = dict(zip(others, given[count:], strict=True))
        if "factors" in named:
            query = (query * named["factors"]).to(dtype)
        rest: Any = given[count - 1] if has_rest else None
        if batches > 1:
            rest = rest.flatten(0, batches - 1)
        if has_rest and not is_bias:
            rest = _as_bias(rest, hides, low, dtype)
        elif has_rest and "divisor of all" in bound:
            rest = rest / bound["divisor of all"]
        result = torch.ops.cudnn_ops.sdpa.default(
            *layout.laid_out(query, key, value),
            rest,
            dropout_p,
            visible.is_causal,
            scale=scale,
            enable_gqa=is_grouped,
            sinks=named.get("sinks"),
            **mask_options(visible, given[:count], length_kv),
        )
        return layout.of_result(result)

    note = note_of(mask, visible, is_grouped)
    nodes = [*bound.nodes, *passed]
    return Found(nodes, [node], [query, key, value, *masks, *others.values()], build, note)


def _divisors(bound: Bound) -> list[float]:
    return [bound[name] for name in ("divisor", "divisor of all") if name in bound]


def _operands(node: fx.Node, bound: Bound) -> _Operands | None:
    layout = _layout(node, bound)
    if layout is None:
        return None
    found = _Operands(bound["query"], bound["key"], bound["value"], layout)
    if layout.is_key_first:
        found = found._replace(query=found.key, key=found.query)
    return _narrow(_grouped(_untransposed(found)))


def _layout(node: fx.Node, bound: Bound) -> Layout | None:
    scores, results = bound.get("scores"), bound.get("results", bound.get("results of values"))
    operands = [shape_of(bound[name]) for name in ("query", "key")]
    product = call_of(node)
    assert product is not None
    others = [shape_of(product[name]) for name in ("input", "other")]
    if scores is None and results is None and "turned" not in bound:
        have_same = len({len(sizes) for sizes in (*operands, *others)}) == 1
        return of_matmuls(operands[0]) if have_same else None
    if "turned" in bound:
        *batch, keys, rows = others[1]
        others[1], results = (*batch, rows, keys), RESULTS_OF_VALUES
    is_value_first = "turned" in bound or "results of values" in bound
    return layout_of(
        scores or SCORES, operands, results or RESULTS, others, weights=int(is_value_first)
    )


def _untransposed(found: _Operands) -> _Operands:
    """Keys that nothing but the product reads transposed."""
    plain = first_match(_TRANSPOSED_KEYS, found.key) if len(found.key.users) == 1 else None
    if plain is None:
        return found
    *rest, one, other = range(len(shape_of(found.key)))
    swapped = (*rest, other, one)
    layout = found.layout._replace(key=tuple(swapped[dim] for dim in found.layout.key))
    return found._replace(key=plain["keys"], layout=layout, nodes=(*found.nodes, *plain.nodes))


def _grouped(found: _Operands) -> _Operands:
    """Heads that are repeated for groups of queries, where both keys and values are."""
    if not are_in_order(found.layout.key) or not are_in_order(found.layout.value):
        return found
    heads = [unrepeated(one) for one in (found.key, found.value)]
    if heads[0] is None or heads[1] is None:
        return found
    return found._replace(
        key=heads[0]["heads"],
        value=heads[1]["heads"],
        nodes=(*found.nodes, *heads[0].nodes, *heads[1].nodes),
        is_grouped=True,
    )


def _narrow(found: _Operands) -> _Operands:
    """Queries and keys of 16 bits that were converted for the product, which attention does too."""
    dtype, sources = tensor(found.value).dtype, []
    for node in (found.query, found.key):
        call = call_of(node)
        if call is None or call.name != "cast" or len(node.users) > 1:
            return found
        if tensor(node).dtype != torch.float32 or tensor(call["input"]).dtype != dtype:
            return found
        sources.append(call["input"])
    return found._replace(
        query=sources[0], key=sources[1], nodes=(*found.nodes, found.query, found.key)
    )


def _has_batches(mask: fx.Node | None, layout: Layout) -> bool:
    """Whether a mask has all of the dimensions that are the batch, or none."""
    batches = shape_of(mask)[:-_DIMS_OF_HEADS] if mask is not None else ()
    return batches == layout.batches or all(size == 1 for size in batches)


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


def _are_of_heads(sinks: fx.Node, column: fx.Node, query: fx.Node) -> bool:
    """Whether there is one for each head, in a column of these."""
    heads = shape_of(query)[1]
    return shape_of(sinks) == (heads,) and shape_of(column) == (1, heads, 1, 1)


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
