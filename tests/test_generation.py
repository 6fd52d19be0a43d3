"""The generation engine: against generation without a cache, under preemption, with errors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from cudnn_ops import _C, OutOfPages
from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.serving.model_runner import padded_batch
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
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("overlap")

# Greedy


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_is_generation_without_a_cache(device):
    """200 requests that come when they like, in a cache that is too small for those running."""
    unit = SETUPS[device].page_size
    engine = make_engine(device, pages=28)
    draw = random.Random(1)
    jobs = [
        (prompt, SamplingParams(max_tokens=draw.randint(1, 5 * unit)))
        for prompt in make_prompts(200, unit)
    ]
    requests = serve_at_random(engine, jobs)

    stats = engine.stats
    assert stats.preemptions > 10
    assert stats.prefix_hits > 500
    assert stats.preemptions == sum(request.stats.preemptions for request in requests)
    assert stats.prefix_hits == sum(request.stats.prefix_hits for request in requests)
    assert stats.finished == 200
    assert stats.output_tokens == sum(params.max_tokens for _, params in jobs)
    assert (stats.replays > 0) == (device == "cuda")
    assert 20 < stats.peak_pages <= 28
    assert engine.cache.usage().in_use == engine.cache.usage().sequences == 0
    model = make_model(device)
    for request, (prompt, params) in zip(requests, jobs, strict=True):
        assert request.prompt == prompt
        assert request.finish_reason == "length"
        assert len(request.output) == params.max_tokens
        if device == "cpu":
            assert request.output == generate_alone(model, prompt, params.max_tokens)
    check_likeliest(model, requests if device == "cuda" else requests[:20])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sharing", [True, False])
def test_caches_of_every_kind(device, layout, sharing):
    unit = SETUPS[device].page_size
    model = make_model(device)
    cache = make_cache(device, 40, kv_layout=layout, prefix_sharing=sharing)
    engine = Engine(model.serve, cache, max_batch=4, chunk=2 * unit)
    requests = [engine.submit(p, SamplingParams(12)) for p in make_prompts(10, unit, seed=3)]
    finished = list(engine.run())
    assert set(finished) == set(requests)
    check_likeliest(model, finished)
    assert (engine.stats.prefix_hits > 0) == sharing


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("max_batch", [1, 5])
def test_greedy_does_not_depend_on_chunks_and_batches(chunk, max_batch):
    engine = make_engine("cpu", 60, chunk=chunk, max_batch=max_batch)
    prompts = make_prompts(8, 4, seed=5)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
    list(engine.run())
    model = make_model("cpu")
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == generate_alone(model, prompt, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_warming_up_touches_nothing(device):
    engine = make_engine(device, 40)
    for layer in range(2):
        engine.cache.key_cache(layer).fill_(7)
    engine.warm_up()
    assert all(bool((engine.cache.key_cache(layer) == 7).all()) for layer in range(2))
    assert engine.stats.steps == engine.stats.replays == 0
    assert engine.cache.usage().in_use == 0
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    list(engine.run())
    check_likeliest(make_model(device), [request])


# Ends


def test_stop_tokens_end_a_request():
    model = make_model("cpu")
    prompt = make_prompts(1, 4, seed=9)[0]
    alone = generate_alone(model, prompt, 40)
    stop = alone[4]
    engine = make_engine("cpu", 60)
    stopped = engine.submit(prompt, SamplingParams(max_tokens=40, stop_tokens={stop, 1000}))
    unmoved = engine.submit(prompt, SamplingParams(max_tokens=40, stop_tokens=[1000]))
    assert list(engine.run()) == [stopped, unmoved]
    assert stopped.output == alone[: alone.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert unmoved.output == alone
    assert unmoved.finish_reason == "length"
    assert engine.cache.usage().in_use == 0


def test_a_stop_token_that_is_the_last_one_stops():
    prompt = [3, 4, 5]
    first = generate_alone(make_model("cpu"), prompt, 1)[0]
    engine = make_engine("cpu", 60)
    request = engine.submit(prompt, SamplingParams(max_tokens=1, stop_tokens=[first]))
    list(engine.run())
    assert (request.output, request.finish_reason) == ([first], "stop")


def test_requests_may_come_while_others_are_served():
    engine = make_engine("cpu", 60)
    first = engine.submit([1, 2, 3], SamplingParams(max_tokens=8))
    served = []
    for request in engine.run():
        served.append(request)
        if request is first:
            second = engine.submit([1, 2, 3, 4], SamplingParams(max_tokens=2))
    assert served == [first, second]
    engine.submit([9], SamplingParams(max_tokens=30))
    engine.step()
    late = engine.submit([1, 2], SamplingParams(max_tokens=3))
    assert next(engine.run()) is late
    assert engine.running == 1
    list(engine.run())
    assert engine.step() == []


def test_aborting_a_request():
    """One that runs, one in its prompt, one that waits, one that is over; the others go on."""
    engine = make_engine("cpu", 60, max_batch=3, chunk=8)
    prompts = [[1, 2, 3], list(range(30)), [4, 5], [6, 7], [8, 9]]
    running, computing, other, waiting, late = (
        engine.submit(prompt, SamplingParams(max_tokens=6)) for prompt in prompts
    )
    engine.step()
    assert (engine.running, engine.waiting) == (2, 3)
    for request in (running, computing, waiting):
        engine.abort(request)
        assert request.finish_reason == "abort"
        assert request.is_finished
        assert request.stats.seconds is not None
    assert (engine.running, engine.waiting) == (0, 2)
    assert engine.cache.usage().in_use == 0
    assert len(running.output) == 1
    assert set(engine.run()) == {other, late}
    engine.abort(other)
    assert other.finish_reason == "length"
    model = make_model("cpu")
    assert other.output == generate_alone(model, other.prompt, 6)
    assert late.output == generate_alone(model, late.prompt, 6)
    assert (engine.stats.finished, engine.stats.aborted) == (2, 3)
    stranger = make_engine("cpu", 60).submit([1])
    with pytest.raises(ValueError, match="request must be one of this engine, got Request"):
        engine.abort(stranger)


# The schedule


def steps_of(engine: Engine) -> Callable[[], list[int]]:
    """A function that makes a step and tells how many tokens it computed of each share."""
    schedule = engine._scheduler.schedule
    seen: list[list[int]] = []

    def recorded():
        batch = schedule()
        seen.append([share.stop - share.start for share in batch.shares])
        return batch

    engine._scheduler.schedule = recorded  # type: ignore[method-assign]

    def step():
        engine.step()
        return seen[-1]

    return step


def test_prompts_are_computed_in_chunks_beside_decoding():
    engine = make_engine("cpu", 60, chunk=8, overlap=False)
    step = steps_of(engine)
    engine.submit(range(3), SamplingParams(max_tokens=30))
    assert step() == [3]
    engine.submit(range(20, 40), SamplingParams(max_tokens=30))
    engine.submit(range(40, 46), SamplingParams(max_tokens=30))
    assert [step() for _ in range(5)] == [
        [1, 8],
        [8, 1],  # what is there of a request decides: the longest come first
        [4, 1, 4],
        [1, 1, 2],
        [1, 1, 1],
    ]


def test_a_beginning_that_is_being_computed_is_waited_for():
    engine = make_engine("cpu", 60, chunk=64, overlap=False)
    step = steps_of(engine)
    shared = list(range(12))
    for end in ([20, 21], [30], [40, 41, 42]):
        engine.submit(shared + end, SamplingParams(max_tokens=3))
    assert step() == [14]
    assert step() == [1, 1, 3]
    assert engine.stats.prefix_hits == 24


def test_what_is_not_shared_waits_for_nobody():
    engine = make_engine("cpu", 60, chunk=64)
    step = steps_of(engine)
    for prompt in ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5], [1, 2, 3, 4]):
        engine.submit(prompt, SamplingParams(max_tokens=3))
    assert step() == [5, 5, 4]


def test_the_youngest_is_preempted_and_comes_back_first():
    engine = make_engine("cpu", pages=8)
    old, young, late = (
        engine.submit([token] * 7, SamplingParams(max_tokens=17)) for token in (1, 2, 3)
    )
    finished = list(engine.run())
    assert finished == [old, young, late]
    assert old.stats.preemptions == 0
    assert young.stats.preemptions > 0
    assert engine.cache.usage().in_use == 0


def test_a_request_as_large_as_the_cache():
    engine = make_engine("cpu", pages=6)
    prompt = list(range(14))
    request = engine.submit(prompt, SamplingParams(max_tokens=10))
    others = [engine.submit([7] * 10, SamplingParams(max_tokens=14)) for _ in range(3)]
    assert set(engine.run()) == {request, *others}
    assert request.output == generate_alone(make_model("cpu"), prompt, 10)
    assert request.stats.peak_pages == 6 == engine.stats.peak_pages


# Errors


def test_pages_that_others_hold_are_missing():
    engine = make_engine("cpu", pages=6)
    other = engine.cache.allocate()
    engine.cache.extend(other, 16)
    request = engine.submit([1] * 6, SamplingParams(max_tokens=10))
    with pytest.raises(OutOfPages):
        list(engine.run())
    assert 0 < len(request.output) < 10
    waiting = engine.submit([2] * 9, SamplingParams(max_tokens=1))
    engine.cache.free(other)
    assert list(engine.run()) == [request, waiting]
    assert request.output == generate_alone(make_model("cpu"), [1] * 6, 10)
    assert engine.cache.usage().in_use == 0


def test_nothing_is_admitted_where_others_hold_all_pages():
    engine = make_engine("cpu", pages=6)
    other = engine.cache.allocate()
    engine.cache.extend(other, 24)
    engine.submit([1] * 6, SamplingParams(max_tokens=3))
    with pytest.raises(OutOfPages):
        engine.step()
    assert (engine.running, engine.waiting) == (0, 1)
    assert engine.cache.usage().sequences == 1
    engine.cache.free(other)
    assert len(list(engine.run())) == 1


def test_a_step_that_failed_can_be_made_again():
    model, failing = make_model("cpu"), [False]

    def serve(tokens, positions, last, attend):
        if failing[0]:
            attend(0, *(torch.full((len(tokens), heads, 8), 9.0) for heads in (4, 2, 2)))
            raise RuntimeError("no luck")
        return model.serve(tokens, positions, last, attend)

    engine = Engine(serve, make_cache("cpu", 40), max_batch=4, chunk=8)
    prompts = make_prompts(4, 4, seed=11)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=1))
        for prompt in prompts
    ]
    run_failing_every_other_step(engine, failing)
    undisturbed = make_engine("cpu", 60)
    expected = [undisturbed.submit(request.prompt, request.params) for request in requests]
    list(undisturbed.run())
    assert [r.output for r in requests] == [r.output for r in expected]
    assert engine.cache.usage().in_use == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 4, "prompt must have at least one token"),
        (["a"], 4, "prompt must be a sequence of token ids"),
        ([1.5], 4, "prompt must be a sequence of token ids"),
        ([3, -1], 4, "prompt must be a sequence of token ids"),
        ([1 << 63], 4, "prompt must be a sequence of token ids"),
        ([1] * 37, 4, r"37 \+ 4 tokens, and a request has room for 40"),
        ([1], 40, r"1 \+ 40 tokens"),
    ],
)
def test_prompts_that_cannot_be_served(prompt, max_tokens, sentence):
    engine = make_engine("cpu", pages=10)
    with pytest.raises(ValueError, match=sentence):
        engine.submit(prompt, SamplingParams(max_tokens=max_tokens))
    assert engine.waiting == 0


def test_the_model_has_an_end_too():
    engine = make_engine("cpu", pages=100)
    with pytest.raises(ValueError, match="room for 96"):
        engine.submit([1] * 90, SamplingParams(max_tokens=7))
    engine.submit([1] * 90, SamplingParams(max_tokens=6))
    assert len(next(engine.run()).output) == 6


@pytest.mark.parametrize("option", [{"max_batch": 0}, {"chunk": -1}, {"max_length": 1.5}], ids=str)
def test_engine_options_out_of_range(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))} must be a whole number"):
        make_engine_of(**option)


def make_engine_of(**option) -> Engine:
    return Engine(make_model("cpu").serve, make_cache("cpu", 10), **option)


def test_options_that_are_not_there():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="batch"):
        make_engine_of(batch=3)


# Figures


def test_figures_of_a_request():
    engine = make_engine("cpu", 60)
    first = engine.submit(range(9), SamplingParams(max_tokens=6))
    assert first.stats.time_to_first_token is first.stats.seconds is None
    assert "waiting" in repr(first)
    engine.step()
    assert "running" in repr(first)
    list(engine.run())
    second = engine.submit(range(9), SamplingParams(max_tokens=6))
    list(engine.run())
    assert first.stats.prompt_tokens == 9
    assert first.stats.output_tokens == 6
    assert first.stats.prefix_hits == 0
    assert second.stats.prefix_hits == 8
    assert first.stats.peak_pages == 4  # for 14 tokens: the last one is not stored
    assert 0 < first.stats.time_to_first_token < first.stats.seconds
    assert first.stats.tokens_per_second == 6 / first.stats.seconds
    assert engine.stats.steps == 12
    assert engine.stats.computed_tokens == 9 + 5 + 1 + 5
    assert engine.stats.tokens_per_second == 12 / engine.stats.seconds


def test_batches_are_padded_to_what_plans_are_declared_for():
    sizes = [padded_batch(batch) for batch in range(1, 18)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
    cache = torch.empty(9, 16, 2, 64, device="meta", dtype=torch.float16)
    for batch in (*range(1, 70), 1000):
        query = torch.empty(batch, 1, 2, 64, device="meta", dtype=torch.float16)
        table = torch.empty(batch, 4, device="meta", dtype=torch.int32)
        words = torch.ops.cudnn_ops._paged_plan_key(query, cache, cache, table, table[:, 0])
        assert f"page_table=Int[{padded_batch(batch)}, 1, 4, 1]" in _C.describe_plan(words)
