"""Attention under vmap: the tensors of a sample, and the same by torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa_features
from tests.cases.sdpa_features import Features
from tests.cases.vmap import Problem, Results, drawing, randn

_ops = torch.ops.cudnn_ops

# Attention


def _by_torch(
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if q.dtype == torch.float64:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        # The formula, rounded at each step: torch's function computes in float32 inside.
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ v

    return attend


def _by_us(**options: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return cudnn_ops.scaled_dot_product_attention(q, k, v, attn_mask, **options)

    return attend


_Shapes = dict[str, tuple[int, ...]]

_QKV: _Shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 16)}
_INPUTS = ("q", "k", "v")


def _plain(name: str, shapes: _Shapes, **options: Any) -> Problem:
    return Problem(name, _by_us(**options), _by_torch(**options), drawing(**shapes), _INPUTS)


def _masked(name: str, shape: tuple[int, ...], is_bool: bool) -> Problem:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        mask = randn(generator, *shape)
        if is_bool:
            mask = mask > -0.5
            mask[..., 0] = True  # torch gives NaN to a query without keys
        tensors = {n: randn(generator, *s) for n, s in _QKV.items()}
        return {"attn_mask": mask, **tensors}

    wanted = _INPUTS if is_bool else (*_INPUTS, "attn_mask")
    options = {"enable_gqa": True}
    first = ("attn_mask", "q", "k")
    return Problem(
        f"sdpa_{name}", _by_us(**options), _by_torch(**options), draw, wanted, first=first
    )


def _featured(name: str, case: Features, first: tuple[str, ...]) -> Problem:
    """Output and log-sum-exp, with options that torch's function has not."""
    shapes = {
        "q": (case.batch, case.heads, case.length, case.head_size),
        "k": (case.batch, case.heads_kv, case.length_kv, case.head_size),
        "v": (case.batch, case.heads_kv, case.length_kv, case.value_size),
    }

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        seed = int(torch.randint(1000, (), generator=generator))
        extras = sdpa_features.make_extras(case, torch.float64, "cpu", seed)
        return {n: randn(generator, *s) for n, s in shapes.items()} | extras

    def ours(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Results:
        return _ops.sdpa_with_lse(q, k, v, **case.kwargs(), **extras)

    def reference(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Results:
        return sdpa_features.attention(case, q, k, v, extras, None)

    names = set(draw(torch.Generator()))
    wanted = (*_INPUTS, *sorted(names & {"sinks"}))
    wide = ("sinks", "alibi_slopes")
    return Problem(f"sdpa_{name}", ours, reference, draw, wanted, wide, first)


_ONE = Features(2, 4, 2, 5, 7, 8, 16)

ATTENTION = [
    _plain("sdpa", _QKV, is_causal=True, enable_gqa=True),
    _plain("sdpa_one_group", {**_QKV, "k": (2, 1, 7, 8), "v": (2, 1, 7, 16)}, scale=0.3),
    _plain("sdpa_heads_of_one", {**_QKV, "q": (2, 1, 5, 8)}),
    _plain("sdpa_batch_of_one", {**_QKV, "k": (1, 4, 7, 8), "v": (1, 4, 7, 16)}),
    _plain("sdpa_no_batch", {"q": (4, 5, 8), "k": (4, 7, 8), "v": (4, 7, 16)}, is_causal=True),
    _plain("sdpa_no_heads", {"q": (5, 8), "k": (7, 8), "v": (7, 16)}),
    _plain("sdpa_two_batches", {"q": (3, 2, 2, 5, 8), "k": (2, 2, 7, 8), "v": (3, 1, 2, 7, 8)}),
    _plain("sdpa_odd_size", {"q": (2, 2, 5, 6), "k": (2, 2, 7, 6), "v": (2, 2, 7, 9)}),
    _plain("sdpa_one_query", {"q": (1, 2, 1, 8), "k": (1, 2, 9, 8), "v": (1, 2, 9, 8)}),
    _masked("mask_of_keys", (2, 1, 1, 7), is_bool=True),
    _masked("mask", (2, 4, 5, 7), is_bool=True),
    _masked("bias", (2, 1, 5, 7), is_bool=False),
    _masked("bias_of_heads", (1, 4, 5, 7), is_bool=False),
    _masked("bias_of_two_dimensions", (5, 7), is_bool=False),
    _featured("window", replace(_ONE, window_size=(2, 1), bottom_right=True), ("q", "k")),
    _featured("softcap", replace(_ONE, softcap=2.0), ("q", "v")),
    _featured("sinks", replace(_ONE, sinks=True), ("q", "k", "sinks")),
    _featured("alibi", replace(_ONE, alibi=True, is_causal=True), ("q", "v", "alibi_slopes")),
    _featured(
        "alibi_sinks_mask",
        replace(_ONE, alibi=True, sinks=True, mask="b1qk", mask_dtype="bool", hides="some"),
        ("q", "attn_mask", "sinks", "alibi_slopes"),
    ),
    _featured(
        "lengths",
        replace(_ONE, lengths="both", sinks=True, is_causal=True, bottom_right=True),
        ("q", "sinks", "seq_lens_q", "seq_lens_kv"),
    ),
    _featured(
        "lengths_alibi",
        replace(_ONE, lengths="kv", alibi=True),
        ("k", "alibi_slopes", "seq_lens_kv"),
    ),
]


# Packed and paged attention


def _offsets(generator: torch.Generator, tokens: int, least: int) -> Tensor:
    """Of three sequences of at least so many tokens."""
    inner = torch.randint(0, tokens - 3 * least + 1, (2,), generator=generator).sort().values
    inner = inner + torch.tensor([least, 2 * least])
    return torch.cat([torch.tensor([0]), inner, torch.tensor([tokens])]).int()


def _packed(name: str, case: Features, same: bool, used: bool, first: tuple[str, ...]) -> Problem:
    tokens, tokens_k = 11, 11 if same else 13

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        seed = int(torch.randint(1000, (), generator=generator))
        tensors = {
            "q": randn(generator, tokens, case.heads, case.head_size),
            "k": randn(generator, tokens_k, case.heads_kv, case.head_size),
            "v": randn(generator, tokens_k, case.heads_kv, case.value_size),
            "cu_seqlens_q": _offsets(generator, tokens, 2 * used),
        }
        if not same:
            tensors["cu_seqlens_k"] = _offsets(generator, tokens_k, 2 * used)
        if used:
            tensors["seqused_k"] = torch.randint(0, 3, (3,), generator=generator).int()
        return tensors | sdpa_features.make_extras(case, torch.float64, "cpu", seed)

    options = {
        "causal": case.is_causal,
        "window_size": case.window_size,
        "bottom_right": case.bottom_right,
        "softcap": case.softcap,
    }

    def ours(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **others: Tensor) -> Results:
        cu_seqlens_k = others.pop("cu_seqlens_k", cu_seqlens_q)
        return cudnn_ops.varlen_attention_with_lse(
            q, k, v, cu_seqlens_q, cu_seqlens_k, tokens, tokens_k, **options, **others
        )

    def reference(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **others: Tensor
    ) -> Results:
        starts_k = others.pop("cu_seqlens_k", cu_seqlens_q).tolist()
        lengths_k = others.pop("seqused_k", torch.tensor(starts_k).diff()).tolist()
        starts_q = cu_seqlens_q.tolist()
        outs, lses = [], []
        for start, end, start_k, length_k in zip(
            starts_q[:-1], starts_q[1:], starts_k[:-1], lengths_k, strict=True
        ):
            rows, keys = slice(start, end), slice(start_k, start_k + length_k)
            query, key, value = (t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys]))
            of_one = replace(case, batch=1, length=end - start, length_kv=length_k)
            out, lse = sdpa_features.attention(of_one, query, key, value, others, None)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    names = set(draw(torch.Generator()))
    wanted = (*_INPUTS, *sorted(names & {"sinks"}))
    return Problem(
        f"varlen_{name}", ours, reference, draw, wanted, ("sinks", "alibi_slopes"), first
    )


_OF_PACKED = replace(_ONE, batch=1, bottom_right=True)

PACKED = [
    _packed("same", replace(_OF_PACKED, is_causal=True), True, False, ("q", "k", "cu_seqlens_q")),
    _packed("two", _OF_PACKED, False, False, ("q", "cu_seqlens_q", "cu_seqlens_k")),
    _packed("used", _OF_PACKED, False, True, ("v", "cu_seqlens_k", "seqused_k")),
    _packed("sinks", replace(_OF_PACKED, sinks=True), True, False, ("k", "cu_seqlens_q", "sinks")),
    _packed(
        "alibi",
        replace(_OF_PACKED, alibi=True, is_causal=True),
        True,
        False,
        ("q", "cu_seqlens_q", "alibi_slopes"),
    ),
]


def _paged(name: str, *, packed: bool, head_major: bool, sinks: bool) -> Problem:
    pages, size, heads, heads_kv, batch, length = 6, 4, 4, 2, 2, 3

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        inner = (heads_kv, size) if head_major else (size, heads_kv)
        tensors = {
            "query": randn(generator, *((5,) if packed else (batch, length)), heads, 8),
            "key_cache": randn(generator, pages, *inner, 8),
            "value_cache": randn(generator, pages, *inner, 16),
            "page_table": torch.randperm(pages, generator=generator).int().view(batch, 3),
            "seq_lens_kv": torch.randint(0, 3 * size + 1, (batch,), generator=generator).int(),
        }
        if packed:
            first = torch.randint(0, 6, (1,), generator=generator)
            tensors["cu_seqlens_q"] = torch.cat([torch.tensor([0]), first, torch.tensor([5])]).int()
        if sinks:
            tensors["sinks"] = randn(generator, heads)
        return tensors

    def ours(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, **others: Any
    ) -> Results:
        options: dict[str, Any] = {"kv_layout": "HND" if head_major else "NHD"}
        if packed:
            options["max_seqlen_q"] = 5
        lengths = others.pop("seq_lens_kv")
        return cudnn_ops.paged_attention_with_lse(
            query, key_cache, value_cache, page_table, lengths, is_causal=True, **options, **others
        )

    def reference(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, **others: Tensor
    ) -> Results:
        extras = {"sinks": others["sinks"]} if sinks else {}
        starts = others["cu_seqlens_q"].tolist() if packed else []
        outs, lses = [], []
        for index, length_kv in enumerate(others["seq_lens_kv"].tolist()):

            def tokens(cache: Tensor, index: int = index, count: int = length_kv) -> Tensor:
                by_token = cache.transpose(1, 2) if head_major else cache
                return by_token[page_table[index].long()].flatten(0, 1)[:count]

            mine = query[starts[index] : starts[index + 1]] if packed else query[index]
            parts = mine, tokens(key_cache), tokens(value_cache)
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            case = Features(
                1, heads, heads_kv, len(mine), length_kv, 8, 16, is_causal=True, bottom_right=True
            )
            out, lse = sdpa_features.attention(case, q, k, v, extras, None)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        if packed:
            return torch.cat(outs), torch.cat(lses, 1)
        return torch.stack(outs), torch.stack(lses)

    first: tuple[str, ...]
    first = ("query", "key_cache", "value_cache", "page_table", "seq_lens_kv")
    if packed:
        first = ("query", "key_cache", "page_table", "cu_seqlens_q")
    if sinks:
        first = ("query", "page_table", "sinks")
    return Problem(f"paged_{name}", ours, reference, draw, (), ("sinks",), first)


PAGED = [
    _paged("tokens_first", packed=False, head_major=False, sinks=False),
    _paged("heads_first", packed=False, head_major=True, sinks=False),
    _paged("packed", packed=True, head_major=False, sinks=False),
    _paged("sinks", packed=False, head_major=False, sinks=True),
]
