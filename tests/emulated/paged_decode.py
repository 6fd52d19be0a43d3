"""Attention over pages by our kernels on this machine's processor, launched as on a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.emulated.kernels import launch, library_of, structs_of

#: The names of types in kernels' names and in their sources.
NAMES = {
    torch.bfloat16: ("bfloat16", "BFloat16"),
    torch.float16: ("half", "Half"),
    torch.float8_e4m3fn: ("e4m3", "E4M3"),
}
#: Words of a plan: counters, what it was made for, and the sums.
COUNTERS, HEAD = 1024, 8
#: The most sequences that need no plan, and for how many streams there are counters then.
COUNTED, SLOTS = 128, 64
#: The most blocks of a cluster.
MOST_PARTS = 8


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(descale: Tensor | None) -> int:
    return 0 if descale is None or descale.numel() == 1 else 1


def rows_of(queries: int, group: int) -> int:
    """Of a block, as the launcher chooses them."""
    return next((rows for rows in (8, 16) if queries * group <= rows), 32)


def _work(
    seq_lens_kv: Tensor,
    offsets: Tensor | None,
    queries: int,
    group: int,
    window: tuple[int, int],
    bottom_right: bool,
    rows: int,
) -> ctypes.Structure:
    return structs_of("paged_decode_call.h")["PagedWork"](
        _address(seq_lens_kv),
        _address(offsets),
        seq_lens_kv.shape[0],
        0 if offsets is not None else queries,
        *(group, *window, bottom_right, rows),
    )


def make_plan(
    folder: Path,
    seq_lens_kv: Tensor,
    offsets: Tensor | None,
    queries: int,
    group: int,
    window: tuple[int, int],
    bottom_right: bool,
    rows: int = 0,
) -> Tensor:
    """What the kernel of plans writes; ``rows`` of a block, 0: as many as there are."""
    rows = rows or rows_of(queries, group)
    words = torch.full((COUNTERS + HEAD + len(seq_lens_kv) + 1,), -1, dtype=torch.int32)
    work = _work(seq_lens_kv, offsets, queries, group, window, bottom_right, rows)
    call = structs_of("paged_decode_call.h")["PagedPlanCall"](work, _address(words))
    launch(library_of(folder, "paged_plan", ("PagedPlanCall",)), "paged_plan", call, (1, 1), 64)
    return words


def append(
    folder: Path,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    descale: Tensor | None,
    *,
    is_wide: bool,
    macros: tuple[str, ...] = (),
) -> None:
    """Rounds tokens into pages of E4M3 [pages, page size, heads, head size]."""
    structs = structs_of("paged_append_call.h")
    width = 16 // key.element_size() if is_wide else 1

    def side(tokens: Tensor, cache: Tensor) -> ctypes.Structure:
        strides = (*tokens.stride()[:2], *cache.stride()[:3])
        return structs["PagedAppendSide"](
            *(_address(tokens), _address(cache)),
            *(stride // width for stride in strides),
            tokens.shape[2] // width,
            *(_address(descale), _step(descale)),
        )

    tokens, heads = key.shape[:2]
    call = structs["PagedAppendCall"](
        *(side(key, key_cache), side(value, value_cache), _address(slots)),
        *(tokens, heads, key_cache.shape[1], key_cache.shape[0] * key_cache.shape[1]),
    )
    name = NAMES[key.dtype][0] if key.dtype != torch.float32 else "float"
    library = library_of(folder, "paged_append", ("PagedAppendCall",), *macros)
    launch(library, f"paged_append_{name}_{width}", call, (-(-tokens // 4), 2), 32)


def attend(
    folder: Path,
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
    head_major: bool = False,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    blocks: int = 6,
    stages: int = 4,
    parts: int = 0,
    warps: int = 4,
    rows: int = 0,
    seed: int = 0,
    plan: Tensor | None = None,
    is_planned: bool = False,
    macros: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp; ``rows`` of a block are 8, 16 or 32, 0: as many as needed.

    Few sequences have a plan where one is given, or with ``is_planned``; many have one always.
    With ``parts`` each sequence's head of keys has a cluster of so many blocks of ``warps``.
    """
    name, source = NAMES[query.dtype]
    cache_name, cache_source = NAMES[key_cache.dtype]
    size, heads = query.shape[-1], query.shape[-2]
    slot_dim, head_dim = (2, 1) if head_major else (1, 2)
    heads_kv = key_cache.shape[head_dim]
    group, batch = heads // heads_kv, page_table.shape[0]
    packed = cu_seqlens_q is not None
    queries = max_seqlen_q if packed else query.shape[1]
    rows = rows or rows_of(queries, group)
    offsets = cu_seqlens_q.int().contiguous() if cu_seqlens_q is not None else None
    window = (window_size[0], 0 if is_causal else window_size[1])
    whose = (seq_lens_kv, offsets, queries, group, window, bottom_right)
    if plan is None and (is_planned or batch > COUNTED):
        plan = make_plan(folder, *whose, rows)
    work = _work(*whose, rows)
    out = torch.full_like(query, torch.nan).contiguous()
    tokens = query.shape[0]
    lse = torch.full((heads, tokens) if packed else (batch, heads, queries), torch.nan)
    lse_strides = (0, 1, lse.stride(0)) if packed else (lse.stride(0), 1, lse.stride(1))
    blocks = parts * batch * heads_kv or blocks
    partials = torch.full((2 * blocks, rows * (size + 2)), torch.nan)
    sinks = None if sinks is None else sinks.float().contiguous()
    query_strides = (0, *query.stride()[:2]) if packed else query.stride()[:3]
    values: dict[str, Any] = {
        "work": work,
        "plan": _address(plan),
        "counters": _address(plan),
        "slot": 3,
        "query": _address(query),
        "key_cache": _address(key_cache),
        "value_cache": _address(value_cache),
        "page_table": _address(page_table),
        "descale_k": _address(descale_k),
        "descale_v": _address(descale_v),
        "sinks": _address(sinks),
        "out": _address(out),
        "lse": _address(lse),
        "partials": _address(partials),
        "table_row": page_table.stride(0),
        "out_token": heads * size,
        "heads_kv": heads_kv,
        "table_lines": page_table.untyped_storage().nbytes() // 128,
        "page_shift": key_cache.shape[slot_dim].bit_length() - 1,
        "descale_k_step": _step(descale_k),
        "descale_v_step": _step(descale_v),
        "table_width": page_table.shape[1],
        "stages": stages,
        "parts": parts,
        "scale": size**-0.5 if scale is None else scale,
        "softcap": softcap,
    }
    for side, strides in (("query", query_strides), ("lse", lse_strides)):
        values |= zip((f"{side}_{dim}" for dim in ("batch", "token", "head")), strides, strict=True)
    for side, cache in (("key", key_cache), ("value", value_cache)):
        dims = {"page": 0, "slot": slot_dim, "head": head_dim}
        values |= {f"{side}_{dim}": cache.stride(at) for dim, at in dims.items()}
    call = structs_of("paged_decode_call.h")["PagedDecodeCall"]()
    assert {field[0] for field in call._fields_} == set(values)
    for field, value in values.items():
        setattr(call, field, value)
    names = {"NAME": f"{name}_{cache_name}", "QUERY": source, "CACHE": cache_source}
    library = library_of(
        folder,
        "paged_decode",
        ("PagedDecodeCall",),
        *(f"-DKERNEL_{key}={value}" for key, value in names.items()),
        *macros,
    )
    element = key_cache.element_size()
    shared = rows * size * 2 + rows * 4 * (3 + 2 * warps) + warps * stages * 2 * 16 * size * element
    if parts:
        shared += (rows * size // 4 + MOST_PARTS) * 16 + MOST_PARTS * rows * 8
    types = f"{name}_{cache_name}_{size}_{rows}"
    kernel = f"paged_decode_even_{types}_{warps}" if parts else f"paged_decode_{types}"
    launch(library, kernel, call, (blocks, 1), 32 * warps, shared, seed, max(parts, 1))
    own = (ctypes.c_int * (SLOTS * COUNTERS)).in_dll(library, "paged_counters")
    counters = torch.frombuffer(own, dtype=torch.int32) if plan is None else plan[:COUNTERS]
    assert not counters.any()
    return out, lse
