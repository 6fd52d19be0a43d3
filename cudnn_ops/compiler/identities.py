"""What gives its input back, such as a division by one: patterns end there and need not.

Diffusion models divide a residual sum by an output scale that is one. Inductor makes nothing of it
within its own kernels, but between two operators it is a copy.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from cudnn_ops.compiler.nodes import (
    call_of,
    memory_given_to,
    memory_of_result,
    number_of,
    value_of,
)
from cudnn_ops.compiler.strides import same_strides


def identities(graph: fx.Graph, mutated: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes that give their input back, with that input.

    Args:
        graph: a captured graph.
        mutated: nodes whose memory is written to: there a copy is one.

    Returns:
        nodes that the graph can do without, in its order. What it returns, or was given, is memory
        that its caller can write to.
    """
    returned = map(memory_of_result, graph.output_node().all_input_nodes)
    outside = memory_given_to(graph).union(*returned)
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _source_of(node)
        if source is None or not {node, source}.isdisjoint(mutated):
            continue
        memory = memory_of_result(node) | memory_of_result(source)
        if _is_same_tensor(node, source) and outside.isdisjoint(memory):
            found[node] = found.get(source, source)
    return found


def _source_of(node: fx.Node) -> fx.Node | None:
    """What it multiplies or divides by one."""
    call = call_of(node)
    if call is None or call.name not in ("mul", "div") or call.in_place:
        return None
    if call.name == "div" and call["rounding_mode"] is not None:
        return None
    source, factor = call["input"], call["other"]
    if call.name == "mul" and not isinstance(source, fx.Node):
        source, factor = factor, source
    return source if isinstance(source, fx.Node) and number_of(factor) == 1 else None


def _is_same_tensor(node: fx.Node, source: fx.Node) -> bool:
    """In all that a user can see."""
    result, given = value_of(node), value_of(source)
    if result is None or given is None:
        return False
    return (
        result.dtype == given.dtype
        and result.requires_grad == given.requires_grad
        and same_strides(result, given)
    )
