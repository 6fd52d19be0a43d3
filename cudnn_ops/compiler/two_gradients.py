"""Sums of two gradients, which the backward of a batch norm or a max pooling reads as two.

An image that two layers read, as the result of a residual block is, has a gradient from each, and
autograd adds them up in a pass over memory of its own. The backward of a batch norm with a residual
and a ReLU reads the gradient once and writes what came through the ReLU, which is the residual's
gradient: it adds up both on the way, and the pass is saved. So does that of max pooling, which
finds in the cache what it reads again.

The sums are autograd's: they are in the graph of the forward and the backward, which inductor hands
to a pass before it divides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from cudnn_ops.compiler.caching import sources
from cudnn_ops.ops.arguments import bind

_OF_NORM = torch.ops.cudnn_ops._batch_norm_backward.default
_OF_POOL = torch.ops.cudnn_ops._max_pool2d_backward.default
_ADD = torch.ops.aten.add.Tensor


class TakeTwoGradients(CustomGraphPass):
    """The pass, and behind it the one that the user has given inductor, if any."""

    def __init__(self, users: Callable[[fx.Graph], None] | None = None) -> None:
        self._users = users

    def __call__(self, graph: fx.Graph) -> None:
        """Changes a graph of torch's operators in place."""
        for backward in (_OF_NORM, _OF_POOL):
            for node in graph.find_nodes(op="call_function", target=backward):
                _take_two(node)
        if self._users is not None:
            self._users(graph)

    def uuid(self) -> Any:
        """What inductor's cache knows it by; None where the user's pass has no name."""
        if self._users is None:
            return sources()
        if not isinstance(self._users, CustomGraphPass):
            return None
        users = self._users.uuid()
        return None if users is None else (sources(), users)


def _take_two(backward: fx.Node) -> None:
    """Gives a backward both terms of its gradient, where that is a sum."""
    op: Any = backward.target
    call = bind(op, backward.args, backward.kwargs)
    total = call.grad_out
    # Other norms cannot add up and write the sum on the way.
    if op is _OF_NORM and (call.out is None or not call.output_mask[3]):
        return
    if call.grad_more is not None:
        return
    if not isinstance(total, fx.Node) or not _is_sum_of_alike(total):
        return
    if len(total.users) != 1 or backward.args.count(total) != 1:
        return
    one, other = total.args
    # In its place: inductor holds arguments against those that the graph was traced with.
    place = [argument.name for argument in op._schema.arguments].index("grad_more")
    if place < len(backward.args):
        backward.update_arg(place, other)
    else:
        backward.kwargs = {**backward.kwargs, "grad_more": other}
    backward.update_arg(0, one)
    total.graph.erase_node(total)


def _is_sum_of_alike(node: fx.Node) -> bool:
    """Whether it is ``a + b`` with neither a factor nor broadcasting nor a change of dtype."""
    if node.target is not _ADD or node.kwargs:
        return False
    values = [one.meta.get("val") if isinstance(one, fx.Node) else None for one in node.args]
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(
        isinstance(one, Tensor) and one.shape == value.shape and one.dtype == value.dtype
        for one in values
    )
