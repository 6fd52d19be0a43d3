"""Max pooling of images: the public function, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/max_pool*``, the derivative and the checks in
``csrc/ops/max_pool``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops.activation import wide
from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.conv import as_list
from cudnn_ops.ops.image_order import empty_in_order, in_order_of, is_channels_last
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_max_pool2d_op = _ops.max_pool2d.default
_max_pool2d = fast(_max_pool2d_op)

Pair = int | Sequence[int]


def max_pool2d(
    input: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    r"""The greatest number of each window; replaces ``torch.nn.functional.max_pool2d`` by name.

    .. math::
        \mathrm{out}_{n, c, y, x} = \max_{i, j} \mathrm{input}_{n, c,
            s_0 y + d_0 i - p_0, s_1 x + d_1 j - p_1}

    with :math:`s, p, d` for stride, padding and dilation. Padding is less than every number. NaN is
    greater than every number, as in torch. The gradient of an output goes to the first of equal
    numbers, row by row, and where there is NaN to the last of these. For the gradient a byte is
    kept for each output, and neither input nor output. Differentiable once.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``, float16, bfloat16 or float32; on a CPU also
            float64. Channels last in memory (``torch.channels_last``) is the fast order where they
            are a multiple of 8 (of 4 in float32); all others are read as they lie, a number at a
            time.
        kernel_size: rows and columns of a window; one number for both, or one for H and one for W.
            Windows of more than 255 numbers are computed by torch's function.
        stride: how far windows are from each other, likewise; None stands for ``kernel_size``.
        padding: rows and columns on each side, likewise; at most half of ``kernel_size``.
        dilation: how far the numbers of a window are from each other, likewise.
        ceil_mode: also has the windows that reach beyond the padding, but for those that begin
            there.

    Returns:
        A tensor of the input's dtype and memory order, ``[N, C, H', W']`` or ``[C, H', W']``.

    Raises:
        ValueError: numbers that are not positive, too much padding, an input of another rank, or
            one that is smaller than a window.
        TypeError: an unsupported dtype; an argument of a wrong type.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 64, 9, 9).contiguous(memory_format=torch.channels_last)
        >>> out = cudnn_ops.max_pool2d(x, 3, stride=2, padding=1)
        >>> torch.equal(out, torch.nn.functional.max_pool2d(x, 3, stride=2, padding=1))
        True
    """
    try:
        return _max_pool2d(
            input,
            as_list(kernel_size),
            () if stride is None else as_list(stride),
            as_list(padding),
            as_list(dilation),
            ceil_mode,
        )
    except RuntimeError:
        _refuse_wrong_numbers(kernel_size=kernel_size, padding=padding, dilation=dilation)
        _refuse_wrong_numbers(stride=() if stride is None else stride)
        refuse_wrong_types(_max_pool2d_op, {"input": input, "ceil_mode": ceil_mode})
        raise


def _refuse_wrong_numbers(**given: object) -> None:
    """Raises TypeError for what is neither a whole number nor some of them."""
    for name, value in given.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(number, int | torch.SymInt) for number in numbers):
            raise TypeError(
                f"cudnn_ops.max_pool2d: {name} must be a whole number, or one for H and one for W; "
                f"got {value!r}"
            ) from None


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    *given, with_offsets = args
    size, input = _ops._max_pool2d_size.default(*given), args[0]
    is_last = is_channels_last(input)
    out = empty_in_order(input, size, is_last)
    if not with_offsets:
        return out, input.new_empty(0, dtype=torch.uint8)
    return out, empty_in_order(input, size, is_last, dtype=torch.uint8)


def _backward_fake(*args: Any) -> Tensor:
    _ops._max_pool2d_backward_check.default(*args)
    call = bind(_ops._max_pool2d_backward.default, args, {})
    size = (*call.grad_out.shape[:2], *call.size)
    return empty_in_order(call.grad_out, size, is_channels_last(call.offsets))


def _taps(call: Any, out_size: Sequence[int]) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """The offsets of a window, each with where that number of all windows is in a padded image."""
    (height, width), s, d = call.kernel_size, call.stride, call.dilation
    for tap in range(height * width):
        starts = (tap // width * d[0], tap % width * d[1])
        ends = ((n - 1) * step + 1 for n, step in zip(out_size, s, strict=True))
        rows, columns = map(slice, starts, map(sum, zip(starts, ends, strict=True)), s)
        yield tap, (rows, columns)


def _padded_size(call: Any, size: Sequence[int], out_size: Sequence[int]) -> list[int]:
    """Of an image with its padding, and what windows reach beyond that."""
    return [
        max((out - 1) * s + (k - 1) * d + 1, n + p)
        for n, out, k, s, p, d in zip(
            size, out_size, call.kernel_size, call.stride, call.padding, call.dilation, strict=True
        )
    ]


def _first_offset(call: Any, out_size: Sequence[int], device: torch.device) -> Tensor:
    """Of each window the offset of the first number that is not in the padding before it."""
    firsts = []
    for out, s, p, d in zip(out_size, call.stride, call.padding, call.dilation, strict=True):
        in_padding = (p - torch.arange(out, device=device) * s).clamp(min=0)
        firsts.append((in_padding + d - 1) // d)
    return firsts[0][:, None] * call.kernel_size[1] + firsts[1]


def max_pool_in_torch(call: Any) -> tuple[Tensor, Tensor]:
    """The results of ``_max_pool2d`` by torch's operators."""
    input = call.input
    numbers = call.kernel_size, call.stride, call.padding, call.dilation, call.ceil_mode
    if not call.with_offsets:
        out = in_order_of(input, F.max_pool2d(input, *numbers))
        return out, input.new_empty(0, dtype=torch.uint8)
    out, places = F.max_pool2d(input, *numbers, return_indices=True)
    taps = []
    for dim, place in enumerate((places // input.shape[3], places % input.shape[3])):
        starts = torch.arange(out.shape[2 + dim], device=input.device) * call.stride[dim]
        starts = starts if dim == 1 else starts.unsqueeze(1)
        taps.append((place - starts + call.padding[dim]) // call.dilation[dim])
    offsets = (taps[0] * call.kernel_size[1] + taps[1]).to(torch.uint8)
    return in_order_of(input, out), in_order_of(input, offsets)


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    out, offsets = _fake(*args)
    call = bind(_ops._max_pool2d.default, args, {})
    if out.numel() == 0:
        return out, offsets
    if not call.with_offsets:
        return max_pool_in_torch(call)
    size, out_size = call.input.shape[2:], out.shape[2:]
    whole = _padded_size(call, size, out_size)
    top, left = call.padding
    sides = (left, whole[1] - size[1] - left, top, whole[0] - size[0] - top)
    image = F.pad(call.input, sides, value=float("-inf"))
    out.fill_(float("-inf"))
    offsets.copy_(_first_offset(call, out_size, out.device))
    for tap, (rows, columns) in _taps(call, out_size):
        numbers = image[:, :, rows, columns]
        is_greater = (numbers > out) | numbers.isnan()
        out.copy_(torch.where(is_greater, numbers, out))
        offsets.masked_fill_(is_greater, tap)
    return out, offsets


def _backward_cpu(*args: Any) -> Tensor:
    grad_input = _backward_fake(*args)
    call = bind(_ops._max_pool2d_backward.default, args, {})
    grad = wide(call.grad_out)
    if call.grad_more is not None:
        grad = grad + call.grad_more
    size, out_size = call.size, grad.shape[2:]
    whole = _padded_size(call, size, out_size)
    image = grad.new_zeros((*grad.shape[:2], *whole))
    for tap, (rows, columns) in _taps(call, out_size):
        image[:, :, rows, columns] += grad.where(call.offsets == tap, 0)
    (top, left), (height, width) = call.padding, size
    return grad_input.copy_(image[:, :, top : top + height, left : left + width])


register("_max_pool2d", fake=_fake, cpu=_cpu)
register("_max_pool2d_backward", fake=_backward_fake, cpu=_backward_cpu)
