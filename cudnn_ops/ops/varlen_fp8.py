"""FP8 attention over packed sequences: public functions, fake and CPU kernels.

The CUDA kernel and the checks are in ``csrc/ops/attention/fp8/``.
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
from cudnn_ops.ops.sdpa_fp8 import in_out_dtype
from cudnn_ops.ops.varlen import batched, sequences_of

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_varlen_fp8_op = _ops._varlen_fp8.default


class PackedAttentionFp8(NamedTuple):
    """What :func:`varlen_attention_fp8` returns."""

    out: Tensor
    """[tokens, heads, value head size], contiguous."""
    amax_s: Tensor
    """float32 [1]: the largest probability, as cuDNN reports it."""
    amax_o: Tensor
    """float32 [1]: the largest magnitude of the output, before it is scaled and rounded."""


def varlen_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    scale_o: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    bottom_right: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> PackedAttentionFp8:
    """Attention by cuDNN over packed sequences of 8 bits; forward only.

    The formula and the scales are those of :func:`sdpa_fp8`, applied to each sequence separately;
    sequences, offsets and plans are those of :func:`varlen_attention`. A GPU must be a Blackwell:
    :func:`sdpa_fp8` on padded sequences supports Hopper too. The CPU kernel computes in float32 and
    rounds the output alone.

    Args:
        q: [tokens, heads, head size], ``float8_e4m3fn`` or ``float8_e5m2``. Head sizes are
            multiples of 16; cuDNN supports those up to 128, and 192 with values of 128.
        k: [tokens_kv, heads_kv, head size], in the dtype of ``q``; ``heads`` must be a multiple of
            ``heads_kv``.
        v: [tokens_kv, heads_kv, value head size].
        cu_seqlens_q: as in :func:`varlen_attention`.
        cu_seqlens_k: as there. Pass the same tensor as ``cu_seqlens_q`` for self-attention.
        max_seqlen_q: as there.
        max_seqlen_k: as there.
        descale_q: float32, one number on the device: what ``q`` is multiplied with.
        descale_k: likewise.
        descale_v: likewise.
        scale_o: as in :func:`sdpa_fp8`.
        softmax_scale: factor of the scores, above 0; None stands for ``1 / sqrt(head size)``.
        causal: as in :func:`varlen_attention`.
        window_size: as there.
        seqused_q: as there.
        seqused_k: as there.
        bottom_right: as there.
        out_dtype: bfloat16, float16, ``float8_e4m3fn`` or ``float8_e5m2``; on a CPU also float32.

    Returns:
        The output, zero where a query sees no key, and the largest magnitudes.

    Raises:
        ValueError: as in :func:`varlen_attention`; scales that do not fit.
        TypeError: an unsupported dtype, or different dtypes; one number for a window, a list for a
            tensor.
        NotImplementedError: the GPU is no Blackwell: cuDNN's kernel for Hopper executes an illegal
            instruction where a sequence has no queries or no keys. Forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> q, descale, _ = cudnn_ops.quantize_fp8(torch.randn(7, 8, 64))  # of 3 and 4 tokens
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), descale)
        >>> found = cudnn_ops.varlen_attention_fp8(q, q, q, starts, starts, 4, 4, **scales)
        >>> found.out.shape
        torch.Size([7, 8, 64])
    """
    refuse_one_number("varlen_attention_fp8", window_size)
    try:
        results = _varlen_fp8_op(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            descale_q,
            descale_k,
            descale_v,
            out_dtype,
            scale_o,
            softmax_scale,
            causal,
            window_size,
            seqused_q,
            seqused_k,
            bottom_right,
        )
    except RuntimeError:  # the schema's
        refuse_lists("varlen_attention_fp8", locals())
        refuse_wrong_types(_varlen_fp8_op, locals(), "varlen_attention_fp8")
        raise
    return PackedAttentionFp8(*results)


def _empty(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = call.q
    out = q.new_empty((q.shape[0], q.shape[1], call.v.shape[2]), dtype=call.out_dtype)
    amax, amax_out = (q.new_empty(1, dtype=torch.float32) for _ in range(2))
    return out, amax, amax_out


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._varlen_fp8_check.default(*args, **kwargs)
    return _empty(bind(_varlen_fp8_op, args, kwargs))


def widened(call: Any) -> dict[str, Any]:
    """The arguments of ``varlen_attention_with_lse`` for what a call is of, in float32."""
    names = ("q", "k", "v")
    wide = {name: getattr(call, name).float() for name in names}
    wide = {name: x * getattr(call, f"descale_{name}").reshape(()) for name, x in wide.items()}
    same = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    options = ("causal", "window_size", "seqused_q", "seqused_k", "bottom_right")
    return wide | {name: getattr(call, name) for name in (*same, *options)}


def rounded(call: Any, out: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a call, of its output in float32 and the largest probability."""
    amax_out = out.abs().amax().reshape(1) if out.numel() > 0 else torch.zeros_like(amax)
    return in_out_dtype(out, call.out_dtype, call.descale_v, call.scale_o), amax, amax_out


def _cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._varlen_fp8_check.default(*args, **kwargs)
    call = bind(_varlen_fp8_op, args, kwargs)
    wide = bind(_ops.varlen_attention_with_lse.default, (), widened(call))
    out = wide.q.new_zeros(*wide.q.shape[:2], wide.v.shape[2])
    amax = out.new_zeros(1)
    for queries, keys, options in sequences_of(wide):
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        tensors = batched(wide.q, queries), batched(wide.k, keys), batched(wide.v, keys)
        one = bind(_ops.sdpa.default, tensors, {**options, "enable_gqa": True})
        out[queries] = sdpa_cpu.in_torch(one)[0][0].transpose(0, 1)
        amax = torch.maximum(amax, sdpa_cpu.largest_probability(one).reshape(1))
    return rounded(call, out, amax)


register("_varlen_fp8", fake=_fake, cpu=_cpu)
