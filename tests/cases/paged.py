"""Attention over pages: the cases, their tensors, and the contiguous problem as the reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.cases import sdpa, sdpa_features
from tests.cases.sdpa_features import Features
from tests.cases.varlen import Sequences

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class PagedCase(Sequences):
    """Sequences whose keys and values lie in pages."""

    page_size: int = 16
    spare_width: int = 0
    """Columns of the table beyond the longest sequence's."""
    head_major: bool = False
    packed: bool = False
    """Else all have as many queries as the first."""
    top_left: bool = False
    """Whether the first query belongs to the first key."""

    def __str__(self) -> str:
        return (
            f"{self.lengths}x{self.lengths_kv}-page{self.page_size}+{self.spare_width}"
            f"{'-hnd' * self.head_major}{'-packed' * self.packed}{'-tl' * self.top_left}-{self.one}"
        )

    def sequence(self, index: int) -> Features:
        """One of them by itself."""
        return replace(super().sequence(index), bottom_right=not self.top_left)

    def kwargs(self) -> dict[str, Any]:
        one = self.one
        return {
            "scale": one.scale,
            "is_causal": one.is_causal,
            "window_size": one.window_size,
            "bottom_right": not self.top_left,
            "softcap": one.softcap,
            "head_major": self.head_major,
        }


@dataclass(frozen=True)
class Tensors:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    seq_lens_kv: Tensor
    options: dict[str, Any]
    keys: list[Tensor]
    """What each sequence's pages hold, [tokens, heads_kv, head size]; nothing else is read."""
    values: list[Tensor]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.page_table, self.seq_lens_kv


def make(case: PagedCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    """Random values in random pages; all that may not be read is NaN, or no page of the cache."""
    generator = torch.Generator().manual_seed(seed)
    one, size = case.one, case.page_size

    def random_tokens(count: int, heads: int, width: int) -> Tensor:
        shape = (count, heads, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    counts = [-(-length // size) for length in case.lengths_kv]
    pages = sum(counts) + 3  # some belong to nobody
    order = torch.randperm(pages, generator=generator)
    width = max(counts, default=0) + case.spare_width
    table = torch.full((len(counts), width), 2**30, dtype=torch.int32)
    key_cache = torch.full((pages, size, one.heads_kv, one.head_size), math.nan, dtype=dtype)
    value_cache = torch.full((pages, size, one.heads_kv, one.value_size), math.nan, dtype=dtype)
    keys, values = [], []
    for index, (count, length) in enumerate(zip(counts, case.lengths_kv, strict=True)):
        mine, order = order[:count], order[count:]
        table[index, :count] = mine.int()
        if count < width:  # beyond the length: whatever was there
            table[index, count:] = torch.tensor([-1, 2**30, -(2**31), int(order[-1])])[index % 4]
        keys.append(random_tokens(length, one.heads_kv, one.head_size))
        values.append(random_tokens(length, one.heads_kv, one.value_size))
        if set(case.lengths) != {1}:  # then what lies behind the end has to be finite
            value_cache[mine] = 1e4
        place = torch.arange(length)
        for cache, tokens in ((key_cache, keys[-1]), (value_cache, values[-1])):
            cache[mine[place // size], place % size] = tokens
    if case.head_major:
        key_cache, value_cache = (c.transpose(1, 2).contiguous() for c in (key_cache, value_cache))
    options: dict[str, Any] = case.kwargs()
    if case.packed:
        query = random_tokens(sum(case.lengths), one.heads, one.head_size)
        starts = torch.tensor([0, *case.lengths]).cumsum(0).int()
        options |= {"cu_seqlens_q": starts.to(device), "max_seqlen_q": max(case.lengths)}
    else:
        query = random_tokens(sum(case.lengths), one.heads, one.head_size)
        query = query.unflatten(0, (len(case.lengths), case.lengths[0]))
    if one.sinks:
        options["sinks"] = torch.randn(one.heads, generator=generator).to(device)
    return Tensors(
        query.to(device),
        key_cache.to(device),
        value_cache.to(device),
        table.to(device),
        torch.tensor(case.lengths_kv, dtype=torch.int32, device=device),
        options,
        [tensor.to(device) for tensor in keys],
        [tensor.to(device) for tensor in values],
    )


def in_fp8(tensors: Tensors, descale_k: Tensor, descale_v: Tensor) -> Tensors:
    """The same with caches of E4M3, under descales of one number or one for each head of keys."""
    head_major = tensors.options["head_major"]

    def rounded(memory: Tensor, descale: Tensor) -> Tensor:
        scaled = memory.double() / descale.double().to(memory.device)[:, None]
        return scaled.clamp(-448, 448).float().to(torch.float8_e4m3fn)

    def cache(memory: Tensor, descale: Tensor) -> Tensor:
        by_token = memory.transpose(1, 2) if head_major else memory
        data = rounded(by_token, descale)
        return data.transpose(1, 2).contiguous() if head_major else data

    keys, values = (
        [rounded(one, descale).double() * descale.double().to(one.device)[:, None] for one in all]
        for all, descale in ((tensors.keys, descale_k), (tensors.values, descale_v))
    )
    device = tensors.query.device
    descales = {"descale_k": descale_k.to(device), "descale_v": descale_v.to(device)}
    return replace(
        tensors,
        key_cache=cache(tensors.key_cache, descale_k),
        value_cache=cache(tensors.value_cache, descale_v),
        options=tensors.options | descales,
        keys=keys,
        values=values,
    )


def check(case: PagedCase, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Each sequence against the float64 formula over its contiguous keys."""
    dtype = tensors.query.dtype
    extras = {"sinks": tensors.options["sinks"]} if case.one.sinks else {}
    start = 0
    for index, length in enumerate(case.lengths):
        if case.packed:
            rows = slice(start, start + length)
            query, mine, my_lse = tensors.query[rows], out[rows], lse[:, rows]
            start += length
        else:
            query, mine, my_lse = tensors.query[index], out[index], lse[index]
        one = case.sequence(index)
        inputs = [
            tensor.transpose(0, 1).unsqueeze(0)
            for tensor in (query, tensors.keys[index], tensors.values[index])
        ]
        exact, rough, wide = (
            _formula(one, inputs, extras, precision)
            for precision in (torch.float64, dtype, sdpa.lse_dtype(dtype))
        )
        found = mine.transpose(0, 1).unsqueeze(0)
        sdpa.check(found, exact[0], rough[0], f"{case} out of {index}")
        sdpa.check(my_lse.unsqueeze(0), exact[1], wide[1], f"{case} lse of {index}")


def _formula(
    one: Features, inputs: list[Tensor], extras: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    query, key, value = (tensor.to(dtype) for tensor in inputs)
    more = {name: tensor.to(dtype) for name, tensor in extras.items()}
    return sdpa_features.attention(one, query, key, value, more, None)


def draw(rng: random.Random, *, on_gpu: bool) -> PagedCase:
    """Any combination that attention over pages takes."""
    one = sdpa_features.draw(rng, on_gpu=on_gpu)
    one = replace(
        one,
        mask="",
        alibi=False,
        lengths="",
        dropout_p=0.0,
        deterministic=None,
        window_size=(one.window_size[0], -1 if one.window_size[1] < 0 else one.window_size[1]),
    )
    count = rng.randint(1, 7)
    packed = rng.random() < 0.5
    single = rng.choice([1, 1, 1, 2, 4, 8, 16, 33])
    lengths = tuple(
        rng.choice([1, rng.randint(0, 9), rng.randint(1, 150)]) if packed else single
        for _ in range(count)
    )
    if packed and not sum(lengths):
        lengths = (1, *lengths[1:])
    lengths_kv = tuple(
        rng.choice([0, length, length + rng.randint(0, 300), rng.randint(1, 70)])
        for length in lengths
    )
    return PagedCase(
        lengths,
        lengths_kv,
        one,
        page_size=rng.choice([1, 2, 16, 16, 16, 32, 64, 128]),
        spare_width=rng.choice([0, 1, 5]),
        head_major=rng.random() < 0.4,
        packed=packed,
        top_left=rng.random() < 0.25,
    )
