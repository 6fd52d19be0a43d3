"""Adaptive norms: the cases, their tensors, and the float64 formula as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa
from tests.cases.norm import in_flat_buffer


@dataclass(frozen=True)
class AdaptiveNormCase:
    shape: tuple[int, ...]
    """[B, ..., C]."""
    is_layer: bool = True
    gated: bool = False
    """The norm is of a gated sum, which is a result too."""
    scale: str = "sample"
    """"sample": [B, C]; "ones": [B, 1, ..., C]; "token": of the input's shape; "batch": one for all
    samples; "first": of the batch and the first dimension of tokens; "": none."""
    shift: str = "sample"
    gate: str = "sample"
    wide: bool = False
    """Gate, scale and shift in float32."""
    weight: str = ""
    """"same": of the input's dtype; "float32"; "": none."""
    bias: str = ""
    eps: float = 1e-6
    layout: str = "dense"
    """"sliced": rows with gaps; "part": some of a sample's tokens; "flat": at an address that is no
    multiple of 16. Gate, scale and shift are chunks of one tensor, but for "flat"."""
    shift_by: float = 0.0
    """What the values lie around."""

    def __str__(self) -> str:
        options = [f"w{self.weight}" if self.weight else "", f"b{self.bias}" if self.bias else ""]
        options += [f"gate:{self.gate}" * self.gated, "wide" * self.wide, self.layout]
        name = "layer" if self.is_layer else "rms"
        kinds = f"scale:{self.scale}-shift:{self.shift}"
        size = "x".join(map(str, self.shape))
        return "-".join([name, size, kinds, *filter(None, options), f"around{self.shift_by:g}"])


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    update: Tensor | None
    gate: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    grad_out: Tensor
    grad_sum: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        names = ("input", "update", "gate", "scale", "shift", "weight", "bias")
        return {name: leaf for name in names if (leaf := getattr(self, name)) is not None}


def shape_of(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Of gate, scale or shift."""
    batch, *tokens, columns = shape
    return {
        "sample": (batch, columns),
        "ones": (batch, *(1 for _ in tokens), columns),
        "token": shape,
        "batch": (1, *(1 for _ in tokens), columns),
        "first": (batch, *tokens[:1], *(1 for _ in tokens[1:]), columns),
    }[kind]


def lay_out(values: Tensor, layout: str) -> Tensor:
    if layout == "flat":
        return in_flat_buffer(values)
    # Other numbers lie between.
    if layout == "sliced":
        columns = values.shape[-1]
        return torch.cat([values, torch.full_like(values[..., :1], 77).expand_as(values)], -1)[
            ..., :columns
        ]
    if layout == "part" and values.dim() > 2:
        return torch.cat([torch.full_like(values, 77), values], 1)[:, values.shape[1] :]
    return values


def make(case: AdaptiveNormCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def rows(around: float = 0.0) -> Tensor:
        return lay_out((draw(*case.shape) + around).to(dtype).to(device), case.layout)

    def modulation(kind: str, place: int) -> Tensor | None:
        if not kind:
            return None
        *leading, columns = shape_of(case.shape, kind)
        of_all = draw(*leading, 3 * columns).to(torch.float32 if case.wide else dtype).to(device)
        chunk = of_all.chunk(3, -1)[place] if columns else of_all
        return in_flat_buffer(chunk) if case.layout == "flat" else chunk

    def parameter(kind: str) -> Tensor | None:
        if not kind:
            return None
        return draw(case.shape[-1]).to(torch.float32 if kind == "float32" else dtype).to(device)

    tensors = (
        rows(case.shift_by),
        rows() if case.gated else None,
        modulation(case.gate, 0) if case.gated else None,
        modulation(case.scale, 1),
        modulation(case.shift, 2),
        parameter(case.weight),
        parameter(case.bias),
    )
    x, update, gate, scale, shift, weight, bias = (
        None if one is None else one.detach().requires_grad_() for one in tensors
    )
    assert x is not None
    return Tensors(x, update, gate, scale, shift, weight, bias, rows(), rows())


def beside(modulation: Tensor, input: Tensor) -> Tensor:
    """With as many dimensions as the input."""
    if modulation.dim() == input.dim():
        return modulation
    return modulation.unflatten(0, (modulation.shape[0], *(1,) * (input.dim() - 2)))


def formula(
    case: AdaptiveNormCase, leaves: dict[str, Tensor], total: Tensor | None = None
) -> list[Tensor]:
    """In the tensors' own precision; the norm is of ``total``, if it is given."""
    x = leaves["input"]
    if case.gated:
        x = x + beside(leaves["gate"], x) * leaves["update"]
    # As it was rounded, with the derivative of what it was made from.
    normed = x if total is None else x + (total - x).detach()
    size = x.shape[-1:]
    if case.is_layer:
        weight, bias = leaves.get("weight"), leaves.get("bias")
        if weight is None and bias is not None:  # of which torch has no gradient
            weight = torch.ones_like(bias)
        out = F.layer_norm(normed, size, weight, bias, case.eps)
    else:
        out = F.rms_norm(normed, size, leaves.get("weight"), case.eps)
    if "scale" in leaves:
        out = out * (1 + beside(leaves["scale"], x))
    if "shift" in leaves:
        out = out + beside(leaves["shift"], x)
    return [out, x] if case.gated else [out]


def run(case: AdaptiveNormCase, t: Tensors) -> list[Tensor]:
    """The norm, and the sum if there is one."""
    options: dict[str, Any] = {"weight": t.weight, "eps": case.eps}
    kind = "layer" if case.is_layer else "rms"
    if case.is_layer:
        options["bias"] = t.bias
    if case.gated:
        of_sum = getattr(cudnn_ops, f"gate_add_adaptive_{kind}_norm")
        return list(of_sum(t.input, t.update, t.gate, t.scale, t.shift, **options))
    return [getattr(cudnn_ops, f"adaptive_{kind}_norm")(t.input, t.scale, t.shift, **options)]


def reference(
    case: AdaptiveNormCase, t: Tensors, total: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output and gradients, computed in ``dtype``."""
    leaves = {
        name: leaf.detach().to(dtype).contiguous().requires_grad_()
        for name, leaf in t.leaves.items()
    }
    results = formula(case, leaves, total.to(dtype) if case.gated else None)
    by = [t.grad_out.to(dtype), t.grad_sum.to(dtype)][: len(results)]
    grads = torch.autograd.grad(results, list(leaves.values()), by)
    return {"out": results[0], **dict(zip(leaves, grads, strict=True))}


def check(
    case: AdaptiveNormCase, t: Tensors, within: AbstractContextManager[object] | None = None
) -> None:
    """Output and gradients against float64; torch's own in the input's dtype is the yardstick.

    They are computed within a context, if there is one.
    """
    with within or nullcontext():
        results = run(case, t)
        by = [t.grad_out, t.grad_sum][: len(results)]
        grads = torch.autograd.grad(results, list(t.leaves.values()), by)
    found = {"out": results[0], **dict(zip(t.leaves, grads, strict=True))}
    total = results[-1].detach()
    for name, like in (("out", t.input), *t.leaves.items()):
        assert found[name].dtype == like.dtype, f"{case} {name}"
        assert found[name].is_contiguous(), f"{case} {name}"
    low = t.input.dtype
    if case.gated:
        exact = formula(case, {name: leaf.detach().double() for name, leaf in t.leaves.items()})
        rough = formula(case, {name: leaf.detach().to(low) for name, leaf in t.leaves.items()})
        sdpa.check(total, exact[1], rough[1], f"{case} sum")
    exact_of, rough_of = (reference(case, t, total, dtype) for dtype in (torch.float64, low))
    for name, mine in found.items():
        sdpa.check(mine, exact_of[name], rough_of[name], f"{case} {name}")


def draw(rng: random.Random) -> AdaptiveNormCase:
    """Any combination that the operators take."""
    columns = rng.choice([1, 2, 8, 64, 100, 128, 256, 384, 520, 1152, rng.randint(1, 700)])
    tokens: list[tuple[int, ...]] = [
        *((), (1,), (2,), (7,), (rng.randint(1, 40),), (rng.randint(1, 40),)),
        *((3, 4), (2, 1, 5), (rng.randint(1, 9), rng.randint(1, 9))),
    ]
    is_layer = rng.random() < 0.5
    gated = rng.random() < 0.5
    usual = ["sample", "sample", "ones", "token", "batch", "first"]
    kind = rng.choice(usual)  # mostly they are alike
    kinds = [rng.choice([kind, kind, rng.choice(usual)]) for _ in range(3)]
    return AdaptiveNormCase(
        (rng.choice([0, 1, 2, 2, 3, 5]), *rng.choice(tokens), columns),
        is_layer,
        gated,
        scale="" if gated and rng.random() < 0.2 else kinds[0],
        shift="" if (gated or not is_layer) and rng.random() < 0.3 else kinds[1],
        gate=kinds[2],
        wide=rng.random() < 0.3,
        weight=rng.choice(["", "", "same", "float32"]),
        bias=rng.choice(["", "", "same", "float32"]) if is_layer else "",
        eps=rng.choice([1e-6, 1e-5, 1e-2]),
        layout=rng.choice(["dense", "dense", "sliced", "part", "flat"]),
        shift_by=rng.choice([0.0, 0.0, 3.0]),
    )
