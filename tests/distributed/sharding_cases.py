"""Calls of every operator with sharded arguments, in float64 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import cudnn_ops

B, H, S, D = 4, 8, 6, 8
S0, S1, S2, S3 = (Shard(dim) for dim in range(4))
R = Replicate()
#: One for a mesh of one dimension, or one for each dimension.
Placements = Placement | tuple[Placement, ...]
#: Shapes of random tensors by name, or the tensors themselves.
Tensors = Mapping[str, tuple[int, ...] | Tensor]


@dataclass(frozen=True)
class Case:
    """A call, and how its arguments are sharded over one dimension of a mesh.

    Attributes:
        name: of the case.
        call: gives the results from the tensors, which it is given by name.
        tensors: shapes of random tensors by name, or the tensors themselves.
        placements: those of tensors that are not replicated.
        silent: whether neither forward nor backward may communicate.
        sizes: the numbers of processes that it is for.
    """

    name: str
    call: Callable[..., Any]
    tensors: Tensors
    placements: Mapping[str, Placements] = field(default_factory=dict)
    silent: bool = False
    sizes: tuple[int, ...] = (2, 4)

    def make(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors, the same in every process."""
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))

        def tensor(given: tuple[int, ...] | Tensor) -> Tensor:
            if isinstance(given, Tensor):
                return given.to(device)
            random = torch.randn(given, generator=generator, dtype=torch.float64)
            return random.to(device, dtype)

        return {name: tensor(given) for name, given in self.tensors.items()}


sdpa = cudnn_ops.scaled_dot_product_attention
sdpa_with_lse = cudnn_ops.scaled_dot_product_attention_with_lse
MHA: Tensors = dict.fromkeys(("query", "key", "value"), (B, H, S, D))
GQA: Tensors = {"query": (B, H, S, D), "key": (B, 4, 5, D), "value": (B, 4, 5, 16)}
MQA: Tensors = {"query": (B, H, S, D), "key": (B, 1, 5, D), "value": (B, 1, 5, D)}
QKV = ("query", "key", "value")


def every(placement: Placements, *names: str) -> dict[str, Placements]:
    """The same for several tensors."""
    return dict.fromkeys(names, placement)


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


causal = partial(sdpa, is_causal=True)
grouped = partial(sdpa, enable_gqa=True)
SLOPES = torch.linspace(0.1, 0.9, H)
HIDDEN = torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(1)) < 0.7

ATTENTION = [
    Case("batch", causal, MHA, every(S0, *QKV), silent=True),
    Case("heads", causal, MHA, every(S1, *QKV), silent=True),
    Case("grouped batch", grouped, GQA, every(S0, *QKV), silent=True),
    Case("grouped heads", grouped, GQA, every(S1, *QKV), silent=True),
    Case("one key head", grouped, MQA, {"query": S1}, silent=True),
    Case("one key head by batch", grouped, MQA, every(S0, *QKV), silent=True),
    Case("uneven batch", causal, dict.fromkeys(QKV, (5, 2, S, D)), every(S0, *QKV), silent=True),
    Case("uneven heads", causal, dict.fromkeys(QKV, (2, 6, S, D)), every(S1, *QKV), silent=True),
    Case("query alone by heads", causal, MHA, {"query": S1}, silent=True),
    Case("by tokens", causal, MHA, every(S2, *QKV)),
    Case("by head size", causal, MHA, every(S3, *QKV)),
    Case("partial sums", causal, MHA, every(Partial(), *QKV)),
    Case("mixed", causal, MHA, {"query": S0, "key": S1}),
    Case("mask of scores", sdpa, {**MHA, "attn_mask": (S, S)}, every(S0, *QKV)),
    Case("mask of heads", sdpa, {**MHA, "attn_mask": (1, H, S, S)}, every(S1, *QKV, "attn_mask")),
    Case("replicated mask of heads", sdpa, {**MHA, "attn_mask": (H, 1, S)}, every(S1, *QKV)),
    Case("mask of batch", sdpa, {**MHA, "attn_mask": (B, 1, S, S)}, every(S0, *QKV, "attn_mask")),
    Case("mask of batch by heads", sdpa, {**MHA, "attn_mask": (B, 1, S, S)}, every(S1, *QKV)),
    Case("mask of all", sdpa, {**MHA, "attn_mask": (B, H, S, S)}, every(S1, *QKV)),
    Case("hidden keys", sdpa, {**MHA, "attn_mask": HIDDEN}, every(S0, *QKV)),
    Case("sinks by batch", sdpa_with_lse, {**MHA, "sinks": (H,)}, every(S0, *QKV)),
    Case("sinks by heads", sdpa_with_lse, {**MHA, "sinks": (H,)}, every(S1, *QKV)),
    Case("sharded sinks", causal, {**MHA, "sinks": (H,)}, {**every(S1, *QKV), "sinks": S0}),
    Case(
        "sharded sinks by batch", causal, {**MHA, "sinks": (H,)}, {**every(S0, *QKV), "sinks": S0}
    ),
    Case("slopes", causal, {**MHA, "alibi_slopes": SLOPES}, every(S1, *QKV)),
    Case(
        "lengths by batch",
        sdpa_with_lse,
        {**MHA, "seq_lens_q": lengths(6, 1, 0, 4), "seq_lens_kv": lengths(2, 6, 3, 5)},
        every(S0, *QKV),
    ),
    Case("lengths by heads", causal, {**MHA, "seq_lens_kv": lengths(2, 6, 3, 5)}, every(S1, *QKV)),
    Case("no batch", causal, dict.fromkeys(QKV, (H, S, D)), every(S0, *QKV)),
    Case("broadcast keys", causal, {**MHA, "key": (1, H, S, D)}, {"query": S0, "value": S0}),
    Case("two batch dimensions", causal, dict.fromkeys(QKV, (4, 2, H, S, D)), every(S0, *QKV)),
    Case("odd head size", causal, dict.fromkeys(QKV, (B, H, S, 5)), every(S1, *QKV)),
]

STARTS = lengths(0, 3, 3, 8)


def _packed(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    starts = rest.pop("starts")
    return attend(q, k, v, starts, starts, 5, 5, causal=True, **rest)


packed = partial(_packed, cudnn_ops.varlen_attention)
packed_with_lse = partial(_packed, cudnn_ops.varlen_attention_with_lse)
TOKENS: Tensors = {**dict.fromkeys("qkv", (8, H, D)), "starts": STARTS}
GROUPED_TOKENS: Tensors = {**TOKENS, "k": (8, 4, D), "v": (8, 4, D)}

PACKED = [
    Case("packed heads", packed, TOKENS, every(S1, *"qkv"), silent=True),
    Case("packed groups", packed_with_lse, GROUPED_TOKENS, every(S1, *"qkv")),
    Case("packed one key head", packed, {**TOKENS, "k": (8, 1, D), "v": (8, 1, D)}, {"q": S1}),
    Case("packed by tokens", packed, TOKENS, every(S0, *"qkv")),
    Case(
        "packed options",
        packed_with_lse,
        {
            **TOKENS,
            "sinks": (H,),
            "alibi_slopes": SLOPES,
            "seqused_k": lengths(3, 0, 2),
        },
        every(S1, *"qkv"),
    ),
    # As a GPU supports them.
    Case(
        "packed sinks",
        packed_with_lse,
        {**TOKENS, "sinks": (H,), "seqused_k": lengths(3, 0, 2)},
        every(S1, *"qkv"),
    ),
    Case("packed slopes", packed_with_lse, {**TOKENS, "alibi_slopes": SLOPES}, every(S1, *"qkv")),
]

PAGES = torch.tensor([[3, 0], [7, 5]], dtype=torch.int32)
CACHE: Tensors = {"key_cache": (8, 4, 4, D), "value_cache": (8, 4, 4, D)}
PAGED: Tensors = {
    "query": (2, 3, H, D),
    **CACHE,
    "page_table": PAGES,
    "seq_lens_kv": lengths(5, 8),
}
CACHES = tuple(CACHE)
#: Of 8 bits: as large as a GPU supports heads.
PAGED_FP8: Tensors = {**PAGED, "query": (2, 3, H, 64), **dict.fromkeys(CACHES, (8, 4, 4, 64))}
HEADS_FIRST: Tensors = {**PAGED, **dict.fromkeys(CACHES, (8, 4, 4, D))}
paged = cudnn_ops.paged_attention_with_lse


def _paged_into(query: Tensor, **tensors: Tensor) -> Tensor:
    out = torch.zeros_like(query)
    return cudnn_ops.paged_attention(query, **tensors, out=out)  # type: ignore[arg-type]


def _paged_fp8(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, descales: Tensor, **tensors: Any
) -> Any:
    caches = [cache.to(torch.float8_e4m3fn) for cache in (key_cache, value_cache)]
    plan = torch.ops.cudnn_ops._paged_plan(
        tensors["seq_lens_kv"], None, query.shape[1], H // 4, False, [-1, -1], True
    )
    return paged(query, *caches, **tensors, descale_k=descales, descale_v=descales, plan=plan)


def _append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    caches = key_cache.clone(), value_cache.clone()
    cudnn_ops.paged_kv_append_(*caches, key, value, slot_mapping)
    return caches


def _append_fp8(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    descales: Tensor,
) -> tuple[Tensor, Tensor]:
    keys, values = (cache.to(torch.float8_e4m3fn) for cache in (key_cache, value_cache))
    options: dict[str, Any] = dict.fromkeys(("descale_k", "descale_v"), descales)
    cudnn_ops.paged_kv_append_(keys, values, key, value, slot_mapping, **options)
    return keys.float(), values.float()


APPENDED: Tensors = {
    **CACHE,
    "key": (2, 4, D),
    "value": (2, 4, D),
    "slot_mapping": torch.tensor([5, 30]),
}

FP8_SIZES = (B, 4, S, 16)
FP8: Tensors = {**dict.fromkeys(QKV, FP8_SIZES), "scale": torch.tensor([90.0])}
MXFP8: Tensors = {
    **dict.fromkeys(QKV, FP8_SIZES),
    **dict.fromkeys(("of_query", "of_key", "of_value"), (B, 4, 128, 4)),
}
FP8_GRADIENTS: Tensors = {**FP8, "grad": FP8_SIZES}
HEADS: Tensors = {"x": FP8_SIZES, "scale": torch.tensor([90.0, 80.0, 70.0, 60.0])}


def _attend_fp8(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, **rest: Any) -> Any:
    data, descales, _ = zip(
        *(cudnn_ops.quantize_fp8(x, scale) for x in (query, key, value)), strict=True
    )
    of_query, of_key, of_value = descales
    return cudnn_ops.sdpa_fp8_with_stats(
        *data, descale_q=of_query, descale_k=of_key, descale_v=of_value, is_causal=True, **rest
    )


def _gradients_fp8(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: Tensor) -> Any:
    q, k, v, g = (cudnn_ops.quantize_fp8(x, scale) for x in (query, key, value, grad))
    options: dict[str, Any] = {
        "descale_q": q.descale,
        "descale_k": k.descale,
        "descale_v": v.descale,
        "is_causal": True,
    }
    found = cudnn_ops.sdpa_fp8_with_stats(
        q.data, k.data, v.data, out_dtype=torch.float8_e4m3fn, **options
    )
    options |= {"descale_o": v.descale, "descale_do": g.descale, "scale_dp": scale}
    return cudnn_ops.sdpa_fp8_backward(
        *(g.data, q.data, k.data, v.data, found.out, found.lse), **options
    )


def _attend_mxfp8(
    query: Tensor, key: Tensor, value: Tensor, of_query: Tensor, of_key: Tensor, of_value: Tensor
) -> Any:
    data = (x.to(torch.float8_e4m3fn) for x in (query, key, value))
    powers = (x.float().abs().to(torch.float8_e8m0fnu) for x in (of_query, of_key, of_value))
    names = ("descale_q", "descale_k", "descale_v")
    options: dict[str, Any] = dict(zip(names, powers, strict=True))
    return cudnn_ops.sdpa_mxfp8(*data, **options, is_causal=True)


def _attend_packed_fp8(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: Tensor) -> Any:
    data, descales, _ = zip(*(cudnn_ops.quantize_fp8(x, scale) for x in (q, k, v)), strict=True)
    of_query, of_key, of_value = descales
    return cudnn_ops.varlen_attention_fp8(
        *(*data, starts, starts, 3, 3),
        descale_q=of_query,
        descale_k=of_key,
        descale_v=of_value,
    )


PACKED_FP8: Tensors = {
    **dict.fromkeys(("q", "k", "v"), (6, 4, 16)),
    "starts": lengths(0, 3, 6),
    "scale": torch.tensor([90.0]),
}


def _turn_fp8(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, scales: Tensor
) -> Any:
    *data, descale, amax = cudnn_ops.rotary_embedding_qkv_fp8(query, key, value, cos, sin, scales)
    one = descale[:1]
    wide = (cudnn_ops.dequantize_fp8(x, one, dtype=torch.float32) for x in data)
    return *wide, descale, amax


TURNED_FP8: Tensors = {
    **dict.fromkeys(QKV, FP8_SIZES),
    **dict.fromkeys(("cos", "sin"), (1, S, 16)),
    "scales": torch.tensor([90.0, 80.0, 70.0]),
}


def _round(x: Tensor, scale: Tensor | None = None, dim: int | None = None) -> Any:
    data, descale, amax = cudnn_ops.quantize_fp8(x, scale, dim=dim)
    return cudnn_ops.dequantize_fp8(data, descale, dim=dim, dtype=torch.float32), descale, amax


def _gated_fp8(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Any:
    data, descale, amax = cudnn_ops.swiglu_fp8(gate, up, scale)
    if scale is None:  # what gloo can send
        return descale, amax
    return cudnn_ops.dequantize_fp8(data, descale, dtype=torch.float32), descale, amax


GATED_FP8: Tensors = {**dict.fromkeys(("gate", "up"), (B, 3, 16))}

#: Without gradients.
SERVING = [
    Case("FP8 by batch", _attend_fp8, FP8, every(S0, *QKV)),
    Case("FP8 by heads", _attend_fp8, FP8, every(S1, *QKV)),
    Case(
        "FP8 lengths by batch",
        _attend_fp8,
        {**FP8, "seq_lens_kv": lengths(2, 6, 0, 5)},
        every(S0, *QKV),
    ),
    Case("MXFP8 by batch", _attend_mxfp8, MXFP8, every(S0, *MXFP8)),
    Case("MXFP8 by heads", _attend_mxfp8, MXFP8, every(S1, *MXFP8)),
    Case("FP8 gradients by batch", _gradients_fp8, FP8_GRADIENTS, every(S0, *QKV, "grad")),
    Case("FP8 gradients by heads", _gradients_fp8, FP8_GRADIENTS, every(S1, *QKV, "grad")),
    Case(
        "FP8 gradients of one key head by heads",
        _gradients_fp8,
        {**FP8_GRADIENTS, **dict.fromkeys(("key", "value"), (B, 1, S, 16))},
        every(S1, "query", "grad"),
    ),
    Case("gated rows by batch", _gated_fp8, GATED_FP8, every(S0, "gate", "up"), silent=True),
    Case(
        "gated rows of one scale",
        _gated_fp8,
        {**GATED_FP8, "scale": torch.tensor([90.0])},
        every(S0, "gate", "up"),
    ),
    Case("packed FP8 by heads", _attend_packed_fp8, PACKED_FP8, every(S1, "q", "k", "v")),
    Case("turned and rounded by batch", _turn_fp8, TURNED_FP8, every(S0, *QKV), silent=True),
    Case("turned and rounded by heads", _turn_fp8, TURNED_FP8, every(S1, *QKV), silent=True),
    Case(
        "turned and rounded by tokens",
        _turn_fp8,
        TURNED_FP8,
        {**every(S2, *QKV), **every(S1, "cos", "sin")},
        silent=True,
    ),
    Case("turned and rounded by size", _turn_fp8, TURNED_FP8, every(S3, *QKV)),
    Case("rounded by tokens", _round, {"x": FP8_SIZES}, {"x": S2}),
    Case("rounded by heads", partial(_round, dim=1), {"x": FP8_SIZES}, {"x": S1}, silent=True),
    Case("rounded by scales", partial(_round, dim=1), HEADS, {"x": S1, "scale": S0}, silent=True),
    Case("rounded by batch", partial(_round, dim=1), HEADS, {"x": S0}),
    Case("pages", paged, PAGED, {**every(S2, "query", *CACHES)}, silent=True),
    Case(
        "pages of heads first",
        partial(paged, kv_layout="HND"),
        HEADS_FIRST,
        {"query": S2, **every(S1, *CACHES)},
        silent=True,
    ),
    Case("pages of sinks", paged, {**PAGED, "sinks": (H,)}, every(S2, "query", *CACHES)),
    Case(
        "pages of 8 bits",
        _paged_fp8,
        {**PAGED_FP8, "descales": torch.tensor([0.5, 2.0, 1.0, 0.25])},
        {**every(S2, "query", *CACHES), "descales": S0},
        silent=True,
    ),
    Case(
        "pages of 8 bits and one scale",
        _paged_fp8,
        {**PAGED_FP8, "descales": torch.tensor([0.5])},
        every(S2, "query", *CACHES),
        silent=True,
    ),
    Case(
        "pages of one head",
        paged,
        {**PAGED, "key_cache": (8, 4, 1, D), "value_cache": (8, 4, 1, D)},
        {"query": S2},
        silent=True,
    ),
    Case(
        "pages of packed queries",
        partial(paged, max_seqlen_q=2),
        {**PAGED, "query": (3, H, D), "cu_seqlens_q": lengths(0, 2, 3)},
        {"query": S1, **every(S2, *CACHES)},
        silent=True,
    ),
    Case("pages by batch", paged, PAGED, {"query": S0}, sizes=(2,)),
    Case("pages into", _paged_into, PAGED, every(S2, "query", *CACHES), silent=True),
    Case("append", _append, APPENDED, {**every(S2, *CACHES), **every(S1, "key", "value")}),
    Case("append what is replicated", _append, APPENDED, every(S2, *CACHES), silent=True),
    Case("append what is sharded", _append, APPENDED, every(S1, "key", "value")),
    Case(
        "append 8 bits",
        _append_fp8,
        {**APPENDED, "descales": torch.tensor([0.5, 2.0, 1.0, 0.25])},
        {**every(S2, *CACHES), **every(S1, "key", "value"), "descales": S0},
    ),
]


def _rms(x: Tensor, weight: Tensor | None = None, **rest: Any) -> Tensor:
    return cudnn_ops.rms_norm(x, (D,), weight, **rest)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return cudnn_ops.layer_norm(x, (D,), weight, bias)


def _planes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return cudnn_ops.layer_norm(x, tuple(weight.shape), weight, bias)


def _add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return cudnn_ops.add_rms_norm(x, residual, (D,), weight)


def _of_sum_alone(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return _add_rms(x, residual, weight)[1]


ROWS: Tensors = {"x": (B, 5, D), "weight": (D,)}
ROWS_BIAS: Tensors = {**ROWS, "bias": (D,)}
ADDED: Tensors = {**ROWS, "residual": (B, 5, D)}

NORMS = [
    Case("rms by batch", _rms, ROWS, {"x": S0}, silent=True),
    Case("rms by tokens", _rms, ROWS, {"x": S1}, silent=True),
    Case("rms by width", _rms, ROWS, {"x": S2}),
    Case("rms of partial sums", _rms, ROWS, {"x": Partial()}),
    Case("rms of uneven rows", _rms, {**ROWS, "x": (5, 3, D)}, {"x": S0}, silent=True),
    Case("rms without weight", _rms, {"x": (B, 5, D)}, {"x": S1}, silent=True),
    Case("rms sharded weight", partial(_rms, zero_centered=True), ROWS, {"x": S1, "weight": S0}),
    Case("layer by batch", _layer, ROWS_BIAS, {"x": S0}, silent=True),
    Case("layer by tokens", _layer, ROWS_BIAS, {"x": S1}, silent=True),
    Case(
        "layer of planes",
        _planes,
        {"x": (B, 5, D), "weight": (5, D), "bias": (5, D)},
        {"x": S1, "weight": S0},
    ),
    Case("sum by tokens", _add_rms, ADDED, {"x": S1, "residual": S1}, silent=True),
    Case("sum of partial sums", _add_rms, ADDED, {"x": Partial(), "residual": S1}),
    Case("sum of a sharded residual", _add_rms, ADDED, {"residual": S0}, silent=True),
    Case("sum alone", _of_sum_alone, ADDED, {"x": S1, "residual": S1}),
]

PAIR: Tensors = {"gate": (B, 5, D), "up": (B, 5, D)}
TURNED: Tensors = {"input": (B, H, 4, D), "cos": (1, 4, D), "sin": (1, 4, D)}


def _rotary(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return cudnn_ops.rotary_embedding(input, cos.detach(), sin.detach())


def _rotary_both(
    input: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """By two axes."""
    options: dict[str, Any] = {"interleaved": True, "sections": (D // 4, D // 4)}
    angles = cos.detach(), sin.detach()
    return cudnn_ops.rotary_embedding_qk(input, key, *angles, positions=positions, **options)


BOTH: Tensors = {
    "input": (B, H, 4, D),
    "key": (B, 2 * H, 4, D),
    "cos": (2, B, 4, D),
    "sin": (2, B, 4, D),
}
OF_TABLE: Tensors = {
    **BOTH,
    "cos": (5, D),
    "sin": (5, D),
    "positions": torch.arange(2 * B * 4).view(2, B, 4) % 5,
}
POINTWISE = [
    *(
        Case(f"swiglu {dim}", cudnn_ops.swiglu, PAIR, every(Shard(dim), "gate", "up"), silent=True)
        for dim in range(3)
    ),
    Case("geglu of a sharded gate", cudnn_ops.geglu, PAIR, {"gate": S1}),
    Case("swiglu of partial sums", cudnn_ops.swiglu, PAIR, every(Partial(), "gate", "up")),
    Case("rotary by batch", _rotary, TURNED, {"input": S0}, silent=True),
    Case("rotary by heads", _rotary, TURNED, {"input": S1}, silent=True),
    Case("rotary by tokens", _rotary, TURNED, {"input": S2, "cos": S1, "sin": S1}, silent=True),
    Case("rotary of replicated angles", _rotary, TURNED, {"input": S2}, silent=True),
    Case("rotary by head size", _rotary, TURNED, {"input": S3}),
    Case("rotary of partial sums", _rotary, TURNED, {"input": Partial()}),
    Case(
        "rotary of a batch of angles",
        _rotary,
        {**TURNED, "cos": (B, 4, D), "sin": (B, 4, D)},
        {"input": S0, "cos": S0, "sin": S0},
        silent=True,
    ),
    Case(
        "rotary of both by batch",
        _rotary_both,
        BOTH,
        {"input": S0, "key": S0, "cos": S1, "sin": S1},
        silent=True,
    ),
    Case("rotary of both by heads", _rotary_both, BOTH, every(S1, "input", "key"), silent=True),
    Case("rotary of both by heads of one", _rotary_both, BOTH, {"input": S1}),
    Case(
        "rotary by positions of tokens",
        _rotary_both,
        OF_TABLE,
        {**every(S2, "input", "key"), "positions": S2},
        silent=True,
    ),
    Case(
        "rotary by positions of a batch",
        _rotary_both,
        OF_TABLE,
        {**every(S0, "input", "key"), "positions": S1},
        silent=True,
    ),
]


EXPERTS = {"experts": torch.tensor([[0, 2], [1, 0], [2, -1], [0, 1]])}
PLACES = {"positions": torch.tensor([[0, 5], [3, 1], [6, -8], [2, 4]], dtype=torch.int32)}
PERMUTED: Tensors = {"x": (4, D), **EXPERTS}
SUMMED: Tensors = {"rows": (8, D), **PLACES}
COMBINED: Tensors = {**SUMMED, "weights": (4, 2)}
GROUPED: Tensors = {"x": (6, D), "weight": (3, 4, D), "offsets": lengths(1, 4, 6)}
MIXTURE: Tensors = {
    **{"x": (4, D), "weights": (4, 2), "gate_up": (3, 16, D), "down": (3, D, 8)},
    **EXPERTS,
}


def _permute(x: Tensor, experts: Tensor) -> Tensor:
    return cudnn_ops.moe_permute(x, experts, 3)[0]


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return cudnn_ops.grouped_linear(x, weight, offsets)


def _experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor) -> Tensor:
    return cudnn_ops.moe_experts(x, experts, weights, gate_up, down)


MOE = [
    Case("permutation by columns", _permute, PERMUTED, {"x": S1}, silent=True),
    Case("permutation of partial sums", _permute, PERMUTED, {"x": Partial()}),
    Case("permutation by tokens", _permute, PERMUTED, {"x": S0}),
    Case("combined columns", cudnn_ops.moe_combine, COMBINED, {"rows": S1}),
    Case("combined without weights", cudnn_ops.moe_combine, SUMMED, {"rows": S1}, silent=True),
    Case("combined partial sums", cudnn_ops.moe_combine, COMBINED, {"rows": Partial()}),
    Case("combined rows", cudnn_ops.moe_combine, COMBINED, {"rows": S0, "weights": S0}),
    Case("groups by outputs", _grouped, GROUPED, {"weight": S1}),
    Case("groups by inputs", _grouped, GROUPED, {"x": S1, "weight": S2}),
    Case("groups of partial sums", _grouped, GROUPED, {"x": Partial()}),
    Case("groups by experts", _grouped, GROUPED, {"weight": S0}),
    Case("experts by size", _experts, MIXTURE, {"gate_up": S1, "down": S2}),
]


def _conv(input: Tensor, weight: Tensor, **rest: Any) -> Tensor:
    return cudnn_ops.conv2d(input, weight, rest.pop("bias", None), padding=1, **rest)


def _transposed(input: Tensor, weight: Tensor, **rest: Any) -> Tensor:
    return cudnn_ops.conv_transpose2d(input, weight, rest.pop("bias", None), 2, **rest)


def _group(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return cudnn_ops.group_norm(x, 2, weight, bias, activation="silu")


def _add_group(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return cudnn_ops.add_group_norm(x, residual, 2, weight)


CHANNELS_OF_IMAGES: Tensors = {"x": (B, 4, 6, 5), "weight": (4,)}
IN_GROUPS: Tensors = {**CHANNELS_OF_IMAGES, "bias": (4,)}
ADDED_IN_GROUPS: Tensors = {**CHANNELS_OF_IMAGES, "residual": (B, 4, 6, 5)}

GROUP_NORMS = [
    Case("group norm by batch", _group, IN_GROUPS, {"x": S0}, silent=True),
    Case("group norm by channels", _group, IN_GROUPS, {"x": S1, "weight": S0, "bias": S0}),
    Case("group norm by rows", _group, IN_GROUPS, {"x": S2}),
    Case("group norm of partial sums", _group, IN_GROUPS, {"x": Partial()}),
    Case("group sum", _add_group, ADDED_IN_GROUPS, {"x": S0, "residual": S0}, silent=True),
]


def _batch(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return cudnn_ops.batch_norm(
        x, None, None, weight, bias, training=True, residual=residual, activation="relu"
    )


def _batch_by_statistics(
    x: Tensor, mean: Tensor, weight: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    mean = mean.detach()
    return cudnn_ops.batch_norm(
        x, mean, mean.square() + 1, weight, bias, residual=residual, activation="relu"
    )


IN_BATCHES: Tensors = {**IN_GROUPS, "residual": (B, 4, 6, 5)}
BY_STATISTICS: Tensors = {**IN_BATCHES, "mean": (4,)}
OF_CHANNELS = {**every(S1, "x", "residual"), **every(S0, "weight", "bias")}

BATCH_NORMS = [
    Case("batch norm by channels", _batch, IN_BATCHES, OF_CHANNELS, silent=True),
    Case("batch norm by batch", _batch, IN_BATCHES, every(S0, "x", "residual")),
    Case("batch norm by rows", _batch, IN_BATCHES, {"x": S2}),
    Case("batch norm of partial sums", _batch, IN_BATCHES, {"x": Partial()}),
    *(
        Case(
            f"batch norm by statistics {dim}",
            _batch_by_statistics,
            BY_STATISTICS,
            every(Shard(dim), "x", "residual"),
            silent=True,
        )
        for dim in (0, 2)
    ),
    Case(
        "batch norm by statistics by channels",
        _batch_by_statistics,
        BY_STATISTICS,
        {**OF_CHANNELS, "mean": S0},
        silent=True,
    ),
]


def _pool(x: Tensor) -> Tensor:
    return cudnn_ops.max_pool2d(x, 3, 2, 1)


IMAGES_OF_CHANNELS: Tensors = {"x": (B, 4, 6, 5)}

MAX_POOLS = [
    Case("max pooling by batch", _pool, IMAGES_OF_CHANNELS, {"x": S0}, silent=True),
    Case("max pooling by channels", _pool, IMAGES_OF_CHANNELS, {"x": S1}, silent=True),
    Case("max pooling by rows", _pool, IMAGES_OF_CHANNELS, {"x": S2}),
    Case("max pooling of partial sums", _pool, IMAGES_OF_CHANNELS, {"x": Partial()}),
]


def _adaptive(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None = None) -> Tensor:
    return cudnn_ops.adaptive_layer_norm(x, scale, shift, weight=weight)


def _gate_add(x: Tensor, update: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return cudnn_ops.gate_add_adaptive_rms_norm(x, update, gate, scale)


MODULATED: Tensors = {"x": (B, 6, 8), "scale": (B, 8), "shift": (B, 8), "weight": (8,)}
OF_EACH_TOKEN: Tensors = {**MODULATED, "scale": (B, 6, 8), "shift": (1, 6, 8)}
GATED_SUM: Tensors = {"x": (B, 6, 8), "update": (B, 6, 8), "gate": (B, 8), "scale": (B, 1, 8)}

ADAPTIVE_NORMS = [
    Case(
        "adaptive norm by batch",
        _adaptive,
        MODULATED,
        {"x": S0, "scale": S0, "shift": S0},
        silent=True,
    ),
    Case("adaptive norm by tokens", _adaptive, MODULATED, {"x": S1}),
    Case("adaptive norm by columns", _adaptive, MODULATED, {"x": S2, "weight": S0}),
    Case("adaptive norm of partial sums", _adaptive, MODULATED, {"x": Partial()}),
    Case(
        "adaptive norm of each token",
        _adaptive,
        OF_EACH_TOKEN,
        {"x": S1, "scale": S1, "shift": S1},
        silent=True,
    ),
    Case(
        "gated sum",
        _gate_add,
        GATED_SUM,
        {"x": S0, "update": S0, "gate": S0, "scale": S0},
        silent=True,
    ),
    Case("gated sum by tokens", _gate_add, GATED_SUM, {"x": S1, "update": S1}),
]

IMAGES: Tensors = {"input": (B, 4, 6, 5), "weight": (8, 4, 3, 3), "bias": (8,)}
CHANNELS = {"weight": S0, "bias": S0}
silu = partial(_conv, activation="silu")
relu = partial(_conv, activation="relu")
ADDED_TO: Tensors = {**IMAGES, "residual": (B, 8, 6, 5)}
TURNED_IMAGES: Tensors = {**IMAGES, "weight": (4, 8, 3, 3)}
TURNED_CHANNELS = {"weight": S1, "bias": S0}

CONVOLUTIONS = [
    Case("images", _conv, IMAGES, {"input": S0}, silent=True),
    Case("channels", _conv, IMAGES, CHANNELS, silent=True),
    Case("images of silu", silu, ADDED_TO, {"input": S0, "residual": S0}, silent=True),
    Case("channels of silu", silu, ADDED_TO, {**CHANNELS, "residual": S1}, silent=True),
    Case("channels of relu", relu, ADDED_TO, CHANNELS, silent=True),
    Case("input channels", _conv, IMAGES, {"input": S1, "weight": S1}),
    Case("rows of images", silu, IMAGES, {"input": S2}),
    Case(
        "groups",
        partial(silu, groups=2),
        {**IMAGES, "weight": (8, 2, 3, 3)},
        {"input": S0, "weight": S0},
    ),
    Case("one image", _conv, {**IMAGES, "input": (4, 6, 5)}, CHANNELS),
    Case("transposed images", _transposed, TURNED_IMAGES, {"input": S0}, silent=True),
    Case("transposed channels", _transposed, TURNED_IMAGES, TURNED_CHANNELS, silent=True),
    Case(
        "transposed channels of silu",
        partial(_transposed, activation="silu"),
        {**TURNED_IMAGES, "residual": (B, 8, 13, 11)},
        {**TURNED_CHANNELS, "residual": S1},
        silent=True,
    ),
    Case("transposed input channels", _transposed, TURNED_IMAGES, {"input": S1, "weight": S0}),
]


def _mlp(x: Tensor, w1: Tensor, w2: Tensor, **rest: Any) -> Tensor:
    return cudnn_ops.mlp(x, w1, rest.pop("b1", None), w2, rest.pop("b2", None), **rest)


LAYER: Tensors = {"input": (B, 6, D), "weight": (12, D), "bias": (12,)}
ADDED_LAYER: Tensors = {**LAYER, "residual": (B, 6, 12)}
TWO_LAYERS: Tensors = {"x": (B, 6, D), "w1": (12, D), "b1": (12,), "w2": (D, 12), "b2": (D,)}
GATED_LAYERS: Tensors = {**TWO_LAYERS, "w2": (D, 6)}
linear = cudnn_ops.linear
linear_gelu = partial(linear, activation="gelu")
linear_relu = partial(linear, activation="relu")
BY_OUTPUTS: Mapping[str, Placements] = {"weight": S0, "bias": S0}
BY_INPUTS: Mapping[str, Placements] = {"input": S2, "weight": S1}
BY_HIDDEN: Mapping[str, Placements] = {"w1": S0, "b1": S0, "w2": S1}

LAYERS = [
    Case("layer by batch", linear, LAYER, {"input": S0}, silent=True),
    Case("layer by tokens", linear_gelu, ADDED_LAYER, every(S1, "input", "residual"), silent=True),
    Case("layer by outputs", linear_gelu, LAYER, BY_OUTPUTS, silent=True),
    Case(
        "layer by outputs, added",
        linear_relu,
        ADDED_LAYER,
        {**BY_OUTPUTS, "residual": S2},
        silent=True,
    ),
    Case("layer by inputs", linear, LAYER, BY_INPUTS),
    Case("layer by inputs, added", linear, ADDED_LAYER, BY_INPUTS),
    Case("layer by inputs, activated", linear_gelu, LAYER, BY_INPUTS),
    Case("layer of partial sums", linear_relu, LAYER, {"input": Partial()}),
    Case("layer of one row", linear_gelu, {**LAYER, "input": (D,)}, BY_OUTPUTS, silent=True),
    Case("two layers by batch", _mlp, TWO_LAYERS, {"x": S0}, silent=True),
    Case("two layers by hidden", _mlp, TWO_LAYERS, BY_HIDDEN),
    Case("two layers by hidden of relu", partial(_mlp, activation="relu"), TWO_LAYERS, BY_HIDDEN),
    Case(
        "two gated layers",
        partial(_mlp, activation="silu", gated=True),
        GATED_LAYERS,
        {"x": S1},
        silent=True,
    ),
    Case(
        "two gated layers by hidden",
        partial(_mlp, activation="silu", gated=True),
        GATED_LAYERS,
        {"w1": S0, "w2": S1},
    ),
]

DIFFERENTIABLE = [*ATTENTION, *PACKED, *NORMS, *GROUP_NORMS, *BATCH_NORMS, *ADAPTIVE_NORMS]
DIFFERENTIABLE += MAX_POOLS
DIFFERENTIABLE += [*POINTWISE, *MOE, *CONVOLUTIONS, *LAYERS]

#: Over a mesh of two dimensions, with a placement for each.
TWO_DIMENSIONS = [
    Case("batch and heads", grouped, GQA, every((S0, S1), *QKV), silent=True),
    Case("heads and heads", grouped, GQA, every((S1, S1), *QKV), silent=True),
    Case(
        "batch and one key head",
        grouped,
        MQA,
        {"query": (S0, S1), **every((S0, R), "key", "value")},
    ),
    Case(
        "batch, heads and sinks",
        sdpa_with_lse,
        {**MHA, "sinks": (H,), "attn_mask": (B, 1, S, S)},
        {**every((S0, S1), *QKV), "attn_mask": (S0, R), "sinks": (R, S0)},
    ),
    Case("sum by batch and tokens", _add_rms, ADDED, every((S0, S1), "x", "residual"), silent=True),
    Case("swiglu by batch and width", cudnn_ops.swiglu, PAIR, every((S0, S2), "gate", "up")),
    Case(
        "images and channels",
        silu,
        ADDED_TO,
        {"input": (S0, R), "residual": (S0, S1), **every((R, S0), "weight", "bias")},
        silent=True,
    ),
]
