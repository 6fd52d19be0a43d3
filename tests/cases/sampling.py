"""A model whose logits are rows of a table, and generation by the processors of transformers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from cudnn_ops import PagedKVCache
from cudnn_ops.generation import Engine, SamplingParams

VOCABULARY = 40


def make_table(seed: int, vocabulary: int = VOCABULARY, scale: float = 2.0) -> Tensor:
    """[vocabulary, vocabulary]: the logits after each token."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocabulary, vocabulary, dtype=torch.float64, generator=generator)


def make_engine(table: Tensor, pages: int = 60, **options: Any) -> Engine:
    """Serves the table."""

    def serve(tokens, positions, last, attend):
        return table[tokens[last]]

    cache = PagedKVCache(1, pages, 4, 1, 8, dtype=torch.float32, device=table.device)
    return Engine(serve, cache, **({"max_batch": 6, "chunk": 16} | options))


def chain(*followers: int, vocabulary: int = VOCABULARY) -> Tensor:
    """A table in which the tokens follow one another from token 0, and the last one itself."""
    table = torch.zeros(vocabulary, vocabulary)
    for token, follower in itertools.pairwise((0, *followers, followers[-1])):
        table[token, follower] = 9.0
    return table


def cycle(*tokens: int, vocabulary: int = 40) -> Tensor:
    """A table in which the tokens follow one another from token 0, and the first the last one."""
    table = chain(*tokens, vocabulary=vocabulary)
    table[tokens[-1]] = 0.0
    table[tokens[-1], tokens[0]] = 9.0
    return table


def distribution(
    scores: Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> Tensor:
    """[vocabulary], the probabilities of the next token.

    By transformers' processors; the penalties of presence and frequency, which it lacks, by the
    formula in OpenAI's documentation.
    """
    known = torch.tensor([prompt + output])
    rows = scores[None].clone()
    processors: list[Any] = []
    if params.logit_bias:
        bias: list[Any] = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        processors.append(logits_process.SequenceBiasLogitsProcessor(bias))
    processors.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for processor in processors:
        rows = processor(known, rows)
    for token, count in Counter(output).items():
        rows[0, token] -= params.frequency_penalty * count + params.presence_penalty
    processors = []
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        processors.append(logits_process.NoBadWordsLogitsProcessor(words))
    if params.min_tokens:
        size, stops = len(prompt), list(params.stop_tokens)
        least = logits_process.MinNewTokensLengthLogitsProcessor(size, params.min_tokens, stops)
        processors.append(least)
    if params.allowed_tokens is not None:
        allowed = params.allowed_tokens

        def allow(batch: int, ids: Tensor) -> list[int]:
            given: Any = allowed(ids[len(prompt) :].tolist())
            if given is None:
                return list(range(scores.shape[0]))
            return given.nonzero()[:, 0].tolist() if isinstance(given, Tensor) else list(given)

        processors.append(logits_process.PrefixConstrainedLogitsProcessor(allow, 1))
    if params.temperature:
        processors.append(logits_process.TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            processors.append(logits_process.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(logits_process.TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(logits_process.MinPLogitsWarper(params.min_p))
    for processor in processors:
        rows = processor(known, rows)
    if not params.temperature:
        return torch.nn.functional.one_hot(rows[0].argmax(), scores.shape[0]).double()
    return rows[0].softmax(-1)


def generate(table: Tensor, prompt: list[int], params: SamplingParams) -> list[int]:
    """One token after the other, each drawn by the seed's next number, the likeliest first."""
    draw = random.Random(params.seed)
    output: list[int] = []
    while len(output) < params.max_tokens:
        scores = table[(prompt + output)[-1]]
        weights, order = distribution(scores, prompt, output, params).sort(descending=True)
        index = min(int((weights.cumsum(0) <= draw.random()).sum()), len(weights) - 1)
        output.append(int(order[index]))
        if output[-1] in params.stop_tokens:
            break
    return output
