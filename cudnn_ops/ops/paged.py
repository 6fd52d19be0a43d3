"""Attention over a paged cache, and writing into one: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/ops/paged*.cpp`` and ``csrc/kernels/``.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa_cpu
from cudnn_ops.ops.arguments import (
    bind,
    refuse_lists,
    refuse_one_number,
    refuse_wrong_types,
)
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register, register_with_lse
from cudnn_ops.ops.quantize import round_to_fp8
from cudnn_ops.ops.sdpa import lse_dtype
from cudnn_ops.ops.varlen import places

_ops = torch.ops.cudnn_ops
_paged_attention = fast(_ops.paged_attention.default)
_paged_attention_with_lse = fast(_ops.paged_attention_with_lse.default)
_paged_kv_append = fast(_ops.paged_kv_append_.default)

#: The order of a page: tokens before heads, [pages, page_size, heads_kv, head size], or heads
#: before tokens, [pages, heads_kv, page_size, head size].
KVLayout = Literal["NHD", "HND"]


def is_head_major(kv_layout: KVLayout) -> bool:
    """Whether heads are the outer dimension of a page."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')
    return kv_layout == "HND"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    plan: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over keys and values in the pages of a cache, for inference.

    The formula is that of :func:`cudnn_ops.scaled_dot_product_attention`, by default aligned at the
    bottom right: the last query of a sequence corresponds to its last key. One query in each
    sequence is decoding, a few are speculative decoding, many (with ``is_causal``) are a chunk of a
    prompt whose keys are in the cache already. The host reads neither lengths nor pages, so a
    captured CUDA graph can be replayed while they change. One plan serves every length, and every
    batch size up to the one that it was declared for. Not differentiable.

    Sequences of mixed lengths run up to an eighth faster if the longest come first. A batch of 1,
    2, 3, 4, 6, 8, 12, 16, 24, ... with a page table whose width is a power of 2 needs no copy of
    the table and the queries.

    Caches of ``float8_e4m3fn`` halve what is read. cuDNN does not decode them: a kernel of this
    package does, which divides the work evenly among the GPU's multiprocessors whatever the lengths
    and their order are (:func:`paged_plan` does so once for all layers). Keys and values are
    widened to float16 exactly. The kernel reads the keys once for every 32 rows, which are queries
    times the query heads of a key head. It supports head sizes 64 and 128, equal for keys and
    values. With caches of 16 bits it also runs for two or more queries of each sequence, up to 32
    rows in all, and for one query of up to 64 sequences whose page tables reach 2048 tokens or
    more: it is faster than cuDNN there.

    Args:
        query: [batch, length, heads, head size]; or packed, [tokens, heads, head size], with
            ``cu_seqlens_q``. The last stride must be 1. float16 or bfloat16; on a CPU also float32
            and float64.
        key_cache: [pages, page_size, heads_kv, head size] (``kv_layout="NHD"``) or
            [pages, heads_kv, page_size, head size] (``"HND"``), in the query's dtype or
            ``float8_e4m3fn``, on its device. The page size must be a power of 2.
        value_cache: likewise, with the value head size. Unless each sequence has one query, the
            slots after a sequence's last token in its last page must hold finite numbers, for cuDNN
            multiplies them by 0; those of a zero-initialized cache do. Of ``float8_e4m3fn`` they
            may hold anything.
        page_table: int32 [batch, width], the pages of each sequence, in order. Entries beyond a
            sequence's length are not read.
        seq_lens_kv: int32 [batch], the number of each sequence's tokens in the cache, including
            those of this call's queries; at most ``width * page_size``. If 0, the output is 0.
        cu_seqlens_q: int32 or int64 [batch + 1], the offset of each sequence's queries.
        max_seqlen_q: with ``cu_seqlens_q``, at least the largest number of queries of a sequence.
        scale: factor of the scores; None stands for ``1 / sqrt(head size)``.
        is_causal: no query sees a key after its own.
        window_size: (left, right), how many keys a query sees on each side of its own; -1 for all
            keys on that side.
        bottom_right: aligns the last query of a sequence with its last key instead of the first
            with the first, for ``is_causal`` and ``window_size``.
        softcap: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        sinks: as there.
        kv_layout: the order of dimensions in a page.
        descale_k: of keys of ``float8_e4m3fn``: float32, one number or [heads_kv], what they are
            multiplied with. None stands for 1.
        descale_v: likewise of values.
        plan: what :func:`paged_plan` returned for these lengths and options; where cuDNN computes,
            it has no effect. Up to 128 sequences need none outside of CUDA graphs; for more, and
            while a graph is captured, None makes one, by a kernel more. One that was made for other
            options makes the output NaN.
        out: a contiguous tensor for the output; None allocates one.

    Returns:
        [batch, length, heads, value head size] or [tokens, heads, value head size], contiguous;
        ``out`` if that is given.

    Raises:
        ValueError: shapes, strides, devices or options that do not fit; a page size that is not a
            power of 2; lengths that exceed the table, page numbers that exceed the cache, and
            values that are not finite as described above (on a GPU checked only with
            ``CUDNN_OPS_CHECK=1``, which waits for the GPU).
        TypeError: an unsupported dtype, or different dtypes; one number for a window,
            a list for a tensor.
        NotImplementedError: cuDNN has no kernel for this on this GPU; the message has its reason.
            Caches of ``float8_e4m3fn`` with other head sizes.

    Example:
        >>> import torch, cudnn_ops
        >>> query = torch.randn(2, 1, 8, 64)  # decoding: one query a sequence
        >>> cache = torch.randn(10, 16, 2, 64)  # pages of 16 tokens, two key heads
        >>> pages = torch.tensor([[3, 0], [7, 5]], dtype=torch.int32)
        >>> lengths = torch.tensor([9, 30], dtype=torch.int32)
        >>> cudnn_ops.paged_attention(query, cache, cache, pages, lengths).shape
        torch.Size([2, 1, 8, 64])
    """
    refuse_one_number("paged_attention", window_size)
    attend = _paged_attention
    if out is not None:
        attend = partial(_ops._paged_attention_out.default, out=out)
    try:
        result = attend(
            query,
            key_cache,
            value_cache,
            page_table,
            seq_lens_kv,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            bottom_right=bottom_right,
            softcap=softcap,
            sinks=sinks,
            head_major=is_head_major(kv_layout),
            descale_k=descale_k,
            descale_v=descale_v,
            plan=plan,
        )
    except RuntimeError:  # the schema's
        refuse_lists("paged_attention", locals())
        raise
    return result if out is None else out


def paged_attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    kv_layout: KVLayout = "NHD",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Like :func:`paged_attention` without ``out``, and returns the log-sum-exp too.

    Args:
        query: as in :func:`paged_attention`, like all arguments below.
        key_cache: as there.
        value_cache: as there.
        page_table: as there.
        seq_lens_kv: as there.
        kv_layout: as there.
        options: ``cu_seqlens_q``, ``max_seqlen_q``, ``scale``, ``is_causal``, ``window_size``,
            ``bottom_right``, ``softcap``, ``sinks``, ``descale_k``, ``descale_v`` and ``plan``, by
            keyword.

    Returns:
        The output, and the log-sum-exp of the scores: [batch, heads, length], or [heads, tokens]
        if the queries are packed; float32 (float64 for float64 inputs), natural logarithm; the sink
        or ``-inf`` where a query sees no key.

    Raises:
        ValueError: as :func:`paged_attention`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> query, cache = torch.randn(1, 1, 8, 64), torch.randn(10, 16, 2, 64)
        >>> pages = torch.tensor([[3]], dtype=torch.int32)
        >>> lengths = torch.tensor([9], dtype=torch.int32)
        >>> _, lse = cudnn_ops.paged_attention_with_lse(query, cache, cache, pages, lengths)
        >>> lse.shape
        torch.Size([1, 8, 1])
    """
    refuse_one_number("paged_attention_with_lse", options.get("window_size"))
    try:
        return _paged_attention_with_lse(
            query,
            key_cache,
            value_cache,
            page_table,
            seq_lens_kv,
            head_major=is_head_major(kv_layout),
            **options,
        )
    except RuntimeError:  # the schema's
        refuse_lists("paged_attention_with_lse", locals() | options)
        raise


def paged_kv_append_(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: KVLayout = "NHD",
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
) -> None:
    """Writes new keys and values into their pages, in place, with one kernel.

    Where the caches are of ``float8_e4m3fn`` and the tokens are not, these are rounded as
    :func:`quantize_fp8` does, with the inverse of the descale as the scale: to the nearest, what is
    too large to the largest number; NaN stays NaN.

    Args:
        key_cache: as in :func:`paged_attention`; any dtype.
        value_cache: likewise.
        key: [tokens, heads_kv, head size], in the cache's dtype, with a last stride of 1; for
            caches of ``float8_e4m3fn`` also float16, bfloat16 or float32 (on a CPU float64 too).
        value: [tokens, heads_kv, value head size].
        slot_mapping: int64 [tokens], ``page * page_size + place in the page``, or -1 for a token
            that is not to be written. Two tokens must not share a slot. On a GPU, tokens with slots
            outside of the cache are skipped without an error.
        kv_layout: the order of dimensions in a page.
        descale_k: for keys that are rounded: float32, one number or [heads_kv], what attention
            multiplies them with. None stands for 1.
        descale_v: likewise for values.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit; slots outside of the cache (on a GPU
            checked only with ``CUDNN_OPS_CHECK=1``, which waits for the GPU).

    Example:
        >>> import torch, cudnn_ops
        >>> keys, values = torch.zeros(10, 16, 2, 64), torch.zeros(10, 16, 2, 64)
        >>> new = torch.ones(2, 2, 64)
        >>> slots = torch.tensor([3 * 16, 3 * 16 + 1])  # the first two tokens of page 3
        >>> cudnn_ops.paged_kv_append_(keys, values, new, new, slots)
        >>> bool((keys[3, :2] == 1).all())
        True
    """
    arguments = (key_cache, value_cache, key, value, slot_mapping, is_head_major(kv_layout))
    try:
        _paged_kv_append(*arguments, descale_k, descale_v)
    except RuntimeError:  # the schema's
        refuse_wrong_types(_ops.paged_kv_append_.default, locals())
        raise


def _empty(query: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    *lead, heads, _ = query.shape
    rows = [heads, *lead] if query.dim() == 3 else [lead[0], heads, lead[1]]
    out = query.new_empty([*lead, heads, value_cache.shape[3]])
    return out, query.new_empty(rows, dtype=lse_dtype(query.dtype))


def _with_lse_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any, **kwargs: Any
):
    _ops._paged_check.default(query, key_cache, value_cache, *args, **kwargs)
    return _empty(query, value_cache)


def _out_fake(*args: Any, **kwargs: Any) -> None:
    _ops._paged_check.default(*args, **kwargs)


def _append_fake(*args: Any, **kwargs: Any) -> None:
    _ops._paged_append_check.default(*args, **kwargs)


def _gather(cache: Tensor, page_table: Tensor, seq_lens: Tensor, head_major: bool) -> Tensor:
    """[batch, heads, slots, head size]: the tokens on each sequence's pages, padded with 0.

    Entries beyond a length are not followed, and values there not read: they may be NaN.
    """
    # 8 bits as integers: not everything is defined for them, and 0 has no bit of either.
    by_token = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    by_token = by_token.transpose(1, 2) if head_major else by_token
    width, page_size = page_table.shape[1], by_token.shape[1]
    lengths = seq_lens.unsqueeze(1)
    starts = torch.arange(width, device=cache.device) * page_size
    slots = by_token[page_table.long().masked_fill(starts >= lengths, 0)].flatten(1, 2)
    there = torch.arange(width * page_size, device=cache.device) < lengths
    slots = slots.masked_fill(~there[:, :, None, None], 0)
    return (slots.view(cache.dtype) if slots.dtype == torch.uint8 else slots).transpose(1, 2)


def _widened(tokens: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of 8 bits, [batch, heads, slots, head size]; others as they are."""
    if tokens.dtype != torch.float8_e4m3fn:
        return tokens
    wide = tokens.to(torch.promote_types(dtype, torch.float32))
    return wide if descale is None else wide * descale.reshape(-1, 1, 1)


def paged_in_torch(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The results of ``paged_attention_with_lse`` by torch's operators.

    Packed queries are padded to ``max_seqlen_q`` of each sequence.
    """
    query, offsets, most = call.query, call.cu_seqlens_q, call.max_seqlen_q
    rows, lengths = query, None
    if offsets is not None:
        lengths = offsets.diff()
        of_each = torch.arange(most, device=query.device)
        rows = query[(offsets[:-1].unsqueeze(1) + of_each).clamp(max=query.shape[0] - 1)]
    key, value = (
        _widened(
            _gather(cache, call.page_table, call.seq_lens_kv, call.head_major), descale, query.dtype
        )
        for cache, descale in (
            (call.key_cache, call.descale_k),
            (call.value_cache, call.descale_v),
        )
    )
    rows = rows.to(key.dtype)
    shared = ("is_causal", "scale", "softcap", "window_size", "bottom_right", "sinks")
    options = {name: getattr(call, name) for name in shared}
    lengths_of = {"seq_lens_q": lengths, "seq_lens_kv": call.seq_lens_kv}
    dense = bind(_ops.sdpa.default, (rows.transpose(1, 2), key, value), options | lengths_of)
    out, lse = sdpa_cpu.in_torch(dense)
    out = out.transpose(1, 2)
    if offsets is not None:
        sequence, place, _ = places(offsets, query.shape[0], None)
        of_token = (sequence, place.clamp(max=most - 1))
        out, lse = out[of_token], lse.transpose(1, 2)[of_token].t()
    return out.to(query.dtype).contiguous(), lse.contiguous()


def _with_lse_cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    _ops._paged_check.default(*args, **kwargs)
    call = bind(_ops.paged_attention_with_lse.default, args, kwargs)
    out, lse = _empty(call.query, call.value_cache)
    if out.numel() == 0:
        return out, lse
    # No more than there is: bounds may be far above it.
    page_size = call.key_cache.shape[2 if call.head_major else 1]
    call.page_table = call.page_table[:, : -(-int(call.seq_lens_kv.max()) // page_size)]
    if call.page_table.shape[1] == 0:
        return sdpa_cpu.without_keys(out, lse, call.sinks)
    if call.cu_seqlens_q is not None:
        call.max_seqlen_q = int(call.cu_seqlens_q.diff().max())
    return paged_in_torch(call)


def _out_cpu(*args: Any, out: Tensor, **kwargs: Any) -> None:
    _ops._paged_check.default(*args, **kwargs, out=out)
    out.copy_(_with_lse_cpu(*args, **kwargs)[0])


def _append_cpu(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    head_major: bool = False,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
) -> None:
    arguments = (key_cache, value_cache, key, value, slot_mapping, head_major)
    _ops._paged_append_check.default(*arguments, descale_k, descale_v)
    for cache, given, descale in ((key_cache, key, descale_k), (value_cache, value, descale_v)):
        by_token = cache.transpose(1, 2) if head_major else cache
        tokens = given
        if given.dtype != cache.dtype:
            scale = 1.0 if descale is None else descale.reciprocal().reshape(-1, 1)
            tokens = round_to_fp8(given.float() * scale, cache.dtype)
        pages, page_size = by_token.shape[:2]
        there = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
        slots = slot_mapping[there]
        page = torch.div(slots, page_size, rounding_mode="floor")
        by_token.index_put_((page, slots % page_size), tokens[there])


register_with_lse("paged_attention", fake=_with_lse_fake, cpu=_with_lse_cpu)
register("_paged_attention_out", fake=_out_fake, cpu=_out_cpu)
register("paged_kv_append_", fake=_append_fake, cpu=_append_cpu)
