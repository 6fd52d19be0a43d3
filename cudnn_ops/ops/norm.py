"""Layer norm and RMS norm: public functions, fake and CPU kernels.

The CUDA kernels, the derivative and the autocast rule are in ``csrc/ops/norm*.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_rms_norm = fast(_ops.rms_norm.default)
_layer_norm = fast(_ops.layer_norm.default)
_add_rms_norm = fast(_ops.add_rms_norm.default)
_add_layer_norm = fast(_ops.add_layer_norm.default)


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
            return _rms_norm(input, normalized_shape, weight, eps, zero_centered=True)
        return _rms_norm(input, normalized_shape, weight, eps)
    except RuntimeError:
        refuse_wrong_types(_ops.rms_norm.default, locals())
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
            return _layer_norm(input, normalized_shape, weight, bias, eps, zero_centered=True)
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    except RuntimeError:
        refuse_wrong_types(_ops.layer_norm.default, locals())
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
        residual: of the input's shape and dtype; under autocast, where the dtypes differ, all
            tensors are cast to the one that ``input + residual`` has in torch.
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
        return _add_rms_norm(
            input, residual, normalized_shape, weight, eps, zero_centered=zero_centered
        )
    except RuntimeError:
        refuse_wrong_types(_ops.add_rms_norm.default, locals())
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
        residual: of the input's shape and dtype; under autocast, where the dtypes differ, all
            tensors are cast to the one that ``input + residual`` has in torch.
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
        return _add_layer_norm(
            input, residual, normalized_shape, weight, bias, eps, zero_centered=zero_centered
        )
    except RuntimeError:
        refuse_wrong_types(_ops.add_layer_norm.default, locals())
        raise


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norm_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._norm_check.default(*args[:-1])
    call = bind(_ops._norm.default, args, {})
    input, with_stats = call.input, call.with_stats
    dtype = _stats_dtype(input.dtype)
    rows = math.prod(input.shape[: input.dim() - len(call.normalized_shape)])
    mean, rstd = (
        input.new_empty(rows if wanted else 0, dtype=dtype)
        for wanted in (with_stats and call.is_layer, with_stats)
    )
    total = input.new_empty(0 if call.residual is None else input.shape)
    return input.new_empty(input.shape), total, mean, rstd


def _norm_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._norm_backward_check.default(*args)
    call = bind(_ops._norm_backward.default, args, {})
    like = call.input if call.weight is None else call.weight

    def result(wanted: bool, like: Tensor, shape: Sequence[int]) -> Tensor:
        if not wanted:
            return call.input.new_empty(0, dtype=_stats_dtype(call.input.dtype))
        return like.new_empty(shape)

    return (
        result(call.output_mask[0], call.input, call.input.shape),
        result(call.output_mask[1], like, call.normalized_shape),
        result(call.output_mask[2], like, call.normalized_shape),
    )


def _factor(weight: Tensor | None, zero_centered: bool, dtype: torch.dtype) -> Tensor | None:
    if weight is None:
        return None
    return weight.to(dtype) + 1 if zero_centered else weight.to(dtype)


def rms_in_torch(
    wide: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """RMS norm over some dimensions, in the input's dtype, and 1 / the root mean square."""
    rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
    factor = _factor(weight, zero_centered, wide.dtype)
    return wide * rstd if factor is None else wide * rstd * factor, rstd


def norm_in_torch(
    call: SimpleNamespace, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``_norm`` by torch's operators, computed in ``dtype``."""
    input, shape = call.input, call.normalized_shape
    total = input.new_empty(0)
    if call.residual is not None:
        input = total = (input + call.residual).contiguous()
    wide = input.to(dtype)
    if call.is_layer:
        factor = _factor(call.weight, call.zero_centered, dtype)
        bias = None if call.bias is None else call.bias.to(dtype)
        out, mean, rstd = torch.native_layer_norm(wide, shape, factor, bias, call.eps)
    else:
        dims = tuple(range(-len(shape), 0))
        mean = wide
        out, rstd = rms_in_torch(wide, dims, call.weight, call.eps, call.zero_centered)
    stats = (mean, call.with_stats and call.is_layer), (rstd, call.with_stats)
    kept = _stats_dtype(input.dtype)
    return (
        out.to(input.dtype).contiguous(),
        total,
        *(part.flatten().to(kept) if w else input.new_empty(0, dtype=kept) for part, w in stats),
    )


def _norm_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._norm_check.default(*args[:-1])
    call = bind(_ops._norm.default, args, {})
    # A mean in float64, or equal numbers would be far from it where eps is small, and the sum of
    # large ones infinite.
    return norm_in_torch(call, torch.float64 if call.is_layer else _stats_dtype(call.input.dtype))


def _norm_backward_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = _norm_backward_fake(*args)
    call = bind(_ops._norm_backward.default, args, {})
    input, is_layer = call.input, call.is_layer
    dtype = _stats_dtype(input.dtype)
    first = input.dim() - len(call.normalized_shape)
    dims, leading = tuple(range(first, input.dim())), tuple(range(first))
    column = (*input.shape[:first], *(1 for _ in dims))
    x, grad, scale = input.to(dtype), call.grad_out.to(dtype), call.rstd.view(column)
    normed = (x - call.mean.view(column) if is_layer else x) * scale
    factor = _factor(call.weight, call.zero_centered, dtype)
    weighed = grad if factor is None else grad * factor
    if call.output_mask[0]:
        along = (weighed * normed).mean(dims, keepdim=True) * normed
        shift = weighed.mean(dims, keepdim=True) if is_layer else 0
        result = (weighed - along - shift) * scale
        results[0].copy_(result if call.grad_sum is None else result + call.grad_sum.to(dtype))
    for wanted, result, terms in zip(
        call.output_mask[1:], results[1:], (grad * normed, grad), strict=True
    ):
        if wanted:
            result.copy_(terms.sum(leading) if leading else terms)
    return results


register("_norm", fake=_norm_fake, cpu=_norm_cpu)
register("_norm_backward", fake=_norm_backward_fake, cpu=_norm_backward_cpu)
