"""Serves prompts with the model that `examples.train_llama` trains, from a paged cache.

    python -m examples.generate
    torchrun --nproc-per-node 2 -m examples.generate --tp 2

With `--tp`, processes share the model's heads, and each has a GPU of its own.

Prompts are pieces of the held-out text behind beginnings that many of them share, as requests
share a system prompt. What belongs here: the prompts, the progress, the report and the command
line; the engine is `cudnn_ops.generation`, the model is in `llama.py`, how it is spread in
`parallel.py`.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from cudnn_ops import PagedKVCache
from cudnn_ops.distributed import heads_of_rank
from cudnn_ops.generation import Engine, PromptLookup, Request, SamplingParams, SpeculationStats
from examples.llama import Llama, LlamaConfig, Operators
from examples.processes import process_group
from examples.train_llama import (
    CHECKPOINT,
    RECIPES,
    TrainConfig,
    check_seed,
    kind_of_device,
    load_text,
)


@dataclass(frozen=True)
class GenerateConfig:
    """The command line's choices."""

    checkpoint: Path = TrainConfig.out / CHECKPOINT
    random: bool = False
    device: str = "auto"
    tp: int = 1
    prompts: int | None = None
    beginnings: int = 4
    max_tokens: int = 48
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    max_batch: int | None = None
    chunk: int | None = None
    draft_tokens: int = 0
    pages: int | None = None
    page_size: int = 16
    samples: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Load:
    """What suits one kind of device, where the command line does not say."""

    prompts: int
    max_batch: int
    chunk: int


LOADS = {"cpu": Load(32, 8, 128), "cuda": Load(512, 64, 1024)}


@dataclass(frozen=True)
class Summary:
    """What one run measured; times are in seconds, tokens are bytes of text."""

    device: str
    processes: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float  # of output, over the time spent in steps
    time_to_first_token_median: float
    time_to_first_token_p99: float
    prefix_hits: int
    preemptions: int
    peak_pages: int
    pages: int
    steps: int
    replays: int  # steps from a CUDA graph
    speculation: SpeculationStats


def load_checkpoint(path: Path) -> Llama:
    """The trained model, on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint; the message says how to get one.
        ValueError: the file is something else.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: `python -m examples.train_llama` trains a model and writes it, "
            "--checkpoint names another"
        )
    try:
        return Llama.load(path, Operators.named("cudnn_ops"))
    except (EOFError, KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        raise ValueError(
            f"--checkpoint: {path} is not what `python -m examples.train_llama` writes"
        ) from error


def load_model(config: GenerateConfig, device: torch.device) -> Llama:
    """The trained model, or one of the device's size with random weights; on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint; the message says how to get one.
        ValueError: the file is something else.
    """
    if config.random:
        torch.manual_seed(config.seed)
        model = Llama(RECIPES[device.type].model, Operators.named("cudnn_ops"))
    else:
        model = load_checkpoint(config.checkpoint)
    if device.type == "cuda":
        for weight in model.parameters():
            # Not model.bfloat16(): the angles of the positions must stay float32.
            weight.data = weight.data.bfloat16()
    return model


def make_prompts(
    text: Tensor, config: GenerateConfig, prompts: int, context: int
) -> list[list[int]]:
    """Prompts that leave room for `max_tokens` in `context`, in random order.

    Three quarters of a prompt are one of a few beginnings, the rest is its own.
    """
    generator = torch.Generator().manual_seed(config.seed)
    length = context - config.max_tokens
    own = length // 4

    def piece(size: int) -> list[int]:
        start = int(torch.randint(len(text) - size, (), generator=generator))
        return text[start : start + size].tolist()

    beginnings = [piece(length - own) for _ in range(config.beginnings)]
    picks = torch.randint(len(beginnings), (prompts,), generator=generator)
    return [beginnings[pick] + piece(own) for pick in picks.tolist()]


def serve(engine: Engine, requests: list[Request]) -> None:
    """Steps until all requests are finished, and shows how far they are."""
    total = sum(request.params.max_tokens for request in requests)
    with tqdm(total=total, unit="token") as bar:
        while engine.running or engine.waiting:
            bar.update(len(engine.step()))
            usage = engine.cache.usage()
            bar.set_postfix_str(
                f"{engine.running} run, {engine.waiting} wait, "
                f"{usage.in_use}/{usage.pages} pages, {engine.stats.preemptions} preempted",
                refresh=False,
            )


def summarize(
    engine: Engine, requests: Iterable[Request], device: torch.device, processes: int
) -> Summary:
    """The figures of a run that is over."""
    stats = [request.stats for request in requests]
    waits = [each.time_to_first_token or 0.0 for each in stats]
    overall = engine.stats
    return Summary(
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        processes=processes,
        requests=len(stats),
        prompt_tokens=sum(each.prompt_tokens for each in stats),
        output_tokens=overall.output_tokens,
        tokens_per_second=overall.tokens_per_second,
        time_to_first_token_median=statistics.median(waits),
        time_to_first_token_p99=sorted(waits)[-(-99 * len(waits) // 100) - 1],
        prefix_hits=overall.prefix_hits,
        preemptions=overall.preemptions,
        peak_pages=overall.peak_pages,
        pages=engine.cache.pages,
        steps=overall.steps,
        replays=overall.replays,
        speculation=overall.speculation,
    )


def report(summary: Summary) -> str:
    """The lines printed at the end."""
    speculation = summary.speculation
    drafts = [
        f"draft tokens   {speculation.accepted_tokens:,} of {speculation.draft_tokens:,} accepted, "
        f"{speculation.mean_acceptance_length:.2f} tokens a verification"
    ]
    return "\n".join(
        [
            f"served         {summary.requests} requests, {summary.prompt_tokens:,} + "
            f"{summary.output_tokens:,} tokens, on "
            f"{summary.device}{f' x {summary.processes}' if summary.processes > 1 else ''}",
            f"speed          {summary.tokens_per_second:,.0f} tokens/s",
            f"first token    {1e3 * summary.time_to_first_token_median:,.0f} ms median, "
            f"{1e3 * summary.time_to_first_token_p99:,.0f} ms p99, all having come at once",
            f"prefix hits    {summary.prefix_hits:,} tokens",
            f"pages          {summary.peak_pages} of {summary.pages} at most",
            f"preemptions    {summary.preemptions}",
            f"steps          {summary.steps}, of them {summary.replays} from CUDA graphs",
            *(drafts if speculation.drafts else []),
        ]
    )


def processes(config: GenerateConfig) -> AbstractContextManager[None]:
    """The processes that torchrun has started; nothing for one process.

    Raises:
        ValueError: they are not as many as `config` says; no GPU is there for "cuda".
    """
    if config.tp == 1:
        return nullcontext()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count != config.tp:
        raise ValueError(
            f"--tp {config.tp} needs as many processes, and there are {count}: start it by "
            f"torchrun --nproc-per-node {config.tp}"
        )
    return process_group(kind_of_device(config.device))


def make_engine(
    config: GenerateConfig, load: Load, device: torch.device, mesh: DeviceMesh | None
) -> tuple[Engine, LlamaConfig]:
    """An engine around this process's part of the model, and the sizes of the whole one."""
    model = load_model(config, device)
    sizes = model.config
    if not 1 <= config.max_tokens <= sizes.sequence - 4:
        raise ValueError(f"--max-tokens is 1 to {sizes.sequence - 4}, got {config.max_tokens}")
    kv_heads = sizes.kv_heads
    if mesh is not None:
        from examples.parallel import shard_for_serving  # on demand: its imports take long

        shard_for_serving(model, mesh)
        _, kv_heads = heads_of_rank(sizes.heads, sizes.kv_heads, mesh)
    model.to(device)
    max_batch = load.max_batch if config.max_batch is None else config.max_batch
    longest = -(-sizes.sequence // config.page_size)
    # Fewer than all that run may come to need, as in practice: sharing makes up for some.
    pages = max(longest, max_batch * longest // 2) if config.pages is None else config.pages
    cache = PagedKVCache(
        sizes.layers,
        pages,
        config.page_size,
        kv_heads,
        sizes.head_size,
        dtype=next(model.parameters()).dtype,
        device=device,
    )
    engine = Engine(
        model.serve,
        cache,
        max_batch=max_batch,
        chunk=load.chunk if config.chunk is None else config.chunk,
        max_length=sizes.sequence,
        mesh=mesh,
        speculation=PromptLookup(config.draft_tokens) if config.draft_tokens else None,
    )
    return engine, sizes


def generate(config: GenerateConfig) -> tuple[Summary, list[Request]] | None:
    """Serves the prompts that `config` asks for; None in processes that follow the first one.

    With more than one process, the default process group must be there.
    """
    kind = kind_of_device(config.device)
    device = torch.device(kind)
    load = LOADS[kind]
    mesh = init_device_mesh(kind, (config.tp,)) if config.tp > 1 else None
    engine, sizes = make_engine(config, load, device, mesh)
    with engine:
        if not engine.is_leader:
            engine.follow()
            return None
        engine.warm_up()
        params = SamplingParams(
            config.max_tokens, config.temperature, config.top_k, config.top_p, config.seed
        )
        _, heldout = load_text(torch.device("cpu"))
        prompts = load.prompts if config.prompts is None else config.prompts
        requests = [
            # Same seed, same choices: each has its own, so that equal prompts may go on
            # differently.
            engine.submit(prompt, replace(params, seed=config.seed + index))
            for index, prompt in enumerate(make_prompts(heldout, config, prompts, sizes.sequence))
        ]
        serve(engine, requests)
    return summarize(engine, requests, device, config.tp), requests


def sample_text(request: Request) -> str:
    """The end of a prompt and what follows it."""
    prompt, output = (
        bytes(part).decode(errors="replace") for part in (request.prompt[-80:], request.output)
    )
    return f"--- {prompt!r}\n+++ {output!r}"


def parse_args(argv: Sequence[str] | None = None) -> GenerateConfig:
    """The command line as a GenerateConfig."""
    default = GenerateConfig()
    parser = argparse.ArgumentParser(
        description="Serve prompts from a paged cache with cudnn_ops.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, default=default.checkpoint, help="the model")
    parser.add_argument("--random", action="store_true", help="random weights instead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default=default.device)
    parser.add_argument("--tp", type=int, default=default.tp, help="processes that share the model")
    for name, meaning in (
        ("beginnings", "beginnings that the prompts share"),
        ("max_tokens", "tokens to generate for each"),
        ("top_k", "draw from so many tokens; 0: all"),
        ("page_size", "tokens of a page"),
        ("draft_tokens", "draft tokens of a request in a step, by prompt lookup; 0: none"),
        ("samples", "samples to print"),
        ("seed", "of prompts, sampling and random weights"),
    ):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(default, name), help=meaning)
    for name, meaning in (
        ("prompts", "requests to serve"),
        ("max_batch", "requests that run at once"),
        ("chunk", "tokens of prompts that a step computes"),
    ):
        option, note = "--" + name.replace("_", "-"), "; None: what suits the device"
        parser.add_argument(option, type=int, help=meaning + note)
    parser.add_argument(
        "--pages", type=int, help="pages of the cache; None: half of what max-batch may need"
    )
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=default.top_p, help="draw from this much")
    config = GenerateConfig(**vars(parser.parse_args(argv)))
    check_seed(parser, config.seed)
    for name in ("tp", "prompts", "beginnings", "max_batch", "chunk", "page_size"):
        if (number := getattr(config, name)) is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("draft_tokens", "samples"):
        if getattr(config, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """The program; arguments that only it can judge end it with a line and status 2."""
    config = parse_args(argv)
    # For the CPU: its model is so small that threads wait for each other longer than they compute.
    torch.set_num_threads(1)
    try:
        with processes(config):
            result = generate(config)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result is not None:
        measured, served = result
        print("\n".join(sample_text(request) for request in served[: config.samples]))
        print(report(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
