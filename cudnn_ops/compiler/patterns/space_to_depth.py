"""Convolutions of few channels in steps of two, by squares of pixels in steps of one.

What a network begins with has three channels, and tensor cores want sixteen: cuDNN pads them to
eight and takes a slow kernel. Each square of 2 x 2 pixels becomes one of 12 channels here, the
weight likewise, and zeros fill both up. MLPerf's ResNets call this transform "space to depth".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.compiler.pattern import applied

STEP = 2
#: Of the channels of an image, at most so many; and those of the product are a multiple of so many.
MOST_CHANNELS, CHANNELS = 4, 8


class Sides(NamedTuple):
    """One dimension: the padding ``before`` and ``after`` all squares, and of the kernel by zeros.

    ``taps`` of the new kernel are two of that padded one each.
    """

    before: int
    after: int
    zeros: tuple[int, int]
    taps: int


def sides_of(size: int, kernel: int, padding: int) -> Sides:
    """Output ``o`` reads pixels ``2 o - padding + tap``, in squares ``o - before`` and on.

    Args:
        size: pixels, a multiple of two.
        kernel: taps.
        padding: pixels, on both sides.
    """
    first = padding % STEP  # taps of zero, so that the first one is the first pixel of a square
    taps = -(-(kernel + first) // STEP)
    outputs = (size + 2 * padding - kernel) // STEP + 1
    before = (padding + first) // STEP
    after = outputs + taps - 1 - size // STEP - before
    return Sides(before, after, (first, taps * STEP - kernel - first), taps)


def squares(
    x: Any, weight: Any, shape: Sequence[int], kernel: Sequence[int], padding: Sequence[int]
) -> tuple[Any, Any]:
    """Input and weight of the convolution in steps of one, without padding.

    Args:
        x: [batch, channels, height, width], or what stands for it; the sizes are even.
        weight: [outputs, channels, *kernel].
        shape: that of ``x``.
        kernel: its height and width.
        padding: pixels above and below, and on the left and the right.
    """
    rows, columns = _sides(shape, kernel, padding)
    weight = _deep(F.pad(weight, (*columns.zeros, *rows.zeros)), (rows.taps, columns.taps))
    weight = F.pad(weight, (0, 0, 0, 0, 0, _more_channels(shape)))
    return applied(image_squares, x, tuple(kernel), tuple(padding)), weight


def image_squares(x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The input of :func:`squares`, which is one node of a graph."""
    rows, columns = _sides(x.shape, kernel, padding)
    image = _deep(x, [size // STEP for size in x.shape[2:]])
    more = _more_channels(x.shape)
    return F.pad(image, (columns.before, columns.after, rows.before, rows.after, 0, more))


def _sides(
    shape: Sequence[int], kernel: Sequence[int], padding: Sequence[int]
) -> tuple[Sides, Sides]:
    """Of rows and of columns."""
    rows, columns = (sides_of(*one) for one in zip(shape[2:], kernel, padding, strict=True))
    return rows, columns


def _more_channels(shape: Sequence[int]) -> int:
    """Zeros behind those of the squares of images of this shape."""
    return -shape[1] * STEP**2 % CHANNELS


def _deep(x: Any, squares: Sequence[int]) -> Any:
    """[N, C, 2 h, 2 w] as [N, 4 C, h, w]."""
    rows, columns = squares
    split = x.unflatten(3, (columns, STEP)).unflatten(2, (rows, STEP))
    return split.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
