"""Batch norms in training, with the sum and the ReLU behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from cudnn_ops.compiler.match import match
from cudnn_ops.compiler.nodes import Call, call_of, number_of
from cudnn_ops.compiler.pattern import (
    Found,
    Inputs,
    Pattern,
    Refusal,
    is_tensor,
    shape_of,
    tensor,
    terms_of,
    through_dropout,
)
from cudnn_ops.compiler.patterns.activations import EPILOGUES
from cudnn_ops.compiler.patterns.batch_counts import count_together
from cudnn_ops.compiler.patterns.keeping import kept_beside_input, relu_kept_beside_input
from cudnn_ops.ops.batch_norm import BatchNormActivation

_STATISTICS = ("running_mean", "running_var")
_TENSORS = ("input", *_STATISTICS, "weight", "bias")


class _Parts(NamedTuple):
    """A batch norm, and from it to the last node what it is computed with.

    Attributes:
        norm: the batch norm.
        nodes: all of it.
        residual: of the result's shape.
        activation: behind all of these.
    """

    norm: fx.Node
    nodes: tuple[fx.Node, ...]
    residual: fx.Node | None = None
    activation: BatchNormActivation = "none"

    def behind(self, *nodes: fx.Node, **changes: Any) -> _Parts:
        return self._replace(nodes=(*self.nodes, *nodes), **changes)


class BatchNorm(Pattern):
    """``relu(batch_norm(x) + residual)`` in training, as much of it as there is.

    In evaluation a batch norm belongs to the convolution before it.
    """

    name = "batch_norm"
    of_images = True
    ends_in = frozenset({"batch_norm", "add", "relu", "clamp"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for parts in _with_relu(node):
            yield _found(node, parts)

    def finish(
        self, graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
    ) -> None:
        count_together(graph, mode)


def _with_relu(node: fx.Node) -> Iterator[_Parts]:
    for bound in match(EPILOGUES["relu"], node):
        source, passed = through_dropout(bound["before"])
        for parts in _with_residual(source):
            yield parts.behind(*passed, *bound.nodes, activation="relu")
    yield from _with_residual(node)


def _with_residual(node: fx.Node) -> Iterator[_Parts]:
    for term, residual in terms_of(node):
        # Of two norms, both terms of the sum, the later one takes the other.
        if shape_of(residual) == shape_of(node):
            source, passed = through_dropout(term)
            for parts in _alone(source):
                yield parts.behind(*passed, node, residual=residual)
    yield from _alone(node)


def _alone(node: fx.Node) -> Iterator[_Parts]:
    call = call_of(node)
    if call is None or call.name != "batch_norm" or call["training"] is not True:
        return
    if is_tensor(call["input"]) and None not in _numbers(call):
        yield _Parts(node, (node,))


def _numbers(call: Call) -> list[float | None]:
    """Momentum and eps, where they are known."""
    return [number_of(call[name]) for name in ("momentum", "eps")]


def _found(node: fx.Node, parts: _Parts) -> Found:
    call = call_of(parts.norm)
    assert call is not None
    value = tensor(call["input"])
    if value.is_cuda and value.dtype == torch.float64:
        raise Refusal("on a GPU batch norm supports float16, bfloat16 and float32")
    inputs = Inputs({**{name: call[name] for name in _TENSORS}, "residual": parts.residual})
    numbers = _numbers(call)

    def build(*given: Any) -> Any:
        named = inputs.named(given)
        return torch.ops.cudnn_ops.batch_norm.default(
            *(named.get(name) for name in _TENSORS),
            *(True, *numbers),
            residual=named.get("residual"),
            activation=parts.activation,
        )

    # Inductor computes a norm's result again from the input, which is kept in any case. Ours writes
    # running statistics and cannot: EfficientNet-B0 would keep 1.47 times as much, and RegNetY,
    # whose gates read what a ReLU gives, 1.13 times.
    if parts.activation == "none":
        kept = kept_beside_input(node)
    else:
        for_itself = parts.residual is not None or not _tells_relu_from_input(value)
        kept = relu_kept_beside_input(node, for_itself=for_itself)
    written = [inputs.tensors[name] for name in _STATISTICS if name in inputs.tensors]
    return Found(parts.nodes, [node], inputs.nodes, build, written=written, only_asked=kept)


def _tells_relu_from_input(value: Tensor) -> bool:
    """Whether the backward of a norm of it, with its channels last, needs no result for a ReLU."""
    channels = value.shape[1]
    is_whole = isinstance(channels, int) and channels % 8 == 0
    return value.is_cuda and value.dim() in (2, 4, 5) and is_whole
