"""The generation engine: how much of a decoding step the GPU spends in the captured graph.

A model of Llama 3 8B's sizes with random bf16 weights; 64 requests that all decode. A step's time
is the host's, from one call of `Engine.step` to its end, which waits for the tokens; the GPU's is
that between two events around the graph, in the same step.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.harness import Rows, main
from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.serving import PagedKVCache
from examples.llama import Llama, LlamaConfig, Operators

CONFIG = LlamaConfig(layers=32, width=4096, heads=32, kv_heads=8, sequence=2048, vocabulary=128_256)
BATCH = 64
PROMPTS = (256, 1024)  # tokens, shortest and longest
CHUNK = 4096
WARM_UP_STEPS = 10
STEPS = 8  # a round
PAGE = 16


@contextmanager
def timed_replays() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Inside it every replay of a CUDA graph stands between two events, which are listed."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        events.append((begin, end))

    with patch.object(torch.cuda.CUDAGraph, "replay", timed):
        yield events


def engine(steps: int) -> Engine:
    """One whose requests have all had their prompts computed, with `steps` tokens to go."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(CONFIG, Operators.named("torch"))
    model.to(torch.bfloat16).requires_grad_(False)
    rng = random.Random(0)
    lengths = [rng.randint(*PROMPTS) for _ in range(BATCH)]
    longest = max(lengths) + steps + BATCH
    cache = PagedKVCache(
        CONFIG.layers,
        BATCH * -(-longest // PAGE),
        PAGE,
        CONFIG.kv_heads,
        CONFIG.head_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    serving = Engine(model.serve, cache, max_batch=BATCH, chunk=CHUNK, max_length=longest)
    requests = []
    for length in lengths:
        prompt = [rng.randrange(CONFIG.vocabulary) for _ in range(length)]
        requests.append(serving.submit(prompt, SamplingParams(max_tokens=steps + BATCH)))
    while not all(request.output for request in requests):
        serving.step()
    return serving


def run(rows: Rows, rounds: int) -> None:
    steps = STEPS * rounds
    serving = engine(WARM_UP_STEPS + steps)
    for _ in range(WARM_UP_STEPS):
        serving.step()
    step_ms = []
    with timed_replays() as events:
        for _ in range(steps):
            began = time.perf_counter()
            serving.step()
            step_ms.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    if len(events) != steps:
        raise RuntimeError(f"{len(events)} of {steps} steps were replayed from a graph")
    graph_ms = [begin.elapsed_time(end) for begin, end in events]
    case = f"decode, {BATCH} requests"
    rows.add(case, "cudnn_ops", "step_ms", statistics.median(step_ms))
    rows.add(case, "cudnn_ops", "graph_ms", statistics.median(graph_ms))
    rows.add(case, "cudnn_ops", "gpu_share", sum(graph_ms) / sum(step_ms))
    rows.add(case, "cudnn_ops", "tokens_per_s", BATCH / statistics.median(step_ms) * 1e3)


if __name__ == "__main__":
    main("generation", run)
