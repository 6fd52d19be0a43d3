"""The HTTP server on loopback, beside the continuous batching of transformers.

A Llama of transformers with Llama 3 8B's sizes and random bf16 weights. First all requests come at
once, as `generate_batch` of transformers gets them too, which has no HTTP to do. Then they come at
random, as from users. Times are those that a client sees, in a process of its own: to the first
token, and between two.
"""

import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks.harness import OURS, ROOT, Rows, main
from benchmarks.serving_client import Pieces
from cudnn_ops.generation import Engine
from cudnn_ops.integrations.transformers_serving import ServedModel, ServedTokenizer
from cudnn_ops.server import AsyncEngine
from cudnn_ops.server.app import create_app
from cudnn_ops.server.running import serve_in_thread

PEER = "transformers"
PAGE = 16
REQUESTS = 5  # a round
LIMIT_S = 240  # of one trace


@dataclass(frozen=True)
class Load:
    """A model and what it is asked."""

    device: str
    dtype: torch.dtype
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: tuple[int, int]  # tokens, shortest and longest
    output: int  # tokens
    rate: float  # requests a second, where they come at random
    max_batch: int
    chunk: int

    @property
    def longest(self) -> int:
        return self.prompts[1] + self.output


LLAMA_8B = Load(
    "cuda", torch.bfloat16, 4096, 14336, 32, 32, 8, 128_256, (64, 1024), 256, 16.0, 64, 2048
)
#: Shows that it runs, on a CPU.
TINY = Load("cpu", torch.float32, 64, 96, 2, 4, 2, 512, (4, 40), 12, 20.0, 4, 64)


def make_model(load: Load) -> LlamaForCausalLM:
    """Random weights."""
    config = LlamaConfig(
        vocab_size=load.vocabulary,
        hidden_size=load.width,
        intermediate_size=load.hidden,
        num_hidden_layers=load.layers,
        num_attention_heads=load.heads,
        num_key_value_heads=load.kv_heads,
        max_position_embeddings=load.longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(load.device):
        model = LlamaForCausalLM._from_config(config, dtype=load.dtype)
    return model.eval().requires_grad_(False)


def make_tokenizer(load: Load) -> ServedTokenizer:
    """One that has a character for each token, so that a client can count them."""
    # From the first ideograph on there are as many without a gap.
    vocabulary = {chr(0x20000 + token): token for token in range(load.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x20000)))
    tokenizer.decoder = decoders.Fuse()
    return ServedTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    )


def make_prompts(load: Load, requests: int) -> list[list[int]]:
    draw = random.Random(0)
    return [
        [draw.randrange(load.vocabulary) for _ in range(draw.randint(*load.prompts))]
        for _ in range(requests)
    ]


def add_times(
    rows: Rows, case: str, impl: str, seconds: float, tokens: int, times: Iterable[Pieces]
) -> None:
    """Rows of the speed, and of both waits: their median and 99th percentile.

    Args:
        rows: where they go.
        case: the trace.
        impl: who served it.
        seconds: from the first request to the last token.
        tokens: of output, in all.
        times: when the tokens of each request came, as the client tells it.
    """
    rows.add(case, impl, "tokens_per_s", tokens / seconds)
    first, between = [], []
    for pieces in times:
        first.append(1e3 * pieces[0][0])
        for (before, _), (now, count) in itertools.pairwise(pieces):
            # What came together waited as long as its share.
            between += [1e3 * (now - before) / count] * count
    for name, waits in (("first_token", first), ("between_tokens", between)):
        cuts = statistics.quantiles(waits, n=100, method="inclusive")
        rows.add(case, impl, f"{name}_p50_ms", cuts[49])
        rows.add(case, impl, f"{name}_p99_ms", cuts[98])


def measure_peer(
    model: LlamaForCausalLM, load: Load, prompts: Sequence[list[int]], rows: Rows
) -> None:
    """What transformers' own continuous batching takes, warmed up before."""
    options = GenerationConfig(max_new_tokens=load.output, do_sample=False, eos_token_id=-1)
    results = model.generate_batch(
        inputs=list(prompts),
        generation_config=options,
        # Enough for all requests of the trace at once.
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.6),
        record_timestamps=True,
        max_new_tokens=load.output,
    )
    times: list[Pieces] = []
    begins, ends = [], []
    for result in results.values():
        stamps = result.timestamps or []
        if result.error is not None or len(stamps) != load.output:
            raise RuntimeError(f"{PEER} gave {len(stamps)} of {load.output} tokens: {result.error}")
        begins.append(result.created_time)
        ends.append(stamps[-1])
        times.append([(stamp - result.created_time, 1) for stamp in stamps])
    if len(times) != len(prompts):
        raise RuntimeError(f"{PEER} finished {len(times)} of {len(prompts)} requests")
    seconds = max(ends) - min(begins)
    add_times(rows, "all at once", PEER, seconds, len(prompts) * load.output, times)


def ask(url: str, jobs: Sequence[tuple[float, dict[str, Any]]]) -> list[Pieces]:
    """What a client sees, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving_client", url],
        input=json.dumps(jobs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the client failed: {done.stderr}")
    times: list[Pieces] = json.loads(done.stdout)
    return times


def measure_server(
    served: ServedModel, load: Load, prompts: Sequence[list[int]], rows: Rows
) -> None:
    """What the server takes, warmed up before."""
    tokenizer = make_tokenizer(load)
    pages = load.max_batch * -(-load.longest // PAGE)
    engine = Engine(
        served,
        served.cache(pages, PAGE),
        max_batch=load.max_batch,
        chunk=load.chunk,
        max_length=load.longest,
        decode=tokenizer.decode,
    )
    engine.warm_up()
    serving = AsyncEngine(
        engine, vocabulary=load.vocabulary, decode=tokenizer.decode, max_waiting=len(prompts)
    )
    options = {"max_tokens": load.output, "temperature": 0}
    bodies = [{"prompt": prompt, **options} for prompt in prompts]
    draw = random.Random(1)
    with serve_in_thread(create_app(serving, tokenizer, "random", max_body_bytes=1 << 24)) as url:
        for case in ("all at once", f"{load.rate:g} a second"):
            engine.cache.reset()  # no prefix is known from the trace before
            at, jobs = 0.0, []
            for body in bodies:
                jobs.append((at, body))
                if case != "all at once":
                    at += draw.expovariate(load.rate)
            times = ask(url, jobs)
            counts = [sum(count for _, count in pieces) for pieces in times]
            if set(counts) != {load.output}:
                raise RuntimeError(f"not all requests got {load.output} tokens: {counts}")
            ends = [begin + pieces[-1][0] for (begin, _), pieces in zip(jobs, times, strict=True)]
            add_times(rows, case, OURS, max(ends), sum(counts), times)


def measure(load: Load, requests: int, rows: Rows) -> None:
    """All traces, of so many requests; transformers first, for the server changes the model."""
    prompts = make_prompts(load, requests)
    model = make_model(load)
    measure_peer(model, load, prompts, rows)
    gc.collect()  # its cache
    if load.device == "cuda":
        torch.cuda.empty_cache()
    measure_server(ServedModel(model), load, prompts, rows)


def run(rows: Rows, rounds: int) -> None:
    measure(LLAMA_8B, REQUESTS * rounds, rows)


if __name__ == "__main__":
    main("serving", run)
