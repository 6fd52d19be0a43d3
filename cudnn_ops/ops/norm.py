"""Layer norm and RMS norm: public functions, fake and CPU kernels.

The CUDA kernels, the derivative and the autocast rule are in ``csrc/ops/norm*.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import refuse_wrong_types

_ops = torch.ops.cudnn_ops


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
) -> Tensor:
    r"""RMS norm; replaces ``torch.nn.functional.rms_norm`` by name.

    .. math::
        \mathrm{out} = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \varepsilon}} \cdot w

    (Zhang and Sennrich, "Root mean square layer normalization", equation 4), computed in float32.
    Differentiable once.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16 or float32; on a CPU also float64.
            Rows may be strided, like the heads of a fused projection: they are read without a copy.
        normalized_shape: the last dimensions, over which the mean is computed.
        weight: of ``normalized_shape``, in the input's dtype or float32; None stands for ones.
        eps: added to the mean square; None stands for the machine epsilon of float32 (of float64
            for float64), as in torch.
        zero_centered: multiplies by ``1 + weight`` instead of ``weight``, as in Gemma.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: an unsupported dtype; an argument of a wrong type.
        NotImplementedError: the GPU is older than the A100; or, under the plan policy ``"exact"``,
            cuDNN has no kernel for this; the message has its reason.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(4, 64), torch.ones(64)
        >>> out = cudnn_ops.rms_norm(x, (64,), weight, eps=1e-6)
        >>> torch.allclose(out.square().mean(-1), torch.ones(4), atol=1e-4)
        True
    """
    try:
        if zero_centered:
            return _ops.rms_norm.default(input, normalized_shape, weight, eps, zero_centered=True)
        # A keyword argument costs half a microsecond.
        return _ops.rms_norm.default(input, normalized_shape, weight, eps)
    except RuntimeError:
        refuse_wrong_types(
            _ops.rms_norm.default, input, normalized_shape, weight, eps, zero_centered
        )
        raise


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
) -> Tensor:
    r"""Layer norm; replaces ``torch.nn.functional.layer_norm`` by name.

    .. math::
        \mathrm{out} = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \varepsilon}}
            \cdot w + b

    (Ba, Kiros and Hinton, "Layer normalization", equation 4; the variance is the biased one),
    computed in float32. Differentiable once.

    Args:
        input: as in :func:`rms_norm`.
        normalized_shape: as there.
        weight: as there.
        bias: of ``normalized_shape``, in the input's dtype or float32; None stands for zeros.
        eps: added to the variance.
        zero_centered: as in :func:`rms_norm`.

    Returns:
        A contiguous tensor of the input's shape and dtype; float32 under CUDA autocast.

    Raises:
        ValueError: as :func:`rms_norm`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(4, 64)
        >>> out = cudnn_ops.layer_norm(x, (64,), torch.ones(64), torch.zeros(64))
        >>> torch.allclose(out, torch.nn.functional.layer_norm(x, (64,)), atol=1e-5)
        True
    """
    try:
        if zero_centered:
            return _ops.layer_norm.default(
                input, normalized_shape, weight, bias, eps, zero_centered=True
            )
        return _ops.layer_norm.default(input, normalized_shape, weight, bias, eps)
    except RuntimeError:
        refuse_wrong_types(
            _ops.layer_norm.default, input, normalized_shape, weight, bias, eps, zero_centered
        )
        raise


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of ``input + residual``, and that sum: the next residual.

    Args:
        input: as in :func:`rms_norm`.
        residual: of the input's shape and dtype.
        normalized_shape: as there, and so are the rest.
        weight: as there.
        eps: as there.
        zero_centered: as there.

    Returns:
        The norm, and the sum.

    Raises:
        ValueError: as the norm without the sum, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> out, residual_next = cudnn_ops.add_rms_norm(x, residual, (64,), torch.ones(64))
        >>> torch.equal(residual_next, x + residual)
        True
    """
    try:
        return _ops.add_rms_norm.default(
            input, residual, normalized_shape, weight, eps, zero_centered=zero_centered
        )
    except RuntimeError:
        refuse_wrong_types(
            _ops.add_rms_norm.default,
            input,
            residual,
            normalized_shape,
            weight,
            eps,
            zero_centered,
        )
        raise


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`layer_norm` of ``input + residual``, and that sum: the next residual.

    Args:
        input: as in :func:`layer_norm`.
        residual: of the input's shape and dtype.
        normalized_shape: as there, and so are the rest.
        weight: as there.
        bias: as there.
        eps: as there.
        zero_centered: as there.

    Returns:
        The norm, and the sum.

    Raises:
        ValueError: as the norm without the sum, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> out, residual_next = cudnn_ops.add_layer_norm(x, residual, (64,))
        >>> torch.equal(residual_next, x + residual)
        True
    """
    try:
        return _ops.add_layer_norm.default(
            input, residual, normalized_shape, weight, bias, eps, zero_centered=zero_centered
        )
    except RuntimeError:
        refuse_wrong_types(
            _ops.add_layer_norm.default,
            input,
            residual,
            normalized_shape,
            weight,
            bias,
            eps,
            zero_centered,
        )
        raise


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(input: Tensor, normalized_shape: Sequence[int]) -> int:
    rows = 1
    for size in input.shape[: input.dim() - len(normalized_shape)]:
        rows *= size
    return rows


def _norm_fake(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    with_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._norm_check.default(
        input, residual, normalized_shape, weight, bias, eps, is_layer, zero_centered
    )
    dtype = _stats_dtype(input.dtype)
    rows = _rows(input, normalized_shape)
    mean, rstd = (
        input.new_empty(rows if wanted else 0, dtype=dtype)
        for wanted in (with_stats and is_layer, with_stats)
    )
    total = input.new_empty(0 if residual is None else input.shape)
    return input.new_empty(input.shape), total, mean, rstd


def _norm_backward_fake(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    _ops._norm_backward_check.default(
        grad_out,
        grad_sum,
        input,
        normalized_shape,
        weight,
        mean,
        rstd,
        is_layer,
        zero_centered,
        output_mask,
    )
    none = input.new_empty(0, dtype=_stats_dtype(input.dtype))
    like = input if weight is None else weight
    return (
        input.new_empty(input.shape) if output_mask[0] else none,
        like.new_empty(normalized_shape) if output_mask[1] else none.clone(),
        like.new_empty(normalized_shape) if output_mask[2] else none.clone(),
    )


def _factor(weight: Tensor | None, zero_centered: bool, dtype: torch.dtype) -> Tensor | float:
    if weight is None:
        return 1.0
    return weight.to(dtype) + 1 if zero_centered else weight.to(dtype)


def _norm_cpu(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    with_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, total, mean, rstd = _norm_fake(
        input, residual, normalized_shape, weight, bias, eps, is_layer, zero_centered, with_stats
    )
    if residual is not None:
        input = torch.add(input, residual, out=total)
    dtype = _stats_dtype(input.dtype)
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    x = input.to(dtype)
    # In float64, or equal numbers would be far from their mean where eps is small, and the sum of
    # large ones infinite.
    center = x.mean(dims, keepdim=True, dtype=torch.float64) if is_layer else x.new_zeros(())
    center = center.to(dtype)
    centered = x - center
    scale = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    result = centered * scale * _factor(weight, zero_centered, dtype)
    out.copy_(result if bias is None else result + bias.to(dtype))
    if with_stats:
        rstd.copy_(scale.reshape(-1))
    if with_stats and is_layer:
        mean.copy_(center.reshape(-1))
    return out, total, mean, rstd


def _norm_backward_cpu(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    results = _norm_backward_fake(
        grad_out,
        grad_sum,
        input,
        normalized_shape,
        weight,
        mean,
        rstd,
        is_layer,
        zero_centered,
        output_mask,
    )
    dtype = _stats_dtype(input.dtype)
    first = input.dim() - len(normalized_shape)
    dims, leading = tuple(range(first, input.dim())), tuple(range(first))
    column = (*input.shape[:first], *(1 for _ in dims))
    x, grad, scale = input.to(dtype), grad_out.to(dtype), rstd.view(column)
    normed = (x - mean.view(column) if is_layer else x) * scale
    weighed = grad * _factor(weight, zero_centered, dtype)
    if output_mask[0]:
        along = (weighed * normed).mean(dims, keepdim=True) * normed
        shift = weighed.mean(dims, keepdim=True) if is_layer else 0
        result = (weighed - along - shift) * scale
        results[0].copy_(result if grad_sum is None else result + grad_sum.to(dtype))
    for wanted, result, terms in zip(
        output_mask[1:], results[1:], (grad * normed, grad), strict=True
    ):
        if wanted:
            result.copy_(terms.sum(leading) if leading else terms)
    return results


torch.library.register_fake("cudnn_ops::_norm", _norm_fake)
torch.library.register_fake("cudnn_ops::_norm_backward", _norm_backward_fake)
torch.library.impl("cudnn_ops::_norm", "CPU", _norm_cpu)
torch.library.impl("cudnn_ops::_norm_backward", "CPU", _norm_backward_cpu)
