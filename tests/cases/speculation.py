"""Requests of every kind with speculation against those without, and sampled frequencies."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from cudnn_ops.generation import (
    DraftModel,
    Engine,
    PromptLookup,
    Request,
    SamplingParams,
    SpeculationStats,
)
from cudnn_ops.serving.page_pool import Node
from tests.cases.generation import serve_at_random
from tests.cases.sampling import distribution, make_engine

Speculation = PromptLookup | DraftModel


def check_cache(engine: Engine, requests: list[Request]) -> None:
    """What the prefix cache knows are beginnings of requests, and nothing is held any more."""
    assert engine.cache.usage().in_use == engine.cache.usage().sequences == 0
    known = {
        tuple(request.tokens[:length])
        for request in requests
        for length in range(len(request.tokens) + 1)
    }

    def walk(node: Node, before: tuple[int, ...]) -> None:
        for block, child in node.children.items():
            tokens = (*before, *memoryview(block).cast("q"))
            assert tokens in known
            walk(child, tokens)

    walk(engine.cache._pool._root, ())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 0.9, "frequency_penalty": -0.3},
    {"logit_bias": {3: 2.0}, "bad_words": [[3, 4], [1, 2, 5], [7]], "logprobs": 1},
    {"min_tokens": 9, "stop_tokens": [2, 5]},
    {"allowed_tokens": lambda output: range(len(output) % 2, 10, 2)},
    {"allowed_tokens": lambda output: torch.arange(10) != (output or [0])[-1]},
    {"stop_sequences": [[1, 2], [3, 3], [6, 1, 4]], "min_tokens": 2},
    {"stop_strings": ["12", "405", "77"]},
]
WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1},
]


def serve_options(table: torch.Tensor, speculation: Speculation | None, **options: Any):
    engine = make_engine(
        table,
        decode=lambda tokens: "".join(map(str, tokens)),
        speculation=speculation,
        **options,
    )
    draw = random.Random(3)
    jobs = [
        (
            [draw.randrange(10) for _ in range(draw.randint(1, 12))],
            SamplingParams(draw.randint(9, 30), seed=index, **edits, **warpers),
        )
        for index, (edits, warpers) in enumerate(itertools.product(OPTIONS * 3, WARPERS))
    ]
    return engine, serve_at_random(engine, jobs)


def check_same_as_without(
    table: torch.Tensor, speculation: Speculation, pages: int
) -> tuple[Engine, list[Request]]:
    """Of all options: tokens, texts, ends and log probabilities."""
    plain, expected = serve_options(table, None)
    engine, requests = serve_options(table, speculation, pages=pages)
    for request, right in zip(requests, expected, strict=True):
        assert request.output == right.output
        assert request.finish_reason == right.finish_reason
        assert request.stopped_by == right.stopped_by
        assert request.text == right.text
        assert [each.token for each in request.logprobs] == [each.token for each in right.logprobs]
        for ours, theirs in zip(request.logprobs, right.logprobs, strict=True):
            assert ours.top == theirs.top
            assert ours.logprob == theirs.logprob
    stats = engine.stats
    assert stats.output_tokens == plain.stats.output_tokens
    assert {request.finish_reason for request in requests} == {"stop", "length"}
    assert 200 < stats.speculation.accepted_tokens < stats.speculation.draft_tokens - 200
    return engine, requests


def check_frequencies(
    table: torch.Tensor, drafts: Speculation, warpers: dict[str, Any]
) -> SpeculationStats:
    """Chi-squared, of the first three tokens together with seeds from 0, against the exact ones."""
    prompt = [0, 1, 2, 3, 2, 1, 0, 1]
    params = SamplingParams(max_tokens=6, **warpers)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*output, token): chance * probability
            for output, chance in expected.items()
            for token, probability in enumerate(
                distribution(table[(*prompt, *output)[-1]], prompt, list(output), params).tolist()
            )
            if probability
        }
    engine = make_engine(table, pages=400, max_batch=64, chunk=512, speculation=drafts)
    count = 4000
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        engine.submit(prompt, replace(params, seed=seed))
        if seed % 50 == 49:
            found.update(tuple(request.output[:3]) for request in engine.run())
    assert found.keys() <= expected.keys()
    # The rare ones count together, as the test requires.
    common = [output for output, chance in expected.items() if chance * count > 5]
    pairs = [(found[output], expected[output] * count) for output in common]
    rest = [count - sum(each) for each in zip(*pairs, strict=True)]
    pairs += [(int(rest[0]), rest[1])] if rest[1] > 5 else []
    distance = sum((seen - right) ** 2 / right for seen, right in pairs)
    halves = torch.tensor([len(pairs) - 1, distance], dtype=torch.float64) / 2
    assert torch.special.gammaincc(*halves) > 0.01
    speculation = engine.stats.speculation
    assert speculation.drafts > count
    return speculation
