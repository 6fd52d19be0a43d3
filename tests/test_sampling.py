"""Sampled generation: from seeds, by each request's own options."""

from __future__ import annotations

import pytest
import torch

from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.serving.choosing import sample
from tests.cases.generation import (
    check_likeliest,
    make_cache,
    make_engine,
    make_model,
    make_prompts,
    serve_at_random,
)
from tests.conftest import DEVICES


def test_sampling_follows_from_the_seed_alone():
    """Alone in a large cache, or among others in a small one that preempts."""
    jobs = [
        (prompt, SamplingParams(max_tokens=16, temperature=1.5, top_k=20, top_p=0.9, seed=index))
        for index, prompt in enumerate(make_prompts(30, 4, seed=7))
    ]
    crowded = make_engine("cpu", pages=26)
    together = serve_at_random(crowded, jobs)
    assert crowded.stats.preemptions
    lonely = make_engine("cpu", pages=60, max_batch=1, chunk=64)
    alone = [lonely.submit(*job) for job in jobs]
    list(lonely.run())
    assert [r.output for r in together] == [r.output for r in alone]
    assert crowded.cache.usage().in_use == 0


def test_seeds_matter_and_none_is_another_each_time():
    engine = make_engine("cpu", 60)
    params = [
        SamplingParams(max_tokens=20, temperature=2.0, seed=seed) for seed in (1, 2, 1, None, None)
    ]
    requests = [engine.submit([5, 6, 7], each) for each in params]
    list(engine.run())
    one, two, again, *others = (tuple(request.output) for request in requests)
    assert one == again
    assert len({one, two, *others}) == 4


def test_each_token_is_drawn_anew():
    def indifferent(tokens, positions, last, attend):
        return torch.zeros(len(last), 64)

    engine = Engine(indifferent, make_cache("cpu", 60), max_batch=2)
    request = engine.submit([1], SamplingParams(max_tokens=200, temperature=1.0, seed=0))
    list(engine.run())
    assert len(set(request.output)) > 50


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_and_sampled_requests_share_a_batch(device):
    engine = make_engine(device, 60)
    greedy = engine.submit([5, 6, 7], SamplingParams(max_tokens=10))
    sampled = engine.submit([5, 6, 7], SamplingParams(max_tokens=10, temperature=5.0, seed=0))
    single = engine.submit([5, 6, 7], SamplingParams(max_tokens=10, temperature=5.0, top_k=1))
    list(engine.run())
    check_likeliest(make_model(device), [greedy, single])
    assert sampled.output != greedy.output


def options(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, number=0.5) -> list[float]:
    return [temperature, top_k, top_p, min_p, number]


def chosen(probabilities: list[float], rows: list[list[float]], device: str) -> list[int]:
    logits = torch.tensor([probabilities], device=device).log().expand(len(rows), -1)
    return sample(logits, torch.tensor(rows, dtype=torch.float64, device=device))[0].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_is_drawn_by_its_own_options(device):
    rows = {
        2: options(temperature=0.0, number=0.99),
        1: options(number=0.65),  # 0.4 of token 2, then 0.3 of token 1
        0: options(number=0.75),
        3: options(number=0.9999999),
    }
    assert chosen([0.2, 0.3, 0.4, 0.1], list(rows.values()), device) == list(rows)
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(top_k=2, number=0.99)], device) == [1]
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(top_k=9, number=1.0)], device) == [3]
    # 0.4 does not reach 0.5; 0.4 + 0.3 does.
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(top_p=0.5, number=0.99)], device) == [1]
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(top_p=0.3, number=0.99)], device) == [2]
    # top_p counts within what top_k leaves: 0.4 of 0.7 is more than half of it.
    both = options(top_k=2, top_p=0.55, number=0.99)
    assert chosen([0.2, 0.3, 0.4, 0.1], [both], device) == [2]
    # 0.3 is at least 0.7 of 0.4, and 0.2 is not.
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(min_p=0.7, number=0.99)], device) == [1]
    assert chosen([0.2, 0.3, 0.4, 0.1], [options(min_p=1.0, number=0.99)], device) == [2]
    assert chosen([0.0, 1.0], [options(number=0.0)], device) == [1]
    assert chosen([1.0, 0.0], [options(number=1.0)], device) == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature):
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    numbers = (torch.arange(20_000) + 0.5) / 20_000
    rows = [options(temperature, number=number) for number in numbers.tolist()]
    found = chosen(probabilities.tolist(), rows, "cpu")
    frequencies = torch.bincount(torch.tensor(found), minlength=4) / len(rows)
    torch.testing.assert_close(frequencies.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": "a"},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": None},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "1"},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": [(1, 1.0)]},
        {"bad_words": [5]},
        {"bad_words": [[]]},
        {"bad_words": [[1.5]]},
        {"bad_words": 5},
        {"min_tokens": -1},
        {"min_tokens": 65},
        {"min_tokens": 1.0},
        {"allowed_tokens": [1, 2]},
        {"stop_sequences": [[1, -2]]},
        {"stop_sequences": ["ab"]},
        {"stop_strings": "ab"},
        {"stop_strings": [""]},
        {"stop_strings": [1]},
        {"stop_strings": 1},
        {"logprobs": -1},
        {"logprobs": 1.0},
    ],
    ids=str,
)
def test_sampling_options_out_of_range(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))} must be .* got "):
        SamplingParams(**option)
