"""Requests of every kind, for steps that overlap and steps one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from cudnn_ops.generation import Engine, SamplingParams
from tests.cases.generation import make_prompts


def decode(tokens: list[int]) -> str:
    return "".join(f"{token:02d}" for token in tokens)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 0.9, "frequency_penalty": -0.3},
    {"logit_bias": {3: 2.0}, "bad_words": [[3, 4], [1, 2, 5], [7]], "logprobs": 1},
    {"min_tokens": 6, "stop_tokens": range(0, 64, 5)},
    {"stop_tokens": range(0, 64, 9)},
    {"allowed_tokens": lambda output: range(len(output) % 2, 64, 2)},
    {"allowed_tokens": lambda output: torch.arange(64) != (output or [0])[-1]},
    {"stop_sequences": [[token] for token in range(1, 64, 11)], "min_tokens": 2},
    {"stop_strings": ["12", "40", "77", "5"]},
]
WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1},
]


def jobs_of_every_kind(seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    kinds = list(itertools.product(OPTIONS, WARPERS))
    draw.shuffle(kinds)
    prompts = make_prompts(len(kinds), 4, seed)
    return [
        (prompt, SamplingParams(draw.randint(7, 20), seed=index, **edits, **warpers))
        for index, (prompt, (edits, warpers)) in enumerate(zip(prompts, kinds, strict=True))
    ]


def serve_all(engine: Engine) -> list[list[int]]:
    """All at once, with ends that are known: so all batches are the same, however they overlap."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
        {"frequency_penalty": 0.5, "min_tokens": 40, "stop_tokens": [3]},
    ]
    requests = [
        engine.submit([1, 2, 3, index], SamplingParams(40, seed=index, **kind))
        for index, kind in enumerate(kinds)
    ]
    list(engine.run())
    return [request.output for request in requests]
