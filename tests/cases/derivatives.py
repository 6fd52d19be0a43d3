"""Every derivative of the package, for tests of what surrounds a backward.

Each runs an operator forward and backward within a context, and holds output and gradients against
the float64 reference of the operator's own cases.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import (
    adaptive_norm,
    batch_norm,
    conv,
    conv_transpose,
    fp8,
    group_norm,
    linear,
    max_pool,
    norm,
    sdpa,
    sdpa_features,
    sdpa_in_fp8,
    varlen,
)
from tests.cases.adaptive_norm import AdaptiveNormCase
from tests.cases.batch_norm import BatchNormCase
from tests.cases.conv import ConvCase
from tests.cases.conv_transpose import TransposeCase
from tests.cases.group_norm import GroupNormCase
from tests.cases.max_pool import MaxPoolCase
from tests.cases.norm import NormCase
from tests.cases.sdpa_features import Features
from tests.cases.varlen import Packed

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Derivative:
    name: str
    check: Callable[[str, AbstractContextManager[object]], None]
    """Of a device and a context."""

    def __str__(self) -> str:
        return self.name


def _attention(name: str, case: Features, *, with_lse: bool = False) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        inputs, extras, grad_out = sdpa_features.make_problem(case, DTYPE, device, seed=3)
        shape = (case.batch, case.heads, case.length)
        grad_lse = None
        if with_lse:
            grad_lse = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
        with within:
            actual = sdpa_features.run(case, inputs, extras, grad_out, grad_lse)
        sdpa_features.check(case, inputs, extras, grad_out, actual, grad_lse)

    return Derivative(name, check)


def _in_fp8(name: str, case: fp8.Case) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        sdpa_in_fp8.check(case, DTYPE, device, within=within)

    return Derivative(name, check)


def _packed(name: str, case: Packed) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        tensors = varlen.make(case, DTYPE, device, seed=1)
        with within:
            actual = varlen.run(case, tensors)
        varlen.check(case, tensors, actual)

    return Derivative(name, check)


def _differentiate(
    name: str,
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    leaves: list[Tensor],
    within: AbstractContextManager[object],
) -> None:
    """By the function, and by the formula in float64 and in the leaves' own dtypes."""
    with within:
        out = function(*leaves)
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        found = [out, *torch.autograd.grad(out, leaves, grad)]
    results = []
    for dtype in (torch.float64, DTYPE):
        wide = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        result = formula(*wide)
        results.append([result, *torch.autograd.grad(result, wide, grad.to(dtype))])
    for i, (mine, exact, rough) in enumerate(zip(found, *results, strict=True)):
        sdpa.check(mine, exact, rough, f"{name}: result {i}")


def _draw(device: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, DTYPE)


def _conv(name: str, case: ConvCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        conv.check(case, conv.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _transposed(name: str, case: TransposeCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        conv_transpose.check(case, conv_transpose.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _layer(name: str, case: linear.Case) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        linear.check(case, DTYPE, device, within=within)

    return Derivative(name, check)


def _norm(name: str, case: NormCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        norm.check(case, norm.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _group_norm(name: str, case: GroupNormCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        group_norm.check(case, group_norm.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _batch_norm(name: str, case: BatchNormCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        batch_norm.check(case, batch_norm.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _max_pool(name: str, case: MaxPoolCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        max_pool.check(case, DTYPE, device, within)

    return Derivative(name, check)


def _adaptive_norm(name: str, case: AdaptiveNormCase) -> Derivative:
    def check(device: str, within: AbstractContextManager[object]) -> None:
        adaptive_norm.check(case, adaptive_norm.make(case, DTYPE, device, seed=0), within)

    return Derivative(name, check)


def _check_add_norm(device: str, within: AbstractContextManager[object]) -> None:
    """Through the norm and the sum."""

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.stack(cudnn_ops.add_rms_norm(x, residual, (64,), weight, 1e-6))

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x + residual
        return torch.stack([F.rms_norm(total, (64,), weight, 1e-6), total])

    leaves = [_draw(device, *shape).requires_grad_() for shape in ((5, 7, 64), (5, 7, 64), (64,))]
    _differentiate("add_rms_norm", function, formula, leaves, within)


def _check_swiglu(device: str, within: AbstractContextManager[object]) -> None:
    leaves = [_draw(device, *shape).requires_grad_() for shape in ((5, 7, 48), (5, 7, 48))]
    leaves[1] = leaves[1].detach().neg().requires_grad_()
    _differentiate("swiglu", cudnn_ops.swiglu, lambda g, u: F.silu(g) * u, leaves, within)


def _check_permute(device: str, within: AbstractContextManager[object]) -> None:
    experts = torch.tensor([[0, 2], [1, 0], [2, -1], [0, 1]], device=device)

    def formula(x: Tensor) -> Tensor:
        order = torch.tensor([0, 1, 3, 1, 3, 0, 2], device=x.device)
        return torch.cat([x[order], x.new_zeros(1, x.shape[1])])

    def function(x: Tensor) -> Tensor:
        return cudnn_ops.moe_permute(x, experts, 3)[0]

    _differentiate("permute", function, formula, [_draw(device, 4, 48).requires_grad_()], within)


def _check_experts(device: str, within: AbstractContextManager[object]) -> None:
    """One expert for each token, in their order."""
    experts = torch.tensor([[0], [0], [0], [1], [1]], device=device)
    shapes = ((5, 16), (5, 1), (2, 48, 16), (2, 16, 24))
    leaves = [_draw(device, *shape).requires_grad_() for shape in shapes]

    def formula(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        parts = []
        for part, first, second in zip(x.split([3, 2]), gate_up, down, strict=True):
            gate, up = (part @ first.t()).chunk(2, -1)
            parts.append((F.silu(gate) * up) @ second.t())
        return torch.cat(parts) * weights

    def function(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return cudnn_ops.moe_experts(x, experts, weights, gate_up, down)

    _differentiate("experts", function, formula, leaves, within)


def _check_rotary(device: str, within: AbstractContextManager[object]) -> None:
    cos, sin = _draw(device, 1, 7, 64), _draw(device, 1, 7, 64).neg()

    def function(x: Tensor) -> Tensor:
        return cudnn_ops.rotary_embedding(x, cos, sin)

    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * cos.to(x.dtype).unsqueeze(1) + turned * sin.to(x.dtype).unsqueeze(1)

    _differentiate(
        "rotary", function, formula, [_draw(device, 2, 3, 7, 64).requires_grad_()], within
    )


_IMAGE = ConvCase(
    2, 16, 24, (9, 7), (3, 3), (2, 1), (1, 1), (1, 1), activation="relu", residual=True
)
_TURNED = TransposeCase(2, 16, 24, (5, 4), (3, 4), (2, 2), (1, 1), (1, 0), 1, (1, 1))
_ONE = Features(1, 4, 2, 0, 0, 64, 64, bottom_right=True)
_SEQUENCES = Packed((70, 0, 33, 129), (131, 5, 0, 64), _ONE)
_SAME = replace(_SEQUENCES, lengths_kv=_SEQUENCES.lengths, same=True)

DERIVATIVES: list[Derivative] = [
    _attention("bool_mask", sdpa_features.SOME[0]),
    _attention("bias", sdpa_features.SOME[1], with_lse=True),
    _attention("window_sinks", sdpa_features.SOME[2]),
    _attention("alibi", sdpa_features.SOME[3]),
    _attention("dropout", sdpa_features.SOME[4]),
    _attention("lengths", sdpa_features.SOME[5], with_lse=True),
    _in_fp8("in_fp8", fp8.Case(heads_kv=2, options={"is_causal": True, "seq_lens_kv": [90, 0]})),
    _packed("packed", replace(_SEQUENCES, lse=True, gaps=(2, 1, 0, 3))),
    _packed("packed_same", replace(_SAME, one=replace(_ONE, is_causal=True, sinks=True))),
    _packed("packed_alibi", replace(_SAME, one=replace(_ONE, is_causal=True, alibi=True))),
    _packed("packed_dropout", replace(_SAME, one=replace(_ONE, dropout_p=0.3))),
    _norm("rms_norm", NormCase((6, 5, 96), (96,), is_layer=False)),
    _norm("layer_norm", NormCase((6, 5, 96), (96,), is_layer=True, bias="same")),
    Derivative("add_rms_norm", _check_add_norm),
    _group_norm("group_norm", GroupNormCase((2, 12, 5, 7), 3, layout="last")),
    _group_norm("group_norm_silu", GroupNormCase((2, 12, 9), 3, "silu", residual=True)),
    _batch_norm("batch_norm", BatchNormCase((4, 12, 5, 7), layout="last")),
    _batch_norm("batch_norm_relu", BatchNormCase((4, 64, 9), activation="relu", residual=True)),
    _batch_norm("batch_norm_by_statistics", BatchNormCase((2, 12, 5, 7), training=False)),
    _max_pool("max_pool2d", MaxPoolCase((2, 16, 9, 11), 3, 2, 1)),
    _adaptive_norm("adaptive_layer_norm", AdaptiveNormCase((2, 7, 48), weight="same")),
    _adaptive_norm("adaptive_rms_norm", AdaptiveNormCase((2, 7, 48), False, gate="", shift="")),
    _adaptive_norm("gate_add_adaptive_layer_norm", AdaptiveNormCase((2, 7, 48), gated=True)),
    _conv("conv", replace(_IMAGE, activation="none")),
    _conv("conv_relu", _IMAGE),
    _conv("conv_silu", replace(_IMAGE, activation="silu", residual=False)),
    _conv(
        "conv3d_relu",
        ConvCase(1, 8, 8, (5, 6, 7), (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, activation="relu"),
    ),
    _transposed("conv_transpose", _TURNED),
    _transposed("conv_transpose_relu", replace(_TURNED, activation="relu", residual=True)),
    _transposed("conv_transpose_silu", replace(_TURNED, activation="silu")),
    _layer("linear_relu", linear.LinearCase((3, 7), 16, 24, "relu")),
    _layer("linear_gelu", linear.LinearCase((3, 7), 16, 24, "gelu_tanh", residual=True)),
    _layer("mlp", linear.MlpCase((3, 7), 16, 24, 40, "gelu_tanh")),
    _layer("mlp_gated", linear.MlpCase((3, 7), 16, 24, 40, "silu", gated=True)),
    Derivative("swiglu", _check_swiglu),
    Derivative("rotary", _check_rotary),
    Derivative("moe_permute", _check_permute),
    Derivative("moe_experts", _check_experts),
]
