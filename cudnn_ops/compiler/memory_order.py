"""Convolutions that stay torch's, in a graph where our operators have images with channels last.

Inductor lays such images out so, whatever the model's memory is, but what the graph says of them
follows the model's memory, and inductor copies what an operator reads until it is as the graph
says. So the graph says it: these convolutions read channels last, and what follows them does too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from cudnn_ops.compiler.nodes import call_of, has_static_sizes, value_of

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
        with graph.inserting_before(node):
            converted = graph.call_method("contiguous", (call["input"],))
        converted.kwargs = {"memory_format": memory_format}
        _compute(converted, x, node, run)
        node.replace_input_with(call["input"], converted)
        _compute(node, out, node, run)
        before[node] = out
    return before


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


def _compute(node: fx.Node, like: Tensor, beside: fx.Node, run: Callable[[fx.Node], Any]) -> None:
    """Gives a node its value, which has a gradient where the other one has."""
    node.meta = {**beside.meta, "example_value": run(node)}
    if like.requires_grad:
        node.meta["example_value"].requires_grad_()
