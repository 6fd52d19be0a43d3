"""What RMS norm and layer norm share: their weights, and the sum that they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.pattern import Found, is_tensor, shape_of, tensor


def is_last(shape: Any, _: fx.Node) -> bool:
    """For ``normalized_shape``: whether it is the last dimension alone."""
    return len(shape) == 1


def is_scale(weight: fx.Node, x: fx.Node) -> bool:
    """Whether it has a number for each column of x."""
    return shape_of(weight) == shape_of(x)[-1:]


def with_sum(
    node: fx.Node,
    x: fx.Node,
    weights: Sequence[fx.Node | None],
    nodes: Sequence[fx.Node],
    build: Callable[..., Any],
) -> Iterator[Found]:
    """The norm and the sum of two tensors that it is of, where it is of one.

    ``build`` has the two tensors and the weights as arguments, and gives the norm and the sum.
    """
    call = call_of(x)
    if call is None or call.name != "add" or call["alpha"] != 1:
        return
    terms = [call["input"], call["other"]]
    if not all(is_tensor(term) for term in terms):
        return
    first, second = map(tensor, terms)
    if first.shape != second.shape or first.dtype != second.dtype:
        return
    inputs = [*terms, *(weight for weight in weights if weight is not None)]
    yield Found([x, *nodes], [node, x], inputs, build)
