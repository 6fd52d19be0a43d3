"""MXFP8: rounding with a scale for each 32 numbers, and attention on what it makes.

The CUDA kernel and the checks of attention are in ``csrc/ops/attention/fp8/``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa_cpu
from cudnn_ops.ops.arguments import (
    bind,
    refuse_lists,
    refuse_one_number,
    refuse_wrong_types,
)
from cudnn_ops.ops.kernels import register
from cudnn_ops.ops.sdpa import empty_like_order
from cudnn_ops.ops.sdpa_fp8 import OTHER_OPTIONS

_ops = torch.ops.cudnn_ops
_op = _ops._sdpa_mxfp8.default

#: How many numbers share a scale, and the tile that scales lie in memory by.
BLOCK, ROWS, COLUMNS = 32, 128, 4


class QuantizedMxFp8(NamedTuple):
    """What :func:`quantize_mxfp8` returns."""

    data: Tensor
    """The input over the scales of its blocks, rounded."""
    descale: Tensor
    """``float8_e8m0fnu``: what each block is multiplied with, in the order of cuDNN's
    ``F8_128x4``."""


class AttentionMxFp8(NamedTuple):
    """What :func:`sdpa_mxfp8` returns."""

    out: Tensor
    """[batch, heads, length, value head size], dense, with the query's order of dimensions in
    memory."""
    lse: Tensor
    """[batch, heads, length], float32: the log-sum-exp of the scores, natural logarithm."""
    amax_o: Tensor
    """float32 [1]: the largest magnitude of the output."""


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _in_tiles(scales: Tensor) -> Tensor:
    """[..., rows, columns], padded, in the order of ``F8_128x4``; its shape stays.

    Tiles of 128 x 4, in which rows that are 32 apart lie side by side.
    """
    *batch, rows, columns = scales.shape
    tiles = scales.view(*batch, rows // ROWS, 4, ROWS // 4, columns // COLUMNS, COLUMNS)
    return tiles.movedim(-2, -4).transpose(-3, -2).reshape(scales.shape)


def _from_tiles(scales: Tensor) -> Tensor:
    """The way back."""
    *batch, rows, columns = scales.shape
    tiles = scales.reshape(*batch, rows // ROWS, columns // COLUMNS, ROWS // 4, 4, COLUMNS)
    return tiles.transpose(-3, -2).movedim(-4, -2).reshape(scales.shape)


def quantize_mxfp8(
    input: Tensor, *, dim: int = -1, dtype: torch.dtype = torch.float8_e4m3fn
) -> QuantizedMxFp8:
    r"""Rounds a tensor to numbers of 8 bits, with a power of two for each 32 of them as the scale.

    .. math::
        \mathrm{descale} = 2^{\lceil \log_2(\mathrm{amax} / \mathrm{max}) \rceil}, \qquad
            \mathrm{data} = \mathrm{round}(x / \mathrm{descale})

    with the largest magnitude of a block and the largest number of the format, 448 or 57344 (Open
    Compute Project, "OCP microscaling formats (MX) specification", section 6.3; the exponent is
    rounded up, as in Mishra et al., "Recipes for pre-training LLMs with MXFP8", so that no number
    is too large). A block with NaN or infinity has NaN as its scale. Written in torch's operators:
    several passes over memory. Not differentiable.

    Args:
        input: [batch, heads, length, head size], float16, bfloat16 or float32.
        dim: the dimension along which 32 numbers share a scale: -1 for query and key, -2 for the
            value, as the products of :func:`sdpa_mxfp8` add up.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The rounded tensor, in the input's order of dimensions in memory, and the scales: with
        ``dim=-1`` of [batch, heads, length, head size / 32], with ``dim=-2`` of [batch, heads,
        head size, length / 32], the last two padded to multiples of 128 and 4.

    Raises:
        ValueError: another number of dimensions, or another ``dim``.
        TypeError: an unsupported dtype.

    Example:
        >>> import torch, cudnn_ops
        >>> data, descale = cudnn_ops.quantize_mxfp8(torch.randn(2, 8, 100, 64))
        >>> data.dtype, descale.shape
        (torch.float8_e4m3fn, torch.Size([2, 8, 128, 4]))
    """
    op = "cudnn_ops.quantize_mxfp8"
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {input!r}")
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: input must be float16, bfloat16 or float32, got {input.dtype}")
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"{op}: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    if input.dim() != 4:
        raise ValueError(
            f"{op}: input must be [batch, heads, length, head size]; got {tuple(input.shape)}"
        )
    if dim not in (-1, -2, 2, 3):
        raise ValueError(f"{op}: dim must be -1 or -2, got {dim}")
    is_along_rows = dim in (-1, 3)
    with torch.no_grad():
        wide = input.detach().float()
        rows = wide if is_along_rows else wide.mT  # blocks along the last dimension
        length, size = rows.shape[-2:]
        columns = _padded(size, BLOCK * COLUMNS)
        blocks = torch.nn.functional.pad(rows, (0, columns - size)).unflatten(-1, (-1, BLOCK))
        ratio = blocks.abs().amax(-1) / torch.finfo(dtype).max
        bits = ratio.view(torch.int32)  # of a float32: 8 bits of exponent above 23
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        exponent = exponent.masked_fill(~ratio.isfinite(), 255)
        scale = torch.exp2(127.0 - exponent.float()).masked_fill(exponent == 255, torch.nan)
        data = (blocks * scale.unsqueeze(-1)).flatten(-2)[..., :size]
        data = data if is_along_rows else data.mT
        rounded = torch.empty_like(input, dtype=dtype).copy_(data)
        padding = (0, 0, 0, _padded(length, ROWS) - length)
        exponent = torch.nn.functional.pad(exponent.to(torch.uint8), padding)
        return QuantizedMxFp8(rounded, _in_tiles(exponent).view(torch.float8_e8m0fnu))


def meta_scales(tensor: Tensor, dim: int) -> Tensor:
    """Scales as :func:`quantize_mxfp8` makes them, without data."""
    rows, columns = (tensor.shape[i] for i in ((2, 3) if dim == -1 else (3, 2)))
    sizes = (_padded(rows, ROWS), _padded(columns, BLOCK * COLUMNS) // BLOCK)
    return torch.empty(*tensor.shape[:2], *sizes, dtype=torch.float8_e8m0fnu, device="meta")


def dequantized(data: Tensor, descale: Tensor, dim: int) -> Tensor:
    """In float32."""
    scales = _from_tiles(descale.view(torch.uint8)).view(torch.float8_e8m0fnu).float()
    scales = scales.repeat_interleave(BLOCK, -1)
    if dim == -2:
        scales = scales.mT
    return data.float() * scales[..., : data.shape[2], : data.shape[3]]


def sdpa_mxfp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> AttentionMxFp8:
    """Attention by cuDNN on query, key and value in MXFP8; forward only, for Blackwell.

    The formula is that of :func:`sdpa_fp8` on the tensors times the scales of their blocks. Needs a
    Blackwell (compute capability 10.x) and cuDNN 9.21 or newer; the CPU kernel computes in float32
    and rounds the output alone.

    Args:
        query: [batch, heads, length, head size], ``float8_e4m3fn`` or ``float8_e5m2``, by
            ``quantize_mxfp8(query, dim=-1)``. Any strides.
        key: [batch, heads_kv, length_kv, head size], in the query's dtype, by
            ``quantize_mxfp8(key, dim=-1)``; ``heads`` is a multiple of ``heads_kv``.
        value: [batch, heads_kv, length_kv, value head size], by ``quantize_mxfp8(value, dim=-2)``:
            blocks of the value lie along the length.
        descale_q: ``float8_e8m0fnu`` [batch, heads, length, head size / 32], the last two padded to
            multiples of 128 and 4: the scales of :func:`quantize_mxfp8`, in its order.
        descale_k: likewise for the key.
        descale_v: [batch, heads_kv, value head size, length_kv / 32], padded likewise.
        is_causal: as in :func:`scaled_dot_product_attention`.
        scale: factor of the scores, above 0; None stands for ``1 / sqrt(head size)``. Another value
            needs no other plan.
        window_size: as there. Every query must see a key.
        bottom_right: as there.
        out_dtype: bfloat16 or float16; on a CPU also float32.

    Returns:
        The output, the log-sum-exp and the largest magnitude of the output.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: an unsupported dtype, or different dtypes; one number for a window.
        NotImplementedError: this GPU, or this version of cuDNN, has no kernel; the message has the
            reason. A mask that hides all keys from a query. Forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> (q, dq), (k, dk) = (cudnn_ops.quantize_mxfp8(x) for x in (q, k))
        >>> v, dv = cudnn_ops.quantize_mxfp8(v, dim=-2)
        >>> found = cudnn_ops.sdpa_mxfp8(q, k, v, descale_q=dq, descale_k=dk, descale_v=dv)
        >>> found.out.dtype, found.lse.shape
        (torch.bfloat16, torch.Size([2, 8, 100]))
    """
    refuse_one_number("sdpa_mxfp8", window_size)
    try:
        results = _op(
            *(query, key, value, descale_q, descale_k, descale_v, out_dtype),
            is_causal=is_causal,
            scale=scale,
            window_size=window_size,
            bottom_right=bottom_right,
        )
    except RuntimeError:  # the schema's
        refuse_lists("sdpa_mxfp8", locals())
        refuse_wrong_types(_op, locals(), "sdpa_mxfp8")
        raise
    return AttentionMxFp8(*results)


def _empty_results(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    query = call.query
    sizes = [*query.shape[:3], call.value.shape[3]]
    out = empty_like_order(sizes, query, call.out_dtype)
    lse, amax = (query.new_empty(shape, dtype=torch.float32) for shape in (sizes[:3], 1))
    return out, lse, amax


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._sdpa_mxfp8_check.default(*args, **kwargs)
    return _empty_results(bind(_op, args, kwargs))


def _cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._sdpa_mxfp8_check.default(*args, **kwargs)
    call = bind(_op, args, kwargs)
    results = out, lse, amax = _empty_results(call)
    if sdpa_cpu.has_no_scores(call):
        lse.fill_(-torch.inf)
        return out.zero_(), lse, amax.zero_()
    for name, dim in (("query", -1), ("key", -1), ("value", -2)):
        descale = getattr(call, f"descale_{name[0]}")
        setattr(call, name, dequantized(getattr(call, name), descale, dim))
    vars(call).update(OTHER_OPTIONS, seq_lens_q=None, seq_lens_kv=None)
    wide, total = sdpa_cpu.in_torch(call)
    for result, one in zip(results, (wide, total, wide.abs().amax().reshape(1)), strict=True):
        result.copy_(one)
    return results


register("_sdpa_mxfp8", fake=_fake, cpu=_cpu)
