"""Convolutions with their epilogue: public functions, fake and CPU kernels.

The kernels are those of transposed convolutions too (``conv_transpose.py``). The CUDA kernels, the
derivative and the autocast rule are in ``csrc/ops/conv*.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops.activation import (
    ACTIVATIONS,
    Activation,
    activate,
    before_activation,
    needs_before,
    wide,
)
from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_conv1d = fast(_ops._conv1d.default)
_conv2d = fast(_ops._conv2d.default)
_conv3d = fast(_ops._conv3d.default)

Padding = int | Sequence[int] | Literal["same", "valid"]


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    r"""``act(conv2d(input, weight) + bias + residual)``, in one cuDNN graph where possible.

    Replaces ``torch.nn.functional.conv2d`` by name. A cross-correlation, as there; accumulated in
    float32. Differentiable once.

    Args:
        input: [N, C, H, W], or without N: float16, bfloat16 or float32 (in TF32 if
            ``torch.backends.cudnn.allow_tf32`` is set); on a CPU also float64. Channels should be
            last in memory (``torch.channels_last``); other inputs are copied.
        weight: [K, C / groups, R, S], in the input's dtype and, likewise, channels last.
        bias: [K], in the input's dtype.
        stride: one number, or one for H and one for W; padding and dilation likewise.
        padding: zeros on each side; ``"same"`` keeps the size, ``"valid"`` adds none.
        dilation: the distance between elements of the kernel.
        groups: groups of channels, convolved separately; C groups are a depthwise convolution, for
            which there are kernels of this package, in float32 without TF32:
            :func:`cudnn_ops.support.explain` says where they run.
        activation: applied to the sum, one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`:
            ``"gelu_tanh"`` is GELU's tanh approximation, ``"leaky_relu"`` has torch's default
            slope, 0.01.
        residual: of the output's shape and dtype, added before the activation.

    Returns:
        [N, K, H', W'], channels last in memory.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: an unsupported dtype.
        NotImplementedError: cuDNN has no kernel for the convolution on this GPU; the message has
            its reason.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
        >>> weight, bias = torch.randn(32, 16, 3, 3), torch.randn(32)
        >>> cudnn_ops.conv2d(x, weight, bias, padding=1, activation="relu").shape
        torch.Size([2, 32, 8, 8])
    """
    ops = _ops.conv2d, _conv2d
    return _convolve(
        ops, input, weight, bias, stride, padding, dilation, groups, activation, residual
    )


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`conv2d` in one dimension.

    Depthwise ones (``groups`` equal to the channels of input and output) run on kernels of this
    package, in float32 without TF32; :func:`cudnn_ops.support.explain` says where.

    Args:
        input: [N, C, L], or without N; otherwise as in :func:`conv2d`.
        weight: [K, C / groups, R]; likewise.
        bias: as there, like all arguments below.
        stride: as there.
        padding: as there.
        dilation: as there.
        groups: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, L'], channels last in memory; of a depthwise convolution contiguous if the input is.

    Raises:
        ValueError: as :func:`conv2d`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(2, 16, 100), torch.randn(32, 16, 3)
        >>> cudnn_ops.conv1d(x, weight, stride=2, padding=1).shape
        torch.Size([2, 32, 50])
    """
    ops = _ops.conv1d, _conv1d
    return _convolve(
        ops, input, weight, bias, stride, padding, dilation, groups, activation, residual
    )


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`conv2d` in three dimensions.

    Args:
        input: [N, C, D, H, W], or without N; otherwise as in :func:`conv2d`.
        weight: [K, C / groups, T, R, S]; likewise.
        bias: as there, like all arguments below.
        stride: as there.
        padding: as there.
        dilation: as there.
        groups: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, D', H', W'], channels last in memory (``torch.channels_last_3d``).

    Raises:
        ValueError: as :func:`conv2d`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(1, 8, 4, 8, 8), torch.randn(16, 8, 3, 3, 3)
        >>> cudnn_ops.conv3d(x, weight, padding="same", activation="silu").shape
        torch.Size([1, 16, 4, 8, 8])
    """
    ops = _ops.conv3d, _conv3d
    return _convolve(
        ops, input, weight, bias, stride, padding, dilation, groups, activation, residual
    )


def _convolve(
    ops: tuple[torch._ops.OpOverloadPacket, Callable[..., Tensor]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: Padding,
    dilation: int | Sequence[int],
    groups: int,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    op, packed = ops
    s, d = as_list(stride), as_list(dilation)
    if isinstance(padding, str):
        return op.padding(input, weight, bias, s, padding, d, groups, activation, residual)
    # In one list: converting each further list, or a keyword, costs half a microsecond.
    p = as_list(padding)
    numbers = (len(s), len(p), len(d), *s, *p, *d, groups)
    return packed(input, weight, bias, numbers, activation, residual)


def as_list(numbers: int | Sequence[int]) -> Sequence[int]:
    """One number is a list of one."""
    # isinstance(numbers, Sequence) would cost a microsecond.
    return numbers if isinstance(numbers, (tuple, list)) else (numbers,)


def _empty_last(size: Sequence[int], like: Tensor, is_length_last: bool = False) -> Tensor:
    """Channels last in memory, in one dimension too; or the length."""
    if is_length_last:
        return like.new_empty(size)
    if len(size) == 3:
        _, channels, length = size
        return like.new_empty_strided(size, (channels * length, 1, channels))
    return torch.empty(
        size, dtype=like.dtype, device=like.device, memory_format=memory_format(len(size))
    )


def memory_format(rank: int) -> torch.memory_format:
    return torch.channels_last_3d if rank == 5 else torch.channels_last


def _is_last(tensor: Tensor) -> bool:
    image = tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
    return image.is_contiguous(memory_format=memory_format(image.dim()))


def is_transposed(geometry: Sequence[int]) -> bool:
    """Whether it has output paddings in front; as that of csrc/ops/conv/conv.h."""
    return len(geometry) % 4 != 1


def is_length_last(input: Tensor, weight: Tensor, geometry: Sequence[int]) -> bool:
    """Whether results have the length last in memory; as that of csrc/ops/conv/conv_choice.h."""
    return (
        input.dim() == 3
        and not is_transposed(geometry)
        and 1 < input.shape[1] == geometry[-1] == weight.shape[0]
        and input.shape[2] > 1  # else it is last in either layout
        and input.numel() > 0
        and input.is_contiguous()
    )


def _conv_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops._conv.default, args, {})
    size = _ops._conv_size.default(*args[:5])
    is_row = is_length_last(call.input, call.weight, call.geometry)
    with_before = call.with_before and needs_before(ACTIVATIONS[call.activation])
    before = _empty_last(size, call.input, is_row) if with_before else call.input.new_empty(0)
    return _empty_last(size, call.input, is_row), before


def _conv_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._conv_backward_check.default(*args[:-1])
    call = bind(_ops._conv_backward.default, args, {})
    input, weight, output_mask = call.input, call.weight, call.output_mask
    is_last = not is_length_last(input, weight, call.geometry)
    out_channels = weight.shape[0]
    if is_transposed(call.geometry):
        out_channels = weight.shape[1] * call.geometry[-1]

    def result(wanted: bool, size: Sequence[int], is_last: bool) -> Tensor:
        if not wanted:
            return input.new_empty(0)
        return _empty_last(size, input) if is_last else input.new_empty(size)

    return (
        result(output_mask[0], input.shape, is_last),
        # In the weight's memory format: autograd would copy another one.
        result(output_mask[1], weight.shape, _is_last(weight)),
        result(output_mask[2], (out_channels,), is_last=False),
        result(output_mask[3], call.grad_out.shape, is_last),
    )


def _unpacked(
    geometry: Sequence[int],
) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
    """Stride, padding (before each dimension, then behind each), dilation and groups."""
    if is_transposed(geometry):
        geometry = geometry[len(geometry) // 5 :]
    dims = len(geometry) // 4
    return geometry[:dims], geometry[dims : 3 * dims], geometry[3 * dims : -1], geometry[-1]


def _pad(input: Tensor, padding: Sequence[int]) -> Tensor:
    dims = len(padding) // 2
    # F.pad begins with the last dimension.
    pairs = [number for i in reversed(range(dims)) for number in (padding[i], padding[dims + i])]
    return F.pad(input, pairs) if any(pairs) else input


def before_in_torch(call: SimpleNamespace, dtype: torch.dtype) -> Tensor:
    """What the activation of ``_conv`` is of, by torch's operators, in ``dtype``."""
    stride, padding, dilation, groups = _unpacked(call.geometry)
    dims = len(stride)
    input, before = call.input, padding[:dims]
    if list(before) != list(padding[dims:]):
        input, before = _pad(input, padding), [0] * dims
    bias = None if call.bias is None else call.bias.to(dtype)
    tensors = input.to(dtype), call.weight.to(dtype), bias
    if is_transposed(call.geometry):
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        extra = call.geometry[:dims]
        result = transpose(*tensors, stride, before, extra, groups, dilation)
    else:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        result = convolve(*tensors, stride, before, dilation, groups)
    return result if call.residual is None else result + call.residual


def _conv_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    out, before = _conv_fake(*args)
    call = bind(_ops._conv.default, args, {})
    if call.input.numel() == 0:
        return out, before
    result = before_in_torch(call, torch.promote_types(call.input.dtype, torch.float32))
    out.copy_(activate(result, ACTIVATIONS[call.activation]))
    return out, before.copy_(result) if before.numel() > 0 else before


def _conv_backward_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _conv_backward_fake(*args)
    call = bind(_ops._conv_backward.default, args, {})
    input, output_mask = call.input, call.output_mask
    stride, padding, dilation, groups = _unpacked(call.geometry)
    if input.numel() == 0:
        for result in results:
            result.zero_()
        return results
    kept = None if call.saved is None else wide(call.saved)
    grad = before_activation(wide(call.grad_out), kept, ACTIVATIONS[call.activation])
    dims = len(stride)
    transposed, none = is_transposed(call.geometry), [0] * dims
    of_padded, *others = torch.ops.aten.convolution_backward(
        grad,
        wide(input if transposed else _pad(input, padding)),
        wide(call.weight),
        [grad.shape[1]],
        stride,
        padding[:dims] if transposed else none,
        dilation,
        transposed,
        call.geometry[:dims] if transposed else none,
        groups,
        output_mask[:3],
    )
    if output_mask[0] and not transposed:
        for i in range(dims):
            of_padded = of_padded.narrow(2 + i, padding[i], input.shape[2 + i])
    found = (of_padded, *others, grad)
    for wanted, result, part in zip(output_mask, results, found, strict=True):
        if wanted:
            result.copy_(part)
    return results


register("_conv", fake=_conv_fake, cpu=_conv_cpu)
register("_conv_backward", fake=_conv_backward_fake, cpu=_conv_backward_cpu)
