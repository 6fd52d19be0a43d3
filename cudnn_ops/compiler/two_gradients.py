"""Sums of two gradients, which a backward that reads or gives one of them adds up on the way.

What two layers read, as the result of a residual block is, has a gradient from each, and autograd
adds them up in a pass over memory of its own.

The sum may be read: the backward of a batch norm with a residual and a ReLU reads the gradient once
and writes what came through the ReLU, which is the residual's gradient. It adds up both on the way,
and the pass is saved. So does that of max pooling, which finds in the cache what it reads again.

Or one of both is given: a layer, RMS or group norm is the first layer of a residual branch, and its
backward the last step. It adds the gradient that went around the branch to its own, as it does
where the norm computes the residual sum, too. Adaptive norms without a gated sum do not: their
kernels read no second gradient.

The sums are autograd's: they are in the graph of the forward and the backward, which inductor hands
to a pass before it divides it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.caching import sources
from cudnn_ops.ops.arguments import bind

_OF_BATCH_NORM = torch.ops.cudnn_ops._batch_norm_backward.default
_OF_POOL = torch.ops.cudnn_ops._max_pool2d_backward.default
#: Their first result is the input's gradient, with ``grad_sum`` added to it.
_OF_NORMS = (
    torch.ops.cudnn_ops._norm_backward.default,
    torch.ops.cudnn_ops._group_norm_backward.default,
)
_ADD = torch.ops.aten.add.Tensor


class AddUpGradients(CustomGraphPass):
    """The pass, and behind it the one that the user has given inductor, if any."""

    def __init__(self, users: Callable[[fx.Graph], None] | None = None) -> None:
        self._users = users

    def __call__(self, graph: fx.Graph) -> None:
        """Changes a graph of torch's operators in place."""
        for backward in (_OF_BATCH_NORM, _OF_POOL):
            for node in graph.find_nodes(op="call_function", target=backward):
                _take_two(node)
        for node in graph.find_nodes(op="call_function", target=_ADD):
            _add_before(node)
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
    call = _call_of(backward)
    total = call.grad_out
    # Other batch norms cannot add up and write the sum on the way.
    if backward.target is _OF_BATCH_NORM and (call.out is None or not call.output_mask[3]):
        return
    if call.grad_more is not None:
        return
    if not isinstance(total, fx.Node) or not _is_sum_of_alike(total):
        return
    if len(total.users) != 1 or backward.args.count(total) != 1:
        return
    one, other = total.args
    _give(backward, "grad_more", other)
    backward.update_arg(0, one)
    total.graph.erase_node(total)


def _add_before(total: fx.Node) -> None:
    """Has the backward of a norm add what is added to its result, where nothing else reads that."""
    if not _is_sum_of_alike(total):
        return
    for term, other in (total.args, total.args[::-1]):
        assert isinstance(term, fx.Node)
        assert isinstance(other, fx.Node)
        backward = _norm_that_gives(term)
        if backward is None or _call_of(backward).grad_sum is not None:
            continue
        if len(term.users) == 1 and other < backward and _are_in_one_order(term, other):
            _give(backward, "grad_sum", other)
            total.replace_all_uses_with(term)
            total.graph.erase_node(total)
            return


def _norm_that_gives(gradient: fx.Node) -> fx.Node | None:
    """The backward whose input's gradient this is."""
    if gradient.target is not operator.getitem or gradient.args[1] != 0:
        return None
    backward = gradient.args[0]
    assert isinstance(backward, fx.Node)
    return backward if backward.target in _OF_NORMS else None


def _call_of(backward: fx.Node) -> Any:
    """Its arguments by name."""
    op: Any = backward.target
    return bind(op, backward.args, backward.kwargs)


def _give(backward: fx.Node, name: str, value: Any) -> None:
    """In its place: inductor holds arguments against those that the graph was traced with."""
    op: Any = backward.target
    place = [argument.name for argument in op._schema.arguments].index(name)
    if place < len(backward.args):
        backward.update_arg(place, value)
    else:
        backward.kwargs = {**backward.kwargs, name: value}


def _are_in_one_order(one: fx.Node, other: fx.Node) -> bool:
    """In memory, as far as it is known of sizes that are not."""
    strides = (node.meta["val"].stride() for node in (one, other))
    return all(statically_known_true(a == b) for a, b in zip(*strides, strict=True))


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
