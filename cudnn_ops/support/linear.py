"""What runs linear layers: cuDNN's graph where it was measured to be faster, else what does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS, SLOPE, Activation, needs_before
from cudnn_ops.ops.linear import (
    KEEP_INPUT,
    KEEP_NOTHING,
    KEEP_SLOPE,
    LINEAR_ENGINES,
    LINEAR_STEPS,
    is_by_before,
)
from cudnn_ops.support.attempts import Attempt, Kind, Parts
from cudnn_ops.support.device import offer_wheels
from cudnn_ops.support.specs import TensorSpec, optional_tensor

_ops = torch.ops.cudnn_ops

_HALVES = (torch.float16, torch.bfloat16)
#: What cuBLASLt requires the columns of an epilogue's matrix to be a multiple of.
_MATRIX_COLUMNS = 8


class _Layer(NamedTuple):
    """One layer of a call; what is not there is None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: Activation
    keep: int
    """What is a result too: nothing, what the activation is of, or its slope."""

    @property
    def rows(self) -> int:
        return math.prod(self.x.shape[:-1])

    def words(self) -> tuple[list[int], str]:
        """The key of its plan; or none, and why."""
        number = ACTIVATIONS.index(self.activation)
        arguments = self.x, self.weight, self.bias, self.residual, number, self.keep
        words, reason = _ops._linear_plan_key(*arguments)
        return words, reason


def _engine(
    kind: Kind, step: str, activation: int, rows: int, columns: int, depth: int
) -> tuple[str, bool]:
    """What was the fastest without a plan, and whether cuDNN's graph is faster."""
    offer_wheels()  # a table is of one version of cuDNN
    place = LINEAR_STEPS.index(step), activation
    engine, is_graph_faster = _ops._linear_engine(kind.sm, *place, rows, columns, depth)
    return LINEAR_ENGINES[engine], is_graph_faster


def linear_parts(
    kind: Kind,
    x: Tensor,
    weight: Tensor,
    *,
    bias: TensorSpec | bool | None = None,
    residual: TensorSpec | bool | None = None,
    activation: Activation = "none",
    graph: bool = False,
) -> Parts:
    """The attempts of a layer, or of its gradients."""
    number = _number_of(activation)
    _ops._linear_check(x, weight, None, None, number)
    columns = weight.shape[0]
    added = optional_tensor(bias, "bias", (columns,), x.dtype)
    total = optional_tensor(residual, "residual", (*x.shape[:-1], columns), x.dtype)
    _ops._linear_check(x, weight, added, total, number)
    if kind.backward:
        return _gradients(kind, x, weight, added is not None, activation)
    keeps = kind.training and is_by_before(activation, total is not None)
    keep = KEEP_INPUT if keeps else KEEP_NOTHING
    layer = _Layer(x, weight, added, total, activation, keep)
    return [_forward(kind, layer, graph)]


def mlp_parts(
    kind: Kind,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: TensorSpec | bool | None = None,
    b2: TensorSpec | bool | None = None,
    activation: Activation = "gelu",
    gated: bool = False,
    graph: bool = False,
) -> Parts:
    """The attempts of both layers, or of their gradients."""
    number = _number_of(activation)
    _ops._mlp_check(x, w1, None, w2, None, number, gated)
    first = optional_tensor(b1, "b1", w1.shape[:1], x.dtype)
    second = optional_tensor(b2, "b2", w2.shape[:1], x.dtype)
    _ops._mlp_check(x, w1, first, w2, second, number, gated)
    hidden = x.new_empty((*x.shape[:-1], w2.shape[1]))
    inner: Activation = "none" if gated else activation
    keeps_slope = _keeps_slope(kind, _Layer(x, w1, first, None, inner, KEEP_SLOPE))
    if kind.backward:
        grad = x.new_empty((*x.shape[:-1], w2.shape[0]))
        with_sum = first is not None and not _sums_with_weight(kind, x, w1)
        slope = SLOPE if keeps_slope else ACTIVATIONS.index(inner)
        through = _hidden_gradient(kind, grad, w2, with_sum, slope, graph)
        products = _products(kind, x, w1, with_bias=first is not None and (gated or not with_sum))
        return [through] if graph else [through, products]
    keep = KEEP_NOTHING
    if kind.training and needs_before(inner):
        keep = KEEP_SLOPE if keeps_slope else KEEP_INPUT
    parts = [_forward(kind, _Layer(x, w1, first, None, inner, keep), graph)]
    if gated and not graph:
        why = "a kernel of cudnn_ops multiplies the activated gate with the other half"
        parts.append(iter([Attempt(without_plan=why)]))
    return [*parts, _forward(kind, _Layer(hidden, w2, second, None, "none", KEEP_NOTHING), graph)]


def _keeps_slope(kind: Kind, layer: _Layer) -> bool:
    """As csrc's keeps_slope_by_plan decides for rows that come again."""
    if not needs_before(layer.activation) or layer.rows == 0:
        return False
    number = ACTIVATIONS.index(layer.activation)
    _, is_faster = _engine(kind, "training_slope", number, layer.rows, *layer.weight.shape)
    return is_faster and bool(layer.words()[0])


def _number_of(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS.index(activation)


def _forward(kind: Kind, layer: _Layer, graph: bool) -> Iterator[Attempt]:
    words, reason = layer.words()
    if graph:
        yield Attempt(words, refusal=reason)
        return
    step = {KEEP_NOTHING: "inference", KEEP_INPUT: "training", KEEP_SLOPE: "training_slope"}
    number = ACTIVATIONS.index(layer.activation)
    place = step[layer.keep], number, layer.rows, *layer.weight.shape
    engine, is_graph_faster = _engine(kind, *place)
    if words and is_graph_faster:
        yield Attempt(words)
    yield _without_plan(layer, engine)


def _without_plan(layer: _Layer, engine: str) -> Attempt:
    """As csrc's run_layer decides."""
    dtype, name = layer.x.dtype, layer.activation
    if dtype == torch.float64:
        return Attempt(without_plan="float64 runs by torch's operators", engine="torch")
    is_bare = name == "none" and layer.residual is None
    if is_bare and (layer.bias is None or engine == "ours"):
        why = "torch's product, with the bias in it, is all that there is to compute"
        return Attempt(without_plan=why, engine="torch")
    has_epilogue = (
        dtype in _HALVES
        and name in ("none", "relu", "gelu_tanh")
        and (name == "none" or layer.residual is None)
        and (name == "gelu_tanh" or layer.keep == KEEP_NOTHING)
        and layer.keep != KEEP_SLOPE
    )
    has_matrix = layer.residual is not None or layer.keep != KEEP_NOTHING
    if has_matrix and layer.weight.shape[0] % _MATRIX_COLUMNS:
        has_epilogue = False
    behind = "torch's product and a kernel of cudnn_ops behind it run"
    if not has_epilogue:
        return Attempt(without_plan=f"{behind}: cuBLASLt has no such epilogue")
    if layer.residual is not None:
        why = "cuBLASLt adds the residual in the product, which saves a pass"
        return Attempt(without_plan=why, engine="cublasLt")
    if engine == "ours":
        return Attempt(without_plan=f"{behind}: none was measured to be faster for such a product")
    return _by_cublaslt()


def _by_cublaslt() -> Attempt:
    why = "cuBLASLt's epilogue was measured to be the fastest for such a product"
    return Attempt(without_plan=why, engine="cublasLt")


def _hidden_gradient(
    kind: Kind, grad: Tensor, w2: Tensor, with_sum: bool, number: int, graph: bool
) -> Iterator[Attempt]:
    """Of an MLP's hidden layer, through the activation or its slope, with the sum for the bias."""
    if number == ACTIVATIONS.index("none"):
        yield Attempt(without_plan="gradients are torch's products", engine="torch")
        return
    words, reason = _ops._hidden_gradient_plan_key(grad, w2, number, with_sum)
    if graph:
        yield Attempt(words, refusal=reason)
        return
    rows, depth = math.prod(grad.shape[:-1]), grad.shape[-1]
    size = rows, w2.shape[1], depth
    engine, is_graph_faster = _engine(kind, "hidden_gradient", number, *size)
    if words and is_graph_faster:
        yield Attempt(words)
    has_epilogue = (
        grad.dtype in _HALVES
        and number == ACTIVATIONS.index("gelu_tanh")
        and engine != "ours"
        and w2.shape[1] % _MATRIX_COLUMNS == 0
    )
    if has_epilogue:
        yield _by_cublaslt()
    elif grad.dtype == torch.float64:
        yield Attempt(without_plan="float64 runs by torch's operators", engine="torch")
    else:
        yield Attempt(without_plan="a kernel of cudnn_ops runs behind torch's product")


def _gradients(
    kind: Kind, x: Tensor, weight: Tensor, with_bias: bool, activation: Activation
) -> Parts:
    """Of a layer's bias, input and weight: no graph is made of them."""
    parts = []
    if activation != "none":
        why = "a kernel of cudnn_ops computes the gradient through the activation"
        parts.append(iter([Attempt(without_plan=why)]))
        with_bias = False
    return [*parts, _products(kind, x, weight, with_bias)]


def _products(kind: Kind, x: Tensor, weight: Tensor, with_bias: bool) -> Iterator[Attempt]:
    """The gradients of inputs and weights."""
    if with_bias and x.dtype in _HALVES and _sums_with_weight(kind, x, weight):
        yield _by_cublaslt()
    else:
        yield Attempt(without_plan="gradients are torch's products", engine="torch")


def _sums_with_weight(kind: Kind, x: Tensor, weight: Tensor) -> bool:
    """Whether the product of a weight's gradient gives the bias's too."""
    size = *weight.shape, math.prod(x.shape[:-1])
    if 0 in size:
        return False
    engine, _ = _engine(kind, "weight_gradient", ACTIVATIONS.index("none"), *size)
    return engine == "epilogue_sum"
