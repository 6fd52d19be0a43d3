"""Transposed convolutions with their epilogue: public functions.

They are convolutions of another geometry, and have the kernels of ``conv.py``. Schemas and checks
are in ``csrc/ops/conv/conv_transpose.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cudnn_ops.ops.activation import Activation
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.conv import as_list

_ops = torch.ops.cudnn_ops
_conv_transpose1d = fast(_ops._conv_transpose1d.default)
_conv_transpose2d = fast(_ops._conv_transpose2d.default)
_conv_transpose3d = fast(_ops._conv_transpose3d.default)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """``act(conv_transpose2d(input, weight) + bias + residual)``, in one graph where possible.

    Replaces ``torch.nn.functional.conv_transpose2d`` by name, and computes what that does: the
    gradient of :func:`cudnn_ops.conv2d` for its input (also called fractionally-strided
    convolution or deconvolution); accumulated in float32. Differentiable once.

    Args:
        input: [N, C, H, W], or without N: float16, bfloat16 or float32 (in TF32 if
            ``torch.backends.cudnn.allow_tf32`` is set); on a CPU also float64. Channels should be
            last in memory (``torch.channels_last``); other inputs are copied.
        weight: [C, K / groups, R, S], in the input's dtype and, likewise, channels last.
        bias: [K], in the input's dtype.
        stride: the distance of the outputs that neighboring inputs are spread from: one number, or
            one for H and one for W; padding, output_padding and dilation likewise.
        padding: rows or columns cut off on each side of the output.
        output_padding: rows or columns more at the end; less than the stride or the dilation.
        groups: groups of channels, convolved separately.
        dilation: the distance between elements of the kernel.
        activation: applied to the sum, one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`.
        residual: of the output's shape and dtype, added before the activation.

    Returns:
        [N, K, H', W'], channels last in memory, where H' is ``(H - 1) * stride - 2 * padding +
        dilation * (R - 1) + output_padding + 1``.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: an unsupported dtype.
        NotImplementedError: cuDNN has no kernel for the convolution on this GPU; the message has
            its reason.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last)
        >>> weight, bias = torch.randn(32, 16, 2, 2), torch.randn(16)
        >>> cudnn_ops.conv_transpose2d(x, weight, bias, stride=2, activation="relu").shape
        torch.Size([2, 16, 16, 16])
    """
    return _transpose(
        _conv_transpose2d,
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        activation,
        residual,
    )


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`conv_transpose2d` in one dimension.

    Args:
        input: [N, C, L], or without N; otherwise as in :func:`conv_transpose2d`.
        weight: [C, K / groups, R]; likewise.
        bias: as there, like all arguments below.
        stride: as there.
        padding: as there.
        output_padding: as there.
        groups: as there.
        dilation: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, L'], channels last in memory.

    Raises:
        ValueError: as :func:`conv_transpose2d`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(2, 32, 50), torch.randn(32, 16, 4)
        >>> cudnn_ops.conv_transpose1d(x, weight, stride=2, padding=1).shape
        torch.Size([2, 16, 100])
    """
    return _transpose(
        _conv_transpose1d,
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        activation,
        residual,
    )


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`conv_transpose2d` in three dimensions.

    Args:
        input: [N, C, D, H, W], or without N; otherwise as in :func:`conv_transpose2d`.
        weight: [C, K / groups, T, R, S]; likewise.
        bias: as there, like all arguments below.
        stride: as there.
        padding: as there.
        output_padding: as there.
        groups: as there.
        dilation: as there.
        activation: as there.
        residual: as there.

    Returns:
        [N, K, D', H', W'], channels last in memory.

    Raises:
        ValueError: as :func:`conv_transpose2d`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(1, 16, 4, 8, 8), torch.randn(16, 8, 2, 2, 2)
        >>> cudnn_ops.conv_transpose3d(x, weight, stride=2, activation="silu").shape
        torch.Size([1, 8, 8, 16, 16])
    """
    return _transpose(
        _conv_transpose3d,
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        activation,
        residual,
    )


def _transpose(
    packed: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    s, p, o, d = as_list(stride), as_list(padding), as_list(output_padding), as_list(dilation)
    # In one list: converting each further list, or a keyword, costs half a microsecond.
    numbers = (len(s), len(p), len(o), len(d), *s, *p, *o, *d, groups)
    return packed(input, weight, bias, numbers, activation, residual)
