"""What runs attention: dense, packed and over pages, in 16 and in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.mxfp8 import meta_scales
from cudnn_ops.ops.paged import KVLayout, is_head_major
from cudnn_ops.ops.sdpa import empty_like_order
from cudnn_ops.support.attempts import Attempt, Kind, Parts, one_plan
from cudnn_ops.support.specs import TensorSpec, meta_tensor, offsets_tensor, optional_tensor

_ops = torch.ops.cudnn_ops


def _make_optional(
    options: dict[str, Any], names: Sequence[str], size: int, dtype: torch.dtype
) -> None:
    """Puts tensors of one dimension in place of what describes them."""
    for name in names:
        options[name] = optional_tensor(options.get(name), name, (size,), dtype)


def attention_parts(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: TensorSpec | None = None,
    **options: Any,
) -> Parts:
    """Dense attention, or its backward."""
    heads = query.shape[-3] if query.dim() > 2 else 1
    batch = math.prod(query.shape[:-3])
    _make_optional(options, ("alibi_slopes", "sinks"), heads, torch.float32)
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), batch, torch.int32)
    words, refusal = _ops._sdpa_plan_key(
        query,
        key,
        value,
        None if attn_mask is None else meta_tensor(attn_mask, "attn_mask"),
        **options,
        with_lse=kind.training,
        backward=kind.backward,
        polymorphic=kind.polymorphic,
    )
    return one_plan(words, refusal)


def attention_fp8_parts(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    """Dense attention of 8-bit tensors."""
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), query.shape[0], torch.int32)
    one = torch.empty(1, device="meta")
    words, refusal = _ops._sdpa_fp8_plan_key(
        *(query, key, value, one, one, one, out_dtype),
        **options,
        with_lse=kind.training,
        sm_major=kind.sm // 10,
    )
    return one_plan(words, refusal)


def attention_fp8_backward_parts(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    grad_out: TensorSpec | torch.dtype | None = None,
    grad_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    """Dense attention's backward in 8 bits."""
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), query.shape[0], torch.int32)
    out = empty_like_order([*query.shape[:3], value.shape[3]], query)
    if grad_out is None or isinstance(grad_out, torch.dtype):
        grad_out = torch.empty_like(out, dtype=grad_out)
    lse, one = (torch.empty(shape, device="meta") for shape in (query.shape[:3], 1))
    words, refusal = _ops._sdpa_fp8_backward_plan_key(
        *(meta_tensor(grad_out, "grad_out"), query, key, value, out, lse),
        *([one] * 6),
        grad_dtype,
        **options,
        sm_major=kind.sm // 10,
    )
    return one_plan(words, refusal)


def attention_mxfp8_parts(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    """Dense attention of 8-bit tensors with a scale for each block."""
    scales = meta_scales(query, -1), meta_scales(key, -1), meta_scales(value, -2)
    words, refusal = _ops._sdpa_mxfp8_plan_key(query, key, value, *scales, out_dtype, **options)
    return one_plan(words, refusal)


def _sequences_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: TensorSpec | int | None,
    cu_seqlens_k: TensorSpec | int | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of queries and keys, and the longest of each; those of the queries serve the keys."""
    offsets = offsets_tensor(cu_seqlens_q, "cu_seqlens_q")
    is_same = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    offsets_kv = offsets if is_same else offsets_tensor(cu_seqlens_k, "cu_seqlens_k")
    most = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    most_kv = (most if is_same else k.shape[0]) if max_seqlen_k is None else max_seqlen_k
    return offsets, offsets_kv, most, most_kv


def packed_parts(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: TensorSpec | int | None = None,
    cu_seqlens_k: TensorSpec | int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Parts:
    """Packed attention, or its backward."""
    sequences = _sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _make_optional(options, ("alibi_slopes", "sinks"), q.shape[1], torch.float32)
    _make_optional(options, ("seqused_q", "seqused_k"), sequences[0].shape[0] - 1, torch.int32)
    words = _ops._varlen_plan_key(
        *(q, k, v, *sequences),
        **options,
        with_lse=kind.training,
        backward=kind.backward,
        sm_major=kind.sm // 10,
    )
    return one_plan(words)


def packed_fp8_parts(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: TensorSpec | int | None = None,
    cu_seqlens_k: TensorSpec | int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    """Packed attention of 8-bit tensors."""
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sequences = _sequences_of(q, k, *given)
    _make_optional(options, ("seqused_q", "seqused_k"), sequences[0].shape[0] - 1, torch.int32)
    one = torch.empty(1, device="meta")
    words = _ops._varlen_fp8_plan_key(
        *(q, k, v, *sequences, one, one, one, out_dtype), **options, sm_major=kind.sm // 10
    )
    return one_plan(words)


def paged_parts(
    kind: Kind,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    page_table: TensorSpec | Sequence[int] | None = None,
    cu_seqlens_q: TensorSpec | bool | None = None,
    sinks: TensorSpec | bool | None = None,
    kv_layout: KVLayout = "NHD",
    **options: Any,
) -> Parts:
    """Attention over pages."""
    if key_cache.dtype == torch.float8_e4m3fn:
        return [iter([_paged_without_plan(query, key_cache, value_cache)])]
    if page_table is None:
        raise ValueError("paged_attention: page_table is missing, or its shape (batch, pages)")
    if not isinstance(page_table, Tensor) and all(isinstance(size, int) for size in page_table):
        page_table = (page_table, torch.int32)  # type: ignore[assignment]
    table = meta_tensor(page_table, "page_table")  # type: ignore[arg-type]
    batch = table.shape[0]
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    options |= {
        "cu_seqlens_q": optional_tensor(cu_seqlens_q, "cu_seqlens_q", (batch + 1,), torch.int32),
        "sinks": optional_tensor(sinks, "sinks", query.shape[-2:-1], torch.float32),
        "head_major": is_head_major(kv_layout),
    }
    given = (query, key_cache, value_cache, table, lengths)
    if _ops._paged_runs_kernel(*given, **options):
        why = "a kernel of cudnn_ops runs: for few queries of a sequence it is faster than cuDNN's"
        return [iter([Attempt(without_plan=why)])]
    return one_plan(_ops._paged_plan_key(*given, with_lse=kind.training, **options))


def _paged_without_plan(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Attempt:
    """Caches of 8 bits, which cuDNN does not decode: as has_paged_decode of the kernel."""
    sizes = query.shape[-1], key_cache.shape[-1], value_cache.shape[-1]
    if query.dtype in (torch.float16, torch.bfloat16) and sizes in ((64,) * 3, (128,) * 3):
        return Attempt(
            without_plan="a kernel of cudnn_ops runs: cuDNN does not decode caches of 8 bits"
        )
    return Attempt(
        refusal="cuDNN does not decode caches of float8_e4m3fn, and the kernel for them supports "
        "head sizes 64 and 128, equal for keys and values, and queries of float16 or bfloat16"
    )
