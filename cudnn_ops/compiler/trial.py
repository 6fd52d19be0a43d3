"""The two graphs that are timed for a match: the stock one and the replacement, by themselves.

Both begin with what computes the inputs, and go on with what reads the results, as far as inductor
would make one kernel of it: what it computes itself then is never written to memory, and what an
operator reads or gives is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.nodes import call_of, has_static_sizes, is_same, memory_of, value_of
from cudnn_ops.compiler.operations import OPERATIONS
from cudnn_ops.compiler.pattern import Found

#: How many nodes behind a match belong to its trial: no more make a kernel another one.
_MOST_FOLLOWERS = 4
#: How many before it.
_MOST_LEADERS = 6
#: What inductor computes in the kernel that makes its input, or that reads its result.
_FUSED = {
    *("add", "sub", "mul", "addcmul", "div", "pow", "square", "sqrt", "rsqrt", "reciprocal"),
    *("neg", "mean", "var", "sigmoid", "tanh", "exp", "erf", "relu", "relu6", "hardtanh", "clamp"),
    *("silu", "hardswish", "leaky_relu", "gelu", "where", "masked_fill", "layer_norm", "rms_norm"),
    *("cast", "cat", "reshape", "expand", "permute", "transpose", "unsqueeze", "getitem"),
    *("narrow", "flatten", "unflatten", "contiguous"),
}
_FUSED_FUNCTIONS = {F.adaptive_avg_pool2d}
#: Of those, what has sums: a kernel of its own, which what reads its result does not join.
_SUMS = {"mean", "var", "layer_norm", "rms_norm"}
_PARTS = {"split", "chunk", "unbind"}
_IMAGES = (torch.channels_last, torch.channels_last_3d)


class Trial(NamedTuple):
    """What is timed.

    Attributes:
        inputs: nodes of the model's graph, of which both graphs have one placeholder each.
        stock: what the model computes.
        ours: the replacement.
        beforehand: what computes, from the inputs, those that ours has behind them; None: it has no
            more.
    """

    inputs: list[fx.Node]
    stock: fx.Graph
    ours: fx.Graph
    beforehand: fx.Graph | None = None


def trial_of(found: Found) -> Trial:
    """The graphs of a match, with names of their own: layers differ in nothing else."""
    leaders, followers = _leaders(found), list(_followers(found))
    inside = {*found.nodes, *followers}
    own = {*found.outputs, *followers, *leaders}
    beside = (one for node in (*leaders, *followers) for one in node.all_input_nodes)
    read = (one for one in (*found.inputs, *beside) if one not in own)
    inputs = list(dict.fromkeys(read))
    results = _without_views(
        [
            node
            for node in (*found.outputs, *followers)
            if not node.users or not inside.issuperset(node.users)
        ],
        followers,
    )

    def finished(graph: fx.Graph, values: dict[fx.Node, fx.Node]) -> fx.Graph:
        for number, node in enumerate(followers):
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node]._rename(f"follower_{number}")
        graph.output(tuple(values[node] for node in results))
        return graph

    stock = finished(*_stock(found, inputs, leaders))
    ours = finished(*_ours(found, inputs, leaders))
    return Trial(inputs, stock, ours, _without(ours, found.beforehand))


def _without(ours: fx.Graph, function: Callable[..., object] | None) -> fx.Graph | None:
    """Makes inputs of what the function gives in a graph; returns what computes them."""
    calls = [] if function is None else ours.find_nodes(op="call_function", target=function)
    if not calls:
        return None
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in ours.find_nodes(op="placeholder")}
    first = next(node for node in ours.nodes if node.op != "placeholder")
    results = []

    def copied(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = graph.node_copy(node, copied)
        return values[node]

    for call in calls:
        for part in list(call.users):
            results.append(copied(part))
            with ours.inserting_before(first):
                part.replace_all_uses_with(ours.placeholder(f"beforehand_{len(results)}"))
            ours.erase_node(part)
        ours.erase_node(call)
    graph.output(tuple(results))
    return graph


def _leaders(found: Found) -> list[fx.Node]:
    """What computes inputs for nothing but the match, in the graph's order.

    Inductor computes it where it is read, unless a kernel that it does not write reads it. A norm
    does not end in a trial that it does not begin in: it may be one of our operators.
    """
    inside, leaders = set(found.nodes), list[fx.Node]()
    waiting = {*found.inputs}.difference(found.written, found.unchanged, found.filled)
    while waiting:
        node = max(waiting)  # all that reads it has been looked at
        waiting.remove(node)
        call = call_of(node)
        if call is None or not inside.issuperset(node.users):
            continue
        is_pointwise = _is_fused(node) and call.name not in _SUMS
        is_read = any(_is_fused(user) or user in leaders for user in node.users)
        drawn = [one for one in node.all_input_nodes if value_of(one) is not None]
        if (is_pointwise or call.name in _PARTS) and is_read and all(map(_can_be_drawn, drawn)):
            inside.add(node)
            leaders.append(node)
            waiting.update(node.all_input_nodes)
    nearest = _without_norms(leaders[::-1])[-_MOST_LEADERS:]
    return _drawn_from(nearest, set(found.nodes))


def _without_norms(leaders: list[fx.Node]) -> list[fx.Node]:
    """Those for which nothing was summed up."""
    of_sums = set[fx.Node]()
    for node in leaders:
        calls = map(call_of, node.all_input_nodes)
        reads_sum = any(call is not None and call.name in _SUMS for call in calls)
        if reads_sum or not of_sums.isdisjoint(node.all_input_nodes):
            of_sums.add(node)
    return [node for node in leaders if node not in of_sums]


def _drawn_from(leaders: list[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Those that are computed from tensors: not parts of something that is not among them."""
    kept = [
        node
        for node in leaders
        if all(value_of(one) is not None or one in leaders for one in node.all_input_nodes)
        and inside.union(leaders).issuperset(node.users)
    ]
    return kept if kept == leaders else _drawn_from(kept, inside)


def _followers(found: Found) -> Iterator[fx.Node]:
    """What reads the results and nothing that is computed after them, in the graph's order."""
    last, inside, own = max(found.outputs), set(found.nodes), set(found.outputs)
    waiting: list[fx.Node] = []

    def add_users(node: fx.Node) -> None:
        for user in node.users:
            if user not in inside and user not in own and user not in waiting:
                heapq.heappush(waiting, user)

    def is_ready(node: fx.Node) -> bool:
        return all(
            one in own or (one < last and one not in inside and _can_be_drawn(one))
            for one in node.all_input_nodes
        )

    for output in found.outputs:
        add_users(output)
    count = 0
    while waiting and count < _MOST_FOLLOWERS:
        node = heapq.heappop(waiting)
        if _is_fused(node) and is_ready(node):
            own.add(node)
            add_users(node)
            count += 1
            yield node


def _without_views(results: list[fx.Node], followers: list[fx.Node]) -> list[fx.Node]:
    """Without followers that are views of another result.

    A graph that returns a tensor and a view of it makes the view anew at each call, and autograd
    takes the view's gradient through all of the memory: longer than a norm, in both graphs.
    """
    kept: list[fx.Node] = []
    for node in results:
        memory = memory_of(value_of(node))
        is_view = any(memory & memory_of(value_of(other)) for other in kept)
        if not is_view or node not in followers:
            kept.append(node)
    return kept


def _is_fused(node: fx.Node) -> bool:
    call, value = call_of(node), value_of(node)
    if value is None or not has_static_sizes(value):
        return False
    if call is None:
        return node.target in _FUSED_FUNCTIONS
    if call.name == "contiguous" and call["memory_format"] in _IMAGES:
        return False  # of an image that is channels last already, when the graph runs: a view
    return call.name in _FUSED and not call.in_place


def _can_be_drawn(node: fx.Node) -> bool:
    """Whether any numbers will do: integers may be places in something."""
    value = value_of(node)
    if value is None or not has_static_sizes(value):
        return False
    return value.is_floating_point() or value.dtype == torch.bool


def _stock(
    found: Found, inputs: list[fx.Node], leaders: list[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, values = _begun(inputs, leaders)

    def read(node: fx.Node) -> fx.Node:
        if node not in values:  # something once more, such as a slice that is taken twice
            same = next(one for one in (*values, *found.alike) if is_same(one, node))
            values[node] = values[found.alike.get(same, same)]
        return values[node]

    for number, node in enumerate(sorted(found.nodes)):  # as they are in their graph
        values[node] = _out_of_place(graph, node, inputs, read) or graph.node_copy(node, read)
        values[node]._rename(f"value_{number}")
    return graph, values


def _out_of_place(
    graph: fx.Graph, node: fx.Node, inputs: list[fx.Node], read: Callable[[fx.Node], fx.Node]
) -> fx.Node | None:
    """What writes to an input, as inductor computes it in the model: into memory of its own.

    A trial's inputs are leaves, and are read once more by the other graph.
    """
    call = call_of(node)
    if call is None or not call.in_place or call["input"] not in inputs:
        return None
    parameters, spellings = OPERATIONS[call.name]
    function = [one for one in spellings if callable(one)][-1]  # torch's: operator's has no names
    given = {
        name: fx.map_arg(value, read)
        for name, value in call.arguments.items()
        if value is not parameters[name]
    }
    return graph.call_function(function, kwargs=given)


def _ours(
    found: Found, inputs: list[fx.Node], leaders: list[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, values = _begun(inputs, leaders)
    results = found.traced.copied_into(graph, [values[node] for node in found.inputs])
    return graph, values | dict(zip(found.outputs, results, strict=True))


def _begun(
    inputs: list[fx.Node], leaders: list[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    values = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    for number, node in enumerate(leaders):
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node]._rename(f"leader_{number}")
    return graph, values
