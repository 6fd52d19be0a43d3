"""Convolutions of every kind beside torch's: depthwise, grouped, odd; one to three dimensions.

The rule: none takes longer than torch's own kernel, in the forward pass with and without an
epilogue and for either gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from benchmarks.harness import OURS, Functions

TORCH = "eager"
#: What two measurements of the same kernel differ by.
NOISE, NOISE_MS = 0.03, 0.002


class Geometry(NamedTuple):
    """``size`` and ``kernel`` have a number for each dimension."""

    dtype: torch.dtype
    batch: int
    channels: int
    size: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: int
    padding: tuple[int, ...]
    dilation: int
    groups: int
    is_length_last: bool = False
    """In memory, of one dimension; else the channels are."""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        size, kernel = ("x".join(map(str, numbers)) for numbers in (self.size, self.kernel))
        parts = [name, f"{self.batch}x{self.channels}->{self.out_channels}", size, f"k{kernel}"]
        parts += [f"s{self.stride}"] * (self.stride > 1) + [f"d{self.dilation}"] * (
            self.dilation > 1
        )
        parts += [f"g{self.groups}"] * (self.groups > 1) + ["length last"] * self.is_length_last
        return " ".join(parts)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def grouped(
    batch: int,
    channels: int,
    size: tuple[int, ...],
    out_channels: int,
    kernel: int | tuple[int, ...],
    groups: int = 1,
    *,
    stride: int = 1,
    padding: int | None = None,
    dilation: int = 1,
    dtype: torch.dtype = _BF16,
) -> Geometry:
    taps = (kernel,) * len(size) if isinstance(kernel, int) else kernel
    pads = tuple(dilation * (n - 1) // 2 if padding is None else padding for n in taps)
    return Geometry(
        dtype, batch, channels, size, out_channels, taps, stride, pads, dilation, groups
    )


def depthwise(
    batch: int,
    channels: int,
    size: int | tuple[int, ...],
    kernel: int,
    stride: int = 1,
    *,
    multiplier: int = 1,
    dilation: int = 1,
    dtype: torch.dtype = _BF16,
) -> Geometry:
    sizes = (size, size) if isinstance(size, int) else size
    return grouped(
        batch,
        channels,
        sizes,
        channels * multiplier,
        kernel,
        channels,
        stride=stride,
        dilation=dilation,
        dtype=dtype,
    )


#: Depthwise, of one dimension: of Conformer, short filters of state space models, and what nobody
#: would think of; by batch, channels, length and kernel.
_ROWS = (
    depthwise(8, 512, (1500,), 31),
    depthwise(8, 512, (1500,), 31, dtype=_FP32),
    depthwise(1, 256, (2000,), 15),
    depthwise(8, 2048, (1024,), 3),
    depthwise(8, 2048, (1024,), 7, dtype=_FP16),
    *(
        grouped(8, 2048, (2048,), 2048, 4, 2048, padding=3, dtype=dtype)
        for dtype in (_BF16, _FP16, _FP32)
    ),
    depthwise(1, 256, (2000,), 15, dtype=_FP32),
    depthwise(1, 256, (2000,), 9),
    depthwise(4, 1024, (1,), 3),
    depthwise(16, 256, (64,), 5),
    depthwise(64, 33, (500,), 3),
    depthwise(2, 2, (100_000,), 7),
    depthwise(1, 4096, (8192,), 4),
    depthwise(32, 768, (197,), 3, 2),
    depthwise(8, 512, (2000,), 9, dilation=4),
    depthwise(8, 512, (2000,), 65),
    depthwise(2, 64, (20_000,), 257, dtype=_FP32),
    depthwise(300, 8, (32,), 3, dtype=_FP16),
    depthwise(4, 1024, (500,), 9, dtype=_FP16),
    depthwise(128, 64, (128,), 2, 2, dtype=_FP32),
    depthwise(1, 1600, (4096,), 4, dtype=_FP32),
)

#: With the channels last in memory, and with the length last, as most models have it.
ROWS = (*_ROWS, *(row._replace(is_length_last=True) for row in _ROWS))

#: All others.
IMAGES = (
    # ConvNeXt, MobileNet, EfficientNet; large batches and one image.
    *(depthwise(64, *shape) for shape in ((128, 56, 7), (512, 14, 7), (1024, 7, 7))),
    *(depthwise(1, *shape) for shape in ((128, 56, 7), (1024, 7, 7), (144, 56, 3))),
    *(depthwise(32, *shape) for shape in ((32, 112, 3), (144, 56, 3), (672, 14, 5))),
    *(depthwise(32, *shape) for shape in ((96, 112, 3, 2), (240, 28, 5, 2))),
    *(depthwise(8, *shape) for shape in ((256, 28, 7), (960, 7, 3), (64, 64, 7, 2))),
    depthwise(64, 384, 14, 3, 2),
    depthwise(8, 33, 40, 3),
    depthwise(8, 30, 40, 5),
    depthwise(8, 64, 64, 3, multiplier=2),
    depthwise(8, 64, 64, 3, dilation=2),
    depthwise(8, 64, 64, 5, dilation=2),
    depthwise(8, 64, 64, 13),
    *(depthwise(32, 144, 56, 3, dtype=dtype) for dtype in (_FP16, _FP32)),
    *(depthwise(64, 128, 56, 7, dtype=dtype) for dtype in (_FP16, _FP32)),
    depthwise(32, 672, 14, 5, dtype=_FP16),
    depthwise(8, 240, 28, 5, 2, dtype=_FP32),
    depthwise(8, 33, 40, 3, dtype=_FP32),
    depthwise(2, 64, (8, 28, 28), 3),
    depthwise(2, 64, (8, 28, 28), 3, 2, dtype=_FP16),
    depthwise(2, 64, (8, 28, 28), 3, dtype=_FP32),
    depthwise(1, 32, (16, 56, 56), 5),
    # ResNeXt and others, by the channels of a group.
    *(
        grouped(32, channels, (size, size), channels, 3, 32)
        for channels, size in ((128, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    ),
    *(grouped(8, 128, (28, 28), 128, 3, groups) for groups in (2, 4, 8, 64)),
    *(grouped(32, 256, (56, 56), 256, 3, 32, dtype=dtype) for dtype in (_FP16, _FP32)),
    grouped(32, 256, (56, 56), 512, 3, 32, stride=2),
    grouped(1, 128, (28, 28), 128, 3, 16),
    grouped(8, 128, (28, 28), 128, 1, 4),
    grouped(8, 66, (28, 28), 66, 3, 2),
    grouped(8, 20, (56, 56), 20, 3, 2),
    grouped(8, 72, (28, 28), 72, 3, 2, dtype=_FP32),
    grouped(8, 96, (28, 28), 192, 3, 8),
    grouped(8, 256, (28, 28), 256, 3, 4, dtype=_FP16),
    grouped(8, 128, (28, 28), 128, 3, 4, dtype=_FP32),
    grouped(8, 512, (750,), 512, 3, 8),
    grouped(2, 64, (8, 28, 28), 64, 3, 4),
    # Whole ones: few or odd channels, one pixel, kernels as large as the image, large images.
    *(grouped(32, 64, (56, 56), 64, 3, dtype=dtype) for dtype in (_BF16, _FP16, _FP32)),
    *(grouped(32, 256, (14, 14), 1024, 1, dtype=dtype) for dtype in (_BF16, _FP32)),
    grouped(1, 64, (56, 56), 64, 3),
    grouped(64, 3, (224, 224), 64, 7, stride=2),
    grouped(64, 3, (224, 224), 32, 3, stride=2),
    *(grouped(8, 1, (28, 28), 32, 3, dtype=dtype) for dtype in (_BF16, _FP32)),
    *(grouped(8, 33, (40, 40), 65, 3, dtype=dtype) for dtype in (_BF16, _FP16, _FP32)),
    grouped(8, 32, (64, 64), 1, 3),
    *(grouped(8, 64, (64, 64), channels, 3) for channels in (3, 5)),
    grouped(8, 12, (56, 56), 24, 3),
    grouped(8, 9, (56, 56), 16, 3),
    grouped(8, 35, (40, 40), 64, 5),
    grouped(8, 64, (28, 28), 33, 3, dtype=_FP32),
    grouped(64, 256, (7, 7), 512, 7, padding=0),
    grouped(16, 512, (7, 7), 512, 7, padding=0),
    grouped(8, 512, (1, 1), 1000, 1),
    grouped(1, 3, (2048, 2048), 16, 3),
    grouped(8, 64, (28, 28), 64, 3, dilation=12),
    grouped(8, 64, (28, 28), 128, 1, stride=2),
    grouped(8, 80, (3000,), 512, 3),
    grouped(8, 1, (16000,), 512, 10, stride=5, padding=0),
    grouped(8, 512, (3200,), 512, 3, stride=2, padding=0),
    grouped(2, 64, (8, 28, 28), 64, 3),
    grouped(2, 3, (16, 112, 112), 64, (3, 7, 7), stride=2),
)

GEOMETRIES = (*ROWS, *IMAGES)


def steps(geometry: Geometry) -> dict[str, Functions]:
    """Each implementation of the forward pass, of that with an epilogue, and of both gradients."""
    x, weight, bias = tensors(geometry)
    options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    name = f"conv{len(geometry.size)}d"
    ours, theirs = getattr(cudnn_ops, name), getattr(F, name)
    found: dict[str, Functions] = {
        "forward": {
            OURS: partial(ours, x, weight, None, *options),
            TORCH: partial(theirs, x, weight, None, *options),
        }
    }
    for activation, by_torch in (("relu", F.relu), ("silu", F.silu)):
        found[f"forward, bias + {activation}"] = {
            OURS: partial(ours, x, weight, bias, *options, activation=activation),
            TORCH: partial(_then, by_torch, partial(theirs, x, weight, bias, *options)),
        }
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    outs = {OURS: ours(*leaves, None, *options), TORCH: theirs(*leaves, None, *options)}
    # As each one's result lies in memory.
    drawn = torch.randn(outs[TORCH].shape, dtype=geometry.dtype, device=x.device)
    grads = {impl: torch.empty_like(out).copy_(drawn) for impl, out in outs.items()}
    for of, leaf in zip(("input", "weight"), leaves, strict=True):
        found[f"gradient of the {of}"] = {
            impl: partial(torch.autograd.grad, out, leaf, grads[impl], retain_graph=True)
            for impl, out in outs.items()
        }
    return found


def tensors(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias."""

    def draw(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, dtype=geometry.dtype, device="cuda")
        if len(sizes) < 3 or geometry.is_length_last:
            return values
        if len(sizes) == 3:  # torch has no name for that
            return values.movedim(1, -1).contiguous().movedim(-1, 1)
        # One channel too has its strides: torch goes by them.
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return values.to(memory_format=formats[len(sizes)])

    channels = geometry.channels // geometry.groups
    x = draw(geometry.batch, geometry.channels, *geometry.size)
    weight = draw(geometry.out_channels, channels, *geometry.kernel)
    return x, weight / weight[0].numel() ** 0.5, draw(geometry.out_channels)


def _then(activation: Callable[[Tensor], Tensor], conv: Callable[[], Tensor]) -> Tensor:
    return activation(conv())


def is_slower(ms: dict[str, float]) -> bool:
    """Whether ours takes longer than torch's, by more than noise."""
    return ms[OURS] > ms[TORCH] * (1 + NOISE) + NOISE_MS
