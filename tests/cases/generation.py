"""Tiny models, prompts that begin alike, and generation without a cache."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from cudnn_ops import PagedKVCache
from cudnn_ops.generation import Engine, Request, SamplingParams
from examples.llama import Llama, LlamaConfig, Operators


@dataclass(frozen=True)
class Setup:
    """A tiny model, and what suits its device."""

    config: LlamaConfig
    page_size: int
    dtype: torch.dtype


SETUPS = {
    "cpu": Setup(LlamaConfig(2, 32, 4, 2, sequence=96, vocabulary=64), 4, torch.float32),
    "cuda": Setup(LlamaConfig(2, 256, 4, 2, sequence=384, vocabulary=64), 16, torch.bfloat16),
}


def make_model(device: str) -> Llama:
    """Random weights, large enough that what is generated depends on all that came before."""
    torch.manual_seed(0)
    model = Llama(SETUPS[device].config, Operators.named("torch"))
    with torch.no_grad():
        for weight in model.parameters():
            # Only the parameters are rounded: the angles of the positions stay float32.
            weight.data = (weight if weight.dim() == 1 else 3 * weight).to(SETUPS[device].dtype)
    return model.to(device)


def make_cache(device: str, pages: int, **options) -> PagedKVCache:
    setup = SETUPS[device]
    sizes = (setup.config.layers, pages, setup.page_size, setup.config.kv_heads)
    return PagedKVCache(*sizes, setup.config.head_size, dtype=setup.dtype, device=device, **options)


def make_engine(device: str, pages: int, **options) -> Engine:
    options = {"max_batch": 6, "chunk": 5 * SETUPS[device].page_size} | options
    return Engine(
        make_model(device).serve,
        make_cache(device, pages),
        max_length=SETUPS[device].config.sequence,
        **options,
    )


def make_prompts(count: int, unit: int, seed: int = 0) -> list[list[int]]:
    """Prompts of up to 11 units; most begin with one of five beginnings, some are another's all."""
    draw = random.Random(seed)
    shared = [[draw.randrange(64) for _ in range(draw.randint(unit, 7 * unit))] for _ in range(5)]
    prompts = []
    for _ in range(count):
        beginning = draw.choice([*shared, []])
        rest = draw.randint(0 if beginning else 1, 4 * unit)
        prompts.append(beginning + [draw.randrange(64) for _ in range(rest)])
    return prompts


def serve_at_random(
    engine: Engine, jobs: list[tuple[list[int], SamplingParams]], seed: int = 0
) -> list[Request]:
    """Submits jobs between steps, now several, now none, and serves them all."""
    draw = random.Random(seed)
    requests: list[Request] = []
    generated: dict[Request, list[int | None]] = {}
    while len(requests) < len(jobs) or engine.running or engine.waiting:
        for prompt, params in jobs[len(requests) : len(requests) + draw.choice([0, 0, 1, 4])]:
            requests.append(engine.submit(prompt, params))
        for request, token in engine.step():
            generated.setdefault(request, []).append(token)
        assert engine.running <= engine.max_batch
    for request, tokens in generated.items():
        assert [token for token in tokens if token is not None] == request.output
    return requests


@torch.no_grad()
def generate_alone(model: Llama, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens one after the other, each from a computation of all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def check_likeliest(model: Llama, requests: list[Request]) -> None:
    """Each token is the likeliest by a float64 model, but for the rounding of the model's dtype.

    That is twice the error of the same model without a cache in its own dtype, plus a floor.
    """
    exact = copy.deepcopy(model).cpu().double()
    for request in requests:
        tokens = torch.tensor([request.tokens[:-1]])
        logits = exact(tokens)[0]
        # Not `model(tokens)`: its autocast takes float32 parameters.
        rounded = uncached_logits(model, tokens.to(model.embedding.weight.device))
        bound = 2 * (rounded.cpu() - logits).abs().max() + 1e-3
        rows = logits[len(request.prompt) - 1 :]
        taken = rows.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert (taken >= rows.max(-1).values - 2 * bound).all()


def uncached_logits(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """[S, V] of tokens [1, S], in the parameters' dtype with plain attention."""

    def attend(layer, query, key, value):
        heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return model.serve(tokens[0], positions, positions, attend)


def run_failing_every_other_step(engine: Engine, failing: list[bool]) -> None:
    """Until all requests are over; what the engine calls raises where ``failing`` says so."""
    failures = 0
    while engine.running or engine.waiting:
        failing[0] = not failing[0]
        try:
            engine.step()
        except RuntimeError as error:
            if not failing[0] or str(error) != "no luck":
                raise
            failures += 1
        else:  # with overlap it may have read what was queued before, and queued nothing
            assert engine.overlap or not failing[0]
    assert failures > 5
