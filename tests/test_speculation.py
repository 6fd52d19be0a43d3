"""Speculative decoding: the same output as without, fewer steps, and no page too many."""

from __future__ import annotations

import random

import pytest

from cudnn_ops.generation import Engine, PromptLookup, Request, SamplingParams
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
from tests.cases.sampling import cycle, make_table
from tests.cases.sampling import make_engine as make_table_engine
from tests.cases.speculation import WARPERS, check_cache, check_frequencies, check_same_as_without
from tests.conftest import DEVICES

#: Proposes almost always, so that much is rejected.
EAGER = PromptLookup(num_draft_tokens=3, max_ngram=2, min_ngram=1)


class ProposeAtRandom:
    """In place of ``NgramIndex``: any number of any tokens of the request."""

    def __init__(self, options: PromptLookup) -> None:
        self._draw = random.Random(options.num_draft_tokens)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return [self._draw.choice(tokens) for _ in range(self._draw.randint(0, count))]


def repetitive_prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = []
    for _ in range(count):
        phrase = [draw.randrange(64) for _ in range(draw.randint(1, 5))]
        prompts.append(phrase * draw.randint(2, 6))
    return prompts


# Greedy


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_is_generation_without_a_cache(device):
    """Random and repetitive prompts that come when they like, in a cache that is too small."""
    unit = SETUPS[device].page_size
    engine = make_engine(device, pages=30, speculation=EAGER)
    draw = random.Random(1)
    prompts = make_prompts(60, unit, seed=20) + repetitive_prompts(40, seed=21)
    draw.shuffle(prompts)
    jobs = [(prompt, SamplingParams(max_tokens=draw.randint(1, 5 * unit))) for prompt in prompts]
    requests = serve_at_random(engine, jobs)

    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.prefix_hits > 100
    assert (stats.replays > 0) == (device == "cuda")
    assert 0 < stats.speculation.accepted_tokens < stats.speculation.draft_tokens
    assert stats.output_tokens == sum(params.max_tokens for _, params in jobs)
    check_cache(engine, requests)
    model = make_model(device)
    for request, (prompt, params) in zip(requests, jobs, strict=True):
        assert request.finish_reason == "length"
        assert len(request.output) == params.max_tokens
        if device == "cpu":
            assert request.output == generate_alone(model, prompt, params.max_tokens)
    check_likeliest(model, requests if device == "cuda" else requests[:10])


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 9])
def test_whatever_is_proposed_is_verified(chunk, num_draft_tokens, monkeypatch):
    monkeypatch.setattr("cudnn_ops.serving.speculation.NgramIndex", ProposeAtRandom)
    speculation = PromptLookup(num_draft_tokens)
    engine = make_engine("cpu", 60, chunk=chunk, max_batch=5, speculation=speculation)
    prompts = make_prompts(8, 4, seed=5) + repetitive_prompts(6, seed=5)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=17)) for prompt in prompts]
    list(engine.run())
    model = make_model("cpu")
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == generate_alone(model, prompt, 17)
    assert engine.stats.speculation.draft_tokens > 20
    check_cache(engine, requests)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sharing", [True, False])
def test_caches_of_every_kind(layout, sharing):
    model = make_model("cpu")
    cache = make_cache("cpu", 150, kv_layout=layout, prefix_sharing=sharing)
    engine = Engine(model.serve, cache, max_batch=4, chunk=8, speculation=EAGER)
    prompts = [*repetitive_prompts(6, seed=3), [7], [8, 8]]
    requests = []
    for prompt in prompts * 2:
        requests.append(engine.submit(prompt, SamplingParams(24)))
        if len(requests) % 4 == 0:
            list(engine.run())
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 24)
    assert engine.stats.speculation.accepted_tokens > 0
    assert (engine.stats.prefix_hits > 0) == sharing
    check_cache(engine, requests)


def test_accepted_tokens_are_found_by_prefix_caching():
    engine = make_table_engine(cycle(1, 2, 3), speculation=PromptLookup(8))
    prompt = [0, 1, 2, 3, 1, 2]
    first = engine.submit(prompt, SamplingParams(max_tokens=24))
    list(engine.run())
    again = engine.submit(first.tokens, SamplingParams(max_tokens=1))
    list(engine.run())
    assert again.stats.prefix_hits == 28  # of 29 tokens that were computed of 30: full pages of 4


@pytest.mark.parametrize("device", DEVICES)
def test_warming_up_touches_nothing(device):
    engine = make_engine(device, 40, speculation=PromptLookup(2))
    for layer in range(2):
        engine.cache.key_cache(layer).fill_(7)
    engine.warm_up()
    assert all(bool((engine.cache.key_cache(layer) == 7).all()) for layer in range(2))
    assert engine.stats.steps == engine.stats.replays == engine.cache.usage().in_use == 0


# Options of requests: the table's logits depend on the last token alone, without rounding


@pytest.mark.parametrize("any_draft", [False, True])
def test_options_of_every_kind_give_the_same_as_without(any_draft, monkeypatch):
    if any_draft:
        monkeypatch.setattr("cudnn_ops.serving.speculation.NgramIndex", ProposeAtRandom)
    engine, requests = check_same_as_without(make_table(4, vocabulary=10), EAGER, pages=24)
    assert engine.stats.preemptions > 0
    check_cache(engine, requests)


@pytest.mark.parametrize("warpers", WARPERS[1:], ids=str)
def test_frequencies_are_the_probabilities(warpers):
    """Of the first three tokens together, some of which were drafts: a chi-squared test."""
    speculation = check_frequencies(make_table(11, vocabulary=4, scale=0.7), EAGER, warpers)
    assert 0.1 < speculation.acceptance_rate < 0.9


# Ends and errors inside of what is accepted


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 7},
        {"stop_tokens": [7]},
        {"stop_sequences": [[5, 6]]},
        {"stop_strings": ["67"]},
    ],
    ids=str,
)
def test_ends_inside_of_accepted_tokens(options):
    outcomes = []
    for speculation in (None, PromptLookup(8)):
        engine = make_table_engine(
            cycle(1, 2, 3, 4, 5, 6, 7, 8),
            decode=lambda tokens: "".join(map(str, tokens)),
            speculation=speculation,
        )
        params = SamplingParams(**({"max_tokens": 40} | options))
        request = engine.submit([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], params)
        assert list(engine.run()) == [request]
        outcomes.append((request.output, request.finish_reason, request.stopped_by, request.text))
        check_cache(engine, [request])
    assert outcomes[0] == outcomes[1]
    assert engine.stats.steps == 2


def test_errors_count_where_they_are_reached():
    """What a function raises after drafts that are rejected is of no account; else it is."""
    calls: list[list[int]] = []

    def follows(output: list[int]) -> list[int]:
        calls.append(output)
        if output[:3] == [3, 1, 2]:
            raise KeyError("rejected")
        if len(output) == 9:
            raise LookupError("reached")
        return [7] if output == [3, 1] else list(range(40))

    engine = make_table_engine(cycle(1, 2, 3), speculation=PromptLookup(6))
    request = engine.submit([0, 1, 2, 3, 1, 2], SamplingParams(20, allowed_tokens=follows))
    other = engine.submit([0, 1, 2, 3, 1, 2], SamplingParams(20))
    assert set(engine.run()) == {request, other}
    assert [3, 1, 2] in calls
    assert request.output[:3] == [3, 1, 7]
    assert isinstance(request.error, LookupError)
    assert request.error.args == ("reached",)
    assert len(request.output) == request.stats.output_tokens == 9
    assert request.stats.speculation.accepted_tokens > 0
    assert other.finish_reason == "length"
    check_cache(engine, [request, other])


def test_a_step_that_failed_can_be_made_again():
    model, failing = make_model("cpu"), [False]

    def serve(tokens, positions, last, attend):
        logits = model.serve(tokens, positions, last, attend)
        if failing[0]:
            raise RuntimeError("no luck")
        return logits

    engine = Engine(serve, make_cache("cpu", 40), max_batch=4, chunk=8, speculation=EAGER)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=20))
        for prompt in repetitive_prompts(8, seed=11)
    ]
    run_failing_every_other_step(engine, failing)
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 20)
    check_cache(engine, requests)


# Pages


def test_pages_are_those_of_known_tokens_whatever_is_aborted():
    engine = make_engine("cpu", pages=26, speculation=EAGER)
    draw = random.Random(8)
    requests: list[Request] = []
    prompts = make_prompts(60, 4, seed=8) + repetitive_prompts(60, seed=9)
    draw.shuffle(prompts)
    while prompts or engine.running or engine.waiting:
        for prompt in [prompts.pop() for _ in range(min(len(prompts), draw.choice([0, 1, 4])))]:
            requests.append(engine.submit(prompt, SamplingParams(max_tokens=draw.randint(1, 25))))
        engine.step()
        for request in requests:
            if request.sequence is not None:
                assert request.sequence.length < len(request.tokens)
                pages = -(-request.sequence.length // 4)
                assert len(request.sequence.pages) == pages
        if draw.random() < 0.2 and requests:
            engine.abort(draw.choice(requests))
    assert engine.stats.aborted > 10
    assert engine.stats.preemptions > 0
    assert engine.stats.speculation.accepted_tokens > 0
    drafter = engine._scheduler._drafter
    assert drafter is not None
    assert not drafter._indices
    check_cache(engine, requests)


def test_drafts_take_no_page_that_is_not_there():
    """The cache has room for all requests, and for not one token more."""
    engine = make_table_engine(cycle(1, 2, 3), pages=6, speculation=PromptLookup(8))
    requests = [engine.submit([1, 2, 3, 1, 2], SamplingParams(max_tokens=8)) for _ in range(2)]
    list(engine.run())
    assert engine.stats.preemptions == 0
    assert engine.stats.peak_pages <= 6
    assert [request.output for request in requests] == [[3, 1, 2, 3, 1, 2, 3, 1]] * 2


@pytest.mark.parametrize("max_batch", [2, 3, 5, 12, 17])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 8])
def test_the_most_drafts_beside_a_prompt(max_batch, num_draft_tokens):
    """In a step that packs its queries, as many of them with logits as there can be."""
    engine = make_table_engine(
        cycle(1, 2, 3),
        pages=400,
        max_batch=max_batch,
        chunk=400,
        speculation=PromptLookup(num_draft_tokens),
    )
    params = SamplingParams(max_tokens=40)
    requests = [engine.submit([1, 2, 3, 1, 2], params) for _ in range(max_batch - 1)]
    while not all(request.output for request in requests):
        engine.step()
    late = engine.submit([5, 6, 7, 1, 2, 3], SamplingParams(max_tokens=1))
    generated = engine.step()
    assert len(generated) == (max_batch - 1) * (1 + num_draft_tokens) + 1
    assert late.output == [1]
    list(engine.run())
    assert [request.output for request in requests] == [[3, 1, 2] * 13 + [3]] * (max_batch - 1)


def test_drafts_keep_to_the_budget_of_a_step(monkeypatch):
    engine = make_table_engine(cycle(1, 2, 3), chunk=7, speculation=PromptLookup(4))
    for length in range(4, 9):
        engine.submit(([1, 2, 3] * 3)[:length], SamplingParams(max_tokens=30))
    schedule = engine._scheduler.schedule
    sizes: list[int] = []
    mixed: list[bool] = []

    def recorded():
        batch = schedule()
        prompts = (share.stop - share.start for share in batch.shares)
        sizes.append(sum(len(share.drafts) for share in batch.shares))
        assert sizes[-1] + sum(count for count in prompts if count > 1) <= 7
        mixed.append(bool(sizes[-1]) and not batch.is_decoding)
        return batch

    monkeypatch.setattr(engine._scheduler, "schedule", recorded)
    list(engine.run())
    assert max(sizes) == 7
    assert any(mixed)
