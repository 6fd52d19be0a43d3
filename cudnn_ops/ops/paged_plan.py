"""Equal parts of the work of attention over pages: the public function, fake and CPU kernels.

The CUDA kernel is ``csrc/kernels/paged_plan.cu``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import bind, refuse_lists, refuse_one_number
from cudnn_ops.ops.kernels import register
from cudnn_ops.ops.paged import KVLayout, is_head_major

_ops = torch.ops.cudnn_ops
_paged_plan_op = _ops._paged_plan.default

#: As csrc/kernels/paged_decode_call.h has them: words before the sums, of which the first are
#: counters; tokens of a unit of work; and units that take as long as beginning a part of it.
COUNTERS, HEAD, UNIT, BEGINNING = 1024, 8, 64, 2


def paged_plan(
    query: Tensor,
    key_cache: Tensor,
    seq_lens_kv: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
    kv_layout: KVLayout = "NHD",
) -> Tensor:
    """Divides the work of :func:`paged_attention` evenly, once for all layers of a step.

    Where a kernel of this package computes it (caches of ``float8_e4m3fn``, and several queries of
    each sequence, up to 32 with the heads of a group), each block of the GPU gets as much work as
    every other, whatever the lengths and their order are: long sequences are split. One small
    kernel adds the lengths up; the host reads none of them, so a captured CUDA graph may hold both
    and be replayed while they change. Up to 128 sequences need no plan but while a graph is
    captured: each block adds their lengths up by itself. On Hopper and newer GPUs, calls with
    few sequences and no window run on clusters of blocks, which ignore a plan.

    The plan holds for calls one after the other, on one stream: they count in it which of their
    blocks are done. Layers with another ``window_size`` need another plan.

    Args:
        query: the query of the calls; only its shape is read, as of the next.
        key_cache: their keys.
        seq_lens_kv: as in :func:`paged_attention`, like all arguments below.
        cu_seqlens_q: as there.
        max_seqlen_q: as there.
        is_causal: as there.
        window_size: as there.
        bottom_right: as there.
        kv_layout: as there.

    Returns:
        int32 [batch + 1033], for the ``plan`` of :func:`paged_attention`.

    Raises:
        ValueError: lengths, offsets or options that do not fit.
        TypeError: one number for a window, a list for a tensor.

    Example:
        >>> import torch, cudnn_ops
        >>> query = torch.randn(2, 1, 8, 64)
        >>> cache = torch.randn(10, 16, 2, 64).to(torch.float8_e4m3fn)
        >>> pages = torch.tensor([[3, 0], [7, 5]], dtype=torch.int32)
        >>> lengths = torch.tensor([9, 30], dtype=torch.int32)
        >>> plan = cudnn_ops.paged_plan(query, cache, lengths)
        >>> cudnn_ops.paged_attention(query, cache, cache, pages, lengths, plan=plan).shape
        torch.Size([2, 1, 8, 64])
    """
    refuse_one_number("paged_plan", window_size)
    is_packed = cu_seqlens_q is not None
    heads_kv = key_cache.shape[1 if is_head_major(kv_layout) else 2]
    queries = max_seqlen_q if is_packed else query.shape[1]
    # Without heads there is nothing to compute.
    group = query.shape[-2] // heads_kv if heads_kv else 1
    try:
        return _paged_plan_op(
            seq_lens_kv, cu_seqlens_q, queries, group, is_causal, window_size, bottom_right
        )
    except RuntimeError:  # the schema's
        refuse_lists("paged_plan", locals())
        raise


def paged_uses_plan(*tensors: Tensor, kv_layout: KVLayout = "NHD") -> bool:
    """Whether a plan has an effect on :func:`paged_attention` of its first five arguments."""
    return bool(_ops._paged_runs_kernel(*tensors, head_major=is_head_major(kv_layout)))


def _empty(*args: Any) -> Tensor:
    _ops._paged_plan_check.default(*args)
    lengths: Tensor = args[0]
    return lengths.new_empty(COUNTERS + HEAD + 1 + lengths.shape[0])


def plan_in_torch(*args: Any) -> Tensor:
    """The result of ``_paged_plan`` by torch's operators: counters, what it is for, and sums."""
    call = bind(_paged_plan_op, args, {})
    lengths, offsets = call.seq_lens_kv.clamp_min(0), call.cu_seqlens_q
    queries = torch.full_like(lengths, call.queries) if offsets is None else offsets.diff().int()
    rows = next((rows for rows in (8, 16) if call.queries * call.group <= rows), 32)
    left, right = (-1 if bound >= 1 << 30 else bound for bound in call.window_size)
    right = 0 if call.is_causal else right
    # A query's own key is as far behind it.
    shift = lengths - queries if call.bottom_right else torch.zeros_like(lengths)
    begin, end = torch.zeros_like(lengths), lengths
    if left >= 0:
        begin = (shift - left).clamp_min(0).minimum(lengths)
    if right >= 0:
        last = (queries - 1).clamp_min(0)
        end = (last + shift + right + 1).clamp_min(0).minimum(lengths)
    units = (torch.div(end + UNIT - 1, UNIT, rounding_mode="floor")) - torch.div(
        begin, UNIT, rounding_mode="floor"
    )
    blocks = torch.div(queries * call.group + rows - 1, rows, rounding_mode="floor")
    sums = ((BEGINNING + units.clamp_min(1)) * blocks).cumsum(0).int()
    told = 0 if offsets is not None else call.queries
    head = (rows, lengths.shape[0], told, call.group, left, right, int(call.bottom_right), 0)
    words = [lengths.new_full((1,), word) for word in head]
    return torch.cat([lengths.new_zeros(COUNTERS), *words, lengths.new_zeros(1), sums])


def _cpu(*args: Any) -> Tensor:
    _ops._paged_plan_check.default(*args)
    return plan_in_torch(*args)


register("_paged_plan", fake=_empty, cpu=_cpu)
