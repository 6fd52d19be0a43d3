"""Pages of E4M3: attention, plans, appending, what compilers and transforms make of them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cudnn_ops
from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.ops.paged import KVLayout
from cudnn_ops.support import explain
from tests.cases import paged as cases
from tests.cases.paged import PagedCase, Tensors
from tests.conftest import DEVICES
from tests.test_paged import CASES, DECODE, ONE, PREFILL, SPECULATE, run

_ops = torch.ops.cudnn_ops
FP8 = torch.float8_e4m3fn
#: Of head sizes that the kernel has.
SIZES = [case for case in CASES if case.one.head_size == case.one.value_size]
#: What opcheck can do with 8 bits.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NAMES = ("query", "key_cache", "value_cache", "page_table", "seq_lens_kv")


def make(case: PagedCase, dtype: torch.dtype, device: str, seed: int = 1) -> Tensors:
    """A descale for each head, or one for all."""
    descales = torch.tensor([0.012, 0.02, 0.015, 0.03])[: case.one.heads_kv]
    descale_k, descale_v = (descales, descales[:1]) if seed % 2 else (descales[:1], descales)
    return cases.in_fp8(cases.make(case, dtype, device, seed), descale_k, descale_v)


def plan_of(t: Tensors) -> Tensor:
    names = ("cu_seqlens_q", "max_seqlen_q", "is_causal", "window_size", "bottom_right")
    options = {name: t.options[name] for name in names if name in t.options}
    layout: KVLayout = "HND" if t.options["head_major"] else "NHD"
    return cudnn_ops.paged_plan(t.query, t.key_cache, t.seq_lens_kv, kv_layout=layout, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_results(case, device, poisoned):
    t = make(case, torch.bfloat16, device)
    out, lse = run(case, t)
    cases.check(case, t, out, lse)
    plan = plan_of(t)
    for _ in range(2):  # it serves all layers
        assert torch.equal(_ops.paged_attention(*t.arguments, **t.options, plan=plan), out)
    into = torch.full_like(out, torch.nan)
    _ops._paged_attention_out(*t.arguments, **t.options, out=into)
    assert torch.equal(into, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(2))
def test_any_combination(block, device, poisoned):
    rng = random.Random(4000 + block)
    wrong = []
    for seed in range(60):
        case = cases.draw(rng, on_gpu=device == "cuda")
        size = rng.choice([64, 128])
        case = replace(case, one=replace(case.one, head_size=size, value_size=size))
        t = cases.make(case, rng.choice([torch.float16, torch.bfloat16]), device, seed)
        t = cases.in_fp8(t, *torch.tensor([[0.012], [0.02]]))
        try:
            cases.check(case, t, *run(case, t))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_our_kernel_for_16_bits(case, dtype, device, poisoned):
    """As cuDNN's plans, which run where it is not measured to be faster."""
    t = cases.make(case, dtype, "cuda", seed=1)
    _ops._paged_use_kernel(2)
    try:
        out, lse = run(case, t)
        again = _ops.paged_attention(*t.arguments, **t.options, plan=plan_of(t))
    finally:
        _ops._paged_use_kernel(0)
    cases.check(case, t, out, lse)
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
def test_long_and_unequal_sequences(queries):
    """More units than blocks, lengths that share none, as on all multiprocessors."""
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = [50_000, 3, 0, 1, 700, 8192, 64, 63] * 4
    pages = -(-max(lengths) // 16)
    cache = torch.randn(pages, 16, 2, 128, generator=generator, device="cuda")
    keys, values = (x.to(FP8) for x in (cache, cache.flip(0)))
    query = torch.randn(len(lengths), queries, 8, 128, generator=generator, device="cuda")
    table = torch.stack([torch.randperm(pages, generator=generator, device="cuda")] * len(lengths))
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    arguments = query.bfloat16(), keys, values, table.int(), lens
    out, lse = _ops.paged_attention_with_lse(*arguments, is_causal=True)
    for _ in range(3):
        again = _ops.paged_attention(*arguments, is_causal=True)
        assert torch.equal(again, out)
    index = table[0]
    key, value = (x[index].flatten(0, 1).float().double() for x in (keys, values))
    for row, length in enumerate(lengths):
        for place in range(queries):
            seen = max(length - queries + 1 + place, 0)
            for head in range(8):
                scores = key[:seen, head // 4] @ query.bfloat16()[row, place, head].double()
                scores = scores * 128**-0.5
                mine = scores.softmax(0) @ value[:seen, head // 4]
                torch.testing.assert_close(
                    out[row, place, head].double(), mine, rtol=2**-7, atol=2e-3
                )
                torch.testing.assert_close(
                    lse[row, head, place].double(), scores.logsumexp(0), rtol=1e-5, atol=1e-4
                )


@pytest.mark.gpu
def test_a_graph_is_replayed_for_other_lengths():
    t = make(replace(DECODE, lengths_kv=(70, 40, 33, 129, 16)), torch.bfloat16, "cuda")

    def step() -> Tensor:
        return _ops.paged_attention(*t.arguments, **t.options, plan=plan_of(t))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((1, 2, 3, 4, 5), (70, 0, 33, 100, 16)):
        t.seq_lens_kv.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.gpu
def test_calls_without_a_plan_on_many_streams():
    """They run beside each other; streams beyond those that have counters make plans."""
    generator = torch.Generator("cuda").manual_seed(1)
    cache = torch.randn(2000, 16, 2, 128, generator=generator, device="cuda").to(FP8)
    table = torch.randperm(2000, generator=generator, device="cuda").int().view(4, 500)
    lengths = torch.tensor([8000, 3, 700, 5000], dtype=torch.int32, device="cuda")
    queries = torch.randn(80, 4, 1, 8, 128, generator=generator, device="cuda").bfloat16()
    # With a window, though of all keys, there are no clusters of blocks, which need no counters.
    attend = partial(_ops.paged_attention, window_size=(9000, 0))
    calls = [partial(attend, q, cache, cache, table, lengths) for q in queries]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    outs = []
    for i, call in enumerate(calls):
        # Torch has 32 of each priority.
        with torch.cuda.stream(torch.cuda.Stream(priority=-(i % 3))):
            outs += [call() for _ in range(3)]
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert torch.equal(out, expected[i // 3])


@pytest.mark.gpu
def test_the_plan_of_other_options_gives_nan():
    # Of so many that they have no clusters of blocks, which need no plan and read none.
    case = replace(DECODE, lengths=(1,) * 128, lengths_kv=(70, 40) * 64)
    t = make(case, torch.bfloat16, "cuda")
    plan = cudnn_ops.paged_plan(t.query, t.key_cache, t.seq_lens_kv, window_size=(3, 0))
    assert _ops.paged_attention(*t.arguments, **t.options, plan=plan).isnan().all()


@pytest.mark.gpu
def test_head_sizes_that_the_kernel_lacks():
    t = make(replace(DECODE, one=replace(ONE, head_size=32, value_size=32)), torch.half, "cuda")
    with pytest.raises(NotImplementedError, match=r"head sizes 64 and 128.* got 32 and 32"):
        run(DECODE, t)


#: A change of a good call, the error and what it says.
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"value_cache": lambda t: t.bfloat16()}, TypeError, "key_cache has dtype .* and value_cache"),
    ({"key_cache": lambda t: t.to(torch.float8_e5m2)}, TypeError, "or the cache of float8_e4m3fn"),
    ({"query": lambda t: t.to(FP8)}, TypeError, "query has dtype Float8_e4m3fn"),
    ({"descale_k": lambda t: t.new_ones(3)}, ValueError, "descale_k .* one for each key head, .2."),
    (
        {"descale_v": lambda t: t.new_ones(1, 2)},
        ValueError,
        "descale_v must be float32, one number",
    ),
    ({"descale_v": lambda t: t.new_ones(2).half()}, ValueError, "descale_v must be float32"),
    ({"plan": lambda t: t.new_zeros(1037).int()}, ValueError, r"plan must be .* int32 \[1038\]"),
    ({"plan": lambda t: t.new_zeros(1038)}, ValueError, "plan must be what cudnn_ops.paged_plan"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[2])
def test_mistakes(mistake, device):
    change, error, match = mistake
    t = make(DECODE, torch.bfloat16, device)
    arguments = dict(zip(NAMES, t.arguments, strict=True)) | t.options
    numbers = torch.zeros(1, device=device)
    for name, new in change.items():
        arguments[name] = new(arguments.get(name, numbers) if name in NAMES else numbers)
    with pytest.raises(error, match=match):
        _ops.paged_attention(**arguments)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        with pytest.raises(error, match=match):
            _ops.paged_attention(**fakes)


@pytest.mark.parametrize("device", DEVICES)
def test_descales_belong_to_8_bits(device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="descale_k belongs to caches of float8_e4m3fn"):
        _ops.paged_attention(*t.arguments, **t.options, descale_k=one)
    cache, slots = t.key_cache, torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="descale_v belongs to caches of float8_e4m3fn"):
        cudnn_ops.paged_kv_append_(cache, cache, cache[0, :1], cache[0, :1], slots, descale_v=one)
    fp8 = cache.to(FP8)
    with pytest.raises(ValueError, match="for tokens that are rounded"):
        cudnn_ops.paged_kv_append_(fp8, fp8, fp8[0, :1], fp8[0, :1], slots, descale_k=one)
    whole = cache[0, :1].int()
    with pytest.raises(TypeError, match="what is rounded to float8_e4m3fn must be float16"):
        cudnn_ops.paged_kv_append_(fp8, fp8, whole, whole, slots)


@pytest.mark.parametrize("device", DEVICES)
def test_plans_refuse_mistakes(device):
    t = make(DECODE, torch.bfloat16, device)
    with pytest.raises(ValueError, match="seq_lens_kv must be an int32 tensor"):
        cudnn_ops.paged_plan(t.query, t.key_cache, t.seq_lens_kv.long())
    offsets = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="cu_seqlens_q must be an int32 or int64 tensor"):
        cudnn_ops.paged_plan(t.query, t.key_cache, t.seq_lens_kv, cu_seqlens_q=offsets)
    with pytest.raises(TypeError, match=r"window_size must be \(left, right\)"):
        cudnn_ops.paged_plan(t.query, t.key_cache, t.seq_lens_kv, window_size=5)
    with pytest.raises(TypeError, match="seq_lens_kv must be a tensor"):
        cudnn_ops.paged_plan(t.query, t.key_cache, [1, 2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(64, 128), (24, 7)], ids=str)
@pytest.mark.parametrize("head_major", [False, True])
def test_append(dtype, sizes, head_major, device):
    """To the nearest number, ties to even, saturating; NaN stays NaN; nothing else is written."""
    generator = torch.Generator().manual_seed(0)
    pages, page_size, heads, tokens = 7, 5, 3, 20
    inside = (heads, page_size) if head_major else (page_size, heads)
    caches = [torch.full((pages, *inside, size), 1.5, device=device).to(FP8) for size in sizes]
    together = torch.randn(tokens, heads, sum(sizes), generator=generator) * 100
    together[0, :, :6] = torch.tensor([torch.nan, torch.inf, -1e9, 464.0, 2**-10, 1.0625])
    together[1, :, -3:] = torch.tensor([-torch.inf, 500.0, 2**-9])
    key, value = together.to(device, dtype).split(sizes, -1)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens].to(device)
    slots[3] = -1
    descale_k, descale_v = torch.tensor([0.5, 2.0, 3.0]).to(device), torch.tensor(0.25).to(device)
    layout = "HND" if head_major else "NHD"
    cudnn_ops.paged_kv_append_(
        *caches, key, value, slots, kv_layout=layout, descale_k=descale_k, descale_v=descale_v
    )
    numbers = torch.arange(0, 127, dtype=torch.uint8).view(FP8).double()
    for cache, new, descale in ((caches[0], key, descale_k), (caches[1], value, descale_v)):
        by_token = cache.transpose(1, 2) if head_major else cache
        found = by_token.float().double().cpu().flatten(0, 1)
        scaled = new.float().cpu() * descale.cpu().reciprocal().reshape(-1, 1)
        expected = torch.full_like(found, 1.5)
        # Where two are as near, the one whose last bit is 0.
        distances = (scaled.double().abs().clamp(max=448)[..., None] - numbers).abs()
        odd = torch.arange(127) % 2 * 1e-12
        nearest = numbers[(distances + odd).argmin(-1)].copysign(scaled.double())
        nearest = nearest.masked_fill(scaled.isnan(), torch.nan)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = nearest[token]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [DECODE, SPECULATE, PREFILL], ids=str)
def test_opcheck(case, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    t = make(case, dtype, device)
    packed = t.options.get("cu_seqlens_q")
    queries = t.options["max_seqlen_q"] if case.packed else t.query.shape[1]
    told = (packed, queries, 2, t.options["is_causal"], [-1, -1], True)
    torch.library.opcheck(_ops._paged_plan.default, (t.seq_lens_kv, *told))
    tolerance = 2e-2 if device == "cuda" else None
    options = t.options | {"plan": plan_of(t)}
    for op in (_ops.paged_attention, _ops.paged_attention_with_lse):
        torch.library.opcheck(
            *(op.default, t.arguments, options),
            test_utils=CHECKS,
            rtol=tolerance,
            atol=tolerance,
        )


def test_decompositions():
    """Both operators by torch's own: none of ours is left, and results are equal."""
    t = make(PREFILL, torch.bfloat16, "cpu")

    def both(query, keys, values, table, lengths):
        options = t.options | {"plan": plan_of(replace(t, query=query, seq_lens_kv=lengths))}
        return _ops.paged_attention_with_lse(query, keys, values, table, lengths, **options)

    graph = make_fx(both, cudnn_ops.decompositions())(*t.arguments)
    assert not [node for node in graph.graph.nodes if "cudnn_ops" in str(node.target)]
    for found, expected in zip(graph(*t.arguments), both(*t.arguments), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_in_one_compiled_graph(device):
    """The caches are changed in place, and read after that by two layers under one plan."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def step(query, key, value, key_cache, value_cache, slots, table, lengths, descale):
        cudnn_ops.paged_kv_append_(
            key_cache, value_cache, key.sin(), value, slots, descale_k=descale, descale_v=descale
        )
        plan = cudnn_ops.paged_plan(query, key_cache, lengths)
        rest = {"descale_k": descale, "descale_v": descale, "plan": plan}
        for _ in range(2):
            query = cudnn_ops.paged_attention(
                query * 2, key_cache, value_cache, table, lengths, **rest
            )
        return query.relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (5, 7):
        torch.manual_seed(batch)
        query = torch.randn(batch, 1, 4, 64, device=device, dtype=dtype)
        key, value = (torch.randn(batch, 2, 64, device=device, dtype=dtype) for _ in range(2))
        caches = [torch.randn(30, 16, 2, 64, device=device).to(FP8) for _ in range(2)]
        others = [cache.clone() for cache in caches]
        table = torch.randperm(30, device=device)[: batch * 3].view(batch, 3).int()
        lengths = torch.randint(1, 48, (batch,), device=device).int()
        last = (lengths - 1).long()
        slots = table.long().gather(1, (last // 16).unsqueeze(1)).squeeze(1) * 16 + last % 16
        descale = torch.tensor([0.01, 0.02], device=device)
        expected = step(query, key, value, *caches, slots, table, lengths, descale)
        actual = compiled(query, key, value, *others, slots, table, lengths, descale)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        for cache, other in zip(caches, others, strict=True):
            torch.testing.assert_close(cache.float(), other.float(), rtol=0.13, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_own_descales", [False, True])
def test_vmap(has_own_descales, device):
    """Samples of queries over one cache, with a plan that is of one of them alone."""
    t = make(SPECULATE, torch.bfloat16, device)
    queries = torch.stack([t.query, t.query * 0.5, -t.query])
    descales = t.options["descale_k"] * torch.tensor([[1.0], [2.0], [0.5]], device=device)
    plan = plan_of(t)

    def attend(query: Tensor, descale: Tensor) -> Tensor:
        options = t.options | {"descale_k": descale, "plan": plan}
        return _ops.paged_attention_with_lse(query, *t.arguments[1:], **options)

    given = descales if has_own_descales else descales[0]
    found = torch.vmap(attend, in_dims=(0, 0 if has_own_descales else None))(queries, given)
    each = [attend(q, descales[i if has_own_descales else 0]) for i, q in enumerate(queries)]
    for result, parts in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts), rtol=1e-2, atol=1e-3)
    lengths = torch.stack([t.seq_lens_kv, t.seq_lens_kv + 1])
    plans = torch.vmap(lambda x: cudnn_ops.paged_plan(t.query, t.key_cache, x))(lengths)
    assert torch.equal(plans[1], cudnn_ops.paged_plan(t.query, t.key_cache, lengths[1]))


def test_explain_says_that_a_kernel_of_ours_runs():
    query, cache = ((4, 1, 8, 128), torch.bfloat16), ((100, 16, 2, 128), FP8)
    answer = explain("paged_attention", query, cache, page_table=(4, 20), device="h200")
    assert answer.supported
    assert answer.engine == "cudnn_ops"
    assert "cuDNN does not decode caches of 8 bits" in answer.reason
    wide = [((4, 1, 8, 256), torch.bfloat16), ((100, 16, 2, 256), FP8)]
    answer = explain("paged_attention", *wide, page_table=(4, 20), device="h200")
    assert not answer.supported
    assert "head sizes 64 and 128" in answer.reason


def test_caches_have_descales_of_each_layer():
    sizes = (2, 8, 4, 3, 16)
    each, one = torch.rand(2, 3) + 0.5, torch.rand(2) + 0.5
    cache = cudnn_ops.PagedKVCache(*sizes, dtype=FP8, device="cpu", descale_k=each, descale_v=one)
    key = torch.randn(5, 3, 16)
    for layer in range(2):
        cache.append(layer, key, key, torch.arange(5))
        descales = cache.descales(layer)
        assert torch.equal(descales["descale_k"], each[layer])
        stored = cache.key_cache(layer).float().flatten(0, 1)[:5] * each[layer][:, None]
        torch.testing.assert_close(stored, key, rtol=2**-4, atol=2**-9)
        stored = cache.value_cache(layer).float().flatten(0, 1)[:5] * one[layer]
        torch.testing.assert_close(stored, key, rtol=2**-4, atol=2**-9)
    assert cudnn_ops.PagedKVCache(*sizes, dtype=FP8, device="cpu").descales(1) == {}
    with pytest.raises(ValueError, match=r"descale_k must be float32 \[layers\], \[2\], or"):
        cudnn_ops.PagedKVCache(*sizes, dtype=FP8, device="cpu", descale_k=torch.ones(3))
    with pytest.raises(ValueError, match="descale_v belongs to a cache of float8_e4m3fn"):
        cudnn_ops.PagedKVCache(*sizes, dtype=torch.half, device="cpu", descale_v=one)


class TableModel:
    """Whose keys and values are numbers of E4M3 times a power of 2, so that nothing is rounded."""

    def __init__(self, device: str) -> None:
        self.size = 64 if device == "cuda" else 8
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(5)
        numbers = torch.randint(-8, 9, (3, 50, 4 * self.size), generator=generator) / 8
        self.queries, self.keys, self.values = numbers.to(device, dtype)

    def __call__(self, tokens, positions, last, attend):
        hidden = 0
        for layer, window in enumerate(((-1, -1), (9, 0))):
            query = self.queries[tokens].unflatten(1, (4, self.size))
            key, value = (
                x[tokens, : 2 * self.size].unflatten(1, (2, self.size))
                for x in (self.keys, self.values)
            )
            out = attend(layer, query, key.roll(layer, -1), value, window_size=window)
            hidden = hidden + out.flatten(1).float()
        return hidden[last] @ self.queries.float().T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_generation(kv_layout, device):
    """Prompts in chunks, decoding and draft tokens give what a cache of 16 or 32 bits gives."""
    model = TableModel(device)
    prompts = [[(7 * i + j) % 50 for j in range(1 + 9 * i)] for i in range(6)]
    results = []
    powers = torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    for dtype, descales in (
        (model.keys.dtype, {}),
        (FP8, {}),
        (FP8, {"descale_k": powers, "descale_v": powers[0]}),
    ):
        cache = cudnn_ops.PagedKVCache(
            *(2, 64, 16, 2, model.size),
            dtype=dtype,
            device=device,
            kv_layout=kv_layout,
            **descales,
        )
        engine = Engine(
            model,
            cache,
            max_batch=4,
            chunk=20,
            max_length=96,
            speculation=cudnn_ops.generation.PromptLookup(3),
        )
        requests = [engine.submit(prompt, SamplingParams(12)) for prompt in prompts]
        for _ in engine.run():
            pass
        results.append([request.output for request in requests])
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_a_number_as_descale_of_what_is_appended():
    cache, new = torch.zeros(2, 16, 2, 64).to(FP8), torch.ones(1, 2, 64)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match="paged_kv_append_: descale_k must be a tensor or None"):
        cudnn_ops.paged_kv_append_(cache, cache.clone(), new, new, slots, descale_k=1.0)
