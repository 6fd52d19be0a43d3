"""The ways to write a rotary embedding, and what each is of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import (
    Bound,
    Cast,
    Expression,
    Number,
    OneOf,
    Op,
    Var,
    match,
    match_all,
)
from cudnn_ops.compiler.nodes import call_of, is_same, value_of
from cudnn_ops.compiler.pattern import anything, is_last_dim, is_tensor, shape_of

_X = Cast(Var("x", is_tensor))


def _of_two(tensors: Any, node: fx.Node) -> bool:
    """For ``cat``: whether its dimension is the last one."""
    value = value_of(node)
    return value is not None and tensors in (-1, value.dim() - 1)


class _Stretch(Expression):
    """A part of the last dimension, by a slice, ``narrow``, ``split`` or ``chunk``.

    ``where`` is given its first place, its size, and the size of all.
    """

    def __init__(self, whole: Expression, where: Callable[[Any, Any, Any], bool]):
        self.whole, self.where = whole, where

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        found = stretch(value) if isinstance(value, fx.Node) else None
        if found is None:
            return
        source, start, nodes = found
        if self.where(start, shape_of(value)[-1], shape_of(source)[-1]):
            for node in nodes:
                bound = bound.with_node(node)
            yield from self.whole.match(source, bound)


def stretch(node: fx.Node, dim: int = -1) -> tuple[fx.Node, Any, tuple[fx.Node, ...]] | None:
    """What it is a part of, where in a dimension that begins, and the nodes that take it.

    Args:
        node: a slice, or one of what ``narrow``, ``split`` or ``chunk`` gives.
        dim: counted from the last one.
    """
    call = call_of(node)
    if call is None or value_of(node) is None or call.name not in ("getitem", "narrow"):
        return None
    source = call["input"]
    if call.name == "narrow":
        start = _number(call["start"]) if _is_dim(call["dim"], dim, source) else None
        return None if start is None else (source, _from_the_left(start, source, dim), (node,))
    if type(call["index"]) is int:
        parts = call_of(source)
        if parts is None or parts.name not in ("chunk", "split"):
            return None
        if not _is_dim(parts["dim"], dim, parts["input"]):
            return None
        before = source.meta["example_value"][: call["index"]]
        return parts["input"], sum(part.shape[dim] for part in before), (node, source)
    index = _index_at(call["index"], node, dim)
    if not isinstance(index, slice) or index.step not in (None, 1):
        return None
    return source, _from_the_left(_number(index.start) or 0, source, dim), (node,)


def _is_dim(given: Any, dim: int, source: fx.Node) -> bool:
    """Whether a dimension, counted from either end, is one that is counted from the last."""
    return given in (dim, dim + len(shape_of(source)))


def _from_the_left(place: Any, source: fx.Node, dim: int) -> Any:
    return place if place >= 0 else place + shape_of(source)[dim]


def _half(which: int) -> Cast:
    """``x[..., :n]`` and ``x[..., n:]``, or what ``chunk``, ``split`` and ``unbind`` give."""

    def is_half(start: Any, size: Any, whole: Any) -> bool:
        return bool(start == which * (whole // 2) and size == whole // 2)

    def are_halves(_: Any, node: fx.Node) -> bool:
        value, half = value_of(node), _half_size(node)
        return value is not None and half is not None and value.shape[-2:] == (2, half)

    def is_dim_of_halves(dim: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        return source is not None and dim in (-2, source.dim() - 2)

    halves = OneOf(Op("reshape", _X, are_halves), Op("unflatten", _X, anything, are_halves))
    unbound = Op("getitem", Op("unbind", halves, is_dim_of_halves), which)
    return Cast(OneOf(_Stretch(_X, is_half), unbound))


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

    return Cast(
        OneOf(
            Op("getitem", _X, is_slice),
            Op("getitem", _PAIRS, is_one),
            Op("getitem", Op("unbind", _PAIRS, is_last_dim), which),
        )
    )


def _are_pairs(_: Any, node: fx.Node) -> bool:
    value, half = value_of(node), _half_size(node)
    return value is not None and half is not None and value.shape[-2:] == (half, 2)


_PAIRS = OneOf(Op("reshape", _X, _are_pairs), Op("unflatten", _X, anything, _are_pairs))


def _last_index(index: Any, node: fx.Node) -> Any:
    return _index_at(index, node, -1)


def _index_at(index: Any, node: fx.Node, dim: int) -> Any:
    """What an index says of a dimension, if it takes all of the others."""
    source = value_of(node.args[0])
    if not isinstance(index, tuple) or source is None:
        return None
    parts = list(index)
    missing = [slice(None)] * (source.dim() - len([part for part in parts if part is not ...]))
    at = next((i for i, part in enumerate(parts) if part is ...), None)
    if at is None:
        parts += missing
    else:
        parts[at : at + 1] = missing
    if len(parts) != source.dim():
        return None
    others = [part for place, part in enumerate(parts) if place != len(parts) + dim]
    is_whole = all(isinstance(part, slice) and part == slice(None) for part in others)
    return parts[dim] if is_whole else None


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

    return _joined(Cast(Op("stack", [first, second], is_behind_all)))


def _joined(pairs: Expression) -> OneOf:
    """``pairs.flatten(-2)``."""

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

    return OneOf(Op("flatten", pairs, is_last_but_one), Op("reshape", pairs, joins_two))


def _is_complex(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.is_complex()


#: Of complex numbers: neighbours are one, and so are a cosine and a sine.
_BY_COMPLEX = Cast(
    _joined(
        Op("view_as_real", Op("mul", Op("view_as_complex", _PAIRS), Var("angles", _is_complex)))
    )
)


def _whole(turned: Any) -> Cast:
    return Cast(Op("add", Cast(Op("mul", _X, _COS)), Cast(Op("mul", Cast(turned), _SIN))))


def _by_parts(join: Any, part: Callable[[int], Any], first: str, second: str) -> Cast:
    """``join(x1 * cos first x2 * sin, x2 * cos second x1 * sin)``."""
    return Cast(join(*_parts(part, first, second)))


def _parts(part: Callable[[int], Any], first: str, second: str) -> list[Cast]:
    parts = []
    for which, name in enumerate((first, second)):
        by_cos, by_sin = (
            Cast(Op("mul", part(i), angle)) for i, angle in ((which, _COS), (1 - which, _SIN))
        )
        parts.append(Cast(Op(name, by_cos, by_sin)))
    return parts


class Spelling(NamedTuple):
    """One of the ways to write it.

    Attributes:
        expression: of ``x``, and of ``cos`` and ``sin`` or of ``angles``, which are both.
        is_half: whether there is one angle for each pair.
        is_back: whether it turns the other way.
        is_interleaved: whether neighbours are pairs.
    """

    expression: Any
    is_half: bool = False
    is_back: bool = False
    is_interleaved: bool = False


SPELLINGS = (
    *(
        spelling
        for join, part, is_interleaved in (
            (_side_by_side, _half, False),
            (_by_turns, _neighbour, True),
        )
        for spelling in (
            Spelling(_whole(join(_negated(part(1)), part(0))), False, False, is_interleaved),
            Spelling(_whole(join(part(1), _negated(part(0)))), False, True, is_interleaved),
            Spelling(_by_parts(join, part, "sub", "add"), True, False, is_interleaved),
            Spelling(_by_parts(join, part, "add", "sub"), True, True, is_interleaved),
        )
    ),
    Spelling(_BY_COMPLEX, is_half=True, is_interleaved=True),
)


#: The names of what a rotation can end with.
ENDS = frozenset({"add", "cast", "cat", "flatten", "reshape"})


class Rotation(NamedTuple):
    """A rotary embedding in a graph.

    Attributes:
        spelling: how it is written.
        x: the heads, all of them.
        angles: cosines and sines of tokens, as two tensors or as a complex one.
        heads: the dimension of heads in x.
        size: how many numbers at the start of each head turn.
        nodes: what computes it.
        filled: the tensor among them that is filled with the numbers of pairs, where there is one.
        before: tokens of x that do not turn, in front of those that have angles.
    """

    spelling: Spelling
    x: fx.Node
    angles: tuple[fx.Node, ...]
    heads: int
    size: Any
    nodes: tuple[fx.Node, ...]
    filled: tuple[fx.Node, ...] = ()
    before: int = 0


def rotations(node: fx.Node) -> Iterator[Rotation]:
    """Those that end there; first the ones of a part of each head, with the part that is kept."""
    for outer in match(_WITH_REST, node):
        for turned in _rotations_of_all(outer["turned"]):
            for start in match(_START, turned.x):
                for rest in _REST.match(outer["rest"], start):
                    if shape_of(rest["whole"]) == shape_of(node):
                        nodes = dict.fromkeys((*turned.nodes, *rest.nodes, *outer.nodes))
                        yield turned._replace(x=rest["whole"], nodes=tuple(nodes))
    yield from _rotations_of_all(node)


_WHOLE = Var("whole", is_tensor)
_START = _Stretch(_WHOLE, lambda start, size, whole: start == 0)
_REST = _Stretch(_WHOLE, lambda start, size, whole: start + size == whole)
_WITH_REST = Cast(Op("cat", [Var("turned", is_tensor), Var("rest", is_tensor)], _of_two))


def _rotations_of_all(node: fx.Node) -> Iterator[Rotation]:
    for spelling in SPELLINGS:
        for bound in match(spelling.expression, node):
            yield from _rotation_of(spelling, bound)
    yield from _filled(node)


def _rotation_of(spelling: Spelling, bound: Bound) -> Iterator[Rotation]:
    x = bound["x"]
    angles = tuple(bound[name] for name in ("cos", "sin", "angles") if name in bound)
    heads = _heads_of(shape_of(x), spelling, *map(shape_of, angles))
    if heads is not None:
        yield Rotation(spelling, x, angles, heads, shape_of(x)[-1], bound.nodes)


def _filled(node: fx.Node) -> Iterator[Rotation]:
    """``out = empty_like(x); out[..., 0::2] = ...; out[..., 1::2] = ...; out.type_as(x)`` (Wan)."""
    call = call_of(node)
    whole = call["input"] if call is not None and call.name == "cast" else None
    if whole is None or whole.target is not torch.empty_like or len(whole.args) != 1:
        return
    writers: dict[Any, fx.Node] = {}
    for user in whole.users:
        if user is not node:
            last = _last_index(user.args[1], user) if user.target is operator.setitem else None
            if not isinstance(last, slice) or (last.stop, last.step) != (None, 2) or user > node:
                return
            writers[last.start or 0] = user
    if len(whole.users) != 3 or writers.keys() != {0, 1}:
        return
    values = [writers[which].args[2] for which in (0, 1)]
    for bound in match_all(_FILLED.expression, values, node):
        x = bound["x"]
        if is_same(whole.args[0], x) and shape_of(whole) == shape_of(x):
            for rotation in _rotation_of(_FILLED, bound):
                nodes = (*rotation.nodes, whole, *writers.values(), node)
                yield rotation._replace(nodes=nodes, filled=(whole,))


_FILLED = Spelling(_parts(_neighbour, "sub", "add"), is_half=True, is_interleaved=True)


def _heads_of(shape: tuple[Any, ...], spelling: Spelling, *angles: tuple[Any, ...]) -> int | None:
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
