"""Expressions that are compared with a graph, from a result towards what it is computed of.

An expression is a tree: :class:`Op` for a computation and its arguments, :class:`Var` for whatever
is there, by a name, :class:`OneOf` for several ways to write the same. ``match`` gives what the
names stand for and the nodes that were passed; a name that occurs twice stands for one thing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from cudnn_ops.compiler.nodes import call_of, is_same, number_of
from cudnn_ops.compiler.operations import OPERATIONS

#: Of two arguments in either order.
_COMMUTES = {"add", "mul", "and"}


class Bound(Mapping[str, Any]):
    """What the names of an expression stand for, and ``nodes``, which compute it."""

    def __init__(self, names: dict[str, Any] | None = None, nodes: tuple[fx.Node, ...] = ()):
        self._names, self.nodes = names or {}, nodes

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def with_name(self, name: str, value: Any) -> Bound | None:
        """None where the name stands for something else already."""
        if name not in self._names:
            return Bound({**self._names, name: value}, self.nodes)
        known = self._names[name]
        same = is_same(known, value) if isinstance(known, fx.Node) else known == value
        return self if same else None

    def with_node(self, node: fx.Node) -> Bound:
        return self if node in self.nodes else Bound(self._names, (*self.nodes, node))


class Expression:
    """What a value can be compared with."""

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Each way in which the value is such an expression."""
        raise NotImplementedError


class Var(Expression):
    """A node, under a name; ``where`` may look at it."""

    def __init__(self, name: str, where: Callable[[fx.Node], bool] | None = None):
        self.name, self.where = name, where

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        if isinstance(value, fx.Node) and (self.where is None or self.where(value)):
            found = bound.with_name(self.name, value)
            if found is not None:
                yield found


class Named(Expression):
    """A node that is such an expression, under a name."""

    def __init__(self, name: str, inner: Expression):
        self.name, self.inner = name, inner

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        found = bound.with_name(self.name, value) if isinstance(value, fx.Node) else None
        if found is not None:
            yield from self.inner.match(value, found)


class Number(Expression):
    """A number, under a name; or one that is equal to ``value``."""

    def __init__(self, name: str = "", value: float | None = None):
        self.name, self.value = name, value

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        value = number_of(value)
        if value is None or (self.value is not None and value != self.value):
            return
        found = bound.with_name(self.name, value) if self.name else bound
        if found is not None:
            yield found


class Text(Expression):
    """A string, under a name."""

    def __init__(self, name: str):
        self.name = name

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        found = bound.with_name(self.name, value) if isinstance(value, str) else None
        if found is not None:
            yield found


class Op(Expression):
    """A computation of that name; arguments are expressions, functions or plain values.

    Those that are not given must have their defaults.
    """

    def __init__(self, op: str, *args: Any, **kwargs: Any):
        self.op, self.args, self.kwargs = op, args, kwargs

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        call = call_of(value) if isinstance(value, fx.Node) else None
        if call is None or call.name != self.op:
            return
        names = list(call.arguments)
        expected = dict(zip(names, self.args, strict=False)) | self.kwargs
        rest = [name for name in names if name not in expected]
        if not all(_is_default(self.op, name, call[name]) for name in rest):
            return
        orders = [expected]
        if self.op in _COMMUTES:
            first, second = names[:2]
            orders.append({**expected, first: expected[second], second: expected[first]})
        for order in orders:
            yield from _all(
                [(order[name], call[name]) for name in order], bound.with_node(value), value
            )


class OneOf(Expression):
    """Any of several expressions."""

    def __init__(self, *expressions: Any):
        self.expressions = expressions

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        for expression in self.expressions:
            yield from _match(expression, value, bound, None)


class Cast(Expression):
    """What the expression gives, in any dtype: behind any number of casts."""

    def __init__(self, inner: Any):
        self.inner = inner

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        # The most casts first: those of an input belong to the pattern.
        call = call_of(value) if isinstance(value, fx.Node) else None
        if call is not None and call.name == "cast":
            yield from self.match(call["input"], bound.with_node(value))
        yield from _match(self.inner, value, bound, None)


def match(expression: Any, value: Any) -> Iterator[Bound]:
    """Each way in which a node is such an expression."""
    yield from _match(expression, value, Bound(), None)


def match_all(expressions: Sequence[Any], values: Sequence[Any], node: fx.Node) -> Iterator[Bound]:
    """Each way in which several values, arguments of a node, are these expressions."""
    yield from _all(list(zip(expressions, values, strict=True)), Bound(), node)


def first_match(expression: Any, value: Any) -> Bound | None:
    """The first of :func:`match`."""
    return next(match(expression, value), None)


def _is_default(op: str, name: str, value: Any) -> bool:
    operation = OPERATIONS.get(op)
    return operation is not None and value == operation.parameters.get(name)


def _all(pairs: list[tuple[Any, Any]], bound: Bound, node: fx.Node) -> Iterator[Bound]:
    if not pairs:
        yield bound
        return
    (expression, value), rest = pairs[0], pairs[1:]
    for found in _match(expression, value, bound, node):
        yield from _all(rest, found, node)


def _match(expression: Any, value: Any, bound: Bound, node: fx.Node | None) -> Iterator[Bound]:
    if isinstance(expression, Expression):
        yield from expression.match(value, bound)
    elif isinstance(expression, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(expression):
            assert node is not None
            pairs = list(itertools.zip_longest(expression, value))
            yield from _all(pairs, bound, node)
    elif callable(expression):
        if expression(value, node):
            yield bound
    elif not isinstance(value, fx.Node) and type(value) is not bool:
        if value == expression:
            yield bound
    elif value is expression:
        yield bound
