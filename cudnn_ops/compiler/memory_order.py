"""Memory as inductor lays it out, where a captured graph has other strides.

Inductor chooses the strides of what it computes itself, while a graph's follow the model's memory;
before an operator reads a tensor, inductor copies it to the graph's strides. So the graph gets
those that inductor chooses:

- Convolutions that stay torch's read channels last where our operators on images do.
- A transformer's tokens that come from a convolution are the columns of an image. Where rows are
  added to them, such as positions, the sum is rows, and so are the sums of all layers behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from cudnn_ops.compiler.nodes import (
    call_of,
    has_static_sizes,
    memory_given_to,
    memory_of_result,
    value_of,
)
from cudnn_ops.compiler.strides import Strides

#: Those of images, by their names in graphs, with what their results' memory is like.
CONVOLUTIONS = {"conv2d": torch.channels_last, "conv3d": torch.channels_last_3d}
#: Our operators for them.
OUR_CONVOLUTIONS = {
    getattr(getattr(torch.ops.cudnn_ops, name), overload)
    for name in CONVOLUTIONS
    for overload in ("default", "padding")
}


def read_channels_last(graph: fx.Graph, run: Callable[[fx.Node], Any]) -> dict[fx.Node, Tensor]:
    """Puts the conversion before each of torch's convolutions that reads channels first.

    Args:
        graph: one that was rewritten.
        run: what a node gives for the values, without memory, of the nodes that it reads.

    Returns:
        of these convolutions, what they gave before: with other strides.
    """
    before: dict[fx.Node, Tensor] = {}
    for node in list(graph.nodes):
        call = call_of(node)
        if call is None or call.name not in CONVOLUTIONS:
            continue
        memory_format = CONVOLUTIONS[call.name]
        x, out = value_of(call["input"]), value_of(node)
        if x is None or out is None or not has_static_sizes(x) or x.dim() != out.dim():
            continue
        has_batch = x.dim() == (4 if call.name == "conv2d" else 5)
        if not has_batch or x.is_contiguous(memory_format=memory_format):
            continue
        _read_copy(graph, node, call["input"], run, memory_format=memory_format)
        _compute(node, out, node, run)
        before[node] = out
    return before


def add_rows(graph: fx.Graph, mutated: Collection[fx.Node], run: Callable[[fx.Node], Any]) -> bool:
    """Makes rows of computed columns where rows are added to them, or multiplied by them.

    Args:
        graph: a copy of a captured graph.
        mutated: nodes whose memory is written to, which stay as they are.
        run: as for :func:`read_channels_last`.

    Returns:
        whether there are any.

    Raises:
        Unsettled: something needs columns, and there is no way to give them to it.
    """
    given, count = memory_given_to(graph), len(graph.nodes)
    for node in list(graph.nodes):
        if node in mutated:
            continue
        before: dict[fx.Node, Tensor] = {}
        for one, value in _columns_beside_rows(node).items():
            if given.isdisjoint(memory_of_result(one)):
                before[_read_copy(graph, node, one, run)] = value
        if before:  # at once: what follows has rows then, and is not converted
            Strides(graph, before, mutated, run).settle()
    return len(graph.nodes) > count


_OF_TWO = {"add", "sub", "mul"}


def _columns_beside_rows(node: fx.Node) -> dict[fx.Node, Tensor]:
    """The columns that a sum or product reads together with rows, if it gives columns."""
    call, out = call_of(node), value_of(node)
    if call is None or call.name not in _OF_TWO or call.in_place:
        return {}
    if out is None or not _is_columns(out):
        return {}
    read = {one: value for one in node.all_input_nodes if (value := value_of(one)) is not None}
    if not any(_is_rows_of(value, out) for value in read.values()):
        return {}
    return {
        one: value
        for one, value in read.items()
        if _is_columns(value) and value.shape[1:] == out.shape[1:]
    }


def _is_columns(value: Tensor) -> bool:
    """Whether its rows lie across its memory, as those of an image's channels that are tokens."""
    if value.dim() != 3 or not _is_known(value):
        return False
    rows, columns = value.shape[1:]
    return rows > 1 and columns > 1 and value.stride()[1:] == (1, rows)


def _is_rows_of(value: Tensor, out: Tensor) -> bool:
    """Whether its rows lie along its memory, and are as many and as long."""
    if value.dim() not in (2, 3) or not _is_known(value):
        return False
    return value.shape[-2:] == out.shape[-2:] and value.stride()[-2:] == (out.shape[-1], 1)


def _is_known(value: Tensor) -> bool:
    """Whether sizes and strides of rows and columns are numbers: symbols would get guards."""
    if value.layout != torch.strided:
        return False
    return all(isinstance(one, int) for one in (*value.shape[-2:], *value.stride()[-2:]))


def skip_copies(graph: fx.Graph, mutated: Collection[fx.Node]) -> None:
    """Lets convolutions read channels last what a model copied to channels first for them.

    As diffusers' transformers do of images, ``x.permute(0, 3, 1, 2).contiguous()``: inductor makes
    one copy of this and of the conversion behind it, from channels last to channels last.

    Args:
        graph: one whose strides are settled.
        mutated: nodes whose memory is written to: there a copy is one.
    """
    for node in list(graph.nodes):
        if not _converts(node):
            continue
        source = node.args[0]
        while (copied := _copied(source)) is not None:
            if not {node, source, copied}.isdisjoint(mutated):
                break
            node.replace_input_with(source, copied)
            if not source.users:
                graph.erase_node(source)
            source = copied


def _copied(node: Any) -> fx.Node | None:
    """What it is a copy of, if it is one."""
    call = call_of(node) if isinstance(node, fx.Node) else None
    return call["input"] if call is not None and call.name == "contiguous" else None


def _converts(node: fx.Node) -> bool:
    """Whether it is a conversion to channels last, for convolutions and nothing else."""
    call = call_of(node)
    if call is None or call.name != "contiguous":
        return False
    return call["memory_format"] in CONVOLUTIONS.values() and all(map(_is_convolution, node.users))


def _is_convolution(node: fx.Node) -> bool:
    """Whether it is torch's or ours, which write to nothing that they read."""
    call = call_of(node)
    return node.target in OUR_CONVOLUTIONS or (call is not None and call.name in CONVOLUTIONS)


def _read_copy(
    graph: fx.Graph, node: fx.Node, source: fx.Node, run: Callable[[fx.Node], Any], **options: Any
) -> fx.Node:
    """Has a node read a contiguous copy of something in its place; returns the copy."""
    value = value_of(source)
    assert value is not None
    with graph.inserting_before(node):
        copy = graph.call_method("contiguous", (source,), options)
    _compute(copy, value, node, run)
    node.replace_input_with(source, copy)
    return copy


def _compute(node: fx.Node, like: Tensor, beside: fx.Node, run: Callable[[fx.Node], Any]) -> None:
    """Gives a node its value, which has a gradient where the other one has."""
    node.meta = {**beside.meta, "example_value": run(node)}
    if like.requires_grad:
        node.meta["example_value"].requires_grad_()
