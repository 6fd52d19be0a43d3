"""Attention: the cases, their inputs, the float64 reference and the tolerance of every test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
CPU_DTYPES = (*LOW_PRECISION, torch.float32, torch.float64)

#: What is left of an error when the low-precision formula happens to be exact, relative to the
#: largest value of the reference.
FLOOR = {
    torch.float16: 2e-4,
    torch.bfloat16: 1.5e-3,
    torch.float32: 2e-5,
    torch.float64: 1e-13,
}


@dataclass(frozen=True)
class Case:
    """One attention problem; ``layout`` says how the inputs lie in memory."""

    batch: int
    heads: int
    heads_kv: int
    length: int
    length_kv: int
    head_size: int
    value_size: int
    is_causal: bool = False
    scale: float | None = None
    layout: str = "bshd"

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        scale = "" if self.scale is None else f"-scale{self.scale}"
        return (
            f"b{self.batch}-h{self.heads}x{self.heads_kv}-s{self.length}x{self.length_kv}"
            f"-d{self.head_size}x{self.value_size}-{mask}-{self.layout}{scale}"
        )

    def kwargs(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.heads != self.heads_kv,
        }


_BASE = Case(2, 4, 4, 64, 64, 64, 64)

CASES: list[Case] = [
    # masks, groups of heads, cross attention, odd lengths
    _BASE,
    replace(_BASE, is_causal=True),
    replace(_BASE, heads_kv=2, is_causal=True),
    replace(_BASE, heads_kv=1),
    replace(_BASE, heads=6, heads_kv=2, length=33, length_kv=33, is_causal=True),
    replace(_BASE, length=17, length_kv=77),
    replace(_BASE, length=77, length_kv=17),
    replace(_BASE, length=77, length_kv=17, is_causal=True),
    replace(_BASE, length=17, length_kv=77, is_causal=True),
    replace(_BASE, length=1, length_kv=129),
    replace(_BASE, length=129, length_kv=1),
    replace(_BASE, length=1, length_kv=1, is_causal=True),
    *(replace(_BASE, length=s, length_kv=s, is_causal=True) for s in (63, 65, 127, 129, 191, 193)),
    # head sizes, equal and not
    *(replace(_BASE, head_size=d, value_size=d, is_causal=True) for d in (8, 16, 32, 40, 72, 80)),
    *(replace(_BASE, head_size=d, value_size=d, length=96) for d in (96, 104, 128)),
    replace(_BASE, head_size=64, value_size=32),
    replace(_BASE, head_size=32, value_size=128, is_causal=True, heads_kv=2),
    # scales
    replace(_BASE, scale=1.0),
    replace(_BASE, scale=0.0, is_causal=True),
    replace(_BASE, scale=-0.125),
    replace(_BASE, scale=1e-310, is_causal=True),
    # memory
    *(
        replace(_BASE, layout=layout, heads_kv=2, is_causal=True, length=40, length_kv=56)
        for layout in ("bhsd", "sbhd", "hbsd", "packed", "sliced", "misaligned", "broadcast")
    ),
    replace(_BASE, batch=1, layout="bhsd"),
    replace(_BASE, heads=1, heads_kv=1, layout="bhsd"),
    # nothing to do, nothing to attend to
    replace(_BASE, batch=0),
    replace(_BASE, length=0),
    replace(_BASE, length_kv=0, is_causal=True),
    replace(_BASE, length=0, length_kv=0, heads_kv=2),
]

#: Only where cuDNN has kernels for them: head sizes over 128, on Hopper.
HOPPER_CASES: list[Case] = [
    replace(_BASE, head_size=192, value_size=128, is_causal=True),
    replace(_BASE, head_size=192, value_size=192),
    replace(_BASE, head_size=256, value_size=256, is_causal=True, heads_kv=2),
]

_ORDERS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "hbsd": (1, 0, 2, 3)}


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _lay_out(values: Tensor, layout: str) -> Tensor:
    """The same values [B, H, S, D] in another memory layout."""
    batch, heads, length, size = values.shape
    if layout in _ORDERS:
        order = _ORDERS[layout]
        inverse = [order.index(dim) for dim in range(4)]
        return values.permute(order).contiguous().permute(inverse)
    if layout == "packed":  # one of three projections that lie side by side: [B, S, 3, H, D]
        memory = values.new_full((batch, length, 3, heads, size), math.nan)
        view = memory[:, :, 1].transpose(1, 2)
    elif layout == "sliced":  # a window into a longer, wider tensor
        memory = values.new_full((batch, heads, length + 5, size + 8), math.nan)
        view = memory[:, :, 3 : 3 + length, :size]
    elif layout == "misaligned":  # an address and strides that are not multiples of 16 bytes
        memory = values.new_full((batch * heads * length * (size + 1) + 1,), math.nan)
        view = memory[1:].view(batch, heads, length, size + 1)[..., :size]
    elif layout == "broadcast":  # all heads share one memory
        return values[:, :1].contiguous().expand(-1, heads, -1, -1)
    else:
        raise ValueError(layout)
    view.copy_(values)
    return view


def make_inputs(
    case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a case, fresh random values for each seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (case.batch, case.heads, case.length, case.head_size),
        (case.batch, case.heads_kv, case.length_kv, case.head_size),
        (case.batch, case.heads_kv, case.length_kv, case.value_size),
    )
    query, key, value = (
        _lay_out(_random(shape, dtype, generator).to(device), case.layout) for shape in shapes
    )
    return query, key, value


def make_grad_out(case: Case, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.heads, case.length, case.value_size)
    return _random(shape, dtype, generator).to(device)


def attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The formula, written out in the inputs' own precision: output and log-sum-exp.

    Independent of the code under test: key heads are repeated, rows are normalized explicitly,
    and torch's autograd differentiates it.
    """
    group = query.shape[1] // max(key.shape[1], 1)
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * factor
    if is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)[:, None]
        columns = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.where(columns <= rows, -math.inf)
    if scores.shape[-1] == 0:
        out = value.new_zeros(*query.shape[:3], value.shape[-1])
        return out, query.new_full(query.shape[:3], -math.inf)
    peak = scores.amax(-1, keepdim=True).detach()
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bhkd->bhqd", weights / total, value)
    return out, (total.log() + peak).squeeze(-1)


@dataclass(frozen=True)
class Results:
    """Everything a call gives, and what it should give."""

    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from vars(self).items()


def run(case: Case, inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor) -> Results:
    """What the operators give: output, log-sum-exp and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out, lse = torch.ops.cudnn_ops.sdpa_with_lse(*leaves, **case.kwargs())
    grads = torch.autograd.grad(out, leaves, grad_out)
    return Results(out.detach(), lse.detach(), *grads)


def reference(
    case: Case,
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    dtype: torch.dtype,
    grad_lse: Tensor | None = None,
) -> Results:
    """The formula and its gradients, computed in ``dtype``."""
    query, key, value = leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out, lse = attention(query, key, value, case.is_causal, case.scale)
    loss = (out * grad_out.to(dtype)).sum()
    if grad_lse is not None:
        loss = loss + (lse * grad_lse.to(dtype)).sum()
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    else:  # nothing to attend to
        grads = tuple(torch.zeros_like(leaf) for leaf in leaves)
    return Results(out.detach(), lse.detach(), *grads)


def check(actual: Tensor, exact: Tensor, low_precision: Tensor, name: str) -> None:
    """Error at most twice that of the formula in the inputs' precision, plus a small floor.

    Args:
        actual: the result under test.
        exact: the float64 reference.
        low_precision: the reference computed in the precision of the inputs.
        name: of the result, for the message.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, not {exact.shape}"
    if exact.numel() == 0:
        return
    infinite = exact.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{name}: infinities at other places"
    exact = exact.masked_fill(infinite, 0.0)
    error = (actual.double().masked_fill(infinite, 0.0) - exact).abs().max().item()
    allowed_by_formula = (low_precision.double().masked_fill(infinite, 0.0) - exact).abs().max()
    floor = FLOOR[low_precision.dtype] * max(exact.abs().max().item(), 0.5)
    bound = 2 * allowed_by_formula.item() + floor
    assert error <= bound, f"{name}: error {error:.3g} exceeds {bound:.3g}"  # NaN fails too


def check_results(
    case: Case,
    actual: Results,
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> None:
    """Holds a call's output, log-sum-exp and gradients against the float64 reference."""
    exact = reference(case, inputs, grad_out, torch.float64, grad_lse)
    low = reference(case, inputs, grad_out, inputs[0].dtype, grad_lse)
    for (name, tensor), (_, expected), (_, rough) in zip(
        actual.items(), exact.items(), low.items(), strict=True
    ):
        if name == "lse":  # float32 whatever the inputs are
            rough = reference(case, inputs, grad_out, lse_dtype(inputs[0].dtype)).lse
            assert tensor.dtype == rough.dtype
        check(tensor, expected, rough, name)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
