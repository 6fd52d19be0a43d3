"""Batch norm: the cases, their tensors, and the float64 formula as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.ops.batch_norm import BatchNormActivation
from tests.cases import sdpa
from tests.cases.group_norm import channels_last, lay_out
from tests.cases.norm import in_flat_buffer

#: Nothing goes through a ReLU so near to its edge: rounding decides what it lets pass.
EDGE = 0.05


@dataclass(frozen=True)
class BatchNormCase:
    shape: tuple[int, ...]
    """[N, C, ...]."""
    training: bool = True
    activation: BatchNormActivation = "none"
    residual: bool = False
    weight: str = "float32"
    """"same": of the input's dtype; "float32"; "flat": float32 at an address that is no multiple of
    16; "strided": float32, every second of some; "": none."""
    bias: str = "float32"
    running: str = "float32"
    """Likewise, of both statistics."""
    momentum: float = 0.1
    eps: float = 1e-5
    layout: str = "first"
    """As in GroupNormCase, of input and gradient."""
    other: str = ""
    """The residual's, where it is another."""
    shift: float = 0.0
    """What the values lie around."""

    def __str__(self) -> str:
        options = ["train" if self.training else "eval", self.activation, self.layout, self.other]
        options += [f"w{self.weight}" * bool(self.weight), f"b{self.bias}" * bool(self.bias)]
        options += [f"r{self.running}" * bool(self.running), "add" * self.residual]
        options += [f"around{self.shift:g}"]
        return "-".join(["x".join(map(str, self.shape)), *filter(None, options)])


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    grad_out: Tensor

    @property
    def differentiable(self) -> list[Tensor]:
        leaves = (self.input, self.weight, self.bias, self.residual)
        return [leaf for leaf in leaves if leaf is not None]

    @property
    def running(self) -> list[Tensor]:
        return [s for s in (self.running_mean, self.running_var) if s is not None]


def make(case: BatchNormCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def image(layout: str, shift: float = 0.0) -> Tensor:
        return lay_out((draw(*case.shape) + shift).to(dtype).to(device), layout)

    def vector(kind: str, values: Tensor) -> Tensor | None:
        if not kind:
            return None
        values = values.to(dtype if kind == "same" else torch.float32).to(device)
        if kind == "strided":
            return values.repeat_interleave(2)[::2]
        return in_flat_buffer(values) if kind == "flat" else values

    def parameter(kind: str) -> Tensor | None:
        found = vector(kind, draw(case.shape[1]))
        return found if found is None else found.requires_grad_()

    t = Tensors(
        image(case.layout, case.shift).requires_grad_(),
        vector(case.running, draw(case.shape[1]) + case.shift),
        vector(case.running, draw(case.shape[1]).abs() + 0.5),
        parameter(case.weight),
        parameter(case.bias),
        image(case.other or case.layout).requires_grad_() if case.residual else None,
        image(case.layout),
    )
    if case.activation == "relu" and t.input.numel() > 0:
        before = reference(replace(case, activation="none"), t, torch.float64)["out"]
        t.grad_out[before.abs() < EDGE] = 0
    return t


def run(case: BatchNormCase, t: Tensors) -> Tensor:
    return cudnn_ops.batch_norm(
        t.input,
        t.running_mean,
        t.running_var,
        t.weight,
        t.bias,
        case.training,
        case.momentum,
        case.eps,
        residual=t.residual,
        activation=case.activation,
    )


def reference(case: BatchNormCase, t: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, gradients and new statistics by torch's functions, computed in ``dtype``."""

    def copy(tensor: Tensor | None, *, grad: bool = False) -> Any:
        if tensor is None:
            return None
        return tensor.detach().to(dtype).contiguous().clone().requires_grad_(grad)

    input, weight, bias, residual = (
        copy(leaf, grad=True) for leaf in (t.input, t.weight, t.bias, t.residual)
    )
    running = copy(t.running_mean), copy(t.running_var)
    numbers = case.training, case.momentum, case.eps
    factor = weight
    if weight is None and bias is not None:  # of which torch has no gradient
        factor = torch.ones_like(bias)
    with torch.backends.cudnn.flags(enabled=False):  # it takes no more than three dimensions
        out = F.batch_norm(input, running[0], running[1], factor, bias, *numbers)
    if residual is not None:
        out = out + residual
    if case.activation == "relu":
        out = out.relu()
    named = {"input": input, "weight": weight, "bias": bias, "residual": residual}
    leaves = {name: leaf for name, leaf in named.items() if leaf is not None}
    grads = torch.autograd.grad(out, list(leaves.values()), t.grad_out.to(dtype))
    found = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    if case.training and case.running:
        found |= {"running_mean": running[0], "running_var": running[1]}
    return found


def check(
    case: BatchNormCase, t: Tensors, within: AbstractContextManager[object] | None = None
) -> None:
    """Output, gradients and new statistics against float64, with torch's own as the yardstick.

    They are computed within a context, if there is one.
    """
    exact = reference(case, t, torch.float64)
    rough = reference(case, t, t.input.dtype)
    before = [statistic.clone() for statistic in t.running]
    with within or nullcontext():
        out = run(case, t)
        grads = torch.autograd.grad(out, t.differentiable, t.grad_out)
    assert out.dtype == t.input.dtype
    # Hooks may have brought the input back in the other order, which its gradient then has.
    for result in (out, *([grads[0]] if within is None else [])):
        in_order = channels_last(result) if case.layout.endswith("last") else result.contiguous()
        assert result.stride() == in_order.stride(), f"{case}: {result.stride()}"
    found = dict(zip([name for name in exact if "running" not in name], (out, *grads), strict=True))
    if case.training and case.running:
        found |= {"running_mean": t.running_mean, "running_var": t.running_var}  # type: ignore[dict-item]
    else:
        assert all(map(torch.equal, t.running, before)), f"{case}: statistics have changed"
    for name, right in exact.items():
        sdpa.check(found[name], right, rough[name], f"{case} {name}")


def draw(rng: random.Random) -> BatchNormCase:
    """Any combination that batch norm takes."""
    channels = rng.choice([1, 3, 5, 8, 8, 16, 24, 32, 40, 64, 64, 128, rng.randint(1, 130)])
    sizes: list[tuple[int, ...]] = [
        *((), (1,), (7,), (rng.randint(1, 300),), (8, 8), (7, 9), (16, 20)),
        *((rng.randint(1, 30), rng.randint(1, 30)), (3, 4, 5), (2, 3, 2, 3)),
    ]
    size = rng.choice(sizes)
    # Two values a channel are 1 and -1 whatever they are, and their gradients are differences of
    # equal numbers.
    batch = rng.choice([0, 3, 4, 5, 8] if all(number == 1 for number in size) else [1, 2, 3, 5])
    vectors = ["same", "same", "float32", "float32", "flat", "strided", ""]
    layouts = _LAYOUTS if batch > 0 and channels > 1 and max(size, default=1) > 1 else ["first"]
    training = rng.random() < 0.7
    return BatchNormCase(
        (batch, channels, *size),
        training=training,
        activation=rng.choice(["none", "relu"]),
        residual=rng.random() < 0.4,
        weight=rng.choice(vectors),
        bias=rng.choice(vectors),
        running=rng.choice(vectors if training else vectors[:-1]),
        momentum=rng.choice([0.1, 0.1, 0.3, 1.0]),
        eps=rng.choice([1e-5, 1e-5, 1e-3]),
        layout=rng.choice(layouts),
        other=rng.choice(["", "", layouts[-1]]),
        shift=rng.choice([0.0, 0.0, 2.0]),
    )


_LAYOUTS = ["first", "first", "last", "last", "sliced", "sliced last", "flat"]
