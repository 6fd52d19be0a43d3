"""Attention over pages, and writing into them: results, guard pages, poisoned tables, compile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from tests.cases import paged as cases
from tests.cases.paged import PagedCase
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
ONE = Features(1, 4, 2, 0, 0, 64, 64)
DECODE = PagedCase((1,) * 5, (70, 0, 33, 129, 16), ONE)
SPECULATE = replace(DECODE, lengths=(4,) * 5, lengths_kv=(70, 4, 33, 129, 16))
PREFILL = PagedCase(
    (70, 0, 33, 1, 129), (170, 5, 33, 64, 200), replace(ONE, is_causal=True), packed=True
)
CASES = [
    DECODE,
    replace(DECODE, head_major=True, spare_width=3),
    replace(DECODE, one=replace(ONE, is_causal=True, value_size=32)),
    replace(DECODE, one=replace(ONE, window_size=(20, 0))),
    replace(DECODE, one=replace(ONE, softcap=5.0, scale=0.3)),
    replace(DECODE, one=replace(ONE, sinks=True)),
    replace(DECODE, one=replace(ONE, sinks=True, window_size=(20, -1), softcap=5.0)),
    replace(DECODE, one=replace(ONE, heads_kv=1, head_size=128, value_size=128)),
    *(replace(DECODE, page_size=size) for size in (1, 2, 64, 128)),
    *(
        replace(SPECULATE, one=replace(ONE, is_causal=True, **feature))
        for feature in ({}, {"window_size": (20, 0)}, {"sinks": True}, {"softcap": 5.0})
    ),
    *(
        replace(case, lengths_kv=(2, 0, 3, 4, 70))  # some queries see nothing
        for case in (
            replace(SPECULATE, one=replace(ONE, is_causal=True)),
            replace(SPECULATE, one=replace(ONE, is_causal=True, sinks=True)),
        )
    ),
    replace(SPECULATE, one=replace(ONE, sinks=True), head_major=True, spare_width=3),
    replace(SPECULATE, lengths=(8,) * 5, one=replace(ONE, heads=8, heads_kv=1, is_causal=True)),
    replace(SPECULATE, lengths=(16,) * 5, one=replace(ONE, is_causal=True, value_size=32)),
    replace(SPECULATE, lengths=(33,) * 5, one=replace(ONE, is_causal=True)),
    replace(DECODE, lengths=(1,) * 70, lengths_kv=tuple(range(0, 210, 3))),
    PREFILL,
    replace(PREFILL, head_major=True, spare_width=3, page_size=1),
    replace(PREFILL, one=replace(ONE, is_causal=True, window_size=(20, 0), sinks=True)),
    replace(PREFILL, one=replace(ONE, softcap=5.0)),
    replace(PREFILL, lengths=(1, 1, 1, 1, 1)),
    replace(PREFILL, lengths=(1,), lengths_kv=(1,)),
    replace(DECODE, lengths_kv=(0,) * 5),
    *(
        replace(case, top_left=True)
        for case in (
            DECODE,
            # What bounds a single query at the top left bounds its keys.
            replace(DECODE, one=replace(ONE, is_causal=True)),
            replace(DECODE, one=replace(ONE, window_size=(3, 40), sinks=True)),
            replace(DECODE, one=replace(ONE, window_size=(3, 40), softcap=5.0), spare_width=3),
            replace(PREFILL, lengths=(1,) * 5, one=replace(ONE, is_causal=True, sinks=True)),
            SPECULATE,
            replace(SPECULATE, one=replace(ONE, is_causal=True, sinks=True)),
            replace(SPECULATE, lengths=(33,) * 5, one=replace(ONE, window_size=(5, 9))),
            PREFILL,
            replace(PREFILL, head_major=True, one=replace(ONE, is_causal=True, sinks=True)),
            # The last queries of two sequences see nothing.
            replace(PREFILL, one=replace(ONE, window_size=(20, 0)), lengths_kv=(33, 5, 33, 64, 90)),
            replace(PREFILL, one=replace(ONE, is_causal=True, softcap=5.0)),
        )
    ),
]
#: Head sizes that are more than the 256 columns that kernels of ours take at once, on every route.
WIDE = [
    replace(case, one=replace(case.one, head_size=size, value_size=value_size))
    for size, value_size in ((264, 264), (384, 320), (512, 512), (576, 512), (128, 512), (512, 64))
    for case in (
        DECODE,
        replace(DECODE, one=replace(ONE, sinks=True)),
        replace(DECODE, one=replace(ONE, window_size=(20, 0))),
        replace(SPECULATE, one=replace(ONE, is_causal=True)),
        replace(SPECULATE, lengths=(16,) * 5, one=replace(ONE, is_causal=True, sinks=True)),
        replace(SPECULATE, lengths=(33,) * 5, one=replace(ONE, is_causal=True)),
        PREFILL,
    )
]


def run(case: PagedCase, t: cases.Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return _ops.paged_attention_with_lse(*t.arguments, **t.options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES + WIDE, ids=str)
def test_results(case, device, poisoned):
    t = cases.make(case, torch.bfloat16, device, seed=1)
    out, lse = run(case, t)
    cases.check(case, t, out, lse)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    # For heads of 512 cuDNN 9.19 adds up a sequence's parts in any order (measured on an H200).
    close = {"rtol": 0.0, "atol": 0.0} if case not in WIDE else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(_ops.paged_attention(*t.arguments, **t.options), out, **close)
    into = torch.full_like(out, torch.nan)
    _ops._paged_attention_out(*t.arguments, **t.options, out=into)
    torch.testing.assert_close(into, out, **close)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_plans_of_cudnn(case, device, poisoned, without_our_decoding):
    """Of few queries, and of one query of few sequences, a kernel of ours runs."""
    t = cases.make(case, torch.bfloat16, device, seed=1)
    cases.check(case, t, *run(case, t))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    rng = random.Random(3000 + block)
    wrong = []
    for seed in range(60):
        case = cases.draw(rng, on_gpu=device == "cuda")
        t = cases.make(case, rng.choice([torch.float16, torch.bfloat16]), device, seed)
        try:
            cases.check(case, t, *run(case, t))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (64, 128)),
        (torch.float16, (40, 40)),
        (torch.float32, (3, 5)),
        (torch.float8_e4m3fn, (17, 16)),
    ],
    ids=str,
)
def test_append(dtype, sizes, head_major, device):
    """Every byte of the caches is what plain indexing makes it; what has no slot is left out."""
    torch.manual_seed(0)
    pages, page_size, heads, tokens = 7, 5, 3, 20
    inside = (heads, page_size) if head_major else (page_size, heads)
    caches = [torch.randn(pages, *inside, d, device=device).to(dtype) for d in sizes]
    expected = [cache.clone() for cache in caches]
    # Side by side, as a projection leaves them.
    together = torch.randn(tokens, heads, sum(sizes), device=device).to(dtype)
    key, value = together.split(sizes, -1)
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    slots[[3, 7]] = -1
    if device == "cuda":  # a CPU refuses
        slots[11] = pages * page_size
    for cache, new in zip(expected, (key, value), strict=True):
        by_token = cache.transpose(1, 2) if head_major else cache
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < pages * page_size:
                by_token[slot // page_size, slot % page_size] = new[token]
    kv_layout = "HND" if head_major else "NHD"
    cudnn_ops.paged_kv_append_(*caches, key, value, slots, kv_layout=kv_layout)
    for cache, same in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), same.view(torch.uint8))
    cudnn_ops.paged_kv_append_(*caches, key[:0], value[:0], slots[:0], kv_layout=kv_layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [DECODE, SPECULATE, PREFILL], ids=str)
def test_opcheck(case, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    t = cases.make(case, dtype, device, seed=1)
    tolerance = 2e-2 if device == "cuda" else None
    # What may not be read is NaN, and NaN is not equal to NaN.
    caches = (t.key_cache.nan_to_num(), t.value_cache.nan_to_num())
    arguments = (t.query, *caches, t.page_table, t.seq_lens_kv)
    for op in (_ops.paged_attention, _ops.paged_attention_with_lse):
        torch.library.opcheck(op.default, arguments, t.options, rtol=tolerance, atol=tolerance)
    out = torch.zeros_like(_ops.paged_attention(*arguments, **t.options))
    torch.library.opcheck(
        _ops._paged_attention_out.default,
        arguments,
        {**t.options, "out": out},
        rtol=tolerance,
        atol=tolerance,
    )
    tokens = (t.keys[0], t.values[0], torch.arange(len(t.keys[0]), device=device))
    if not case.head_major:
        torch.library.opcheck(_ops.paged_kv_append_.default, (*caches, *tokens))


@pytest.mark.parametrize("device", DEVICES)
def test_append_and_attend_in_one_compiled_graph(device):
    """The caches are changed in place, inputs of the graph, and read after that."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def step(query, key, value, key_cache, value_cache, slots, table, lengths):
        cudnn_ops.paged_kv_append_(key_cache, value_cache, key.sin(), value, slots)
        return cudnn_ops.paged_attention(query * 2, key_cache, value_cache, table, lengths).relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch in (5, 7):
        torch.manual_seed(batch)
        query = torch.randn(batch, 1, 4, 64, device=device, dtype=dtype)
        key, value = (torch.randn(batch, 2, 64, device=device, dtype=dtype) for _ in range(2))
        caches = [torch.randn(30, 16, 2, 64, device=device, dtype=dtype) for _ in range(2)]
        others = [cache.clone() for cache in caches]
        table = torch.randperm(30, device=device)[: batch * 3].view(batch, 3).int()
        lengths = torch.randint(1, 48, (batch,), device=device).int()
        last = (lengths - 1).long()
        slots = table.long().gather(1, (last // 16).unsqueeze(1)).squeeze(1) * 16 + last % 16
        expected = step(query, key, value, *caches, slots, table, lengths)
        actual = compiled(query, key, value, *others, slots, table, lengths)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        for cache, other in zip(caches, others, strict=True):
            torch.testing.assert_close(cache, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_it_has_no_gradient(device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    out = _ops.paged_attention(t.query.requires_grad_(), *t.arguments[1:], **t.options)
    with pytest.raises(RuntimeError, match="derivative for cudnn_ops::paged_attention"):
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_the_keys_that_are_there(device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    with FlopCounterMode(display=False) as counter:
        _ops.paged_attention(*t.arguments, **t.options)
    assert counter.get_total_flops() == 2 * 4 * sum(DECODE.lengths_kv) * (64 + 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("empty", ["heads", "sequences", "queries", "packed", "keys"])
def test_nothing_to_compute(empty, device):
    """The output has the queries' sizes, and nothing in it or zeros."""
    heads = 0 if empty == "heads" else 4
    batch = 0 if empty in ("sequences", "packed") else 2
    dtype = torch.bfloat16
    query = torch.ones(batch, 0 if empty == "queries" else 3, heads, 64, dtype=dtype, device=device)
    pages = 0 if empty == "keys" else 5
    cache = torch.ones(pages, 16, heads // 2, 64, dtype=dtype, device=device)
    table = torch.zeros(batch, 2, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), 0 if empty == "keys" else 3, dtype=torch.int32, device=device)
    options = {"is_causal": True}
    if empty == "packed":
        query = query.flatten(0, 1)
        options |= {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32, device=device)}
    out, lse = _ops.paged_attention_with_lse(query, cache, cache, table, lengths, **options)
    assert out.shape == query.shape
    assert torch.equal(out, torch.zeros_like(out))
    by_head = query.transpose(-3, -2).shape[:-1]
    assert torch.equal(lse, torch.full(by_head, -torch.inf, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [DECODE, SPECULATE, PREFILL], ids=str)
def test_addresses_that_no_vector_fits(case, device, poisoned):
    """What leads into a buffer may begin anywhere; the caches alone may not."""
    # Nothing has to be copied for want of sequences or columns.
    case = replace(case, lengths=case.lengths[:4], lengths_kv=(100, 5, 64, 33))
    t = cases.make(replace(case, spare_width=1), torch.bfloat16, device, seed=1)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    moved_t = replace(
        t,
        query=moved(t.query),
        page_table=moved(t.page_table),
        seq_lens_kv=moved(t.seq_lens_kv),
        options={
            name: moved(option) if isinstance(option, torch.Tensor) else option
            for name, option in t.options.items()
        },
    )
    cases.check(case, t, *run(case, moved_t))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["one", "folded", "packed"])
def test_more_sequences_than_a_plan_takes(route):
    """More than 65,535 of up to 8 keys, in a page of its own or one that it shares."""
    sequences, pages, size, queries = 65_600, 700, 64, 1 if route == "one" else 2
    generator = torch.Generator("cuda").manual_seed(1)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    query = random_tensor(sequences, queries, 2, size)
    key_cache, value_cache = (random_tensor(pages, 8, 1, size) for _ in range(2))
    table = torch.randint(pages, (sequences, 1), generator=generator, device="cuda").int()
    lengths = torch.randint(9, (sequences,), generator=generator, device="cuda").int()
    sinks = torch.randn(2, generator=generator, device="cuda")
    options = {"is_causal": True, "sinks": sinks}
    if route == "packed":
        offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries
        options |= {"cu_seqlens_q": offsets, "max_seqlen_q": queries}
        query = query.flatten(0, 1)
    out, lse = _ops.paged_attention_with_lse(
        query, key_cache, value_cache, table, lengths, **options
    )
    rows = query.view(sequences, queries, 2, size).double().transpose(1, 2)
    keys, values = (
        cache[table[:, 0]].double().transpose(1, 2) for cache in (key_cache, value_cache)
    )
    scores = rows @ keys.transpose(2, 3) * size**-0.5
    last = lengths.view(-1, 1) - queries + torch.arange(queries, device="cuda")
    hidden = torch.arange(8, device="cuda") > last.view(sequences, 1, queries, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    scores = torch.cat([scores, sinks.double().view(1, 2, 1, 1).expand_as(scores[..., :1])], -1)
    exact = (scores.softmax(-1)[..., :8] @ values).transpose(1, 2)
    exact_lse = scores.logsumexp(-1)
    if route == "packed":
        exact_lse = exact_lse.transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.double(), exact.reshape(out.shape), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse.reshape(lse.shape), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DECODE, SPECULATE, PREFILL], ids=str)
def test_replay_with_other_lengths_and_tables(case, fresh_cache):
    t = cases.make(replace(case, spare_width=20), torch.bfloat16, "cuda", seed=1)
    # Room for what comes later; it is full of NaN until then.
    key_cache, value_cache = (
        torch.cat([cache, cache.new_full((40, *cache.shape[1:]), torch.nan)])
        for cache in (t.key_cache, t.value_cache)
    )
    t = replace(t, key_cache=key_cache, value_cache=value_cache)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(case, t)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(case, t)
    for seed in (2, 3):
        lengths = random.Random(seed).sample(range(1, 200), 4)
        other = replace(case, lengths_kv=(*lengths, 0))
        fresh = cases.make(replace(other, spare_width=1), torch.bfloat16, "cuda", seed=seed)
        for cache, new in ((t.key_cache, fresh.key_cache), (t.value_cache, fresh.value_cache)):
            cache.fill_(torch.nan)
            cache[: len(new)] = new
        t.page_table.fill_(-7)
        t.page_table[:, : fresh.page_table.shape[1]] = fresh.page_table
        t.seq_lens_kv.copy_(fresh.seq_lens_kv)
        t.query.copy_(fresh.query)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        cases.check(other, fresh, out, lse)


@pytest.mark.gpu
def test_one_plan_serves_every_length_and_smaller_batch(fresh_cache, without_our_decoding):
    built = []
    for batch in (13, 16, 14, 15):
        for longest in (1, 400, 70):
            lengths_kv = tuple(1 + (7 * i) % longest for i in range(batch))
            case = replace(DECODE, lengths=(1,) * batch, lengths_kv=lengths_kv, spare_width=1)
            t = cases.make(case, torch.bfloat16, "cuda", seed=batch)
            width = torch.full((batch, 32), -1, dtype=torch.int32, device="cuda")
            width[:, : t.page_table.shape[1]] = t.page_table
            caches = [torch.full((900, 16, 2, 64), torch.nan, device="cuda").bfloat16()] * 2
            caches = [cache.clone() for cache in caches]
            for cache, own in zip(caches, (t.key_cache, t.value_cache), strict=True):
                cache[: len(own)] = own
            out, lse = _ops.paged_attention_with_lse(
                t.query, *caches, width, t.seq_lens_kv, **t.options
            )
            cases.check(case, t, out, lse)
            built.append(cudnn_ops.cache_info().builds)
    assert set(built) == {1}


@pytest.mark.gpu
def test_the_host_never_waits():
    for case in (DECODE, replace(DECODE, one=replace(ONE, sinks=True)), PREFILL):
        t = cases.make(case, torch.bfloat16, "cuda", seed=1)
        slots = torch.arange(len(t.keys[0]), device="cuda")
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                run(case, t)
                _ops.paged_kv_append_(t.key_cache, t.value_cache, t.keys[0], t.values[0], slots)
            finally:
                torch.cuda.set_sync_debug_mode("default")
