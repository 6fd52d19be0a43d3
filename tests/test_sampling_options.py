"""What changes a request's logits, alone and mixed, against transformers' processors; logprobs."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_ops.generation import SamplingParams
from cudnn_ops.serving.edits import Edits
from tests.cases.generation import make_engine as make_llama_engine
from tests.cases.generation import (
    make_model,
    run_failing_every_other_step,
    serve_at_random,
    uncached_logits,
)
from tests.cases.sampling import VOCABULARY, distribution, generate, make_engine, make_table
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("overlap")


def only_even(output: list[int]) -> range:
    return range(0, VOCABULARY, 2)


def masked_by_length(output: list[int]) -> torch.Tensor:
    return torch.arange(VOCABULARY) % 5 != len(output) % 5


def now_and_then(output: list[int]) -> set[int] | None:
    return {3, 5, 7, 11} if len(output) % 3 == 0 else None


#: Each alone, then some together.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.3},
    {"presence_penalty": -0.9},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 5.0, 17: -7.5, 39: 2.25}},
    {"bad_words": [[3], [5, 9], [1, 2, 4], *([token, 7] for token in range(20))]},
    {"min_tokens": 9, "stop_tokens": list(range(0, 40, 3))},
    {"allowed_tokens": only_even},
    {"allowed_tokens": masked_by_length},
    {"allowed_tokens": now_and_then},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.2,
        "logit_bias": {2: 4.0, 4: -1.0},
        "bad_words": [(6,), (2, 8)],
        "min_tokens": 3,
        "stop_tokens": {10, 1000},
        "allowed_tokens": only_even,
    },
]
WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.4, "top_p": 0.6},
    {"temperature": 1.2, "min_p": 0.15},
    {"temperature": 2.5, "top_k": 12, "top_p": 0.8, "min_p": 0.3},
]


def reference_params(params: SamplingParams) -> SamplingParams:
    """Without stop tokens that are not in the vocabulary, which transformers refuses."""
    return replace(params, stop_tokens=[t for t in params.stop_tokens if t < VOCABULARY])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_each_option_is_what_transformers_does(options):
    table = make_table(1)
    engine = make_engine(table)
    requests = [
        engine.submit([4, 17, 9, index], SamplingParams(24, seed=index, **options, **warpers))
        for index, warpers in enumerate(WARPERS)
    ]
    list(engine.run())
    plain = [
        generate(table, request.prompt, SamplingParams(24, seed=index, **warpers))
        for index, (request, warpers) in enumerate(zip(requests, WARPERS, strict=True))
    ]
    for request in requests:
        expected = generate(table, request.prompt, reference_params(request.params))
        assert request.output == expected
    assert bool(options) == ([request.output for request in requests] != plain)


def random_jobs(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    jobs = []
    for index in range(count):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))]
        options = draw.choice(OPTIONS) | draw.choice(WARPERS)
        options["logprobs"] = draw.choice([None, None, 0, 3])
        jobs.append((prompt, SamplingParams(draw.randint(9, 30), seed=index, **options)))
    return jobs


def test_any_mixture_in_one_batch():
    """In a cache that is too small, so that requests are preempted and come back."""
    table = make_table(2)
    engine = make_engine(table, pages=32, max_batch=5)
    jobs = random_jobs(80, 3)
    requests = serve_at_random(engine, jobs)
    assert engine.stats.preemptions > 5
    assert engine.cache.usage().in_use == 0
    for request, (prompt, params) in zip(requests, jobs, strict=True):
        assert request.output == generate(table, prompt, reference_params(params))
        assert len(request.logprobs) == (0 if params.logprobs is None else len(request.output))


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_a_model_in_half_precision(device):
    """Computed in float32 or wider: a penalty that bfloat16 would round away decides."""
    table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.bfloat16, device=device)
    table[:, 5], table[:, 6] = 256.0, 255.0
    engine = make_engine(table)
    biased = engine.submit([1], SamplingParams(3, logit_bias={6: 1.25}))
    penalized = engine.submit([1], SamplingParams(4, frequency_penalty=0.4))
    mask = torch.arange(VOCABULARY, device=device) > 20
    masked = engine.submit([1], SamplingParams(2, allowed_tokens=lambda output: mask))
    greedy = engine.submit([1], SamplingParams(2))
    list(engine.run())
    assert biased.output == [6, 6, 6]
    assert penalized.output == [5, 5, 5, 6]
    assert masked.output == [21, 21]
    assert greedy.output == [5, 5]


def test_frequencies_are_those_of_transformers():
    """Chi squared, of 4000 draws by the engine's own numbers."""
    table = make_table(4, scale=1.0)
    options = {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.05}
    engine = make_engine(table, pages=200, max_batch=64, chunk=256)
    requests = [
        engine.submit([7, 3], SamplingParams(1, seed=seed, repetition_penalty=1.2, **options))
        for seed in range(4000)
    ]
    list(engine.run())
    found = Counter(request.output[0] for request in requests)
    expected = 4000 * distribution(table[3], [7, 3], [], requests[0].params)
    kept = expected > 0
    assert set(found) <= set(kept.nonzero()[:, 0].tolist())
    counts = torch.tensor([found[token] for token in range(VOCABULARY)])
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert freedom > 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_prompts_with_tokens_that_stand_for_something_else():
    """Tokens beyond the vocabulary are neither counted nor an error."""
    table = make_table(5)
    engine = make_engine(torch.cat([table, table, table]))
    params = SamplingParams(6, repetition_penalty=1.5, frequency_penalty=0.5)
    request = engine.submit([110, 100, 3], params)
    list(engine.run())
    assert request.output == generate(table, [3], params)


def test_options_are_copied():
    bias, words = {3: 50.0}, [[4]]
    params = SamplingParams(2, logit_bias=bias, bad_words=words)
    bias[5], words[0] = 100.0, [3]
    request = (engine := make_engine(make_table(6))).submit([1], params)
    list(engine.run())
    assert request.output == [3, 3]


def test_a_step_that_failed_is_counted_once():
    """The counts on the device follow the tokens, whatever was raised in between."""
    table, failing = make_table(7), [False]
    engine = make_engine(table)
    jobs = [([8, index], SamplingParams(30, frequency_penalty=1.0)) for index in range(3)]
    requests = [engine.submit(*job) for job in jobs]
    add = torch.Tensor.index_add_

    def fail(*args):
        if failing[0]:
            raise RuntimeError("no luck")
        return add(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_add_", fail)
        engine.step()  # the prompts are counted, and no output
        run_failing_every_other_step(engine, failing)
    assert [r.output for r in requests] == [generate(table, *job) for job in jobs]
    assert requests[0].output != generate(table, jobs[0][0], SamplingParams(30))


def test_requests_that_are_over_are_let_go():
    engine = make_engine(make_table(7))
    params = SamplingParams(2, frequency_penalty=1.0)
    over = weakref.ref(engine.submit([1], params))
    list(engine.run())
    engine.submit([2], params)
    list(engine.run())
    gc.collect()
    assert over() is None


# Log probabilities


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_the_models(device):
    """Whatever the other options make of its logits."""
    model = make_model(device)
    engine = make_llama_engine(device, 60)
    options = {"temperature": 2.0, "repetition_penalty": 1.5, "logit_bias": {3: 4.0}}
    greedy = engine.submit([5, 6, 7], SamplingParams(8, logprobs=4))
    changed = engine.submit([5, 6], SamplingParams(8, logprobs=0, seed=1, **options))
    many = engine.submit([5], SamplingParams(4, logprobs=100, temperature=1.0, seed=2))
    silent = engine.submit([5, 6, 7], SamplingParams(8))
    list(engine.run())
    assert silent.logprobs == []
    assert silent.output == greedy.output
    for request in (greedy, changed, many):
        start = len(request.prompt) - 1
        logits = uncached_logits(model, torch.tensor([request.tokens[:-1]], device=device))
        expected = logits.detach().double().log_softmax(-1)[start:].cpu()
        bound = 1e-4 if device == "cpu" else 0.1  # of bfloat16 logits near 8
        assert [each.token for each in request.logprobs] == request.output
        for row, found in zip(expected, request.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[found.token]), abs=bound)
            assert len(found.top) == min(request.params.logprobs, 64)
            values = [value for _, value in found.top]
            assert values == sorted(values, reverse=True)
            best = row.sort(descending=True).values[: len(values)]
            torch.testing.assert_close(torch.tensor(values).double(), best, atol=bound, rtol=0)
            for token, value in found.top:
                assert value == pytest.approx(float(row[token]), abs=bound)
    assert all(each.top[0] == (each.token, each.logprob) for each in greedy.logprobs)
    assert any(each.top == () for each in changed.logprobs)


# What it costs


class Operators(TorchDispatchMode):
    """Counts what is dispatched, but for what the host does with the lists of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_counting = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_counting:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step(*params: SamplingParams) -> Counter[str]:
    """Of one that decodes."""
    engine = make_engine(make_table(8), max_batch=32, chunk=64, pages=200, overlap=False)
    requests = [engine.submit([index, 1], each) for index, each in enumerate(params)]
    for _ in range(3):
        engine.step()
    add = Edits.add
    operators = Operators()

    def uncounted(*args):
        operators.is_counting = False
        add(*args)
        operators.is_counting = True

    with pytest.MonkeyPatch.context() as patch, operators:
        patch.setattr(Edits, "add", uncounted)
        assert len(engine.step()) == len(requests)
    return operators.counts


def test_greedy_requests_launch_nothing_more():
    """The model's logits, their greatest, and whether it is finite; views, reading the result."""
    counts = operators_of_a_step(*[SamplingParams(9, stop_tokens=[99], stop_sequences=[[98]])] * 3)
    views = ("slice.Tensor", "resolve_conj.default", "resolve_neg.default")
    for name in views:
        del counts[f"aten.{name}"]
    greatest = ("max.dim", "abs.default", "lt.Scalar", "where.ScalarOther")
    assert counts == {
        "aten.index.Tensor": 2,  # table[tokens[last]]
        **{f"aten.{name}": 1 for name in greatest},
    }


def test_what_is_launched_does_not_grow_with_the_batch():
    """And nothing in it waits for the device."""
    mixture = [SamplingParams(9, **options, **WARPERS[1]) for options in OPTIONS]
    mixture.append(SamplingParams(9, logprobs=3))
    few, many = operators_of_a_step(*mixture), operators_of_a_step(*mixture, *mixture)
    assert few == many
    waits = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}
    assert not waits & set(few)
    assert sum(few.values()) < 120


@pytest.mark.gpu
def test_nothing_waits_on_a_gpu():
    """Choosing is queued without the host waiting; reading the result is the step's only wait."""
    table = make_table(9).cuda()
    engine = make_engine(table, max_batch=32, chunk=64, pages=200)
    params = [SamplingParams(20, **options, **WARPERS[5], logprobs=2) for options in OPTIONS]
    for index, each in enumerate(params):
        engine.submit([index, 1], each)
    engine.step()
    choose = engine._runner._chooser.choose

    def guarded(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return choose(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._runner._chooser.choose = guarded
    requests = list(engine.run())
    assert len(requests) == len(params)
