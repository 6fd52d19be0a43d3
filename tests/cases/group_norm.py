"""Group norm: the cases, their tensors, and the float64 formula as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.ops.group_norm import NormActivation
from tests.cases import sdpa
from tests.cases.norm import in_flat_buffer


@dataclass(frozen=True)
class GroupNormCase:
    shape: tuple[int, ...]
    """[N, C, ...]."""
    groups: int
    activation: NormActivation = "none"
    weight: str = "same"
    """"same": of the input's dtype; "float32"; "": none."""
    bias: str = "same"
    eps: float = 1e-5
    layout: str = "first"
    """"first": the channels, in memory; "last"; "sliced" and "sliced last": parts of larger
    tensors; "flat": at an address that is no multiple of 16."""
    residual: bool = False
    """Added first; the sum is a result too."""
    shift: float = 0.0
    """What the values lie around."""

    def __str__(self) -> str:
        options = [f"w{self.weight}" if self.weight else "", f"b{self.bias}" if self.bias else ""]
        options += [self.activation, self.layout, "add" * self.residual, f"around{self.shift:g}"]
        name = "x".join(map(str, self.shape))
        return "-".join([f"{name}by{self.groups}", *filter(None, options)])


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    grad_out: Tensor
    grad_sum: Tensor

    @property
    def leaves(self) -> list[Tensor | None]:
        return [self.input, self.residual, self.weight, self.bias]

    @property
    def differentiable(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if leaf is not None]


def channels_last(tensor: Tensor) -> Tensor:
    """The same, with the channels innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def lay_out(values: Tensor, layout: str) -> Tensor:
    if layout == "flat":
        return in_flat_buffer(values)
    if layout.startswith("sliced"):
        # Other numbers lie between.
        wide = torch.cat([values, torch.full_like(values, 77)], 1)
        return lay_out(wide, layout.removeprefix("sliced ").replace("sliced", "first"))[
            :, : values.shape[1]
        ]
    return channels_last(values) if layout == "last" else values


def make(case: GroupNormCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def image(shift: float = 0.0) -> Tensor:
        return lay_out((draw(*case.shape) + shift).to(dtype).to(device), case.layout)

    def parameter(kind: str) -> Tensor | None:
        if not kind:
            return None
        wanted = torch.float32 if kind == "float32" else dtype
        return draw(case.shape[1]).to(wanted).to(device).requires_grad_()

    return Tensors(
        image(case.shift).requires_grad_(),
        image().requires_grad_() if case.residual else None,
        parameter(case.weight),
        parameter(case.bias),
        image(),
        image(),
    )


def formula(
    case: GroupNormCase, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """In the tensors' own precision."""
    if weight is None and bias is not None:  # of which torch has no gradient
        weight = torch.ones_like(bias)
    out = F.group_norm(input, case.groups, weight, bias, case.eps)
    return F.silu(out) if case.activation == "silu" else out


def run(case: GroupNormCase, t: Tensors) -> list[Tensor]:
    """The norm, and the sum if there is one."""
    rest = (case.groups, t.weight, t.bias, case.eps)
    if t.residual is None:
        return [cudnn_ops.group_norm(t.input, *rest, activation=case.activation)]
    return list(cudnn_ops.add_group_norm(t.input, t.residual, *rest, activation=case.activation))


def reference(case: GroupNormCase, t: Tensors, total: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of the sum, weight and bias, computed in ``dtype``."""
    leaves = [
        None if tensor is None else tensor.detach().to(dtype).contiguous().requires_grad_()
        for tensor in (total, t.weight, t.bias)
    ]
    assert leaves[0] is not None
    out = formula(case, leaves[0], leaves[1], leaves[2])
    wanted = [leaf for leaf in leaves if leaf is not None]
    of_total, *others = torch.autograd.grad(out, wanted, t.grad_out.to(dtype))
    if case.residual:
        of_total = of_total + t.grad_sum.to(dtype)
    return [out, of_total, *others]


def check(
    case: GroupNormCase, t: Tensors, within: AbstractContextManager[object] | None = None
) -> None:
    """Output and gradients against float64; torch's own in the input's dtype is the yardstick.

    They are computed within a context, if there is one.
    """
    with within or nullcontext():
        results = run(case, t)
        by = [t.grad_out, t.grad_sum][: len(results)]
        of_input, *grads = torch.autograd.grad(results, t.differentiable, by)
    if case.residual:
        assert torch.equal(grads.pop(0), of_input)
    # Hooks may have brought the input back in the other order, which its gradient then has.
    for result in (*results, *([of_input] if within is None else [])):
        in_order = channels_last(result) if case.layout.endswith("last") else result.contiguous()
        assert result.stride() == in_order.stride(), f"{case}: {result.stride()}"
    compare(case, t, results, [of_input, *grads])


def compare(case: GroupNormCase, t: Tensors, results: list[Tensor], grads: list[Tensor]) -> None:
    """Results, and gradients of input, weight and bias, against float64 and torch's own."""
    out = results[0]
    total = t.input.detach()
    if t.residual is not None:
        total = total + t.residual.detach()
        assert torch.equal(results[1], total)
    assert out.dtype == t.input.dtype
    found = [out, *grads]
    exact = reference(case, t, total, torch.float64)
    rough = reference(case, t, total, t.input.dtype)
    names = ["out", "input", *(["weight"] * bool(case.weight)), *(["bias"] * bool(case.bias))]
    for name, mine, right, other in zip(names, found, exact, rough, strict=True):
        sdpa.check(mine, right, other, f"{case} {name}")


def draw(rng: random.Random) -> GroupNormCase:
    """Any combination that group norm takes."""
    groups = rng.choice([1, 1, 2, 3, 4, 8, 32])
    channels = groups * rng.choice([1, 2, 3, 4, 5, 8, 10, 16, rng.randint(1, 40)])
    sizes: list[tuple[int, ...]] = [
        *((), (1,), (7,), (rng.randint(1, 300),), (8, 8), (7, 9), (16, 20)),
        *((rng.randint(1, 30), rng.randint(1, 30)), (3, 4, 5), (2, 3, 2, 3)),
    ]
    size = rng.choice(sizes)
    batch = rng.choice([0, 1, 2, 2, 3, 5])
    if channels == groups and all(number == 1 for number in size):
        channels *= 2  # else a group has one value, and a batch of one is refused
    return GroupNormCase(
        (batch, channels, *size),
        groups,
        activation=rng.choice(["none", "silu"]),
        weight=rng.choice(["same", "same", "float32", ""]),
        bias=rng.choice(["same", "same", "float32", ""]),
        eps=rng.choice([1e-5, 1e-6, 1e-2]),
        layout=rng.choice(_LAYOUTS if _is_told_apart((batch, channels, *size)) else ["first"]),
        residual=rng.random() < 0.3,
        shift=rng.choice([0.0, 0.0, 3.0]),
    )


_LAYOUTS = ["first", "first", "last", "last", "sliced", "sliced last", "flat"]


def _is_told_apart(shape: tuple[int, ...]) -> bool:
    """Whether the two memory orders differ."""
    return 0 not in shape and shape[1] > 1 and any(size > 1 for size in shape[2:])
