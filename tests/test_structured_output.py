"""Requests that constrain their tokens by a function, and those that fail alone; many aborts."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from cudnn_ops.generation import Engine, NothingAllowed, PromptLookup, SamplingParams
from tests.cases.generation import generate_alone, make_model, serve_at_random
from tests.cases.generation import make_engine as make_llama_engine
from tests.cases.sampling import VOCABULARY, make_engine, make_table

pytestmark = pytest.mark.usefixtures("overlap")

OPEN, CLOSE, END = 1, 2, 3


def balanced(output: list[int]) -> list[int]:
    """A grammar: brackets that match, at most four deep, then the end."""
    depth = sum({OPEN: 1, CLOSE: -1}.get(token, 0) for token in output)
    return ([OPEN] if depth < 4 else []) + ([CLOSE] if depth else [END])


def test_output_follows_a_grammar_beside_free_requests():
    engine = make_llama_engine("cpu", pages=16)
    structured, free = [], []
    for seed in range(20):
        params = SamplingParams(
            30, temperature=2.0, seed=seed, allowed_tokens=balanced, stop_tokens=[END]
        )
        structured.append(engine.submit([seed, 5, 6], params))
        free.append(engine.submit([seed, 5], SamplingParams(12)))
    list(engine.run())
    assert engine.stats.preemptions
    for request in structured:
        depth = 0
        for token in request.output:
            assert token in (OPEN, CLOSE, END)
            depth += {OPEN: 1, CLOSE: -1, END: 0}[token]
            assert 0 <= depth <= 4
        assert (request.finish_reason == "stop") == (request.output[-1] == END)
        assert depth == 0 or request.finish_reason == "length"
    assert len({tuple(request.output) for request in structured}) > 10
    model = make_model("cpu")
    for request in free:
        assert request.output == generate_alone(model, request.prompt, 12)


@pytest.mark.parametrize(
    "allowed",
    [
        [4, 9],
        (4, 9, 4),
        {4, 9},
        range(4, 10, 5).__iter__,  # a new iterator each time
        numpy.array([4, 9]),
        numpy.arange(VOCABULARY) % 5 == 4,
        torch.tensor([4, 9], dtype=torch.int32),
        torch.arange(VOCABULARY) % 5 == 4,
        None,
    ],
    ids=lambda allowed: type(allowed).__name__,
)
def test_ways_to_say_what_is_allowed(allowed):
    engine = make_engine(make_table(1))
    seen = []

    def told(output: list[int]):
        seen.append(output)
        return allowed() if callable(allowed) else allowed

    request = engine.submit([1, 2], SamplingParams(1, allowed_tokens=told, logit_bias={9: 50.0}))
    other = engine.submit([1, 2], SamplingParams(1, temperature=1.0, seed=1))
    list(engine.run())
    assert seen == [[]]
    assert request.output == [9]
    assert other.output


def fails_with(params: SamplingParams, after: int = 0) -> Exception:
    """The error of one request among others, which are undisturbed."""
    table = make_table(2)
    engine, alone = make_engine(table), make_engine(table)
    others = [
        SamplingParams(9),
        SamplingParams(9, temperature=1.0, seed=3, min_p=0.1),
        SamplingParams(9, frequency_penalty=1.0, logprobs=2),
        SamplingParams(9, allowed_tokens=lambda output: range(7, 30), bad_words=[[8]]),
    ]
    expected = [alone.submit([index, 1], each) for index, each in enumerate(others)]
    list(alone.run())
    requests = [engine.submit([index, 1], each) for index, each in enumerate(others[:2])]
    failing = engine.submit([5] * 9, params)
    requests += [engine.submit([index + 2, 1], each) for index, each in enumerate(others[2:])]
    told = []
    while engine.running or engine.waiting:
        told += [token for request, token in engine.step() if request is failing]
    assert [r.output for r in requests] == [r.output for r in expected]
    assert [r.logprobs for r in requests] == [r.logprobs for r in expected]
    assert failing.finish_reason == "error"
    assert failing.is_finished
    assert failing.stats.seconds is not None
    assert told == [*failing.output, None]
    assert len(failing.output) == failing.stats.output_tokens == after
    assert (engine.stats.failed, engine.stats.finished) == (1, 4)
    assert engine.stats.output_tokens == 36 + after
    usage = engine.cache.usage()
    assert usage.in_use == usage.sequences == 0
    assert failing.error is not None
    engine.abort(failing)
    assert failing.finish_reason == "error"
    return failing.error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed(temperature):
    def until_two(output):
        return range(10) if len(output) < 2 else []

    options = [
        ({"allowed_tokens": until_two}, 2),
        ({"allowed_tokens": lambda output: torch.zeros(VOCABULARY, dtype=torch.bool)}, 0),
        ({"allowed_tokens": lambda output: {4}, "bad_words": [[4]]}, 0),
        ({"allowed_tokens": lambda output: [END], "stop_tokens": [END], "min_tokens": 1}, 0),
        ({"bad_words": [[token] for token in range(VOCABULARY)]}, 0),
    ]
    for option, after in options:
        error = fails_with(SamplingParams(9, temperature=temperature, **option), after)
        assert isinstance(error, NothingAllowed)
        assert str(error).startswith(f"no token may follow after {after} tokens of output: allowed")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ([40], r"token ids from 0 to 39, the model's vocabulary, got 40 to 40"),
        ([-1, 3], r"token ids from 0 to 39, the model's vocabulary, got -1 to 3"),
        ([1.5], r"return token ids .* got \[1\.5\]"),
        (["a"], r"return token ids .* got \['a'\]"),
        ([True, False], r"return token ids .* got \[True, False\]"),
        ([1 << 70], "return token ids"),
        (5, "return token ids .* got 5"),
        (torch.zeros(3, dtype=torch.bool), r"masks of shape \[40\], .* got \[3\] on cpu"),
        (torch.ones(40, dtype=torch.bool, device="meta"), r"on the CPU or cpu, got \[40\] on meta"),
        (torch.ones(40), r"return token ids .* got torch\.float32 \[40\] on cpu"),
        (torch.ones(2, 2, dtype=torch.int64), r"got torch\.int64 \[2, 2\] on cpu"),
    ],
)
def test_answers_that_are_none(answer, sentence):
    error = fails_with(SamplingParams(9, allowed_tokens=lambda output: answer))
    assert isinstance(error, ValueError)
    assert str(error).startswith("allowed_tokens must return ")
    with pytest.raises(ValueError, match=sentence):
        raise error


def test_functions_that_raise():
    def raising(output):
        if len(output) == 3:
            raise LookupError("no such state")
        return range(VOCABULARY)

    error = fails_with(SamplingParams(9, allowed_tokens=raising, presence_penalty=0.5), 3)
    assert isinstance(error, LookupError)
    error = fails_with(SamplingParams(9, logit_bias={3: 1.0, 40: 1.0}))
    assert str(error) == "logit_bias must be of tokens from 0 to 39, the model's vocabulary, got 40"


def test_logits_that_are_not_finite():
    """Beside requests that ask for more than the greatest logit, they are seen."""
    table = make_table(3)
    table[:, 30] = -torch.inf  # a model may exclude tokens itself
    table[7] = torch.nan
    engine = make_engine(table)
    params = SamplingParams(4, temperature=1.0, seed=1, logprobs=1)
    good, bad = engine.submit([3], params), engine.submit([7], params)
    assert set(engine.run()) == {good, bad}
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert str(bad.error) == (
        "the model's logits after 0 tokens of output are not finite: NaN, or infinity"
    )


@pytest.mark.parametrize("speculation", [None, PromptLookup(3)])
def test_logits_that_are_not_finite_where_nobody_asks_for_more(speculation):
    """The greatest logit of all is seen to be none, beside requests that go on."""
    table = make_table(3)
    table[7] = torch.nan
    table[8] = torch.inf
    table[9, 5] = torch.inf
    table[10] = -torch.inf
    engine = make_engine(table, speculation=speculation)
    alone = make_engine(table)
    expected = alone.submit([3, 4, 3, 4], SamplingParams(12))
    list(alone.run())
    good = engine.submit([3, 4, 3, 4], SamplingParams(12))
    bad = [engine.submit([3, token], SamplingParams(12)) for token in (7, 8, 9, 10)]
    assert set(engine.run()) == {good, *bad}
    assert good.output == expected.output
    for request in bad:
        assert request.output == []
        assert isinstance(request.error, RuntimeError)
        assert str(request.error).endswith("are not finite: NaN, or infinity")
    assert engine.stats.failed == 4
    assert engine.cache.usage().in_use == 0


def test_a_thousand_aborts_at_random():
    """Of requests of every kind, some of which fail, in a cache that is too small."""
    draw = random.Random(5)
    table = make_table(6)
    engine: Engine = make_engine(table, pages=24, max_batch=5, decode=str)
    kinds = [
        {},
        {"temperature": 1.0, "min_p": 0.1, "logprobs": 2},
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"allowed_tokens": lambda output: range(5, 30) if len(output) < 9 else ()},
        {"stop_strings": ["9, 1"], "stop_sequences": [[3, 4]], "temperature": 2.0},
        {"bad_words": [[5], [6, 7]], "min_tokens": 4, "stop_tokens": range(20)},
    ]
    alive, aborted, ended = [], 0, 0
    while aborted < 1000:
        if len(alive) < 12:
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))]
            params = SamplingParams(draw.randint(4, 20), seed=ended, **draw.choice(kinds))
            alive.append(engine.submit(prompt, params))
        if draw.random() < 0.5:
            ended += sum(request.is_finished for request, _ in engine.step())
        alive = [request for request in alive if not request.is_finished]
        if alive and draw.random() < 0.7:
            engine.abort(alive.pop(draw.randrange(len(alive))))
            aborted += 1
        usage = engine.cache.usage()
        assert usage.sequences == engine.running
        assert usage.free + usage.evictable + usage.in_use == 24
    list(engine.run())
    usage = engine.cache.usage()
    assert usage.in_use == usage.sequences == 0
    assert usage.free + usage.evictable == 24
    stats = engine.stats
    assert stats.aborted == 1000
    assert stats.failed > 5
    assert stats.preemptions > 5
    # The cache is as good as new.
    jobs = [([index], SamplingParams(8)) for index in range(6)]
    again, fresh = serve_at_random(engine, jobs), serve_at_random(make_engine(table), jobs)
    assert [r.output for r in again] == [r.output for r in fresh]
