"""Convolutions: the cases, their tensors, and torch's own in float64 as the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa

#: What csrc/ops/conv_graph.cpp has measured beside the heuristics' own.
MORE_ENGINES = ("eng4_k24=4", "eng4_k24=9", "eng4_k24=54", "eng4_k24=55")
#: In the order in which operators count them.
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh", "relu6", "hardswish", "leaky_relu")
#: At any geometry. The others have slopes that jump, at 0, 3 or 6: of results of few numbers, one
#: that rounding brings to the other side is all.
DRAWN = ACTIVATIONS[:5]


@dataclass(frozen=True)
class ConvCase:
    """Sizes and options of one call; ``size`` and what follows have a number for each dimension."""

    batch: int
    channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    activation: str = "none"
    bias: bool = True
    residual: bool = False
    channels_last: bool = True

    def __str__(self) -> str:
        return "-".join(
            str(part).replace(" ", "")
            for part in (
                f"{self.batch}x{self.channels}->{self.out_channels}",
                self.size,
                f"k{self.kernel}",
                f"s{self.stride}",
                f"p{self.padding}",
                f"d{self.dilation}",
                f"g{self.groups}",
                self.activation,
                "b" * self.bias + "r" * self.residual + "l" * self.channels_last,
            )
        )

    @property
    def dims(self) -> int:
        return len(self.size)


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    grad_out: Tensor

    @property
    def differentiable(self) -> dict[str, Tensor]:
        named = vars(self)
        names = ("input", "weight", "bias", "residual")
        return {name: named[name] for name in names if named[name] is not None}


def make(case: ConvCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        if case.channels_last and case.dims > 1 and len(shape) == case.dims + 2:
            last = torch.channels_last if case.dims == 2 else torch.channels_last_3d
            values = values.contiguous(memory_format=last)
        return values

    x = draw(case.batch, case.channels, *case.size)
    weight = draw(case.out_channels, case.channels // case.groups, *case.kernel)
    weight = weight / (weight[0].numel() ** 0.5)
    shape = torch_conv(case, x.cpu().double(), weight.cpu().double()).shape
    return Tensors(
        x.requires_grad_(),
        weight.requires_grad_(),
        draw(case.out_channels).requires_grad_() if case.bias else None,
        draw(*shape).requires_grad_() if case.residual else None,
        draw(*shape),
    )


def torch_conv(case: ConvCase, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[case.dims - 1]
    return function(x, weight, bias, case.stride, case.padding, case.dilation, case.groups)


def activate(before: Tensor, activation: str) -> Tensor:
    if activation.startswith("gelu"):
        return F.gelu(before, approximate="tanh" if activation == "gelu_tanh" else "none")
    return before if activation == "none" else getattr(F, activation)(before)


def run(case: ConvCase, t: Tensors, by: object = cudnn_ops) -> Tensor:
    """By the package's functions, or by its operators of the same names."""
    function = getattr(by, f"conv{case.dims}d")
    options = {"activation": case.activation, "residual": t.residual}
    return function(
        t.input, t.weight, t.bias, case.stride, case.padding, case.dilation, case.groups, **options
    )


def reference(case: ConvCase, t: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, computed in ``dtype`` by torch."""
    leaves = {
        name: tensor.detach().to(dtype).requires_grad_()
        for name, tensor in t.differentiable.items()
    }
    before = torch_conv(case, leaves["input"], leaves["weight"], leaves.get("bias"))
    if "residual" in leaves:
        before = before + leaves["residual"]
    out = activate(before, case.activation)
    grads = torch.autograd.grad(out, list(leaves.values()), t.grad_out.to(dtype))
    return [out, *grads]


def check(case: ConvCase, t: Tensors, within: AbstractContextManager[object] | None = None) -> None:
    """Output and gradients against float64; torch's own in the input's dtype is the yardstick.

    They are computed within a context, if there is one.
    """
    check_by(run, reference, case, t, within)


def check_by(
    run: Callable[[Any, Tensors], Tensor],
    reference: Callable[[Any, Tensors, torch.dtype], list[Tensor]],
    case: Any,
    t: Tensors,
    within: AbstractContextManager[object] | None,
) -> None:
    """The same, of what `run` computes, with what `reference` says of it."""
    with within or nullcontext():
        out = run(case, t)
        grads = torch.autograd.grad(out, list(t.differentiable.values()), t.grad_out)
    assert out.dtype == t.input.dtype
    found = [out, *grads]
    exact = reference(case, t, torch.float64)
    rough = reference(case, t, t.input.dtype)
    for name, mine, right, other in zip(
        ["out", *t.differentiable], found, exact, rough, strict=True
    ):
        sdpa.check(mine, right, other, f"{case} {name}")


def check_a_replayed_graph(case: ConvCase, t: Tensors) -> None:
    """A CUDA graph of the forward and the backward gives what calls give."""
    leaves = list(t.differentiable.values())
    expected = torch.autograd.grad(run(case, t), leaves, t.grad_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(run(case, t), leaves, t.grad_out)
    for tensor in found:
        tensor.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def other_engines(case: ConvCase, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Of the forward and both gradients; empty where a plan of cuDNN's runs."""
    ops = torch.ops.cudnn_ops
    input = torch.empty(case.batch, case.channels, *case.size, dtype=dtype, device="meta")
    weight = input.new_empty(case.out_channels, case.channels // case.groups, *case.kernel)
    geometry = ops._conv_geometry(
        *(case.dims, weight, case.stride, case.padding, case.dilation, case.groups)
    )
    bias = input.new_empty(case.out_channels) if case.bias else None
    size = ops._conv_size(input, weight, None, None, geometry)
    residual = input.new_empty(size) if case.residual else None
    call = input, weight, bias, residual, geometry, ACTIVATIONS.index(case.activation)
    return [ops._conv_other_engine(*call, step)[0] for step in range(3)]


def behind(tensor: Tensor) -> Tensor:
    """The same at an address that is no multiple of anything."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    moved = memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())
    return moved.requires_grad_(tensor.requires_grad)


def draw(rng: random.Random) -> ConvCase:
    """Any geometry that fits."""
    dims = rng.choice([1, 2, 2, 2, 3])
    groups = rng.choice([1, 1, 1, 2, 4])
    channels = groups * rng.choice([1, 3, 4, 8, 16])
    out_channels = groups * rng.choice([1, 4, 8, 12])
    if rng.random() < 0.15:  # depthwise
        groups = out_channels = channels

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(dims))

    kernel, dilation = numbers(1, 4), numbers(1, 2)
    stride = numbers(1, 3)
    padding: tuple[int, ...] | str = numbers(0, 3)
    if rng.random() < 0.2:
        padding = rng.choice(["same", "valid"])
        stride = (1,) * dims if padding == "same" else stride
    # Never smaller than the kernel's reach.
    size = tuple(
        rng.randint(d * (k - 1) + 1, d * (k - 1) + 9) for k, d in zip(kernel, dilation, strict=True)
    )
    return ConvCase(
        rng.randint(1, 3),
        channels,
        out_channels,
        size,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        rng.choice(DRAWN),
        bias=rng.random() < 0.7,
        residual=rng.random() < 0.4,
        channels_last=rng.random() < 0.8,
    )
