"""Rotary embedding, in the order of halves: ``x * cos + rotate_half(x) * sin``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.nodes import value_of
from cudnn_ops.compiler.pattern import (
    Found,
    Pattern,
    Refusal,
    anything,
    is_last_dim,
    is_tensor,
    shape_of,
    tensor,
)

_X = Cast(Var("x", is_tensor))


def _of_two(tensors: Any, node: fx.Node) -> bool:
    """For ``cat``: whether its dimension is the last one."""
    value = value_of(node)
    return value is not None and tensors in (-1, value.dim() - 1)


def _half(which: int) -> Cast:
    """``x[..., :n]`` and ``x[..., n:]``, or what ``chunk``, ``split`` and ``unbind`` give."""

    def is_slice(index: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        if not isinstance(index, tuple) or source is None:
            return False
        *before, last = index
        if not isinstance(last, slice) or last.step not in (None, 1):
            return False
        whole = all(part in (..., slice(None, None, None)) for part in before)
        is_last_dim = ... in before or len(before) == source.dim() - 1
        size = source.shape[-1]
        half = size // 2
        start, stop = _number(last.start), _number(last.stop)
        starts, stops = ((None, 0, -size), (half, -half)), ((half, -half), (None, size))
        return whole and is_last_dim and start in starts[which] and stop in stops[which]

    def is_half(size: Any, node: fx.Node) -> bool:
        half = _half_size(node)
        sizes = list(size) if isinstance(size, (tuple, list)) else [size]
        return half is not None and [_number(one) for one in sizes] in ([half], [half, half])

    def is_start(start: Any, node: fx.Node) -> bool:
        half = _half_size(node)
        return half is not None and _number(start) == which * half

    def are_halves(_: Any, node: fx.Node) -> bool:
        value, half = value_of(node), _half_size(node)
        return value is not None and half is not None and value.shape[-2:] == (2, half)

    def is_dim_of_halves(dim: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        return source is not None and dim in (-2, source.dim() - 2)

    halves = OneOf(Op("reshape", _X, are_halves), Op("unflatten", _X, anything, are_halves))
    pairs = OneOf(
        Op("chunk", _X, 2, is_last_dim),
        Op("split", _X, is_half, is_last_dim),
        Op("unbind", halves, is_dim_of_halves),
    )
    return Cast(
        OneOf(
            Op("getitem", _X, is_slice),
            Op("getitem", pairs, which),
            Op("narrow", _X, is_last_dim, is_start, is_half),
        )
    )


def _half_size(node: fx.Node) -> Any:
    """Half of the last dimension of what a node reads."""
    source = value_of(node.args[0])
    return None if source is None else source.shape[-1] // 2


def _number(value: Any) -> Any:
    """A size may be a node, where it is dynamic."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _negated(one: Any) -> OneOf:
    return OneOf(Op("neg", one), Op("mul", one, Number(value=-1)))


_COS, _SIN = Cast(Var("cos", is_tensor)), Cast(Var("sin", is_tensor))


def _whole(first: Any, second: Any) -> Cast:
    turned = Cast(Op("cat", [first, second], _of_two))
    return Cast(Op("add", Cast(Op("mul", _X, _COS)), Cast(Op("mul", turned, _SIN))))


def _product(which: int, angle: Any) -> Cast:
    return Cast(Op("mul", _half(which), angle))


def _by_halves(first: str, second: str) -> Cast:
    """``cat(x1 * cos first x2 * sin, x2 * cos second x1 * sin)``."""
    halves = [
        Cast(Op(name, _product(which, _COS), _product(1 - which, _SIN)))
        for which, name in enumerate((first, second))
    ]
    return Cast(Op("cat", halves, _of_two))


class _Spelling(NamedTuple):
    """One of the ways to write it.

    Attributes:
        expression: of ``x``, ``cos`` and ``sin``.
        is_half: whether the angles are those of one half.
        is_back: whether it turns the other way.
    """

    expression: Any
    is_half: bool = False
    is_back: bool = False


_SPELLINGS = (
    _Spelling(_whole(_negated(_half(1)), _half(0))),
    _Spelling(_whole(_half(1), _negated(_half(0))), is_back=True),
    _Spelling(_by_halves("sub", "add"), is_half=True),
    _Spelling(_by_halves("add", "sub"), is_half=True, is_back=True),
)


class Rotary(Pattern):
    """Of queries or keys, with the angles of each token for all heads."""

    name = "rotary"
    ends_in = frozenset({"add", "cast", "cat"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for spelling in _SPELLINGS:
            for bound in match(spelling.expression, node):
                x, cos, sin = bound["x"], bound["cos"], bound["sin"]
                heads = _heads_of(shape_of(x), spelling, shape_of(cos), shape_of(sin))
                if heads is None:
                    continue
                if any(tensor(one).requires_grad for one in (cos, sin)):
                    raise Refusal("cos or sin requires a gradient")
                ranks = [len(shape_of(one)) for one in (x, cos, sin)]
                build = _build(spelling, heads, ranks)
                yield Found(list(bound.nodes), [node], [x, cos, sin], build)


def _heads_of(shape: tuple[Any, ...], spelling: _Spelling, *angles: tuple[Any, ...]) -> int | None:
    """The dimension of heads; None where the angles are not those of tokens.

    Of [batch, heads, tokens, size], in either order of the middle two; there may be no batch.
    """
    if len(shape) not in (3, 4) or shape[-1] % 2 != 0:
        return None
    size = shape[-1] // 2 if spelling.is_half else shape[-1]
    for heads in (len(shape) - 3, len(shape) - 2):
        expected = [*shape[:-1], size]
        expected[heads] = 1
        if all(_fits(_padded(angle, len(shape)), expected) for angle in angles):
            return heads
    return None


def _padded(angle: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    return (*(1 for _ in range(dims - len(angle))), *angle)


def _fits(angle: tuple[Any, ...], expected: list[Any]) -> bool:
    """Whether only a batch in front of heads and tokens is broadcast."""
    if len(angle) != len(expected):
        return False
    has_batch = len(expected) == 4
    return list(angle[has_batch:]) == expected[has_batch:] and (
        not has_batch or angle[0] in (1, expected[0])
    )


def _build(spelling: _Spelling, heads: int, ranks: Sequence[int]) -> Any:
    dims = ranks[0]

    def rows(angle: Any, rank: int) -> Any:
        """[batch or 1, tokens, size]."""
        for _ in range(dims - rank):
            angle = angle.unsqueeze(0)
        angle = angle.squeeze(heads)
        if dims == 3:
            angle = angle.unsqueeze(0)
        return torch.cat([angle, angle], -1) if spelling.is_half else angle

    def build(x: Any, cos: Any, sin: Any) -> Any:
        cos, sin = rows(cos, ranks[1]), rows(sin, ranks[2])
        if spelling.is_back:
            sin = -sin
        if dims == 3:
            x = x.unsqueeze(0)
        is_behind_tokens = heads == dims - 2
        if is_behind_tokens:
            x = x.transpose(1, 2)
        out = torch.ops.cudnn_ops.rotary_embedding.default(x, cos, sin)
        if is_behind_tokens:
            out = out.transpose(1, 2)
        return out.squeeze(0) if dims == 3 else out

    return build
