"""Norm, rotation and rounding to 8 bits of query, key and value: public function, fake, CPU kernel.

The CUDA kernels are in ``csrc/kernels/rotary_fp8*``, the checks in ``csrc/ops/rotary/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops.activation import wide
from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.kernels import register
from cudnn_ops.ops.norm import rms_in_torch
from cudnn_ops.ops.quantize import quantize_in_torch
from cudnn_ops.ops.rotary import rotary_in_torch

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_rotary_fp8_op = _ops._rotary_fp8.default


class RotaryFp8(NamedTuple):
    """What :func:`rotary_embedding_qkv_fp8` returns."""

    query: Tensor
    """The query, normed, turned, times its scale and rounded: [B, heads, S, D], stored as
    [B, S, heads, D]."""
    key: Tensor
    """The key, likewise."""
    value: Tensor
    """The value times its scale, rounded, likewise."""
    descale: Tensor
    """float32 [3], or [2 + heads of the value] with ``per_head``: the inverse scales of query, key
    and value."""
    amax: Tensor
    """float32, likewise: the largest magnitudes of what was rounded, before it was scaled; NaN
    where it holds one."""


def rotary_embedding_qkv_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    scales: Tensor | None = None,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered: bool = False,
    per_head: bool = False,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    sections: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> RotaryFp8:
    r"""Makes the operands of :func:`sdpa_fp8` of projections of 16 bits.

    .. math::
        q_8 &= \mathrm{round}(\mathrm{scale}_q \cdot \mathrm{rotate}(\mathrm{norm}(q))) \\
        k_8 &= \mathrm{round}(\mathrm{scale}_k \cdot \mathrm{rotate}(\mathrm{norm}(k))) \\
        v_8 &= \mathrm{round}(\mathrm{scale}_v \cdot v)

    by the norm of :func:`rms_norm` over each head (QK-norm), the rotation of
    :func:`rotary_embedding` and the rounding of :func:`quantize_fp8`. Computed in float32, without
    rounding in between. With ``scales`` one kernel reads all three once, and writes them and the
    largest magnitudes, from which the next step's scales follow (delayed scaling):
    ``scales = 448 / amax``. Without, the scales follow from the largest magnitudes, which takes one
    more kernel that reads all three. The host waits for nothing. Not differentiable.

    Args:
        query: [B, H, S, D] with any strides, D even and at most 256; float16, bfloat16 or float32;
            on a CPU also float64, which is rounded to float32 before it is scaled.
        key: [B, heads, S, D], in the query's dtype.
        value: [B, heads, S, Dv], Dv at most 256, in the query's dtype.
        cos: as in :func:`rotary_embedding`, like ``sin``.
        sin: as there.
        scales: float32 [3], those of query, key and value; with ``per_head`` [2 + heads].
        query_weight: [D], in the query's dtype or float32, of the norm of the query; None: no norm.
        key_weight: likewise, of the key's, in the same dtype.
        eps: of the norms; None stands for the machine epsilon of float32.
        zero_centered: of the norms, as in :func:`rms_norm`.
        per_head: whether each head of the value has a scale of its own. :func:`sdpa_fp8` takes
            their descales, ``descale[2:]``, for its output is linear in the value. Scores of all
            heads have one factor there, so query and key have one scale each.
        interleaved: as in :func:`rotary_embedding`, like the following three.
        rotary_dim: as there.
        positions: as there.
        sections: as there.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The three rounded tensors, their descales and their largest magnitudes.

    Raises:
        ValueError: shapes, devices, scales or options that do not fit.
        TypeError: an unsupported dtype, or different dtypes.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> q, k, v = (torch.randn(1, heads, 10, 64) for heads in (8, 2, 2))
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** (-torch.arange(32) / 32)).repeat(1, 2)
        >>> rounded = cudnn_ops.rotary_embedding_qkv_fp8(q, k, v, angles.cos()[None],
        ...                                              angles.sin()[None])
        >>> descale_q, descale_k, descale_v = rounded.descale
        >>> scales = dict(descale_q=descale_q, descale_k=descale_k, descale_v=descale_v)
        >>> cudnn_ops.sdpa_fp8(*rounded[:3], **scales, is_causal=True).shape
        torch.Size([1, 8, 10, 64])
    """
    # 0 stands for all of a head, and no number for one section.
    turned = 0 if rotary_dim is None else rotary_dim or -1
    layout = [int(interleaved), turned, *((sections or [0]) if sections is not None else ())]
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    try:
        results = _rotary_fp8_op(
            query,
            key,
            value,
            cos,
            sin,
            positions,
            layout,
            scales,
            query_weight,
            key_weight,
            eps,
            zero_centered,
            per_head,
            dtype,
        )
    except RuntimeError:
        refuse_wrong_types(_rotary_fp8_op, locals(), "rotary_embedding_qkv_fp8")
        raise
    return RotaryFp8(*results)


_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _rotary_fp8_fake(*args: Any) -> _Results:
    _ops._rotary_fp8_check.default(*args)
    call = bind(_rotary_fp8_op, args, {})

    def like(heads: Tensor) -> Tensor:
        batch, count, tokens, size = heads.shape
        return heads.new_empty((batch, tokens, count, size), dtype=call.dtype).transpose(1, 2)

    count = 2 + (call.value.shape[1] if call.per_head else 1)
    descale, amax = (call.query.new_empty(count, dtype=torch.float32) for _ in range(2))
    return like(call.query), like(call.key), like(call.value), descale, amax


def rotary_fp8_in_torch(*args: Any) -> _Results:
    """The results of ``_rotary_fp8`` by torch's operators."""
    call = bind(_rotary_fp8_op, args, {})

    def normed(heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return wide(heads)
        return rms_in_torch(wide(heads), (-1,), weight, call.eps, call.zero_centered)[0]

    query, key = normed(call.query, call.query_weight), normed(call.key, call.key_weight)
    cos, sin = wide(call.cos), wide(call.sin)
    turned = rotary_in_torch(query, key, cos, sin, call.positions, call.layout, False)
    tensors = (*turned, wide(call.value).transpose(1, 2).contiguous().transpose(1, 2))
    parts = []
    for index, tensor in enumerate(tensors):
        is_of_heads = call.per_head and index == 2
        scale = call.scales
        if scale is not None:
            scale = scale[2:] if is_of_heads else scale[index : index + 1]
        parts.append(quantize_in_torch(tensor, scale, 1 if is_of_heads else None, call.dtype))
    query, key, value = (part[0] for part in parts)
    descale, amax = (torch.cat([part[i] for part in parts]) for i in (1, 2))
    return query, key, value, descale, amax


def _rotary_fp8_cpu(*args: Any) -> _Results:
    _ops._rotary_fp8_check.default(*args)
    return rotary_fp8_in_torch(*args)


register("_rotary_fp8", fake=_rotary_fp8_fake, cpu=_rotary_fp8_cpu)
