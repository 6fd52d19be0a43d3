"""What a pattern is: it finds a part of a graph, and says what computes the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from cudnn_ops.compiler.nodes import call_of, value_of


@dataclass(frozen=True)
class Found:
    """A part of a graph, and its replacement.

    Attributes:
        nodes: what is replaced. But for the outputs, nothing else may use them.
        outputs: the nodes among them whose results the replacement computes.
        inputs: the nodes that the replacement reads.
        build: the replacement, a function of the inputs' tensors: one tensor, or as many as there
            are outputs.
        note: what readers of a report should know of it.
        only_measured: whether it is faster at some shapes only, and measuring alone may choose it.
        only_asked: what it costs beside time. If anything, the swap requires that the options name
            the pattern.
        written: inputs that it writes to, as the nodes do, and that nothing else may read.
        unchanged: what nothing may write to, beside the inputs; what is left of it without a user
            goes away.
        filled: tensors among the nodes that these fill part by part, and nothing else writes to.
        alike: what the nodes read beside the inputs, with the inputs that are computed alike.
        beforehand: a function that ``build`` applies to what models compute once for all layers, or
            a graph for all matches. A trial has its results from the start.
    """

    nodes: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    build: Callable[..., Any]
    note: str = ""
    only_measured: bool = False
    only_asked: str = ""
    written: Sequence[fx.Node] = ()
    unchanged: Sequence[fx.Node] = ()
    filled: Sequence[fx.Node] = ()
    alike: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    beforehand: Callable[..., Any] | None = None

    def built(self, *inputs: Any) -> tuple[Any, ...]:
        """The replacement's results for these inputs, which are tensors or stand for them."""
        results = self.build(*inputs)
        if len(self.outputs) == 1:
            return (results,)
        # An operator that is traced gives one thing for all of its results.
        return tuple(results[i] for i in range(len(self.outputs)))

    @functools.cached_property
    def traced(self) -> Traced:
        """The replacement as a graph, which is traced once: it is checked, timed and put in."""
        graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        inputs = [graph.placeholder(f"input_{i}") for i in range(len(self.inputs))]
        results = self.built(*(fx.Proxy(node, tracer) for node in inputs))
        return Traced(graph, inputs, [result.node for result in results])


class Traced(NamedTuple):
    """A replacement as a graph of its own.

    Attributes:
        graph: without an output.
        inputs: its placeholders.
        results: the nodes of what it gives.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    results: list[fx.Node]

    @property
    def nodes(self) -> list[fx.Node]:
        """What it computes."""
        return [node for node in self.graph.nodes if node.op != "placeholder"]

    def copied_into(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Puts its nodes into another graph, reading these inputs; returns those of the results."""
        copies = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return [copies[node] for node in self.results]


class Inputs:
    """What a replacement reads, by names; a name may stand for nothing, and two for one node.

    Attributes:
        tensors: the nodes of those that are there.
        nodes: these, each of them once.
    """

    def __init__(self, tensors: Mapping[str, fx.Node | None]) -> None:
        self.tensors = {name: node for name, node in tensors.items() if node is not None}
        self.nodes = list(dict.fromkeys(self.tensors.values()))

    def named(self, given: Sequence[Any]) -> dict[str, Any]:
        """What a replacement is given for the nodes, by the names of those that are there."""
        return {name: given[self.nodes.index(node)] for name, node in self.tensors.items()}


class Refusal(Exception):
    """Raised by a pattern where it found what it looks for and cannot replace it; says why."""


class Pattern:
    """Something that models compute, in its spellings, and our operator for it.

    A pattern sees one graph, of torch's functions with autograd and autocast still to come: what it
    puts in is differentiated as any function is.
    """

    name: str
    """For options and reports."""
    ends_in: frozenset[str]
    """The names (:mod:`cudnn_ops.compiler.nodes`) of what can be the last node of a match."""
    of_images = False
    """Whether its 4- and 5-dimensional tensors are images, channels last when convolutions run."""

    def find(self, node: fx.Node) -> Iterator[Found]:
        """The matches whose last node is ``node``, the largest first.

        Raises:
            Refusal: there is one, and our operator does not support it.
        """
        raise NotImplementedError

    def finish(
        self, graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
    ) -> None:
        """What replacements have in common, once all of a graph are made; most have nothing.

        Strides are settled by then: what needs those of the stock graph reads a copy.

        Args:
            graph: to change.
            mode: what switches gradients and autocast before a node.
            mutated: nodes whose memory is written to.
        """


def applied(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result; where arguments stand for tensors of a graph, one node of that graph."""
    proxy = next((one for one in args if isinstance(one, fx.Proxy)), None)
    if proxy is None:
        return function(*args)
    return proxy.tracer.create_proxy("call_function", function, args, {})


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a node's result."""
    value = value_of(node)
    return () if value is None else tuple(value.shape)


def is_last_dim(dim: Any, node: fx.Node) -> bool:
    """Whether an argument is the last dimension of what the node reads."""
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return False
        (dim,) = dim
    source = value_of(node.args[0]) if node.args else None
    return source is not None and dim in (-1, source.dim() - 1)


def is_tensor(node: Any) -> bool:
    return value_of(node) is not None


def tensor(node: fx.Node) -> Tensor:
    """The tensor without memory that stands for a node's result."""
    value = value_of(node)
    assert value is not None, node
    return value


def terms_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two tensors that it is the sum of, in either order."""
    call = call_of(node)
    if call is not None and call.name == "add" and call["alpha"] == 1:
        terms = call["input"], call["other"]
        if all(is_tensor(term) for term in terms):
            yield terms
            yield terms[::-1]


def anything(*_: Any) -> bool:
    """For an argument whose value does not matter."""
    return True


def through_dropout(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """What a dropout that does nothing is of, and these dropouts."""
    passed: tuple[fx.Node, ...] = ()
    while (call := call_of(node) if isinstance(node, fx.Node) else None) is not None:
        if call.name != "dropout" or (call["training"] is not False and call["p"] != 0):
            break
        node, passed = call["input"], (node, *passed)
    return node, passed


def spread(given: Sequence[Any], is_there: Sequence[bool]) -> list[Any]:
    """What a replacement was given, and None where a tensor is not there."""
    values = iter(given)
    return [next(values) if one else None for one in is_there]
