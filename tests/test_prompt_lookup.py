"""Prompt lookup: what is proposed, its figures and its options."""

from __future__ import annotations

import itertools
import random

import pytest

from cudnn_ops.generation import PromptLookup, SamplingParams
from cudnn_ops.serving.speculation import NgramIndex
from tests.cases.sampling import cycle, make_engine


def test_figures():
    engine = make_engine(cycle(1, 2, 3), speculation=PromptLookup(4))
    assert engine.stats.speculation.mean_acceptance_length == 0
    assert engine.stats.speculation.acceptance_rate == 0
    request = engine.submit([0, 1, 2, 3, 1, 2], SamplingParams(max_tokens=22))
    steps = [[token for _, token in engine.step()] for _ in range(6)]
    # The prompt's step gives one; then each gives four and the one behind them, and the last one.
    assert list(map(len, steps)) == [1, 5, 5, 5, 5, 1]
    assert list(itertools.chain(*steps)) == request.output == [3, 1, 2] * 7 + [3]
    assert request.is_finished
    speculation = request.stats.speculation
    assert speculation == engine.stats.speculation
    assert (speculation.drafts, speculation.draft_tokens, speculation.accepted_tokens) == (
        4,
        16,
        16,
    )
    assert speculation.acceptance_rate == 1
    assert speculation.mean_acceptance_length == 5
    assert engine.stats.computed_tokens == 6 + 4 * 5 + 1
    engine = make_engine(cycle(1, 2, 3))
    engine.submit([0, 1, 2, 3, 1, 2], SamplingParams(max_tokens=22))
    list(engine.run())
    assert engine.stats.steps == 22
    assert engine.stats.speculation.drafts == 0


def search(tokens: list[int], count: int, options: PromptLookup) -> list[int]:
    """What :class:`NgramIndex` proposes, by looking at every place."""
    for size in range(options.max_ngram, options.min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                known = list(tokens)
                for index in range(count):
                    known.append(known[end + index])
                return known[len(tokens) :]
    return []


@pytest.mark.parametrize("ngrams", [(1, 1), (3, 2), (4, 1), (5, 5)], ids=str)
def test_proposals_are_those_of_a_search(ngrams):
    draw = random.Random(2)
    options = PromptLookup(5, *ngrams)
    proposed = 0
    for _ in range(40):
        tokens, index = [draw.randrange(4)], NgramIndex(options)
        while len(tokens) < 60:
            count = draw.randint(1, 5)
            proposal = index.propose(tokens, count)
            assert proposal == search(tokens, count, options)
            proposed += bool(proposal)
            tokens += [draw.randrange(4) for _ in range(draw.randint(1, 6))]
    assert proposed > 10


def test_the_latest_and_the_longest_is_proposed():
    options = PromptLookup(3, max_ngram=2, min_ngram=1)
    assert NgramIndex(options).propose([1, 2, 5, 1, 2, 6, 3, 2, 7, 1, 2], 3) == [6, 3, 2]
    assert NgramIndex(options).propose([1, 2, 5, 3, 2], 2) == [5, 3]
    assert NgramIndex(options).propose([4, 9, 9], 3) == [9, 9, 9]
    assert NgramIndex(options).propose([1, 2, 3], 3) == []
    assert NgramIndex(options).propose([1], 3) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be a whole number, at least 1, got 0"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens must be a whole number, at least 1, got 2.5"),
        ({"min_ngram": 0}, "min_ngram must be a whole number, at least 1, got 0"),
        ({"max_ngram": "3"}, "max_ngram must be a whole number, at least 1, got '3'"),
        ({"max_ngram": 1}, "max_ngram must be at least min_ngram, 2, got 1"),
    ],
    ids=str,
)
def test_options_out_of_range(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        PromptLookup(**options)


def test_engines_refuse_other_kinds():
    with pytest.raises(ValueError, match="None, a PromptLookup or a DraftModel, got 'ngram'"):
        make_engine(cycle(1, 2), speculation="ngram")
