"""The generation engine: how much of a decoding step the GPU spends in the captured graph.

A model of Llama 3 8B's sizes with random bf16 weights; requests that all decode: with steps that
overlap, with steps one by one, and with draft tokens, each of which is right with a probability of
0.7, whatever the others are. A step's time is the host's, from one call of `Engine.step` to its
end, which waits for the tokens; the GPU's is that between two events around the graph, of as many
steps in the same time.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness import OURS, Rows, main
from cudnn_ops.generation import Engine, PromptLookup, Request, SamplingParams
from cudnn_ops.serving import PagedKVCache
from cudnn_ops.serving.model_runner import Attend, ModelRunner
from cudnn_ops.serving.speculation import LookupDrafter
from examples.llama import Llama, LlamaConfig, Operators

WARM_UP_STEPS = 10
STEPS = 8  # a round
PAGE = 16
BATCHES = (64, 8, 1)
DRAFTS = 4
RIGHT = 0.7  # of a draft token, if all before it are
#: Kinds of steps, and what their case's name says of them.
KINDS = {
    "overlap": "",
    "one by one": ", one by one",
    "drafts": f", {DRAFTS} drafts of {RIGHT}",
}


@dataclass(frozen=True)
class Load:
    """A model and what it is asked."""

    device: str
    dtype: torch.dtype
    config: LlamaConfig
    batch: int
    prompts: tuple[int, int]  # tokens, shortest and longest
    chunk: int


LLAMA_8B = Load(
    "cuda",
    torch.bfloat16,
    LlamaConfig(32, 4096, 32, 8, sequence=4096, vocabulary=128_256, mlp_width=14336),
    64,
    (256, 1024),
    4096,
)
#: Shows that it runs, on a CPU.
TINY = Load("cpu", torch.float32, LlamaConfig(2, 32, 4, 2, 1024, 64), 3, (4, 20), 64)


@contextmanager
def timed_decoding(device: str) -> Iterator[list[Callable[[], float]]]:
    """Inside it decoding is timed, on a GPU between two events; how to get each time in ms."""
    times: list[Callable[[], float]] = []
    decode = ModelRunner._batched

    def timed_by_events(*args: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = decode(*args)
        end.record()
        times.append(lambda: begin.elapsed_time(end))
        return result

    def timed_by_the_host(*args: Any) -> Any:
        began = time.perf_counter()
        result = decode(*args)
        seconds = time.perf_counter() - began
        times.append(lambda: seconds * 1e3)
        return result

    timed = timed_by_events if device == "cuda" else timed_by_the_host
    with patch.object(ModelRunner, "_batched", timed):
        yield times


@dataclass(frozen=True)
class Counting:
    """The model, whose logits are changed so that each token is followed by the next number.

    So it is known which draft is right, and the model computes all that it would.
    """

    model: Llama

    def __call__(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        logits = self.model.serve(tokens, positions, last, attend)
        following = (tokens[last] + 1) % logits.shape[1]
        return logits.scatter_(1, following[:, None], torch.finfo(logits.dtype).max)


def make_model(load: Load) -> Counting:
    """Random weights."""
    torch.manual_seed(0)
    with torch.device(load.device):
        model = Llama(load.config, Operators.named("cudnn_ops"))
    return Counting(model.to(load.dtype).requires_grad_(False))


@contextmanager
def known_drafts(vocabulary: int) -> Iterator[None]:
    """Inside it prompt lookup proposes what :class:`Counting` says, or else the number after it."""
    rng = random.Random(0)

    def propose(drafter: LookupDrafter, request: Request, count: int) -> list[int]:
        drafts, token = [], request.tokens[-1]
        for _ in range(count):
            token = (token + (1 if rng.random() < RIGHT else 2)) % vocabulary
            drafts.append(token)
        return drafts

    with patch.object(LookupDrafter, "propose", propose):
        yield


def make_engine(load: Load, model: Counting, steps: int, kind: str) -> Engine:
    """One whose requests have all had their prompts computed, with `steps` steps to go."""
    config, rng = load.config, random.Random(0)
    lengths = [rng.randint(*load.prompts) for _ in range(load.batch)]
    # The first ones have a few tokens when the last prompt is computed, and a step may be ahead.
    tokens = (steps + load.batch + 1) * (1 + DRAFTS if kind == "drafts" else 1)
    longest = max(lengths) + tokens
    cache = PagedKVCache(
        config.layers,
        load.batch * -(-longest // PAGE),
        PAGE,
        config.kv_heads,
        config.head_size,
        dtype=load.dtype,
        device=load.device,
    )
    engine = Engine(
        model,
        cache,
        max_batch=load.batch,
        chunk=load.chunk,
        max_length=longest,
        overlap=kind != "one by one",
        speculation=PromptLookup(num_draft_tokens=DRAFTS) if kind == "drafts" else None,
    )
    requests = []
    for length in lengths:
        prompt = [rng.randrange(config.vocabulary) for _ in range(length)]
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=tokens)))
    while not all(request.output for request in requests):
        engine.step()
    return engine


def measure(load: Load, model: Counting, kind: str, steps: int, rows: Rows) -> None:
    """The rows of one kind of steps."""
    engine = make_engine(load, model, WARM_UP_STEPS + steps, kind)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    step_ms, tokens = [], 0
    with timed_decoding(load.device) as times:
        for _ in range(steps):
            began = time.perf_counter()
            tokens += len(engine.step())
            step_ms.append((time.perf_counter() - began) * 1e3)
    if load.device == "cuda":
        torch.cuda.synchronize()
    if len(times) != steps:
        raise RuntimeError(f"{len(times)} steps decoded in the time of {steps}")
    if (engine.stats.overlap_share > 0.5) != (kind == "overlap"):
        raise RuntimeError(f"{engine.stats.overlap_share:.0%} of the steps overlapped")
    graph_ms = [elapsed() for elapsed in times]
    case = f"decode, {load.batch} request{'s'[: load.batch - 1]}{KINDS[kind]}"
    rows.add(case, OURS, "step_ms", statistics.median(step_ms))
    rows.add(case, OURS, "graph_ms", statistics.median(graph_ms))
    rows.add(case, OURS, "gpu_share", sum(graph_ms) / sum(step_ms))
    rows.add(case, OURS, "tokens_per_s", tokens / steps / statistics.median(step_ms) * 1e3)


def measure_all(load: Load, rounds: int, rows: Rows) -> None:
    """Every kind of steps of the same model, with as many requests as asked for, and with fewer."""
    model = make_model(load)
    for batch in dict.fromkeys(min(size, load.batch) for size in BATCHES):
        for kind in KINDS:
            with known_drafts(load.config.vocabulary):
                measure(replace(load, batch=batch), model, kind, STEPS * rounds, rows)


def run(rows: Rows, rounds: int) -> None:
    measure_all(LLAMA_8B, rounds, rows)


if __name__ == "__main__":
    main("generation", run)
