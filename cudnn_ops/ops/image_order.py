"""The two orders in which images lie in memory: channels first or last; as csrc/ops/image_order.h.

And what there is one number of for each channel, beside images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_channels_last(input: Tensor) -> bool:
    """Whether results lie so: the order of the two that is nearest to the input's."""
    if input.is_contiguous() or input.shape[1] == 1:
        return False
    steps = zip(input.shape[2:], input.stride()[2:], strict=True)
    of_positions = [stride for size, stride in steps if size > 1]
    return len(of_positions) > 0 and all(input.stride(1) < stride for stride in of_positions)


def empty_in_order_of(input: Tensor) -> Tensor:
    """Of its shape, in the order that results have."""
    return empty_in_order(input, input.shape, is_channels_last(input))


def empty_in_order(
    like: Tensor, shape: Sequence[int], is_last: bool, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Of a shape, with channels last or first; of another tensor's device, and dtype if none."""
    if not is_last:
        return like.new_empty(shape, dtype=dtype)
    samples, channels, *positions = shape
    return like.new_empty((samples, *positions, channels), dtype=dtype).movedim(-1, 1)


def in_order_of(input: Tensor, result: Tensor) -> Tensor:
    """A result in the order that it has."""
    if not is_channels_last(input):
        return result.contiguous()
    return result.movedim(1, -1).contiguous().movedim(-1, 1)


def per_channel(vector: Tensor, input: Tensor) -> Tensor:
    """[C] beside [N, C, ...]."""
    return vector.reshape(-1, *(1,) * (input.dim() - 2))


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of statistics of images of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
