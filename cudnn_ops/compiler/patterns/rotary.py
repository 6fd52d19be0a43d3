"""Rotary embedding: ``x * cos + rotate(x) * sin``, of halves or of neighbouring numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        last, source = _last_index(index, node), value_of(node.args[0])
        if not isinstance(last, slice) or last.step not in (None, 1) or source is None:
            return False
        size = source.shape[-1]
        half = size // 2
        start, stop = _number(last.start), _number(last.stop)
        starts, stops = ((None, 0, -size), (half, -half)), ((half, -half), (None, size))
        return start in starts[which] and stop in stops[which]

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


def _neighbour(which: int) -> Cast:
    """``x[..., ::2]`` and ``x[..., 1::2]``, or what the last of dimensions (-1, 2) has there."""

    def is_slice(index: Any, node: fx.Node) -> bool:
        last = _last_index(index, node)
        return isinstance(last, slice) and (last.start or 0, last.stop, last.step) == (
            which,
            None,
            2,
        )

    def is_one(index: Any, node: fx.Node) -> bool:
        last = _last_index(index, node)
        return type(last) is int and last in (which, which - 2)

    def are_pairs(_: Any, node: fx.Node) -> bool:
        value, half = value_of(node), _half_size(node)
        return value is not None and half is not None and value.shape[-2:] == (half, 2)

    pairs = OneOf(Op("reshape", _X, are_pairs), Op("unflatten", _X, anything, are_pairs))
    return Cast(
        OneOf(
            Op("getitem", _X, is_slice),
            Op("getitem", pairs, is_one),
            Op("getitem", Op("unbind", pairs, is_last_dim), which),
        )
    )


def _last_index(index: Any, node: fx.Node) -> Any:
    """What an index says of the last dimension, if it takes all of the others."""
    source = value_of(node.args[0])
    if not isinstance(index, tuple) or source is None:
        return None
    *before, last = index
    is_last_dim = ... in before or len(before) == source.dim() - 1
    whole = all(part in (..., slice(None, None, None)) for part in before)
    return last if whole and is_last_dim else None


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


def _side_by_side(first: Any, second: Any) -> Op:
    return Op("cat", [first, second], _of_two)


def _by_turns(first: Any, second: Any) -> OneOf:
    """``stack([first, second], -1).flatten(-2)``."""

    def is_behind_all(dim: Any, node: fx.Node) -> bool:
        value = value_of(node)
        return value is not None and dim in (-1, value.dim() - 1)

    def is_last_but_one(dim: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        return source is not None and dim in (-2, source.dim() - 2)

    def joins_two(_: Any, node: fx.Node) -> bool:
        value, source = value_of(node), value_of(node.args[0])
        return (
            value is not None
            and source is not None
            and value.shape == (*source.shape[:-2], 2 * source.shape[-2])
        )

    both = Cast(Op("stack", [first, second], is_behind_all))
    return OneOf(Op("flatten", both, is_last_but_one), Op("reshape", both, joins_two))


def _whole(turned: Any) -> Cast:
    return Cast(Op("add", Cast(Op("mul", _X, _COS)), Cast(Op("mul", Cast(turned), _SIN))))


def _by_parts(join: Any, part: Callable[[int], Any], first: str, second: str) -> Cast:
    """``join(x1 * cos first x2 * sin, x2 * cos second x1 * sin)``."""
    parts = []
    for which, name in enumerate((first, second)):
        by_cos, by_sin = (
            Cast(Op("mul", part(i), angle)) for i, angle in ((which, _COS), (1 - which, _SIN))
        )
        parts.append(Cast(Op(name, by_cos, by_sin)))
    return Cast(join(*parts))


class _Spelling(NamedTuple):
    """One of the ways to write it.

    Attributes:
        expression: of ``x``, ``cos`` and ``sin``.
        is_half: whether there is one angle for each pair.
        is_back: whether it turns the other way.
        is_interleaved: whether neighbours are pairs.
    """

    expression: Any
    is_half: bool = False
    is_back: bool = False
    is_interleaved: bool = False


_SPELLINGS = tuple(
    spelling
    for join, part, is_interleaved in (
        (_side_by_side, _half, False),
        (_by_turns, _neighbour, True),
    )
    for spelling in (
        _Spelling(_whole(join(_negated(part(1)), part(0))), False, False, is_interleaved),
        _Spelling(_whole(join(part(1), _negated(part(0)))), False, True, is_interleaved),
        _Spelling(_by_parts(join, part, "sub", "add"), True, False, is_interleaved),
        _Spelling(_by_parts(join, part, "add", "sub"), True, True, is_interleaved),
    )
)


class Rotary(Pattern):
    """Of queries or keys, with the angles of each token for all heads."""

    name = "rotary"
    ends_in = frozenset({"add", "cast", "cat", "flatten", "reshape"})

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
                build = _build(spelling, heads, ranks, int(shape_of(x)[-1]))
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


def _build(spelling: _Spelling, heads: int, ranks: Sequence[int], size: int) -> Any:
    dims = ranks[0]

    def rows(angle: Any, rank: int) -> Any:
        """[batch or 1, tokens, size]."""
        for _ in range(dims - rank):
            angle = angle.unsqueeze(0)
        angle = angle.squeeze(heads)
        if dims == 3:
            angle = angle.unsqueeze(0)
        return angle

    def build(x: Any, cos: Any, sin: Any) -> Any:
        cos, sin = rows(cos, ranks[1]), rows(sin, ranks[2])
        if spelling.is_back:
            sin = -sin
        if dims == 3:
            x = x.unsqueeze(0)
        is_behind_tokens = heads == dims - 2
        if is_behind_tokens:
            x = x.transpose(1, 2)
        options: dict[str, Any] = {"interleaved": True} if spelling.is_interleaved else {}
        if spelling.is_half:
            options["rotary_dim"] = size
        rotary = torch.ops.cudnn_ops.rotary_embedding
        out = rotary.options(x, cos, sin, **options) if options else rotary.default(x, cos, sin)
        if is_behind_tokens:
            out = out.transpose(1, 2)
        return out.squeeze(0) if dims == 3 else out

    return build
