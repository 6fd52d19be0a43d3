"""Norms: the cases, their tensors, and the float64 formula as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases import sdpa


@dataclass(frozen=True)
class NormCase:
    """``shape`` ends with ``normalized``; the rest are options of the operators."""

    shape: tuple[int, ...]
    normalized: tuple[int, ...]
    is_layer: bool
    weight: str = "same"
    """"same": of the input's dtype; "float32"; "": none."""
    bias: str = ""
    zero_centered: bool = False
    eps: float = 1e-5
    layout: str = "dense"
    """"sliced": rows with gaps; "heads": a [B, S, H, D] view of a fused projection; "flat": all
    tensors are views of flat buffers, at addresses that are no multiple of 16."""
    shift: float = 0.0
    """What the values lie around."""

    def __str__(self) -> str:
        name = "layer" if self.is_layer else "rms"
        options = [f"w{self.weight}" if self.weight else "", f"b{self.bias}" if self.bias else ""]
        options += ["zero_centered" * self.zero_centered, self.layout, f"around{self.shift:g}"]
        return "-".join([name, "x".join(map(str, self.shape)), *filter(None, options)])


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad_out: Tensor

    @property
    def differentiable(self) -> list[Tensor]:
        return [tensor for tensor in (self.input, self.weight, self.bias) if tensor is not None]


def in_flat_buffer(values: Tensor) -> Tensor:
    """The same, one number behind the start of a buffer, as parameters lie in a flat one."""
    buffer = values.new_empty(values.numel() + 1)
    return buffer[1:].view(values.shape).copy_(values)


def make(case: NormCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if case.layout == "sliced":
        memory = draw(*case.shape[:-1], case.shape[-1] + 8) + case.shift
        values = memory.to(dtype).to(device)[..., : case.shape[-1]]
    elif case.layout == "heads":
        *leading, heads, size = case.shape
        memory = draw(*leading, 3 * heads, size) + case.shift
        values = memory.to(dtype).to(device)[..., heads : 2 * heads, :]
    else:
        values = (draw(*case.shape) + case.shift).to(dtype).to(device)

    def placed(tensor: Tensor) -> Tensor:
        return in_flat_buffer(tensor) if case.layout == "flat" else tensor

    def parameter(kind: str) -> Tensor | None:
        if not kind:
            return None
        wanted = torch.float32 if kind == "float32" else dtype
        return placed(draw(*case.normalized).to(wanted).to(device)).requires_grad_()

    return Tensors(
        placed(values).requires_grad_(),
        parameter(case.weight),
        parameter(case.bias),
        placed(draw(*case.shape).to(dtype).to(device)),
    )


def norm(case: NormCase, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The formula, in the tensors' own precision."""
    factor = weight if weight is None or not case.zero_centered else 1 + weight
    if case.is_layer:
        return F.layer_norm(input, case.normalized, factor, bias, case.eps)
    return F.rms_norm(input, case.normalized, factor, case.eps)


def run(case: NormCase, t: Tensors) -> Tensor:
    options: dict[str, Any] = {"zero_centered": case.zero_centered}
    if case.is_layer:
        return torch.ops.cudnn_ops.layer_norm(
            t.input, case.normalized, t.weight, t.bias, case.eps, **options
        )
    return torch.ops.cudnn_ops.rms_norm(t.input, case.normalized, t.weight, case.eps, **options)


def reference(case: NormCase, t: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, computed in ``dtype``."""
    leaves = [
        None if tensor is None else tensor.detach().to(dtype).requires_grad_()
        for tensor in (t.input, t.weight, t.bias)
    ]
    assert leaves[0] is not None
    out = norm(case, leaves[0], leaves[1], leaves[2])
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [out, *torch.autograd.grad(out, wanted, t.grad_out.to(dtype))]


def check(case: NormCase, t: Tensors, within: AbstractContextManager[object] | None = None) -> None:
    """Output and gradients against float64; torch's own in the input's dtype is the yardstick.

    They are computed within a context, if there is one.
    """
    with within or nullcontext():
        out = run(case, t)
        grads = torch.autograd.grad(out, t.differentiable, t.grad_out)
    assert out.is_contiguous()
    assert out.dtype == t.input.dtype
    found = [out, *grads]
    exact = reference(case, t, torch.float64)
    rough = reference(case, t, t.input.dtype)
    names = ["out", "input", *(["weight"] * bool(case.weight)), *(["bias"] * bool(case.bias))]
    for name, mine, right, other in zip(names, found, exact, rough, strict=True):
        sdpa.check(mine, right, other, f"{case} {name}")


def draw(rng: random.Random) -> NormCase:
    """Any combination that the norms take."""
    size = rng.choice([1, 7, 64, 96, 100, 128, 256, 1000, 1024, rng.randint(1, 700)])
    normalized = (size,) if rng.random() < 0.8 else (rng.randint(1, 5), size)
    leading = rng.choice([(), (1,), (rng.randint(1, 70),), (3, rng.randint(1, 9)), (2, 3, 4), (0,)])
    layout = rng.choice(["dense", "dense", "flat"])
    if len(normalized) == 1 and leading and rng.random() < 0.4:
        layout = "heads" if len(leading) > 1 else "sliced"
    is_layer = rng.random() < 0.5
    return NormCase(
        (*leading, *normalized),
        normalized,
        is_layer,
        weight=rng.choice(["same", "same", "float32", ""]),
        bias=rng.choice(["same", "float32", ""]) if is_layer else "",
        zero_centered=rng.random() < 0.3,
        eps=rng.choice([1e-5, 1e-6, 1e-2]),
        layout=layout,
        shift=rng.choice([0.0, 0.0, 3.0]),
    )
