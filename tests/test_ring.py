"""Attention over a split sequence: several processes against the reference of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import ring, sdpa
from tests.cases.ring import Split
from tests.cases.sdpa_features import Features
from tests.cases.varlen import Packed
from tests.distributed.processes import run_in_processes

RING, ALL_TO_ALL = "ring_attention_with_lse", "all_to_all_attention_with_lse"


def splits_of(ranks: int) -> list[Split]:
    """Lengths are multiples of twice the number of ranks; chunks are of odd sizes."""
    unit = 2 * ranks
    base = Features(2, 4, 2, 7 * unit, 7 * unit, 16, 24)
    causal = replace(base, is_causal=True)
    cases = [
        base,
        causal,
        replace(causal, heads_kv=4, batch=1),
        replace(causal, heads=6, heads_kv=1),
        # windows: inside a chunk, over one, over several; on one side; nothing but itself
        *(
            replace(base, window_size=window)
            for window in ((3, 0), (9, 4), (25, 0), (-1, 5), (5, -1), (0, 0), (40, 40))
        ),
        replace(causal, window_size=(8, -1)),
        # as many queries as keys or not, aligned on either end; rows that see nothing
        *(
            replace(base, length=q * unit, length_kv=k * unit, bottom_right=corner, **band)
            for q, k in ((5, 3), (3, 5))
            for corner in (False, True)
            for band in ({"is_causal": True}, {"window_size": (4, 2)}, {})
        ),
        replace(base, length=unit, length_kv=unit, is_causal=True),
        replace(base, length=9 * unit, length_kv=unit, window_size=(2, 0)),
        # the rest
        replace(causal, softcap=2.0, scale=0.7),
        replace(causal, sinks=True),
        replace(base, sinks=True, length=9 * unit, length_kv=unit, window_size=(2, 0)),
        replace(base, scale=-0.3, layout="bhsd"),
        replace(causal, deterministic=True, layout="packed", heads_kv=4, value_size=16),
        # head sizes that are padded
        replace(causal, head_size=13, value_size=5),
    ]
    splits = [Split(case, order) for case in cases for order in ("contiguous", "zigzag")]
    splits += [
        replace(split, with_lse=True)
        for split in splits
        if split.case in (causal, cases[-4], cases[5])
    ]
    long = replace(causal, head_size=64, value_size=64, length=15 * unit, length_kv=15 * unit)
    splits += [
        Split(long, order, dtype, peak=peak)
        for order in ("contiguous", "zigzag")
        for dtype, peaks in (
            (torch.float16, (120.0, -120.0)),
            (torch.bfloat16, (120.0, -120.0)),
            (torch.float64, (30.0, -30.0)),
        )
        for peak in peaks
    ]
    splits += [Split(long, "zigzag", dtype) for dtype in sdpa.CPU_DTYPES[:3]]
    splits += [Split(replace(long, sinks=True), "zigzag", torch.bfloat16, with_lse=True)]
    return splits + packed_splits(unit)


def packed_splits(unit: int) -> list[Split]:
    tokens = 7 * unit
    one = Features(1, 4, 2, 0, 0, 16, 24)
    causal = replace(one, is_causal=True)
    lengths = (
        (tokens,),
        (1, tokens - 1),
        (5, 0, 2, tokens - 10, 3, 0),
        (unit,) * 7,
        (3 * unit + 1, 4 * unit - 1),
        (0, tokens // 2 + 1, 0, 0, tokens - tokens // 2 - 1),
    )
    features = (
        causal,
        one,
        replace(one, window_size=(9, 4)),
        replace(causal, window_size=(4, -1), sinks=True),
        replace(causal, softcap=2.0, head_size=13, scale=0.4),
    )
    splits = [
        Split(Packed(some, some, features[(index + more) % len(features)], same=True), order)
        for index, some in enumerate(lengths)
        for more in (0, 2)
        for order in ("contiguous", "zigzag")
    ]
    first = Packed(lengths[2], lengths[2], causal, same=True, offsets=torch.int64)
    splits += [Split(first, order, with_lse=True) for order in ("contiguous", "zigzag")]
    low = replace(causal, head_size=64, value_size=64)
    splits += [
        Split(Packed(lengths[4], lengths[4], low, same=True), order, dtype)
        for order in ("contiguous", "zigzag")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return splits


def exchanged_splits(ranks: int) -> list[Split]:
    """For an exchange of heads: as many as the ranks or more; key heads that they must share."""
    unit = 2 * ranks
    heads = 2 * ranks
    base = Features(2, heads, heads, 3 * unit, 3 * unit, 16, 24)
    causal = replace(base, is_causal=True)
    cases = [
        causal,
        replace(causal, heads_kv=ranks, sinks=True),
        replace(base, heads_kv=1, window_size=(9, 4), batch=1),
        replace(causal, heads_kv=2 if ranks == 4 else 1, alibi=True),
        replace(base, length_kv=5 * unit, bottom_right=True, is_causal=True, softcap=3.0),
        replace(causal, head_size=13, value_size=5, scale=0.3),
    ]
    one = Features(1, heads, ranks, 0, 0, 16, 24, is_causal=True, sinks=True)
    lengths = (5, 0, 3 * unit - 5)
    packed = Packed(lengths, lengths, one, same=True)
    splits = [Split(case, order) for case in cases for order in ("contiguous", "zigzag")]
    splits += [Split(packed, order) for order in ("contiguous", "zigzag")]
    splits += [Split(causal, "zigzag", dtype, True) for dtype in sdpa.CPU_DTYPES]
    return splits


Calls = list[tuple[int, str, list[Split]]]


def check_all(calls: Calls, ranks: int, backend: str) -> None:
    """Starts the processes once for all calls: most of the time goes into importing torch."""
    results = run_in_processes(ring.run_parts, ranks, *calls, backend=backend)
    wrong = []
    for place, (size, name, splits) in enumerate(calls):
        for index, split in enumerate(splits):
            try:
                ring.check(split, [of_rank[place][index] for of_rank in results[:size]])
            except AssertionError as error:
                wrong.append(f"{name} over {size}, {split}: {error}")
    assert not wrong, "\n".join(wrong)


def test_on_cpus():
    calls: Calls = []
    for ranks in (1, 2, 3, 4):
        calls.append((ranks, RING, splits_of(ranks)[:: 3 if ranks % 2 else 1]))
        calls.append((ranks, ALL_TO_ALL, exchanged_splits(ranks)))
    check_all(calls, 4, "gloo")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_gpus():
    def in_low_precision(splits: list[Split]) -> list[Split]:
        return list(
            dict.fromkeys(
                split if split.dtype in sdpa.LOW_PRECISION else replace(split, dtype=torch.bfloat16)
                for split in splits
            )
        )

    calls: Calls = [
        (ranks, name, in_low_precision(splits))
        for ranks in (1, 2)
        for name, splits in ((RING, splits_of(ranks)), (ALL_TO_ALL, exchanged_splits(ranks)))
    ]
    check_all(calls, 2, "nccl")
