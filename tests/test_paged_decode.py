"""Our kernels of attention over pages, thread by thread on a CPU, against float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudnn_ops
from tests.cases import paged as cases
from tests.cases.paged import PagedCase, Tensors
from tests.cases.sdpa_features import Features
from tests.emulated.paged_decode import append, attend, make_plan, rows_of

ONE = Features(1, 4, 2, 0, 0, 64, 64)
UNEVEN = (0, 1, 15, 16, 17, 300, 64, 65)
DECODE = PagedCase((1,) * 8, UNEVEN, ONE)
EQUAL = PagedCase((1,) * 3, (130,) * 3, replace(ONE, head_size=128, value_size=128))
SPECULATE = PagedCase((4,) * 6, (4, 70, 2, 129, 0, 16), replace(ONE, is_causal=True))
PACKED = PagedCase(
    (20, 0, 33, 1, 3), (90, 5, 33, 64, 130), replace(ONE, is_causal=True), packed=True
)
CASES = [
    DECODE,
    EQUAL,
    replace(DECODE, head_major=True, spare_width=3),
    *(replace(DECODE, page_size=size, lengths_kv=(70, 0, 129, 33)) for size in (1, 2, 64, 128)),
    *(
        replace(EQUAL, one=replace(EQUAL.one, heads=group * heads_kv, heads_kv=heads_kv))
        for group, heads_kv in ((1, 3), (3, 2), (8, 1), (16, 1))
    ),
    *(
        replace(SPECULATE, lengths=(count,) * 3, lengths_kv=(2, count, 140), one=one)
        for count, one in (
            (2, replace(SPECULATE.one, heads=1, heads_kv=1)),
            (3, replace(SPECULATE.one, heads=6, heads_kv=2, softcap=3.0)),
            (5, replace(EQUAL.one, is_causal=True)),
            (8, replace(SPECULATE.one, heads=16, heads_kv=2)),  # 64 rows
            (8, replace(EQUAL.one, heads=16, heads_kv=1, is_causal=True, sinks=True)),
        )
    ),
    SPECULATE,
    replace(SPECULATE, one=replace(ONE, sinks=True, scale=-0.3)),
    replace(SPECULATE, one=replace(ONE, window_size=(20, 0)), lengths_kv=(4, 170, 2, 129, 0, 16)),
    replace(SPECULATE, one=replace(ONE, window_size=(3, 9), softcap=5.0), top_left=True),
    replace(DECODE, one=replace(ONE, window_size=(70, -1), sinks=True, softcap=2.0)),
    replace(DECODE, one=replace(ONE, is_causal=True), top_left=True),
    PACKED,
    replace(PACKED, one=replace(EQUAL.one, window_size=(20, 0), sinks=True), head_major=True),
    replace(PACKED, top_left=True, one=replace(ONE, is_causal=True, heads=3, heads_kv=1)),
    replace(DECODE, lengths_kv=(0,) * 8),
    # Pages of less than a tile, as much and more: keys that some see, in tiles of 16.
    *(
        replace(SPECULATE, one=replace(ONE, window_size=(window, 0)), page_size=size, lengths_kv=kv)
        for size, window, kv in (
            (4, 5, (300, 33, 17, 4)),
            (8, 40, (150, 64, 16, 79)),
            (16, 9, (33, 160, 7, 48)),
            (32, 61, (65, 31, 129, 300)),
        )
    ),
]
CASES = [replace(case, lengths=case.lengths[: len(case.lengths_kv)]) for case in CASES]
TYPES = [
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    (torch.float16, True),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def make(case: PagedCase, dtype: torch.dtype, is_fp8: bool, seed: int) -> Tensors:
    tensors = cases.make(case, dtype, "cpu", seed)
    if not is_fp8:
        return tensors
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(2, case.one.heads_kv if seed % 2 else 1, generator=generator) * 0.02 + 0.01
    return cases.in_fp8(tensors, *numbers)


@pytest.mark.parametrize(("dtype", "is_fp8"), TYPES, ids=str)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_results(index: int, dtype: torch.dtype, is_fp8: bool, folder: Path) -> None:
    case = CASES[index]
    t = make(case, dtype, is_fp8, seed=index)
    # From one block for all to more than there are units; few and many tiles on their way.
    blocks = (1, 2, 5, 7, 13, 200)[index % 6]
    needed = 4 if is_fp8 else 2
    stages = needed + index % (5 - needed)
    out, lse = attend(
        folder,
        *t.arguments,
        **t.options,
        blocks=blocks,
        stages=stages,
        rows=(0, 8, 16, 32)[index % 4],
        seed=index,
        is_planned=index % 7 < 3,
    )
    cases.check(case, t, out, lse)


@pytest.mark.parametrize(("dtype", "is_fp8"), TYPES[1:3], ids=str)
def test_any_combination(dtype: torch.dtype, is_fp8: bool, folder: Path) -> None:
    rng = random.Random(5)
    for seed in range(15):
        case = cases.draw(rng, on_gpu=True)
        size = rng.choice([64, 128])
        case = replace(case, one=replace(case.one, head_size=size, value_size=size))
        t = make(case, dtype, is_fp8, seed)
        options = t.options | {"is_planned": rng.random() < 0.5}
        out, lse = attend(folder, *t.arguments, **options, blocks=rng.randint(1, 40), seed=seed)
        cases.check(case, t, out, lse)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_parts_begin_while_those_before_are_written(
    is_fp8: bool, stages: int, rows: int, folder: Path
) -> None:
    """Their first tiles lie beside the sums, whether they come at once or as late as they can."""
    # Sums may take all stages of a warp, and no more.
    if rows * 64 * 4 > stages * 32 * 64 * (1 if is_fp8 else 2):
        return
    one = replace(ONE, heads=rows, heads_kv=1)
    case = PagedCase((1,) * 9, (200, 70, 0, 64, 130, 1, 300, 90, 65), one)
    t = make(case, torch.float16, is_fp8, seed=1)
    results = [
        attend(folder, *t.arguments, **t.options, blocks=2, stages=stages, rows=rows, seed=seed)
        for seed in (0, 1)
    ]
    cases.check(case, t, *results[0])
    for result, same in zip(*results, strict=True):
        assert torch.equal(result, same)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_order_of_blocks_changes_no_bit(is_fp8: bool, folder: Path) -> None:
    """Several blocks share a sequence, and the last one, whichever it is, adds up in one order."""
    t = make(replace(DECODE, lengths=(1,), lengths_kv=(700,)), torch.bfloat16, is_fp8, seed=3)
    results = [attend(folder, *t.arguments, **t.options, blocks=9, seed=seed) for seed in range(3)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


#: Of lengths alike and unlike, among them none, and fewer tokens than the warps' first tiles.
EVEN = [
    (EQUAL, 1),
    (EQUAL, 6),
    (replace(EQUAL, lengths_kv=(700, 640, 690)), 3),
    (replace(EQUAL, lengths_kv=(9, 9, 9)), 8),
    (replace(EQUAL, lengths_kv=(0, 0, 0), spare_width=3), 2),
    (replace(EQUAL, lengths_kv=(257, 256, 255), page_size=128, head_major=True), 4),
    (replace(EQUAL, lengths_kv=(300, 290, 280), page_size=4, spare_width=3), 2),
    (PagedCase((1,) * 3, (530,) * 3, replace(ONE, heads=16, heads_kv=2, sinks=True)), 5),
    (PagedCase((2,) * 3, (530,) * 3, replace(ONE, heads=9, heads_kv=3, softcap=3.0)), 2),
    (PagedCase((1,) * 40, (70,) * 40, replace(ONE, heads=1, heads_kv=1)), 2),
    (DECODE, 2),
    (replace(EQUAL, lengths_kv=(700, 100, 690)), 3),
    (replace(DECODE, one=replace(ONE, is_causal=True)), 3),  # sees all, as the last query
    (replace(SPECULATE, one=replace(ONE, is_causal=True, sinks=True)), 4),
    (replace(SPECULATE, top_left=True), 3),
    (replace(SPECULATE, one=replace(ONE, window_size=(-1, 40), softcap=5.0)), 2),
    (PagedCase((5,) * 3, (3, 5, 300), replace(EQUAL.one, heads=6, is_causal=True)), 5),
    (PagedCase((8,) * 2, (700, 70), replace(EQUAL.one, heads=8, is_causal=True)), 7),
    (PagedCase((1,) * 2, (131, 400), replace(EQUAL.one, heads=16, heads_kv=1)), 8),
]


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("dtype", "is_fp8"), TYPES, ids=str)
@pytest.mark.parametrize(("case", "parts"), EVEN, ids=str)
def test_clusters(
    case: PagedCase, parts: int, dtype: torch.dtype, is_fp8: bool, warps: int, folder: Path
) -> None:
    """Of a sequence's head of keys each has one, whose blocks meet in shared memory."""
    # With 4 warps copies come when they are waited for, with 8 at once.
    seed = warps // 4 - 1
    t = make(case, dtype, is_fp8, seed)
    options = t.options | {"parts": parts, "warps": warps}
    stages = 4 if is_fp8 else 2 + seed
    out, lse = attend(folder, *t.arguments, **options, stages=stages, seed=seed)
    cases.check(case, t, out, lse)


def test_one_plan_serves_several_calls(folder: Path) -> None:
    case = replace(SPECULATE, lengths=(4,) * 3, lengths_kv=(4, 70, 300))
    for seed, plan in enumerate([None, "one"]):
        t = make(case, torch.bfloat16, True, seed)
        words = make_plan(folder, t.seq_lens_kv, None, 4, 2, (-1, 0), True) if plan else None
        for _ in range(2):
            out, lse = attend(folder, *t.arguments, **t.options, blocks=5, plan=words)
            cases.check(case, t, out, lse)


def test_the_plan_of_something_else_gives_nan(folder: Path) -> None:
    t = make(DECODE, torch.bfloat16, True, seed=1)
    for group, window in ((3, (-1, -1)), (2, (70, -1))):
        plan = make_plan(folder, t.seq_lens_kv, None, 1, group, window, True)
        out, _ = attend(folder, *t.arguments, **t.options, plan=plan)
        assert out.isnan().all()


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (3, 70)])
def test_plans(window: tuple[int, int], bottom_right: bool, folder: Path) -> None:
    """The kernel's words are those that the CPU's operators give, and these those of a loop."""
    lengths = torch.tensor([*UNEVEN, 5000, -3] * 13, dtype=torch.int32)  # more than threads
    starts = torch.arange(0, 7 * len(lengths) + 1, 7).int()
    starts[5:] += 90
    for queries, group, offsets in itertools.product((1, 4, 40), (1, 3), (None, starts)):
        arguments = lengths, offsets, queries, group, window, bottom_right
        words = make_plan(folder, *arguments)
        # Causal is what has no key on the right.
        causal = window[1] == 0
        same = torch.ops.cudnn_ops._paged_plan(*arguments[:4], causal, window, bottom_right)
        assert torch.equal(words, same)
        rows, total, found = rows_of(queries, group), 0, words[1032:].tolist()
        for index, length in enumerate(lengths.clamp(min=0).tolist()):
            assert found[index] == total
            count = queries if offsets is None else int(offsets[index + 1] - offsets[index])
            shift = length - count if bottom_right else 0
            first, last = 0, length
            if window[0] >= 0:
                first = min(max(shift - window[0], 0), length)
            if window[1] >= 0:
                last = min(max(count - 1 + shift + window[1] + 1, 0), length)
            units = max(-(-last // 64) - first // 64, 1)
            # Two more for the beginning of each.
            total += (2 + units) * -(-count * group // rows)
        assert found[-1] == total


INSTRUCTIONS = [(), ("-D__CUDA_ARCH__=900",)]


@pytest.mark.parametrize("macros", INSTRUCTIONS, ids=["bits", "instructions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_8_bits(dtype: torch.dtype, macros: tuple[str, ...], folder: Path) -> None:
    """The value of a single key is the output, and its product with a query's one the lse."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn)
    values = numbers.view(4, 1, 1, 64)
    # A sum with NaN is NaN: those two codes have keys of their own, zeros but for them.
    is_nan = numbers.float().isnan()
    keys = torch.zeros(6, 1, 1, 64, dtype=torch.uint8)
    keys.view(-1)[:256] = codes.masked_fill(is_nan, 0)
    keys[4:, 0, 0, 5] = codes[is_nan]
    keys = keys.view(torch.float8_e4m3fn)
    query = torch.eye(64).to(dtype).expand(6, 1, 64, 64)
    pages, ones = torch.arange(6).int()[:, None], torch.ones(6, dtype=torch.int32)
    _, lse = attend(folder, query, keys, keys, pages, ones, scale=0.25, macros=macros)
    expected = torch.full((6, 64), torch.nan)
    expected[:4] = keys.float().view(6, 64)[:4] / 4
    torch.testing.assert_close(lse[..., 0], expected, rtol=1e-6, atol=0.0, equal_nan=True)
    zeros = torch.zeros(4, 1, 1, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    few = (pages[:4], ones[:4])
    out, _ = attend(folder, query[:4, :, :1], zeros, values, *few, macros=macros)
    torch.testing.assert_close(
        out.float().flatten(), numbers.float(), rtol=0.0, atol=0.0, equal_nan=True
    )


@pytest.mark.parametrize("magnitude", [1e-30, 2**-14, 1.0, 6e4, 1e30])
def test_queries_of_any_magnitude(magnitude: float, folder: Path) -> None:
    """They are float16 beside 8 bits: what bfloat16 has beyond that, a power of 2 brings there."""
    case = replace(EQUAL, one=replace(EQUAL.one, scale=0.05 / magnitude))
    t = make(case, torch.bfloat16, True, seed=4)
    t = replace(t, query=t.query * magnitude)
    out, lse = attend(folder, *t.arguments, **t.options)
    cases.check(case, t, out, lse)


@pytest.mark.parametrize(("dtype", "is_fp8"), TYPES, ids=str)
def test_large_scores(dtype: torch.dtype, is_fp8: bool, folder: Path) -> None:
    """Of +-120, and all of them equal."""
    size = 64
    key = torch.ones(1, 64, 1, size, dtype=dtype)
    key[0, ::2] = -1
    value = torch.randn(1, 64, 1, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    if is_fp8:
        key, value = (x.to(torch.float8_e4m3fn) for x in (key, value))
    query = torch.ones(1, 1, 2, size, dtype=dtype)
    query[0, 0, 1] = -1
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    out, lse = attend(folder, query, key, value, *tables, scale=120 / size)
    wide = value.double()[0, :, 0]
    expected = torch.stack([wide[1::2].mean(0), wide[::2].mean(0)])
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(
        lse.flatten().double(), torch.tensor([120.0, 120.0]).double() + math.log(32)
    )
    out, lse = attend(folder, query * 0, key, value, *tables)
    torch.testing.assert_close(out[0, 0, 0].double(), wide.mean(0), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(64)] * 2))


#: Of each 64 keys, in units of the first row's scores.
LEVELS = {
    "slowly": torch.arange(10) * 2.0,  # not past what weights may rise by, at each step
    "fast": torch.arange(10) * 40.0,
    "late": torch.tensor([-30.0, -200, -200, -28, -27, -200, -26, -25, 100, 0]),
    "falling": 100 - torch.arange(10) * 12.0,
}


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("dtype", "is_fp8"), TYPES, ids=str)
def test_scores_that_rise(
    dtype: torch.dtype, is_fp8: bool, levels: str, rows: int, folder: Path
) -> None:
    """Of some rows by much, of others little, and of some they fall meanwhile."""
    size, heads, keys = 64, rows, 64 * len(LEVELS[levels])
    generator = torch.Generator().manual_seed(rows)
    key, value = torch.randn(2, 1, keys, 1, size, generator=generator)
    key = (key * 0.5 + LEVELS[levels].repeat_interleave(64)[:, None, None] / size).to(dtype)
    value = value.to(dtype)
    if is_fp8:
        key, value = (x.to(torch.float8_e4m3fn) for x in (key, value))
    query = torch.linspace(1, -1, heads)[:, None].expand(1, 1, heads, size).to(dtype)
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    # One page, whose size is a power of 2; not all of it is seen.
    key, value = (torch.cat([x, x, x], 1)[:, :1024] for x in (key, value))
    out, lse = attend(folder, query, key, value, *tables, scale=1.0, blocks=2, rows=rows)
    wide_key, wide_value = (x.double()[0, :keys, 0] for x in (key, value))
    scores = query.double()[0, 0] @ wide_key.T
    torch.testing.assert_close(lse[0, :, 0].double(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)
    expected = scores.softmax(1) @ wide_value
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("count", [32, 33, 127, 128, 129, 1100])
def test_many_sequences(count: int, folder: Path) -> None:
    """A block finds its first one in one look at the lengths, or in a plan, and goes on from it."""
    rng = random.Random(count)
    lengths = tuple(rng.choice([0, 1, 20, 70]) for _ in range(count))
    one = replace(ONE, heads=1, heads_kv=1)
    case = PagedCase((1,) * count, lengths, one)
    t = make(case, torch.bfloat16, True, seed=1)
    out, lse = attend(folder, *t.arguments, **t.options, blocks=19)
    cases.check(case, t, out, lse)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_pages_far_apart(is_fp8: bool, folder: Path) -> None:
    """Distances of more than 32 bits, where there would be a page at them."""
    case = replace(DECODE, lengths=(1,), lengths_kv=(100,), page_size=128)
    t = make(case, torch.bfloat16, is_fp8, seed=2)
    page = int(t.page_table[0, 0])
    near = [cache[page : page + 1] for cache in (t.key_cache, t.value_cache)]
    far = [cache.as_strided(cache.shape, (1 << 33, *cache.stride()[1:])) for cache in near]
    first = replace(t, page_table=torch.zeros_like(t.page_table))
    results = [
        attend(folder, first.query, *caches, *first.arguments[3:], **t.options)
        for caches in (near, far)
    ]
    cases.check(case, t, *results[1])
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("macros", INSTRUCTIONS, ids=["bits", "instructions"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_append_rounds(
    dtype: torch.dtype, shift: int, macros: tuple[str, ...], folder: Path
) -> None:
    """As the CPU's operators do it, to the last bit, from addresses that wide loads fit or not."""
    generator = torch.Generator().manual_seed(2)
    tokens, heads, size = 37, 3, 16
    memory = torch.randn(2, shift + tokens * heads * size, generator=generator) * 300
    memory[:, 40:50] = torch.tensor([1e9, -1e9, 448, 464, 465, 2**-9, 2**-10, -(2**-9), 0.0, -0.0])
    memory[:, 100] = torch.nan
    memory[:, 101:103] = torch.tensor([torch.inf, -torch.inf])
    key, value = memory.to(dtype)[:, shift:].unflatten(1, (tokens, heads, size))
    slots = torch.randperm(60, generator=generator)[:tokens]
    slots[[3, 7]] = -1
    for descale in (None, torch.tensor(0.25), torch.tensor([0.5, 1.0, 3.0])):
        keys, values = (torch.zeros(10, 6, heads, size).to(torch.float8_e4m3fn) for _ in range(2))
        others = keys.clone(), values.clone()
        append(folder, keys, values, key, value, slots, descale, is_wide=shift == 0, macros=macros)
        cudnn_ops.paged_kv_append_(
            others[0], others[1], key, value, slots, descale_k=descale, descale_v=descale
        )
        for cache, other in zip((keys, values), others, strict=True):
            # NaN has a sign of either.
            bits, same = (x.view(torch.uint8) for x in (cache, other))
            is_nan = other.float().isnan()
            assert torch.equal(bits[~is_nan], same[~is_nan])
            assert cache.float()[is_nan].isnan().all()
            assert is_nan.any()
