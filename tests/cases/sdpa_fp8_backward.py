"""The gradients of FP8 attention in FP8: inputs, the float64 reference, and tolerances.

The reference is the formula on the widened inputs, with the output of 8 bits as it is given. What
rounding that output adds to the gradient of exact attention is bounded apart from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cudnn_ops
from tests.cases import fp8, sdpa
from tests.cases.fp8 import Case
from tests.cases.sdpa_in_fp8 import Formula

E4M3, E5M2 = fp8.FORMATS
NAMES = ("grad_query", "grad_key", "grad_value")


@dataclass
class Call:
    """The arguments of ``sdpa_fp8_backward``, and what they stand for."""

    case: Case
    tensors: tuple[Tensor, ...]
    """``grad_out``, query, key, value, output and log-sum-exp."""
    scales: dict[str, Tensor]
    options: dict[str, Any]

    def __call__(self, **options: Any) -> cudnn_ops.AttentionFp8Gradients:
        given = self.scales | self.options | options
        return cudnn_ops.sdpa_fp8_backward(*self.tensors, **given)

    @property
    def wide(self) -> list[Tensor]:
        """``grad_out``, query, key, value and output as the numbers that they stand for."""
        names = ("do", "q", "k", "v", "o")
        return [
            x.double() * self.scales[f"descale_{name}"].double()
            for x, name in zip(self.tensors, names, strict=False)
        ]


def make(
    case: Case,
    device: str,
    dtype: torch.dtype = E4M3,
    grad_dtype: torch.dtype = E5M2,
    distribution: str = "normal",
    seed: int = 0,
) -> Call:
    """A call behind a forward; ``dtype`` is the query's and ``grad_dtype`` that of ``grad_out``."""
    tensors = fp8.draw(case, device, seed, distribution)
    data, scales = fp8.inputs(tensors, dtype)
    options = fp8.options_of(case, device)
    given: dict[str, Any] = {**scales, **options}
    found = cudnn_ops.sdpa_fp8_with_stats(*data, **given, out_dtype=dtype)
    draw = fp8.DISTRIBUTIONS[distribution]
    grad = draw(torch.randn(found.out.shape)).to(device)
    if case.layout == "bshd":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    grad, descale_do = fp8.rounded(grad, grad_dtype)
    scales |= {"descale_o": scales["descale_v"], "descale_do": descale_do}
    scales["scale_dp"] = torch.full((1,), 16.0, device=device)
    return Call(case, (grad, *data, found.out, found.lse), scales, options)


def formula(call: Call, dtype: torch.dtype, out: Tensor | None = None) -> Formula:
    """The gradients from what the call is given, or from another output."""
    grad, query, key, value, given = call.wide
    out = given if out is None else out
    return Formula(
        call.case, [x.to(dtype) for x in (query, key, value)], grad.to(dtype), out.to(dtype)
    )


def largest_dp(formula: Formula) -> Tensor:
    """What ``amax_dp`` is."""
    of_scores = formula.of_scores * formula.scale
    return of_scores.abs().amax().reshape(1) if of_scores.numel() else of_scores.new_zeros(1)


def check(call: Call, grad_dtype: torch.dtype) -> None:
    """Gradients and the largest magnitude of a call on a CPU, against float64."""
    found = call(grad_dtype=grad_dtype)
    exact, rough = formula(call, torch.float64), formula(call, torch.float32)
    order = call.tensors[1:4]
    for name, mine, one, other, like in zip(
        NAMES, found, exact.grads, rough.grads, order, strict=False
    ):
        assert mine.dtype == grad_dtype, name
        assert mine.shape == like.shape
        is_dense = mine.transpose(1, 2) if call.case.layout == "bshd" else mine
        assert is_dense.is_contiguous()
        sdpa.check(mine, one, other.to(grad_dtype), f"{call.case} {name}")
    assert found.amax_dp.shape == (1,)
    sdpa.check(found.amax_dp, largest_dp(exact), largest_dp(rough), f"{call.case} amax_dp")
    check_hidden(call, found)


def check_hidden(call: Call, found: cudnn_ops.AttentionFp8Gradients) -> None:
    """What takes part in nothing has no gradient."""
    case = call.case
    visible = fp8.visible_pairs(case).expand(case.batch, 1, case.length, case.length_kv)
    queries, keys = ~visible.any(-1), ~visible.any(-2)
    for grad, hidden in zip(found, (queries, keys, keys), strict=False):
        assert not grad[hidden.expand(grad.shape[:3]).to(grad.device)].any()


def check_straight(call: Call) -> None:
    """Against torch's gradient of exact attention, within what rounding the output adds.

    The output is in dP = scale P (dout . v - dout . out) alone. In float32, a sum of n products is
    off by n times eps (Higham, "Accuracy and stability of numerical algorithms", section 3.1).
    """
    grad, *inputs, out = call.wide
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = fp8.reference(call.case, leaves).out
    expected = torch.autograd.grad(exact, leaves, grad)
    with_out = formula(call, torch.float64)
    off = (grad.abs() * (out - exact.detach()).abs()).sum(-1, keepdim=True)
    value = inputs[2].repeat_interleave(call.case.heads // call.case.heads_kv, 1)
    sums = grad.abs() @ value.abs().mT + (grad * out).abs().sum(-1, keepdim=True)
    off = off + call.case.value_size * torch.finfo(torch.float32).eps * sums
    bounds = (*with_out.magnitudes(with_out.weights * off), torch.zeros((), dtype=torch.float64))
    found = call(grad_dtype=torch.float32)
    for name, mine, one, bound in zip(NAMES, found, expected, bounds, strict=False):
        excess = ((mine.double() - one).abs() - bound).max()
        floor = 1e-5 * float(one.abs().max()) + 1e-9
        assert excess <= floor, f"{call.case} {name}: {excess:.3g} above the bound"


def in_steps_of_8_bits(call: Call) -> list[Tensor]:
    """The gradients as cuDNN computes them: P and dP are rounded to 8 bits before products."""
    own = formula(call, torch.float64)
    grad, query, key, *_ = call.wide
    group = call.case.heads // call.case.heads_kv
    scale_dp = call.scales["scale_dp"].double()
    weights = fp8.rounded_to(256 * own.weights, call.tensors[1].dtype) / 256
    of_scores = fp8.rounded_to(scale_dp * own.scale * own.of_scores, call.tensors[0].dtype)
    of_scores = of_scores / scale_dp
    by_key = (call.case.heads_kv, -1)
    return [
        of_scores @ key.repeat_interleave(group, 1),
        (of_scores.mT @ query).unflatten(1, by_key).sum(2),
        (weights.mT @ grad).unflatten(1, by_key).sum(2),
    ]


def check_in_8_bits(call: Call) -> None:
    """Gradients of a call on a GPU: at most 1.2 times the error of the formula in 8 bits."""
    largest = call().amax_dp
    call.scales["scale_dp"] = torch.finfo(call.tensors[0].dtype).max / largest.clamp(min=1e-30)
    found = call()
    exact = formula(call, torch.float64)
    for name, mine, one, rough in zip(
        NAMES, found, exact.grads, in_steps_of_8_bits(call), strict=False
    ):
        error = fp8.root_mean_square(mine.double() - one)
        floor = 1e-2 * fp8.root_mean_square(one)  # gradients of 16 bits, the log-sum-exp
        allowed = 1.2 * fp8.root_mean_square(rough - one) + floor
        assert error <= allowed, f"{call.case} {name}: error {error:.4g} exceeds {allowed:.4g}"
    wanted = largest_dp(exact).item()
    assert math.isclose(found.amax_dp.item(), wanted, rel_tol=0.1, abs_tol=1e-3)
    check_hidden(call, found)
