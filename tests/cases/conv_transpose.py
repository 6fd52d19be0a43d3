"""Transposed convolutions: cases, their tensors, and torch's own in float64 as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import conv
from tests.cases.conv import Tensors


@dataclass(frozen=True)
class TransposeCase:
    """Sizes and options of one call; ``size`` and what follows have a number for each dimension."""

    batch: int
    channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    dilation: tuple[int, ...]
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
                f"o{self.output_padding}",
                f"g{self.groups}",
                f"d{self.dilation}",
                self.activation,
                "b" * self.bias + "r" * self.residual + "l" * self.channels_last,
            )
        )

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def geometry(self) -> tuple[object, ...]:
        """What torch's function accepts after the tensors, in its order."""
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation


#: More than rounding moves a number of about 1, in any dtype.
KINK = 0.05


def make(case: TransposeCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        if case.channels_last and case.dims > 1 and len(shape) == case.dims + 2:
            last = torch.channels_last if case.dims == 2 else torch.channels_last_3d
            values = values.contiguous(memory_format=last)
        return values

    x = draw(case.batch, case.channels, *case.size)
    weight = draw(case.channels, case.out_channels // case.groups, *case.kernel)
    weight = weight / ((weight[:, 0].numel() / case.groups) ** 0.5)
    bias = draw(case.out_channels) if case.bias else None
    of_bias = None if bias is None else bias.cpu().double()
    before = torch_transpose(case, x.cpu().double(), weight.cpu().double(), of_bias)
    residual = draw(*before.shape) if case.residual else None
    grad_out = draw(*before.shape)
    if case.activation == "relu":
        # Its gradient jumps where rounding turns a sign.
        before = before if residual is None else before + residual.cpu()
        grad_out = grad_out.masked_fill(before.abs().to(device) < KINK, 0)
    for leaf in (x, weight, bias, residual):
        if leaf is not None:
            leaf.requires_grad_()
    return Tensors(x, weight, bias, residual, grad_out)


def torch_transpose(
    case: TransposeCase, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    function = getattr(F, f"conv_transpose{case.dims}d")
    return function(x, weight, bias, *case.geometry)


def run(case: TransposeCase, t: Tensors, by: object = cudnn_ops) -> Tensor:
    """By the package's functions, or by its operators of the same names."""
    function = getattr(by, f"conv_transpose{case.dims}d")
    options = {"activation": case.activation, "residual": t.residual}
    return function(t.input, t.weight, t.bias, *case.geometry, **options)


def reference(case: TransposeCase, t: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, computed in ``dtype`` by torch."""
    leaves = {
        name: tensor.detach().to(dtype).requires_grad_()
        for name, tensor in t.differentiable.items()
    }
    # Not in lower precision: on CPUs torch's own gives NaN there for some geometries.
    wide = torch.promote_types(dtype, torch.float32)
    tensors = {name: leaf.to(wide) for name, leaf in leaves.items() if name != "residual"}
    x, weight, bias = tensors["input"], tensors["weight"], tensors.get("bias")

    def finish(before: Tensor) -> Tensor:
        before = before if t.residual is None else before + leaves["residual"]
        return conv.activate(before, case.activation)

    out = finish(torch_transpose(case, x, weight, bias).to(dtype))
    grads = torch.autograd.grad(out, list(leaves.values()), t.grad_out.to(dtype))
    if t.input.is_cuda and bias is not None:  # where torch's own rounds before it adds the bias
        shift = leaves["bias"].view(-1, *[1] * case.dims)
        out = finish(torch_transpose(case, x, weight).to(dtype) + shift)
    return [out, *grads]


def check(
    case: TransposeCase, t: Tensors, within: AbstractContextManager[object] | None = None
) -> None:
    """As ``conv.check``: against float64, with torch's own in the input's dtype as yardstick."""
    conv.check_by(run, reference, case, t, within)


def draw(rng: random.Random) -> TransposeCase:
    """Any geometry that leaves an output."""
    dims = rng.choice([1, 2, 2, 2, 3])
    groups = rng.choice([1, 1, 1, 2, 4])
    channels = groups * rng.choice([1, 3, 4, 8, 16])
    out_channels = groups * rng.choice([1, 4, 8, 12])
    if rng.random() < 0.15:  # depthwise
        groups = out_channels = channels

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(dims))

    kernel, dilation, stride, size = numbers(1, 4), numbers(1, 2), numbers(1, 3), numbers(1, 7)
    extra = tuple(rng.randrange(max(both)) for both in zip(stride, dilation, strict=True))
    padding = []
    for k, d, s, n, more in zip(kernel, dilation, stride, size, extra, strict=True):
        length = (n - 1) * s + d * (k - 1) + more + 1
        padding.append(rng.randint(0, min(3, (length - 1) // 2)))
    return TransposeCase(
        rng.randint(1, 3),
        channels,
        out_channels,
        size,
        kernel,
        stride,
        tuple(padding),
        extra,
        groups,
        dilation,
        rng.choice(conv.DRAWN),
        bias=rng.random() < 0.7,
        residual=rng.random() < 0.4,
        channels_last=rng.random() < 0.8,
    )
