"""Speculative decoding by a draft model: the same output, expected lengths, no page too many."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudnn_ops import PagedKVCache
from cudnn_ops.generation import DraftModel, Engine, Request, SamplingParams
from examples.llama import Llama
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
from tests.cases.speculation import (
    OPTIONS,
    WARPERS,
    check_cache,
    check_frequencies,
    check_same_as_without,
    serve_options,
)
from tests.conftest import DEVICES


def like(model: Llama, noise: float) -> Llama:
    """The model with other weights: what it says is right now and then."""
    torch.manual_seed(7)
    for weight in model.parameters():
        weight.data += noise * weight.std() * torch.randn_like(weight)
    return model


def llama_draft(
    device: str, noise: float, pages: int = 60, num_draft_tokens: int = 3, **options: Any
) -> DraftModel:
    draft = like(make_model(device), noise)
    return DraftModel(draft.serve, make_cache(device, pages, **options), num_draft_tokens)


def table_draft(table: torch.Tensor, num_draft_tokens: int = 3, pages: int = 60) -> DraftModel:
    def serve(tokens, positions, last, attend):
        return table[tokens[last]]

    cache = PagedKVCache(1, pages, 4, 1, 8, dtype=torch.float32, device=table.device)
    return DraftModel(serve, cache, num_draft_tokens)


def check_drafts(engine: Engine) -> None:
    """Nothing is held in the draft model's cache."""
    assert isinstance(engine.speculation, DraftModel)
    assert engine.speculation.cache is not None
    usage = engine.speculation.cache.usage()
    assert usage.in_use == usage.sequences == 0


# Greedy


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_is_generation_without_a_cache(device):
    """Requests that come when they like, where both caches are too small."""
    unit = SETUPS[device].page_size
    engine = make_engine(device, pages=30, speculation=llama_draft(device, 0.1, pages=28))
    draw = random.Random(1)
    jobs = [
        (prompt, SamplingParams(max_tokens=draw.randint(1, 5 * unit)))
        for prompt in make_prompts(80, unit, seed=20)
    ]
    requests = serve_at_random(engine, jobs)

    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.prefix_hits > 100
    assert (stats.replays > 0) == (device == "cuda")
    accepted, proposed = stats.speculation.accepted_tokens, stats.speculation.draft_tokens
    assert 0 < accepted < proposed
    assert stats.output_tokens == sum(params.max_tokens for _, params in jobs)
    check_cache(engine, requests)
    check_drafts(engine)
    model = make_model(device)
    for request, (prompt, params) in zip(requests, jobs, strict=True):
        assert request.finish_reason == "length"
        assert len(request.output) == params.max_tokens
        if device == "cpu":
            assert request.output == generate_alone(model, prompt, params.max_tokens)
    check_likeliest(model, requests if device == "cuda" else requests[:10])


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 7])
@pytest.mark.parametrize("sharing", [True, False])
def test_the_model_itself_is_always_right(chunk, num_draft_tokens, sharing):
    """Its keys and values are those of the right tokens, whatever was rejected or preempted."""
    speculation = llama_draft("cpu", 0.0, 60, num_draft_tokens, prefix_sharing=sharing)
    engine = make_engine("cpu", 60, chunk=chunk, max_batch=5, speculation=speculation)
    prompts = make_prompts(10, 4, seed=5)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=17)) for prompt in prompts]
    list(engine.run())
    model = make_model("cpu")
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == generate_alone(model, prompt, 17)
    counted = engine.stats.speculation
    assert counted.draft_tokens > 10
    assert counted.acceptance_rate == 1
    check_drafts(engine)


def test_a_whole_chain_is_drafted_each_step():
    engine = make_engine("cpu", 60, chunk=64, speculation=llama_draft("cpu", 0.0, 60, 4))
    request = engine.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=21))
    list(engine.run())
    assert engine.stats.steps == 5  # the prompt's, and 4 of 5 tokens each
    assert request.stats.speculation.drafts == 4
    assert request.stats.speculation.mean_acceptance_length == 5


def test_what_was_rejected_is_forgotten():
    """The model itself, but for wrong tokens behind some positions: no other draft is wrong."""
    draft = make_model("cpu")

    def serve(tokens, positions, last, attend):
        logits = draft.serve(tokens, positions, last, attend)
        return torch.where((positions[last] % 5 == 0)[:, None], logits.roll(1, 1), logits)

    engine = make_engine("cpu", 60, speculation=DraftModel(serve, make_cache("cpu", 60), 3))
    prompt, count = [5, 6, 7, 8, 9, 10, 11], 60
    request = engine.submit(prompt, SamplingParams(count))
    list(engine.run())
    assert request.output == generate_alone(make_model("cpu"), prompt, count)
    accepted, position, end = [], len(prompt), len(prompt) + count  # of the last token
    while position < end - 1:
        proposed = min(3, end - position - 2)
        right = [(position + ahead) % 5 != 0 for ahead in range(proposed)]
        accepted.append([*right, False].index(False))
        position += accepted[-1] + 1
    assert request.stats.speculation.accepted_tokens == sum(accepted)
    assert engine.stats.steps == 1 + len(accepted)


# Options of requests, and sampling


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.5])
def test_options_of_every_kind_give_the_same_as_without(noise):
    table = make_table(4, vocabulary=10)
    draft = table_draft(table + noise * make_table(5, vocabulary=10), pages=40)
    engine, requests = check_same_as_without(table, draft, pages=24)
    assert engine.stats.preemptions > 0
    check_cache(engine, requests)
    check_drafts(engine)


def test_the_seed_proposes_what_is_sampled():
    """The draft model draws by the request's own numbers: where it is right, all are accepted."""
    table = make_table(4, vocabulary=10)
    engine = make_table_engine(table, speculation=table_draft(table))
    for seed, warpers in enumerate(WARPERS * 3):
        engine.submit([seed % 10], SamplingParams(20, seed=seed, **warpers))
    list(engine.run())
    assert engine.stats.speculation.acceptance_rate == 1
    assert engine.stats.speculation.accepted_tokens > 100


def test_seeds_give_the_same_drafts():
    table = make_table(4, vocabulary=10)
    draft = table + 0.5 * make_table(5, vocabulary=10)
    counted = [serve_options(table, table_draft(draft))[0].stats.speculation for _ in range(2)]
    assert counted[0] == counted[1]
    assert counted[0].accepted_tokens > 100
    assert len(OPTIONS) > 5


@pytest.mark.parametrize("warpers", WARPERS[1:], ids=str)
def test_frequencies_are_the_probabilities(warpers):
    """Of the first three tokens together, some of which were drafts: a chi-squared test."""
    table = make_table(11, vocabulary=4, scale=0.7)
    draft = table_draft(table + make_table(12, vocabulary=4, scale=0.7), pages=400)
    speculation = check_frequencies(table, draft, warpers)
    assert 0.3 < speculation.acceptance_rate < 0.95


def test_the_mean_length_is_that_of_the_acceptance():
    """Drafts are right with probability 0.7, each for itself: (1 - 0.7 ** 5) / (1 - 0.7)."""
    right = cycle(1, 2, 3, 4, 5, 6, 7, 8)
    draw = torch.Generator().manual_seed(3)

    def serve(tokens, positions, last, attend):
        logits = right[tokens[last]]
        is_wrong = torch.rand(len(last), generator=draw) >= 0.7
        return torch.where(is_wrong[:, None], logits.roll(1, 1), logits)

    cache = PagedKVCache(1, 400, 4, 1, 8, dtype=torch.float32, device="cpu")
    engine = make_table_engine(
        right, pages=800, max_batch=32, chunk=512, speculation=DraftModel(serve, cache, 4)
    )
    for _ in range(32):
        engine.submit([1, 2], SamplingParams(max_tokens=300))
    list(engine.run())
    speculation = engine.stats.speculation
    assert speculation.drafts > 3000
    expected = (1 - 0.7**5) / (1 - 0.7)
    # Of 1 to 5 tokens, the standard deviation is 1.6: this is four of the mean's.
    assert speculation.mean_acceptance_length == pytest.approx(expected, abs=4 * 1.6 / 3000**0.5)


# Faults


@pytest.mark.parametrize("pages", [1, 4, 9])
def test_without_pages_there_are_no_drafts(pages):
    """The engine goes on without, and preempts nobody for the draft model's pages."""
    engine = make_engine("cpu", 80, speculation=llama_draft("cpu", 0.0, pages))
    prompts = make_prompts(8, 4, seed=6)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
    list(engine.run())
    model = make_model("cpu")
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == generate_alone(model, prompt, 12)
    assert engine.stats.preemptions == 0
    assert (engine.stats.speculation.drafts > 0) == (pages == 9)
    check_drafts(engine)


@pytest.mark.parametrize("at", ["before", "behind"])
def test_a_draft_model_that_failed(at):
    """The step can be made again, and what was not computed is not taken for keys and values."""
    model, failing = make_model("cpu"), [False]

    def serve(tokens, positions, last, attend):
        if failing[0] and at == "before":
            raise RuntimeError("no luck")
        logits = model.serve(tokens, positions, last, attend)
        if failing[0]:
            raise RuntimeError("no luck")
        return logits

    cache = make_cache("cpu", 60)
    engine = make_engine("cpu", 40, max_batch=4, chunk=8, speculation=DraftModel(serve, cache, 3))
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=20))
        for prompt in make_prompts(8, 4, seed=11)
    ]
    failed = 0
    while engine.running or engine.waiting:
        failing[0] = not failing[0]
        try:
            engine.step()
        except RuntimeError:  # not each step runs it
            failed += 1
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 20)
    assert failed > 10
    assert engine.stats.speculation.acceptance_rate == 1
    check_cache(engine, requests)
    check_drafts(engine)


def test_an_engine_that_failed_beside_its_draft_model():
    model, failing = make_model("cpu"), [False]

    def serve(tokens, positions, last, attend):
        logits = model.serve(tokens, positions, last, attend)
        if failing[0]:
            raise RuntimeError("no luck")
        return logits

    speculation = llama_draft("cpu", 0.1)
    engine = Engine(serve, make_cache("cpu", 40), max_batch=4, chunk=8, speculation=speculation)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=20))
        for prompt in make_prompts(8, 4, seed=11)
    ]
    run_failing_every_other_step(engine, failing)
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 20)
    check_cache(engine, requests)
    check_drafts(engine)


@pytest.mark.parametrize(("own", "other"), [(40, 30), (30, 40)])
def test_models_of_different_vocabularies(own, other):
    """Tokens that one of them lacks are neither proposed nor drafted behind."""
    sizes = torch.arange(40)
    follows = (sizes + 1) % 40
    table = 9.0 * torch.nn.functional.one_hot(follows % own, own).float()[:own]
    draft = 9.0 * torch.nn.functional.one_hot(follows % other, other).float()[:other]
    plain = make_table_engine(table)
    engine = make_table_engine(table, speculation=table_draft(draft))
    outputs = []
    for each in (plain, engine):
        requests = [each.submit([1, token], SamplingParams(20)) for token in range(0, own, 3)]
        list(each.run())
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    assert max(map(max, outputs[0])) == own - 1
    assert engine.stats.speculation.accepted_tokens > 0
    check_drafts(engine)


def test_no_page_is_left_whatever_is_aborted():
    speculation = llama_draft("cpu", 0.1, pages=30)
    engine = make_engine("cpu", pages=26, speculation=speculation)
    draw = random.Random(8)
    requests: list[Request] = []
    prompts = make_prompts(100, 4, seed=8)
    drafter: Any = engine._drafter
    while prompts or engine.running or engine.waiting:
        for prompt in [prompts.pop() for _ in range(min(len(prompts), draw.choice([0, 1, 4])))]:
            requests.append(engine.submit(prompt, SamplingParams(max_tokens=draw.randint(1, 25))))
        engine.step()
        if draw.random() < 0.2:
            engine.abort(draw.choice(requests))
        assert speculation.cache is not None
        assert speculation.cache.usage().sequences == len(drafter._sequences)
        assert set(drafter._sequences) <= set(engine._scheduler.running)
    assert engine.stats.aborted > 10
    assert engine.stats.preemptions > 0
    assert engine.stats.speculation.accepted_tokens > 0
    check_cache(engine, requests)
    check_drafts(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_warming_up_touches_nothing(device):
    speculation = llama_draft(device, 0.1)
    engine = make_engine(device, 40, speculation=speculation)
    assert speculation.cache is not None
    caches = (engine.cache, speculation.cache)
    for cache in caches:
        cache.key_cache(0).fill_(7)
    engine.warm_up()
    assert all(bool((cache.key_cache(0) == 7).all()) for cache in caches)
    check_drafts(engine)


def test_what_is_no_draft_model():
    cache = make_cache("cpu", 10)
    serve = make_model("cpu").serve
    with pytest.raises(ValueError, match="num_draft_tokens must be a whole number, at least 1"):
        DraftModel(serve, cache, 0)
    with pytest.raises(TypeError, match="model must be a function or a module, got None"):
        DraftModel(None, cache)
    with pytest.raises(TypeError, match="cache must be a PagedKVCache, got 'cache'"):
        DraftModel(serve, "cache")
    with pytest.raises(ValueError, match="must have a model and a cache on the first rank"):
        Engine(serve, cache, speculation=DraftModel(None, None))
    with pytest.raises(ValueError, match="must have a cache of its own, on the device of the eng"):
        Engine(serve, cache, speculation=DraftModel(serve, cache))
    with pytest.raises(ValueError, match="None, a PromptLookup or a DraftModel, got 4"):
        Engine(serve, cache, speculation=4)
    assert replace(DraftModel(serve, cache), num_draft_tokens=2).num_draft_tokens == 2
