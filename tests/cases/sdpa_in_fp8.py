"""Attention of 16 bits in FP8: the float64 reference of its gradients, and what they may be off by.

The reference is the straight-through gradient: that of exact attention on the rounded inputs. What
a backward in 16 bits adds to it is held to twice what the formula in 16 bits adds. What the rounded
output adds is bounded by theory (:func:`bounds_of_output`).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

import cudnn_ops
from tests.cases import sdpa
from tests.cases.fp8 import (
    DISTRIBUTIONS,
    Case,
    check_error,
    draw,
    options_of,
    reference,
    rounding_of_scores,
    visible_pairs,
)

E4M3 = torch.float8_e4m3fn

#: Beside those that errors of FP8 are measured over: keys that have much in common, as those of
#: trained models do.
KINDS = (*DISTRIBUTIONS, "keys alike")


def make(case: Case, dtype: torch.dtype, device: str, kind: str, seed: int) -> list[Tensor]:
    """Query, key and value, and a gradient of the output."""
    tensors = draw(case, "cpu", seed, kind if kind in DISTRIBUTIONS else "normal")
    if kind == "keys alike":
        tensors[1] = tensors[1] + 3 * torch.randn(1, case.heads_kv, 1, case.head_size)
    grad = torch.randn(case.batch, case.heads, case.length, case.value_size)
    return [x.to(device, dtype) for x in (*tensors, grad)]


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor under the largest power of two that is fit for its largest number; a descale."""
    amax = float(x.double().abs().max()) if x.numel() else 0.0
    scale = 2.0 ** math.floor(math.log2(448 / amax)) if amax > 0 else 1.0
    wide = x.double() * scale
    assert not wide.numel() or wide.abs().max() <= 448
    data = torch.empty_like(x, dtype=E4M3).copy_(wide)
    return data, torch.tensor([1 / scale], device=x.device)


def _by_query_head(case: Case, x: Tensor) -> Tensor:
    return x.repeat_interleave(case.heads // case.heads_kv, 1)


def _by_key_head(case: Case, x: Tensor) -> Tensor:
    return x.unflatten(1, (case.heads_kv, -1)).sum(2)


class Formula:
    """The gradients by their formula, from rounded inputs and an output, in one precision."""

    def __init__(self, case: Case, inputs: list[Tensor], grad: Tensor, out: Tensor) -> None:
        self.case, self.scale = case, case.options.get("scale", case.head_size**-0.5)
        query, key, value = inputs
        self.query, self.key = query, _by_query_head(case, key)
        visible = visible_pairs(case).to(query.device)
        scores = (query @ self.key.mT * self.scale).masked_fill(~visible, -math.inf)
        self.weights = scores.softmax(-1).nan_to_num(0.0)
        of_weights = grad @ _by_query_head(case, value).mT
        delta = (grad * out).sum(-1, keepdim=True)
        self.of_scores = self.weights * (of_weights - delta)
        of_value = _by_key_head(case, self.weights.mT @ grad)
        self.grads = (*self.of_rows(self.of_scores), of_value)

    def of_rows(self, of_scores: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of query and key from that of the scores."""
        of_query = of_scores @ self.key * self.scale
        return of_query, _by_key_head(self.case, of_scores.mT @ self.query * self.scale)

    def magnitudes(self, of_scores: Tensor) -> tuple[Tensor, Tensor]:
        """How large the gradients of query and key can be where that of the scores is so large."""
        of_query = of_scores @ self.key.abs() * self.scale
        return of_query, _by_key_head(self.case, of_scores.mT @ self.query.abs() * self.scale)


def is_hopper(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability()[0] < 10


def bounds_of_output(formula: Formula, exact: Tensor, value: Tensor, grad: Tensor, device: str):
    """What the rounding of the output adds to the gradients of query and key, at most.

    It is in dS = P (dP - dout . out) alone. An output is off by half a unit in the last place of
    its dtype, ``eps / 2`` times itself. Before that, in float32, a weight is off by what its score
    is, and a sum of n products by n times eps (Higham, "Accuracy and stability of numerical
    algorithms", section 3.1). cuDNN rounds the exponentials to E4M3 as well: 2^-4 of each, and of
    those below 2^-6 / 256 it is 2^-10 / 256, where their sum is 1 at least. Hopper's kernel rounds
    the output to E4M3 too, under a scale of which amax of the value is 224 at least.
    """
    off = torch.finfo(grad.dtype).eps / 2 * exact.abs()
    if exact.numel() == 0 or value.numel() == 0:
        return formula.grads[:2]
    wide = _by_query_head(formula.case, value).abs()
    largest = float((formula.query.abs() @ formula.key.abs().mT).max()) * formula.scale
    terms = value.shape[2] + 2 * (formula.case.head_size + 2) * largest
    off = off + terms * torch.finfo(torch.float32).eps * (formula.weights @ wide)
    if device == "cuda":
        off = off + 2.0**-4 * formula.weights @ wide + 2.0**-18 * wide.sum(2, keepdim=True)
        if is_hopper(device):
            off = off + 2.0**-4 * (exact.abs() + off) + 2.0**-10 * value.abs().max() / 224
    of_delta = (grad.double().abs() * off).sum(-1, keepdim=True)
    return formula.magnitudes(formula.weights * of_delta)


def run(case: Case, tensors: list[Tensor], within: AbstractContextManager[object]) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = options_of(case, str(grad.device.type))
    with within:
        out = cudnn_ops.scaled_dot_product_attention_fp8(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *grads]


def check(
    case: Case,
    dtype: torch.dtype,
    device: str,
    kind: str = "normal",
    seed: int = 0,
    within: AbstractContextManager[object] | None = None,
) -> None:
    """Output and gradients of a call, against float64."""
    tensors = make(case, dtype, device, kind, seed)
    *inputs, grad = tensors
    out, *found = run(case, tensors, within or nullcontext())
    assert out.dtype == dtype
    data, descales = zip(*map(rounded, inputs), strict=True)
    scales = dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
    written = E4M3 if is_hopper(device) else dtype
    most = 1.2 if device == "cuda" and kind == "uniform" else 1.15  # as test_errors_by_distribution
    check_error(case, out, inputs, data, scales, written, most=most)

    wide = [x.double() * d.double() for x, d in zip(data, descales, strict=True)]
    assert all(torch.equal(x, x.to(dtype).double()) for x in wide)  # the 16 bits of the backward
    by_output = Formula(case, wide, grad.double(), out.double())
    low = Formula(case, [x.to(dtype) for x in wide], grad, out)
    roughs = list(low.grads)
    if device == "cuda":  # the log-sum-exp of Hopper's scores
        off = math.expm1(rounding_of_scores(case, wide))
        of_query, of_key = by_output.magnitudes(by_output.of_scores.abs())
        of_value = _by_key_head(case, by_output.weights.mT @ grad.double().abs())
        roughs = [r + off * b for r, b in zip(roughs, (of_query, of_key, of_value), strict=True)]
    names = ("grad_query", "grad_key", "grad_value")
    for name, mine, exact, rough in zip(names, found, by_output.grads, roughs, strict=True):
        assert mine.dtype == dtype
        sdpa.check(mine, exact, rough.to(dtype), f"{case} {kind} {name}")

    best = reference(case, wide).out
    straight = Formula(case, wide, grad.double(), best)
    bounds = bounds_of_output(straight, best, wide[2], grad, device)
    for name, mine, exact, by_out, bound in zip(
        names, found, straight.grads, by_output.grads, (*bounds, torch.zeros(())), strict=True
    ):
        if mine.numel() == 0:
            continue
        own = (mine.double() - by_out).abs()  # the backward's, which was held to its bound above
        excess = ((mine.double() - exact).abs() - own - bound.to(device)).max()
        floor = 1e-9 * float(exact.abs().max()) + 1e-12
        assert excess <= floor, f"{case} {kind} {name}: {excess:.3g} above the bound"
    hidden = ~visible_pairs(case).any(-1).expand(case.batch, case.heads, -1).to(device)
    assert not found[0][hidden].any()
