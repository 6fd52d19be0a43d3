"""Convolutions with their epilogue: public functions, fake and CPU kernels.

The CUDA kernels, the derivative and the autocast rule are in ``csrc/ops/conv*.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

_ops = torch.ops.cudnn_ops

Activation = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]
Padding = int | Sequence[int] | Literal["same", "valid"]
#: In the order in which C++ counts them.
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


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
    r"""``act(conv2d(input, weight) + bias + residual)``, one cuDNN graph where it takes that.

    Replaces ``torch.nn.functional.conv2d`` by name. A cross-correlation, as there; accumulated in
    float32. Differentiable once.

    Args:
        input: [N, C, H, W], or without N: float16, bfloat16 or float32 (by TF32 where
            ``torch.backends.cudnn.allow_tf32`` says so); on a CPU float64 too. Channels lie last in
            memory (``torch.channels_last``); what lies otherwise is copied.
        weight: [K, C / groups, R, S], of the input's dtype; likewise.
        bias: [K], of the input's dtype.
        stride: one number, or one for H and one for W; and so are padding and dilation.
        padding: zeros on either side; ``"same"`` keeps the size, ``"valid"`` stands for none.
        dilation: the step from one element of the kernel to the next.
        groups: of channels, each convolved by itself; C of them: a depthwise convolution.
        activation: what the sum goes through; ``"gelu_tanh"`` is GELU by a hyperbolic tangent.
        residual: of the output's shape and dtype, added before the activation.

    Returns:
        [N, K, H', W'], the channels last in memory.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: a dtype that is not taken.
        NotImplementedError: cuDNN has no kernel for the convolution on this GPU; the message has
            its reason.
    """
    ops = _ops.conv2d, _ops._conv2d
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
    """:func:`conv2d` of one dimension.

    Args:
        input: [N, C, L], or without N; otherwise as in :func:`conv2d`.
        weight: [K, C / groups, R]; likewise.
        bias: as there, and so are the rest.
        stride: as there.
        padding: as there.
        dilation: as there.
        groups: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, L'], the channels last in memory.

    Raises:
        ValueError: as :func:`conv2d`, and so are TypeError and NotImplementedError.
    """
    ops = _ops.conv1d, _ops._conv1d
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
    """:func:`conv2d` of three dimensions.

    Args:
        input: [N, C, D, H, W], or without N; otherwise as in :func:`conv2d`.
        weight: [K, C / groups, T, R, S]; likewise.
        bias: as there, and so are the rest.
        stride: as there.
        padding: as there.
        dilation: as there.
        groups: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, D', H', W'], the channels last in memory (``torch.channels_last_3d``).

    Raises:
        ValueError: as :func:`conv2d`, and so are TypeError and NotImplementedError.
    """
    ops = _ops.conv3d, _ops._conv3d
    return _convolve(
        ops, input, weight, bias, stride, padding, dilation, groups, activation, residual
    )


def _convolve(
    ops: tuple[torch._ops.OpOverloadPacket, torch._ops.OpOverloadPacket],
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
    # In one list: torch takes half a microsecond to take over each list, or a keyword.
    p = as_list(padding)
    numbers = (len(s), len(p), len(d), *s, *p, *d, groups)
    return packed.default(input, weight, bias, numbers, activation, residual)


def as_list(numbers: int | Sequence[int]) -> Sequence[int]:
    """One number is a list of one."""
    # To look whether it is a Sequence would take a microsecond.
    return numbers if isinstance(numbers, (tuple, list)) else (numbers,)


def needs_before(activation: str) -> bool:
    """Whether an activation's slope is computed from what it is of, and not from its result."""
    return activation not in ("none", "relu")


def _format(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last


def _conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Sequence[int],
    activation: int,
    with_before: bool,
) -> tuple[Tensor, Tensor]:
    size = _ops._conv_size.default(input, weight, bias, residual, geometry)
    with_before = with_before and needs_before(ACTIVATIONS[activation])

    def result() -> Tensor:
        return torch.empty(
            size, dtype=input.dtype, device=input.device, memory_format=_format(input)
        )

    return result(), result() if with_before else input.new_empty(0)


def _conv_backward_fake(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    geometry: Sequence[int],
    activation: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._conv_backward_check.default(grad_out, input, weight, saved, geometry, activation)

    def result(wanted: bool, size: Sequence[int], channels_last: bool = True) -> Tensor:
        if not wanted:
            return input.new_empty(0)
        memory_format = _format(input) if channels_last else torch.contiguous_format
        return torch.empty(
            size, dtype=input.dtype, device=input.device, memory_format=memory_format
        )

    weight_is_last = weight.is_contiguous(memory_format=_format(weight))
    return (
        result(output_mask[0], input.shape),
        # As the weight lies: autograd would copy another.
        result(output_mask[1], weight.shape, weight_is_last),
        result(output_mask[2], (weight.shape[0],), channels_last=False),
        result(output_mask[3], grad_out.shape),
    )


def _activate(before: Tensor, activation: int) -> Tensor:
    if activation == 0:
        return before
    if activation <= 2:
        return F.relu(before) if activation == 1 else F.silu(before)
    return F.gelu(before, approximate="none" if activation == 3 else "tanh")


def _before_activation(grad: Tensor, saved: Tensor | None, activation: int) -> Tensor:
    """The gradient of what the activation is of."""
    if saved is None:
        return grad
    if activation == 1:
        return torch.ops.aten.threshold_backward(grad, saved, 0)
    if activation == 2:
        return torch.ops.aten.silu_backward(grad, saved)
    approximate = "none" if activation == 3 else "tanh"
    return torch.ops.aten.gelu_backward(grad, saved, approximate=approximate)


def _unpacked(
    geometry: Sequence[int],
) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
    """Stride, padding (before each dimension, then behind each), dilation and groups."""
    dims = len(geometry) // 4
    return geometry[:dims], geometry[dims : 3 * dims], geometry[3 * dims : -1], geometry[-1]


def _pad(input: Tensor, padding: Sequence[int]) -> Tensor:
    dims = len(padding) // 2
    # F.pad begins with the last dimension.
    pairs = [number for i in reversed(range(dims)) for number in (padding[i], padding[dims + i])]
    return F.pad(input, pairs) if any(pairs) else input


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _conv_cpu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Sequence[int],
    activation: int,
    with_before: bool,
) -> tuple[Tensor, Tensor]:
    out, before = _conv_fake(input, weight, bias, residual, geometry, activation, with_before)
    convolve = F.conv3d if input.dim() == 5 else F.conv2d
    stride, padding, dilation, groups = _unpacked(geometry)
    x, w, b = _wide(_pad(input, padding)), _wide(weight), None if bias is None else _wide(bias)
    result = convolve(x, w, b, stride, 0, dilation, groups)
    if residual is not None:
        result = result + residual
    out.copy_(_activate(result, activation))
    if before.numel() > 0:
        before.copy_(result)
    return out, before


def _conv_backward_cpu(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    geometry: Sequence[int],
    activation: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _conv_backward_fake(grad_out, input, weight, saved, geometry, activation, output_mask)
    stride, padding, dilation, groups = _unpacked(geometry)
    grad = _before_activation(_wide(grad_out), None if saved is None else _wide(saved), activation)
    padded = _wide(_pad(input, padding))
    dims = len(stride)
    of_padded, of_weight, _ = torch.ops.aten.convolution_backward(
        grad,
        padded,
        _wide(weight),
        None,
        stride,
        [0] * dims,
        dilation,
        False,
        [0] * dims,
        groups,
        [output_mask[0], output_mask[1], False],
    )
    if output_mask[0]:
        for i in range(dims):
            of_padded = of_padded.narrow(2 + i, padding[i], input.shape[2 + i])
        results[0].copy_(of_padded)
    if output_mask[1]:
        results[1].copy_(of_weight)
    if output_mask[2]:
        results[2].copy_(grad.sum((0, *range(2, grad.dim()))))
    if output_mask[3]:
        results[3].copy_(grad)
    return results


torch.library.register_fake("cudnn_ops::_conv", _conv_fake)
torch.library.register_fake("cudnn_ops::_conv_backward", _conv_backward_fake)
torch.library.impl("cudnn_ops::_conv", "CPU", _conv_cpu)
torch.library.impl("cudnn_ops::_conv_backward", "CPU", _conv_backward_cpu)
