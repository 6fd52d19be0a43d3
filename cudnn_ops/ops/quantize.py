"""Rounding to numbers of 8 bits and back: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/fp8*``, the checks in ``csrc/ops/quantize/``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_quantize_op = _ops._quantize_fp8.default
_dequantize_op = _ops._dequantize_fp8.default

#: The largest scale: its inverse is a normal float32, which GPUs do not take for zero.
_LARGEST_SCALE = 2.0**126


class QuantizedFp8(NamedTuple):
    """What :func:`quantize_fp8` returns."""

    data: Tensor
    """The input times its scale, rounded."""
    descale: Tensor
    """float32 [1], or [size of ``dim``]: ``data * descale`` is near the input."""
    amax: Tensor
    """float32, likewise: the largest magnitude of the input; NaN where it holds one."""


def _dim_of(input: Tensor, dim: int | None) -> int | None:
    return dim + input.dim() if isinstance(dim, int) and dim < 0 else dim


def quantize_fp8(
    input: Tensor,
    scale: Tensor | None = None,
    *,
    dim: int | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> QuantizedFp8:
    r"""Rounds a tensor to numbers of 8 bits, under one scale or one for each head.

    .. math::
        \mathrm{data} = \mathrm{round}\bigl(\mathrm{clamp}(\mathrm{scale} \cdot x,
        -\mathrm{max}, \mathrm{max})\bigr), \qquad \mathrm{descale} = 1 / \mathrm{scale}

    with the largest number of the format, 448 for ``float8_e4m3fn`` and 57344 for ``float8_e5m2``
    (Micikevicius et al., "FP8 formats for deep learning", section 3). To the nearest, ties to even;
    what is too large becomes the largest, NaN stays NaN. Without ``scale`` it is
    :math:`\mathrm{max} / \mathrm{amax}`, and 1 where amax is 0 or not finite: one pass for amax and
    one that rounds. With it one pass does both, for scales that follow from the amax of steps
    before. The host waits for nothing. Not differentiable.

    Under a scale that is a power of two, ``data * descale`` is a number of the input's type, so
    that :func:`dequantize_fp8` rounds nothing (but float16 has no 65536, to which what is above
    63488 is rounded). The relative error of normal numbers of 8 bits is the same under every scale.

    Args:
        input: any shape and strides, float16, bfloat16 or float32; on a CPU also float64, which is
            rounded to float32 first. Views whose rows lie apart, such as the parts of one
            projection, are read where they are.
        scale: float32, one number; with ``dim`` as many as it has indices.
        dim: the dimension whose indices have a scale each, such as the heads; at most 65535.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        power_of_two: makes a scale that is not given the largest power of two that is no larger.

    Returns:
        The rounded tensor, dense and in the input's order of dimensions in memory, its descale and
        the input's amax.

    Raises:
        ValueError: a dimension that is none, or a scale that does not fit.
        TypeError: an unsupported dtype.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> data, descale, amax = cudnn_ops.quantize_fp8(torch.tensor([1.0, -7.0, 0.5]))
        >>> amax, data.float() * descale
        (tensor([7.]), tensor([ 1.0000, -7.0000,  0.5000]))
    """
    try:
        return QuantizedFp8(*_quantize_op(input, scale, _dim_of(input, dim), dtype, power_of_two))
    except RuntimeError:
        refuse_wrong_types(_quantize_op, locals())
        raise


class QuantizedQKV(NamedTuple):
    """What :func:`quantize_qkv_fp8` returns: arguments of :func:`sdpa_fp8`, by their names."""

    query: Tensor
    """The query times the scale of its head, rounded."""
    key: Tensor
    """The key, likewise."""
    value: Tensor
    """The value, likewise."""
    descale_q: Tensor
    """float32 [1]: what the products of query and key are multiplied with, in all heads."""
    descale_k: Tensor
    """float32 [1]: 1."""
    descale_v: Tensor
    """float32 [heads of the value]."""


def quantize_qkv_fp8(
    query: Tensor, key: Tensor, value: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn
) -> QuantizedQKV:
    r"""Rounds the operands of :func:`sdpa_fp8` under scales of each head.

    Attention takes one descale of the query and one of the key, so the products of the scales must
    be the same in all heads. A head's scale moves from the key to the query that it is multiplied
    with:

    .. math::
        \mathrm{scale}^k_g = \bigl\lfloor \mathrm{max} / \mathrm{amax}^k_g \bigr\rfloor_2, \qquad
        \mathrm{scale}^q_h = t / \mathrm{scale}^k_{g(h)}, \qquad
        t = \min_h \bigl\lfloor \mathrm{max} \cdot
            \mathrm{scale}^k_{g(h)} / \mathrm{amax}^q_h \bigr\rfloor_2

    where :math:`g(h)` is the key head of query head :math:`h`, and :math:`\lfloor \cdot \rfloor_2`
    the largest power of two that is no larger. Between powers of two the division is exact, so that
    ``descale_q``, :math:`1 / t`, undoes the scales of every head exactly. A query head is rounded
    as coarsely as the scores of the head with the largest ones. The output is linear in the value,
    whose heads have scales of their own.

    Numbers of 8 bits are floating-point ones: under one scale for all heads (:func:`quantize_fp8`)
    the rounding of a head that is less than some 1000 times smaller than the largest is as fine.
    This is for heads that differ by more. It takes two passes over each tensor, and the host waits
    for nothing. Not differentiable.

    Args:
        query: [batch, heads, length, head size], any strides, float16, bfloat16 or float32.
            The largest magnitudes of heads are told apart from 2^-50 to 2^31: heads of less may
            become 0, and numbers of more the largest.
        key: [batch, heads_kv, length_kv, head size]; ``heads`` is a multiple of ``heads_kv``.
        value: [batch, heads_kv, length_kv, value head size].
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The rounded tensors, each dense and in its order of dimensions in memory, and descales.

    Raises:
        ValueError: other than four dimensions; heads that are no multiple.
        TypeError: an unsupported dtype.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> q, k, v = (torch.randn(1, heads, 10, 64) for heads in (8, 2, 2))
        >>> k[:, 1] *= 1e-4
        >>> found = cudnn_ops.quantize_qkv_fp8(q, k, v)
        >>> cudnn_ops.sdpa_fp8(**found._asdict(), is_causal=True).shape
        torch.Size([1, 8, 10, 64])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"cudnn_ops.quantize_qkv_fp8: {name} must be a tensor [batch, heads, length, head "
                f"size], got {got}"
            )
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads_kv == 0 or heads % heads_kv or value.shape[1] != heads_kv:
        raise ValueError(
            "cudnn_ops.quantize_qkv_fp8: the heads of query must be a multiple of the key's, and "
            f"value must have as many as key; got {heads}, {heads_kv} and {value.shape[1]}"
        )
    of_key = _power_below(scale_of(_amax_of_heads(key, dtype), dtype)).clamp(*_APART)
    of_groups = of_key.repeat_interleave(heads // heads_kv)
    amax = _amax_of_heads(query, dtype)
    fits = of_groups * scale_of(amax, dtype)
    is_known = (amax > 0) & amax.isfinite()
    fits = fits.where(is_known, torch.full_like(fits, _APART[1])).clamp(*_APART)
    factor = _power_below(fits.amin(0, keepdim=True)) if heads > 0 else fits.new_ones(1)
    rounded_query = quantize_fp8(query, factor / of_groups, dim=1, dtype=dtype).data
    rounded_key = quantize_fp8(key, of_key, dim=1, dtype=dtype).data
    rounded_value = quantize_fp8(value, dim=1, dtype=dtype)
    return QuantizedQKV(
        rounded_query,
        rounded_key,
        rounded_value.data,
        factor.reciprocal(),
        torch.ones_like(factor),
        rounded_value.descale,
    )


#: How far apart scales are: with the quotient of two of them float32 still has its digits.
_APART = (2.0**-63, 2.0**63)


def _amax_of_heads(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What a rounding under known scales finds on its way."""
    ones = tensor.new_ones(tensor.shape[1], dtype=torch.float32)
    return quantize_fp8(tensor, ones, dim=1, dtype=dtype).amax


def dequantize_fp8(
    input: Tensor,
    descale: Tensor,
    *,
    dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    r"""Numbers of 8 bits times their descale, by one kernel.

    .. math:: \mathrm{out} = \mathrm{descale} \cdot x

    Args:
        input: any shape and strides, ``float8_e4m3fn`` or ``float8_e5m2``.
        descale: float32, one number; with ``dim`` as many as it has indices.
        dim: as in :func:`quantize_fp8`.
        dtype: float16, bfloat16 or float32.

    Returns:
        A dense tensor in the input's order of dimensions in memory.

    Raises:
        ValueError: a dimension that is none, or a descale that does not fit.
        TypeError: an unsupported dtype.

    Example:
        >>> import torch, cudnn_ops
        >>> data, descale, _ = cudnn_ops.quantize_fp8(torch.tensor([1.0, -8.0]))
        >>> cudnn_ops.dequantize_fp8(data, descale, dtype=torch.float32)
        tensor([ 1., -8.])
    """
    try:
        return _dequantize_op(input, descale, _dim_of(input, dim), dtype)
    except RuntimeError:
        refuse_wrong_types(_dequantize_op, locals())
        raise


def round_to_fp8(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of 8 bits; the largest for what is too large."""
    most = torch.finfo(dtype).max
    return scaled.clamp(-most, most).to(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale under which the largest magnitude becomes the largest number; 1 where none can."""
    is_known = (amax > 0) & amax.isfinite()
    # Not a number over a tensor, which torch computes as that times the inverse.
    scale = (torch.full_like(amax, torch.finfo(dtype).max) / amax).clamp(max=_LARGEST_SCALE)
    return scale.where(is_known, torch.ones_like(scale))


def _along(numbers: Tensor, input: Tensor, dim: int | None) -> Tensor:
    """So that they broadcast to the input."""
    sizes = [1] * input.dim()
    if dim is not None:
        sizes[dim] = -1
    return numbers.reshape(sizes)


def _power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is no larger: of a normal number, its exponent alone."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _quantize_fake(
    input: Tensor,
    scale: Tensor | None,
    dim: int | None,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _ops._quantize_fp8_check.default(input, scale, dim, dtype, power_of_two)
    groups = 1 if dim is None else input.shape[dim]
    descale, amax = (input.new_empty(groups, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(input, dtype=dtype), descale, amax


def quantize_in_torch(
    input: Tensor,
    scale: Tensor | None,
    dim: int | None,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``_quantize_fp8`` by torch's operators."""
    x = input.float()
    dims = [one for one in range(input.dim()) if one != dim]
    groups = 1 if dim is None else input.shape[dim]
    if input.numel() == 0:
        amax = x.new_zeros(groups)
    else:
        amax = (x.abs().amax(dims) if dims else x.abs()).reshape(groups)
    if scale is None:
        scale = scale_of(amax, dtype)
        scale = _power_below(scale) if power_of_two else scale
    scale = scale.reshape(groups)
    return round_to_fp8(x * _along(scale, input, dim), dtype), scale.reciprocal(), amax


def _quantize_cpu(
    input: Tensor,
    scale: Tensor | None,
    dim: int | None,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _ops._quantize_fp8_check.default(input, scale, dim, dtype, power_of_two)
    data, descale, amax = quantize_in_torch(input, scale, dim, dtype, power_of_two)
    return torch.empty_like(input, dtype=dtype).copy_(data), descale, amax


def _dequantize_fake(input: Tensor, descale: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    _ops._dequantize_fp8_check.default(input, descale, dim, dtype)
    return torch.empty_like(input, dtype=dtype)


def dequantize_in_torch(
    input: Tensor, descale: Tensor, dim: int | None, dtype: torch.dtype
) -> Tensor:
    """The result of ``_dequantize_fp8`` by torch's operators."""
    return (input.float() * _along(descale, input, dim)).to(dtype)


def _dequantize_cpu(input: Tensor, descale: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    _ops._dequantize_fp8_check.default(input, descale, dim, dtype)
    wide = dequantize_in_torch(input, descale, dim, dtype)
    return torch.empty_like(input, dtype=dtype).copy_(wide)


register("_quantize_fp8", fake=_quantize_fake, cpu=_quantize_cpu)
register("_dequantize_fp8", fake=_dequantize_fake, cpu=_dequantize_cpu)
