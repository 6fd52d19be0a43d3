"""Preemption by swapping: pages go to the host and come back, and nothing else is different."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cudnn_ops import PagedKVCache
from cudnn_ops.generation import Engine, PromptLookup, Request, SamplingParams
from cudnn_ops.serving.swap import Rates, Swapper, SwapSpace
from tests.cases.generation import (
    SETUPS,
    check_likeliest,
    generate_alone,
    make_cache,
    make_engine,
    make_model,
    make_prompts,
    run_failing_every_other_step,
    serve_at_random,
)
from tests.cases.speculation import check_cache
from tests.conftest import DEVICES

#: More than is ever swapped.
SIZE = 64 << 20


def page_bytes(cache: PagedKVCache) -> int:
    keys, values = cache.key_cache(0), cache.value_cache(0)
    return cache.layers * (keys[0].numel() + values[0].numel()) * keys.element_size()


def swapper_of(engine: Engine) -> Swapper:
    assert engine._swapper is not None
    return engine._swapper


def check_host(engine: Engine) -> None:
    """All pages of the host are free, each once."""
    space = swapper_of(engine).space
    assert sorted(space.free) == list(range(space.pages))


def jobs_of(count: int, unit: int, draws: int, **params: Any):
    draw = random.Random(draws)
    return [
        (prompt, SamplingParams(max_tokens=draw.randint(1, 5 * unit), **params))
        for prompt in make_prompts(count, unit, draws)
    ]


# The engine


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["swap", "auto"])
def test_greedy_is_generation_without_a_cache(device, policy):
    unit = SETUPS[device].page_size
    engine = make_engine(device, pages=22, preemption=policy, swap_bytes=SIZE)
    jobs = jobs_of(80, unit, 20)
    requests = serve_at_random(engine, jobs)
    stats = engine.stats
    assert stats.preemptions > 2
    if policy == "swap":
        assert stats.swaps == stats.preemptions
        assert stats.restored_tokens > 0
    assert stats.restored_tokens == sum(each.stats.restored_tokens for each in requests)
    assert (stats.replays > 0) == (device == "cuda")
    check_cache(engine, requests)
    check_host(engine)
    model = make_model(device)
    if device == "cpu":
        for request, (prompt, params) in zip(requests, jobs, strict=True):
            assert request.output == generate_alone(model, prompt, params.max_tokens)
    check_likeliest(model, requests if device == "cuda" else requests[:10])


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_every_kind(sharing, layout):
    """And with drafts, some of which are in the pages."""
    model = make_model("cpu")
    cache = make_cache("cpu", 26, prefix_sharing=sharing, kv_layout=layout)
    options: dict[str, Any] = {
        "max_batch": 6,
        "chunk": 20,
        "preemption": "swap",
        "swap_bytes": SIZE,
    }
    engine = Engine(model.serve, cache, speculation=PromptLookup(3, 2, 1), **options)
    jobs = jobs_of(40, 4, 3)
    requests = serve_at_random(engine, jobs)
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, request.params.max_tokens)
    assert engine.stats.swaps > 0
    assert engine.stats.restored_tokens > 0
    check_host(engine)
    assert cache.usage().in_use == 0


def test_nothing_is_computed_twice():
    """Without prefix caching, what is swapped is all that would be computed again."""
    computed, outputs = [], []
    for policy in ("recompute", "swap"):
        cache = make_cache("cpu", 12, prefix_sharing=False)
        engine = Engine(make_model("cpu").serve, cache, preemption=policy, swap_bytes=SIZE)
        params = SamplingParams(max_tokens=18)
        requests = [engine.submit([token] * 9, params) for token in (1, 2, 3)]
        list(engine.run())
        assert engine.stats.preemptions > 0
        computed.append(engine.stats.computed_tokens)
        outputs.append([request.output for request in requests])
    assert computed[1] == 3 * (9 + 17) < computed[0]
    assert outputs[0] == outputs[1]
    assert engine.stats.swaps == engine.stats.preemptions


def test_pages_that_others_hold_stay():
    """The common beginning of two requests is not copied, and found again."""
    engine = make_engine("cpu", pages=15, preemption="swap", max_batch=2, chunk=64)
    swapper = swapper_of(engine)
    saved: list[int] = []
    save = swapper.space.save
    swapper.space.save = lambda pages: saved.append(len(pages)) or save(pages)
    shared = list(range(24))
    requests = [engine.submit([*shared, token], SamplingParams(max_tokens=19)) for token in (1, 2)]
    list(engine.run())
    assert engine.stats.swaps > 0
    assert max(saved) <= 5  # of 11: the first 6 are shared
    model = make_model("cpu")
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 19)
    check_host(engine)


def test_what_was_not_copied_may_be_gone():
    """Then the request is computed again."""
    engine = make_engine("cpu", pages=15, preemption="swap", max_batch=2, chunk=64)
    shared = list(range(24))
    old, young = (
        engine.submit([*shared, token], SamplingParams(max_tokens=19)) for token in (1, 2)
    )
    while young.kept is None:
        engine.step()
    assert young.kept.first == 6
    engine.abort(old)
    other = engine.cache.allocate()
    engine.cache.extend(other, 60)  # evicts all that is known
    engine.cache.free(other)
    list(engine.run())
    assert young.stats.restored_tokens == 0
    assert young.output == generate_alone(make_model("cpu"), young.prompt, 19)
    check_host(engine)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("pages", [0, 1, 3, 9])
def test_the_host_has_an_end_too(pages):
    cache = make_cache("cpu", 26)
    size = pages * page_bytes(cache) + 1
    model = make_model("cpu")
    engine = Engine(model.serve, cache, max_batch=6, chunk=20, preemption="swap", swap_bytes=size)
    assert swapper_of(engine).space.pages == pages
    jobs = jobs_of(40, 4, 3)
    requests = serve_at_random(engine, jobs)
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, request.params.max_tokens)
    assert engine.stats.swaps < engine.stats.preemptions or pages == 9
    assert (engine.stats.swaps > 0) == (pages > 1)
    check_host(engine)


def test_sampling_goes_on_where_it_was():
    outputs = []
    for options in ({"pages": 200}, {"pages": 26, "preemption": "swap", "swap_bytes": SIZE}):
        engine = make_engine("cpu", **options)
        jobs = jobs_of(30, 4, 3, temperature=1.0, seed=1, repetition_penalty=1.2)
        outputs.append([request.output for request in serve_at_random(engine, jobs)])
    assert outputs[0] == outputs[1]
    assert engine.stats.swaps > 0


@pytest.mark.usefixtures("overlap")
def test_no_page_of_the_host_is_left_whatever_is_aborted():
    engine = make_engine("cpu", pages=20, preemption="swap", swap_bytes=SIZE)
    draw = random.Random(8)
    requests: list[Request] = []
    prompts = make_prompts(100, 4, seed=8)
    dropped = 0
    while prompts or engine.running or engine.waiting:
        for prompt in [prompts.pop() for _ in range(min(len(prompts), draw.choice([0, 1, 4])))]:
            requests.append(engine.submit(prompt, SamplingParams(max_tokens=draw.randint(1, 25))))
        engine.step()
        if draw.random() < 0.3:
            swapped = [each for each in engine._scheduler.waiting if each.kept is not None]
            request = draw.choice(swapped or requests)
            dropped += request.kept is not None
            engine.abort(request)
        held = [each.kept for each in engine._scheduler.waiting if each.kept is not None]
        assert swapper_of(engine).used == sum(len(each.held) for each in held)
    assert dropped > 0
    check_cache(engine, requests)
    check_host(engine)


@pytest.mark.usefixtures("overlap")
def test_a_step_that_failed_can_be_made_again():
    model, failing = make_model("cpu"), [False]

    def serve(tokens, positions, last, attend):
        logits = model.serve(tokens, positions, last, attend)
        if failing[0]:
            raise RuntimeError("no luck")
        return logits

    cache = make_cache("cpu", 16)
    engine = Engine(serve, cache, max_batch=4, chunk=8, preemption="swap", swap_bytes=SIZE)
    requests = [
        engine.submit(prompt[:40], SamplingParams(max_tokens=20))
        for prompt in make_prompts(8, 4, seed=11)
    ]
    run_failing_every_other_step(engine, failing)
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 20)
    assert engine.stats.restored_tokens > 0
    check_cache(engine, requests)
    check_host(engine)


# The choice


def test_the_faster_one_is_chosen():
    cache = make_cache("cpu", 26)
    swapper = Swapper(cache, "auto", 1 << 20)
    sequence = cache.allocate()
    cache.extend(sequence, 20)
    copied = 2 * 5 * page_bytes(cache)
    for rates, is_copied in (
        (Rates(20, copied), False),  # a second each
        (Rates(20, copied + 1), True),
        (Rates(21, copied), False),
        (Rates(19, copied), True),
    ):
        swapper.rates = rates
        kept = swapper.save(sequence)
        assert (kept is not None) == is_copied
        if kept is not None:
            assert (kept.first, kept.length) == (0, 20)
            kept.drop()
    assert swapper.used == 0


def test_rates_are_measured():
    engine = make_engine("cpu", 14, chunk=8, preemption="swap", swap_bytes=SIZE)
    for token in (1, 2, 3):
        engine.submit([token] * 17, SamplingParams(max_tokens=20))
    swapper = swapper_of(engine)
    first = swapper.rates
    list(engine.run())
    assert engine.stats.swaps > 0
    assert len(swapper._computing) > 3
    assert len(swapper.space.rates) > 1
    assert swapper.measure() != first


def test_options_out_of_range():
    with pytest.raises(ValueError, match='preemption must be "recompute", "swap" or "auto", got 1'):
        make_engine("cpu", 9, preemption=1)
    with pytest.raises(ValueError, match="swap_bytes must be a whole number, at least 0, got -1"):
        make_engine("cpu", 9, preemption="swap", swap_bytes=-1)


# The copies


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("piece", [1, 3, 64])
def test_pages_are_copied_there_and_back(device, dtype, piece, monkeypatch):
    """In pieces, to places that are neighbours and to some that are not."""
    cache = PagedKVCache(
        *(3, 40, 4, 2, 8), value_size=24, dtype=dtype, device=device, kv_layout="HND"
    )
    monkeypatch.setattr("cudnn_ops.serving.swap._PIECE", piece * page_bytes(cache))
    space = SwapSpace(cache, 20 * page_bytes(cache))
    everything = cache.by_page()
    for part in everything:
        part.random_(0, 100)
    before = [part.clone() for part in everything]
    draw = random.Random(0)
    kept: list[tuple[list[int], list[int]]] = []
    inside = set(range(40))
    for _ in range(200):
        pages = draw.sample(sorted(inside), min(len(inside), draw.randint(1, 8)))
        if len(pages) <= len(space.free) and draw.random() < 0.6:
            kept.append((space.save(pages), pages))
            inside -= set(pages)
            for part in everything:
                part[pages] = 0
        elif kept:
            held, pages = kept.pop(draw.randrange(len(kept)))
            space.load(held, pages)
            space.free.extend(held)
            inside |= set(pages)
    for held, pages in kept:
        space.load(held, pages)
    for part, right in zip(everything, before, strict=True):
        assert torch.equal(part, right)
    space.measure()
    assert len(space.rates) > 0
