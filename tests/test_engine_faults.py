"""What goes wrong with one request disturbs no other, and leaves no page: counted each time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cudnn_ops.generation import DraftModel, Engine, PromptLookup, Request, SamplingParams
from tests.cases.generation import (
    generate_alone,
    make_cache,
    make_engine,
    make_model,
    make_prompts,
)
from tests.cases.speculation import check_cache


def check_all_free(engine: Engine, requests: list[Request]) -> None:
    """Of the cache, of the draft model's, and of the host's memory."""
    check_cache(engine, requests)
    if isinstance(engine.speculation, DraftModel) and engine.speculation.cache is not None:
        usage = engine.speculation.cache.usage()
        assert usage.in_use == usage.sequences == 0
    if engine._swapper is not None:
        assert engine._swapper.used == 0


@pytest.mark.parametrize(
    "kind", ["plain", "overlapped", "overlapped and swapping", "lookup", "draft model and swapping"]
)
def test_a_thousand_random_aborts(kind):
    """Of requests that run, wait, were preempted, or are in their prompts, beside late ones."""
    options: dict[str, Any] = {}
    if kind.startswith("overlapped"):
        options = {"overlap": True}
    elif kind == "lookup":
        options = {"speculation": PromptLookup(3, 2, 1)}
    elif kind != "plain":
        draft = DraftModel(make_model("cpu").serve, make_cache("cpu", 24), 2)
        options = {"speculation": draft}
    if "swapping" in kind:
        options |= {"preemption": "swap", "swap_bytes": 64 << 20}
    engine = make_engine("cpu", pages=24, **options)
    draw = random.Random(8)
    requests: list[Request] = []
    prompts = make_prompts(300, 4, seed=8)
    while engine.stats.aborted < 1000:
        for _ in range(draw.choice([4, 6, 8])):
            params = SamplingParams(draw.randint(5, 25), temperature=draw.choice([0.0, 1.0]))
            priority = draw.choice([0, 0, 0, 1])
            requests.append(
                engine.submit(draw.choice(prompts), params, priority=priority, timeout=1e6)
            )
        engine.step()
        if draw.random() < 0.05:
            draw.choice(engine._scheduler.running)._timeout = 0.0
        alive = engine._scheduler.running + engine._scheduler.waiting
        for request in draw.sample(alive, min(len(alive), draw.randint(3, 8))):
            engine.abort(request)
        held = {each.sequence for each in requests if each.sequence is not None}
        assert engine.cache._sequences == held
    list(engine.run())
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.timed_out > 0
    assert stats.finished > 0
    assert stats.finished + stats.aborted + stats.timed_out == len(requests)
    assert (stats.overlapped > 0) == (stats.extra_tokens > 0) == ("overlapped" in kind)
    assert engine._queued is None
    check_all_free(engine, requests)


def poisoned(model: Any) -> Any:
    """The model, but token 63 makes its keys, values and logits NaN."""

    def serve(tokens, positions, last, attend):
        def spoil(layer, query, key, value, **rest):
            mask = (tokens == 63)[:, None, None]
            key = torch.where(mask, torch.nan, key)
            return attend(layer, query, key, torch.where(mask, torch.nan, value), **rest)

        return model.serve(tokens, positions, last, spoil)

    return serve


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("speculation", [None, PromptLookup(3, 2, 1)])
def test_a_model_that_yields_nan(speculation):
    """Its request fails alone, and who gets its pages does not see what was in them."""
    model = make_model("cpu")
    cache = make_cache("cpu", 30)
    engine = Engine(poisoned(model), cache, max_batch=4, chunk=20, speculation=speculation)
    draw = random.Random(3)
    good: list[Request] = []
    bad: list[Request] = []
    for index, prompt in enumerate(make_prompts(40, 4, seed=9)):
        clean = [token % 63 for token in prompt]
        if index % 4 == 3:
            clean[draw.randrange(len(clean))] = 63
            bad.append(engine.submit(clean, SamplingParams(8)))
        else:
            good.append(engine.submit(clean, SamplingParams(8)))
        engine.step()
    list(engine.run())
    for request in bad:
        assert request.finish_reason == "error"
        assert str(request.error).startswith("the model's logits after ")
    for request in good:
        expected = generate_alone(model, request.prompt, 8)
        if 63 in expected:
            expected = expected[: expected.index(63) + 1]
            assert request.finish_reason == "error"
        assert request.output == expected
    assert len([each for each in good if each.finish_reason == "length"]) > 15
    for layer in range(2):
        assert cache.key_cache(layer).isfinite().all()
        assert cache.value_cache(layer).isfinite().all()
    check_cache(engine, good + bad)


def test_tokens_that_the_model_lacks():
    engine = make_engine("cpu", 40, vocabulary=64)
    good = engine.submit([1, 63], SamplingParams(4))
    with pytest.raises(ValueError, match=r"tokens from 0 to 63, the model's vocabulary, got 64"):
        engine.submit([1, 64])
    assert list(engine.run()) == [good]
    assert engine.vocabulary == 64
    with pytest.raises(ValueError, match="vocabulary must be a whole number, at least 1, got 0"):
        make_engine("cpu", 40, vocabulary=0)
