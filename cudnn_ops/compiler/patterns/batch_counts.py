"""Counts of the batches that batch norms have seen, raised in one launch.

Each norm in training adds 1 to a number of its own, which nobody reads. Inductor launches a kernel
for each: 53 in ResNet-50.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from cudnn_ops.compiler.nodes import call_of, value_of

_ADD = torch.ops.aten._foreach_add_.Scalar


def count_together(graph: fx.Graph, mode: Mapping[fx.Node, object]) -> None:
    """Has a graph raise all counts at once, where it does so under the same switches.

    Args:
        graph: to change.
        mode: what switches gradients and autocast before a node.
    """
    alike: dict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if (count := _count_of(node)) is not None:
            alike[mode.get(node), count.device].append(node)
    for nodes in alike.values():
        if len(nodes) == 1:
            continue
        with graph.inserting_before(nodes[0]):
            at_once = graph.call_function(_ADD, ([node.args[0] for node in nodes], 1))
        at_once.meta = {**nodes[0].meta, "example_value": None}
        for node in nodes:
            graph.erase_node(node)


def _count_of(node: fx.Node) -> Tensor | None:
    """The count that a node raises by 1, of which the graph has no other use."""
    call = call_of(node)
    if call is None or call.name != "add" or not call.in_place or node.users:
        return None
    count, value = call["input"], value_of(call["input"])
    if value is None or value.dim() or value.dtype != torch.int64 or call["other"] != 1:
        return None
    is_given = count.op in ("placeholder", "get_attr") and count.users.keys() == {node}
    return value if is_given and call["alpha"] in (1, None) else None
