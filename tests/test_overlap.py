"""Overlapped steps: the same tokens as one by one, and a plan that needs none of them."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from cudnn_ops.generation import DraftModel, Engine, PromptLookup, Request, SamplingParams
from cudnn_ops.serving.choosing import Chosen
from tests.cases.generation import generate_alone, make_cache, make_engine, make_model, make_prompts
from tests.cases.overlap import decode, jobs_of_every_kind, serve_all
from tests.cases.sampling import cycle
from tests.cases.sampling import make_engine as make_table_engine
from tests.cases.speculation import check_cache
from tests.conftest import DEVICES

# The same tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_random_schedules_change_no_output(seed, preemption):
    """Of every option; with priorities, preemption, aborts, timeouts and warming up in between."""
    jobs = jobs_of_every_kind(seed)
    alone = make_engine("cpu", 400, decode=decode, max_batch=44, overlap=False)
    expected = [alone.submit(*job) for job in jobs]
    list(alone.run())
    engine = make_engine(
        *("cpu", 24), decode=decode, overlap=True, preemption=preemption, swap_bytes=64 << 20
    )
    draw = random.Random(seed)
    requests: list[Request] = []
    told: dict[Request, list[int]] = {}
    while len(requests) < len(jobs) or engine.running or engine.waiting:
        for job in jobs[len(requests) : len(requests) + draw.choice([0, 0, 1, 4])]:
            requests.append(engine.submit(*job, priority=draw.choice([0, 0, 0, 1]), timeout=1e6))
        for request, token in engine.step():
            told.setdefault(request, [])
            if token is not None:
                told[request].append(token)
        assert engine.running <= engine.max_batch
        chance = draw.random()
        if chance < 0.03 and requests:
            engine.abort(draw.choice(requests))
        elif chance < 0.06 and engine.running:
            draw.choice(engine._scheduler.running)._timeout = 0.0
        elif chance < 0.08:
            engine.warm_up()
    reasons = set()
    for request, right in zip(requests, expected, strict=True):
        reasons.add(request.finish_reason)
        assert told.get(request, []) == request.output
        if request.finish_reason in ("abort", "timeout"):
            assert request.output == right.output[: len(request.output)]
            continue
        assert request.output == right.output
        assert request.finish_reason == right.finish_reason
        assert request.stopped_by == right.stopped_by
        assert request.text == right.text
        assert len(request.logprobs) == len(right.logprobs)
        for ours, theirs in zip(request.logprobs, right.logprobs, strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert reasons == {"stop", "length", "abort", "timeout"}
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.extra_tokens > 0
    assert stats.overlapped == round(stats.overlap_share * stats.steps) > stats.steps / 2
    check_cache(engine, requests)


def test_what_cannot_overlap_does_not():
    """Drafts need the tokens; the output is what it is."""
    prompts = make_prompts(10, 4, seed=2)
    draft = DraftModel(make_model("cpu").serve, make_cache("cpu", 40), 2)
    model = make_model("cpu")
    for speculation in (PromptLookup(3, 2, 1), draft):
        engine = make_engine("cpu", 60, speculation=speculation, overlap=True)
        assert not engine.overlap
        requests = [engine.submit(prompt, SamplingParams(9)) for prompt in prompts]
        list(engine.run())
        assert engine.stats.overlapped == engine.stats.extra_tokens == 0
        for request in requests:
            assert request.output == generate_alone(model, request.prompt, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_it_overlaps_where_the_device_works_beside_the_host(device):
    assert make_engine(device, 40).overlap == (device == "cuda")
    assert make_engine(device, 40, overlap=True).overlap
    assert not make_engine(device, 40, overlap=False).overlap
    with pytest.raises(ValueError, match="overlap must be None, True or False, got 1"):
        make_engine(device, 40, overlap=1)


def test_a_function_sees_the_whole_output():
    """Each time without a gap, and never that of a request that has ended."""
    calls: dict[bool, list[list[int]]] = {}
    for overlap in (False, True):
        seen = calls[overlap] = []

        def allowed(output: list[int], seen: list[list[int]] = seen) -> range:
            seen.append(output)
            return range(10)

        engine = make_table_engine(cycle(1, 2, 3, 4), overlap=overlap)
        options = {"stop_tokens": [3], "allowed_tokens": allowed}
        engine.submit([0], SamplingParams(9, **options))
        engine.submit([0], SamplingParams(5))
        assert [request.output for request in engine.run()] == [[1, 2, 3], [1, 2, 3, 4, 1]]
        assert (engine.stats.overlapped > 0) == overlap
    assert calls[True] == calls[False] == [[], [1], [1, 2]]


def test_a_failure_is_not_shared_with_its_prefix():
    """What begins like a request whose failure is not known yet must not take its pages."""
    model = make_model("cpu")

    def serve(tokens, positions, last, attend):
        def spoil(layer, query, key, value):
            # As masked attention: a NaN anywhere in the prompt is in all of its results.
            spoiled = bool((tokens == 63).any()) and layer == 1
            return attend(layer, query, *((torch.nan * x if spoiled else x) for x in (key, value)))

        return model.serve(tokens, positions, last, spoil)

    engine = Engine(serve, make_cache("cpu", 30), max_batch=2, chunk=8, overlap=True)
    shared = [8, 9, 10, 11]
    bad = engine.submit([*shared, 63, 1], SamplingParams(4))
    good = [engine.submit([*shared, token], SamplingParams(4)) for token in (5, 6)]
    assert list(engine.run()) == [bad, *good]
    assert "are not finite" in str(bad.error)
    for request in good:
        assert request.output == generate_alone(model, request.prompt, 4)
    assert engine.cache.value_cache(1).isfinite().all()
    check_cache(engine, [bad, *good])


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_the_same_on_every_device(device):
    outputs = [serve_all(make_engine(device, 60, overlap=overlap)) for overlap in (False, True)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("device", DEVICES)
def test_warming_up_between_two_steps(device):
    """The graphs write where the logits of the step that is queued are."""
    expected = serve_all(make_engine(device, 60, overlap=True))
    engine = make_engine(device, 60, overlap=True)
    step, steps = engine.step, itertools.count()

    def warmed_up():
        if next(steps) % 7 == 3:
            engine.warm_up()
        return step()

    engine.step = warmed_up
    assert serve_all(engine) == expected


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("end", ["stop", "abort", "warm up and abort"])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_what_is_computed_in_vain_is_not_read(end, length, layout):
    """The token behind the end makes keys and values NaN; who gets the page must not see them."""
    model = make_model("cpu")

    def serve(tokens, positions, last, attend):
        spoiled = (tokens == 63)[:, None, None]

        def spoil(layer, query, *both):
            return attend(layer, query, *(torch.where(spoiled, torch.nan, each) for each in both))

        return model.serve(tokens, positions, last, spoil)

    cache = make_cache("cpu", 12, kv_layout=layout)
    engine = Engine(serve, cache, max_batch=2, chunk=20, overlap=True)
    params = SamplingParams(9, logit_bias={63: 100.0}, stop_tokens=[63] if end == "stop" else [])
    first = engine.submit([5] * length, params)
    other = engine.submit([6] * 7, SamplingParams(12))
    engine.step()
    assert first.output == [63]
    if "warm up" in end:
        engine.warm_up()
    if "abort" in end:
        engine.abort(first)
    assert first.finish_reason == end.split()[-1]
    for layer in range(2):
        assert cache.key_cache(layer).isfinite().all()
        assert cache.value_cache(layer).isfinite().all()
    good = [engine.submit([token] * 6, SamplingParams(5)) for token in (1, 2, 3)]
    list(engine.run())
    for request in (other, *good):
        expected = generate_alone(model, request.prompt, request.params.max_tokens)
        assert 63 not in expected
        assert request.output == expected
    check_cache(engine, [first, other, *good])


# What it costs


def test_an_end_that_is_known_costs_nothing():
    engine = make_engine("cpu", 60, overlap=True)
    request = engine.submit([1, 2, 3], SamplingParams(8))
    steps = []
    while not request.is_finished:
        steps.append(len(engine.step()))
    assert steps == [1] * 8
    stats = engine.stats
    assert (stats.steps, stats.overlapped, stats.extra_tokens) == (8, 7, 0)
    assert stats.computed_tokens == 3 + 7
    assert engine._queued is None


def test_a_place_that_is_sure_to_be_free_is_taken():
    """So that a queue keeps the batch as full as by steps one by one."""
    steps = []
    for overlap in (False, True):
        engine = make_table_engine(cycle(1, 2, 3), max_batch=3, overlap=overlap)
        for index in range(12):
            engine.submit([0, index], SamplingParams(4 + index % 3))
        most = 0
        while engine.running or engine.waiting:
            engine.step()
            most = max(most, engine.running)
        assert most == 3
        steps.append(engine.stats.steps)
    assert steps[0] == steps[1]


def test_places_that_were_counted_on(monkeypatch):
    """What was to end has not, for the step has failed: nobody is lost, and no step too large."""
    engine = make_engine("cpu", 60, max_batch=2, overlap=True)
    requests = [engine.submit([token, 2, 3], SamplingParams(3 + token)) for token in range(5)]
    read, failing = Chosen.read, [False]

    def unlucky(chosen: Chosen) -> list[int]:
        if failing[0]:
            raise RuntimeError("no luck")
        return read(chosen)

    monkeypatch.setattr(Chosen, "read", unlucky)
    most = 0
    while engine.running or engine.waiting:
        failing[0] = not failing[0]
        if failing[0]:
            with pytest.raises(RuntimeError, match="no luck"):
                engine.step()
            most = max(most, engine.running)
        else:
            engine.step()
    assert most == 3
    model = make_model("cpu")
    for token, request in enumerate(requests):
        assert request.output == generate_alone(model, request.prompt, 3 + token)
    check_cache(engine, requests)


@pytest.mark.parametrize("length", range(3, 8))
def test_an_end_is_found_one_step_late(length):
    """It costs a token that nobody sees: neither the user, nor the figures, nor prefix caching."""
    figures = []
    for overlap in (False, True):
        engine = make_table_engine(cycle(1, 2, 3, 4, 5, 6, 7), overlap=overlap)
        request = engine.submit([0] * length, SamplingParams(30, stop_tokens=[5]))
        generated = []
        while not request.is_finished:
            generated += engine.step()
        assert generated == [(request, token) for token in (1, 2, 3, 4, 5)]
        assert engine._queued is None
        assert engine.step() == []
        check_cache(engine, [request])
        figures.append((engine.cache.usage(), request.stats.peak_pages, request.output))
        stats = engine.stats
        assert stats.extra_tokens == overlap
        assert stats.computed_tokens == length + 4 + overlap
        # All but the last token were computed, and their full pages are known.
        again = engine.cache.allocate([*request.tokens, 0, 0, 0, 0])
        assert again.length == (length + 4) // 4 * 4
    assert figures[0] == figures[1]


def test_pages_that_are_missing_are_not_taken_ahead():
    """A step that must preempt waits for the tokens; those before and after it do not."""
    engine = make_engine("cpu", pages=8, overlap=True)
    requests = [engine.submit([token] * 7, SamplingParams(17)) for token in (1, 2, 3)]
    list(engine.run())
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.steps / 2 < stats.overlapped < stats.steps - 1
    assert stats.extra_tokens == 0
    model = make_model("cpu")
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 17)


def test_a_higher_priority_waits_for_one_step_more():
    engine = make_engine("cpu", 60, max_batch=2, overlap=True)
    low = [engine.submit([token, 2, 3], SamplingParams(12)) for token in (1, 2)]
    for _ in range(3):
        engine.step()
    urgent = engine.submit([5, 6], SamplingParams(3), priority=1)
    engine.step()
    assert engine._queued is None
    engine.step()
    assert len(urgent.output) == 1
    assert low[1].sequence is None
    assert list(engine.run()) == [urgent, *low]
    model = make_model("cpu")
    for request, count in ((urgent, 3), (low[0], 12), (low[1], 12)):
        assert request.output == generate_alone(model, request.prompt, count)


def test_no_time_counts_twice():
    engine = make_engine("cpu", 60, overlap=True)
    for token in range(4):
        engine.submit([token, 2, 3], SamplingParams(20))
    began = time.perf_counter()
    list(engine.run())
    passed = time.perf_counter() - began
    assert passed / 2 < engine.stats.seconds < passed


def test_an_abort_drops_what_is_queued():
    engine = make_engine("cpu", 60, overlap=True)
    requests = [engine.submit([token, 2, 3], SamplingParams(8)) for token in (1, 2)]
    engine.step()
    engine.abort(requests[0])
    assert engine._queued is not None
    engine.abort(requests[1])
    assert engine._queued is None
    assert engine.cache.usage().in_use == 0
    assert engine.stats.extra_tokens == 2
    late = engine.submit([5, 6], SamplingParams(3))
    assert list(engine.run()) == [late]
    assert late.output == generate_alone(make_model("cpu"), [5, 6], 3)
    check_cache(engine, [*requests, late])


def test_what_is_queued_is_taken_back_for_those_that_go_on():
    """One of its requests has ended, so that only the others have slots to give back."""
    engine = make_table_engine(cycle(1, 2, 3, 4), overlap=True)
    ended = engine.submit([0], SamplingParams(9, stop_tokens=[2]))
    other = engine.submit([0, 0], SamplingParams(9))
    while not ended.is_finished:
        engine.step()
    assert engine._queued is not None
    engine.warm_up()
    assert engine._queued is None
    assert other.sequence is not None
    assert other.sequence.length == len(other.tokens) - 1
    assert list(engine.run()) == [other]
    assert (ended.output, other.output) == ([1, 2], [1, 2, 3, 4, 1, 2, 3, 4, 1])
    check_cache(engine, [ended, other])


def test_what_fails_ahead_loses_no_token():
    """The step before is read by the next call, even if all others fail."""
    model, failing = make_model("cpu"), [False]

    def serve(*args):
        if failing[0]:
            raise RuntimeError("no luck")
        return model.serve(*args)

    engine = Engine(serve, make_cache("cpu", 40), overlap=True)
    request = engine.submit([1, 2, 3], SamplingParams(6))
    engine.step()
    failing[0] = True
    with pytest.raises(RuntimeError, match="no luck"):
        engine.step()
    assert len(request.output) == 1
    assert len(engine.step()) == 1
    with pytest.raises(RuntimeError, match="no luck"):
        engine.step()
    assert len(request.output) == 2
    failing[0] = False
    assert list(engine.run()) == [request]
    assert request.output == generate_alone(model, [1, 2, 3], 6)
    check_cache(engine, [request])
