"""Mixtures of experts: GPU time beside transformers' ways to compute them, and of each step.

bf16; the experts of each model on tokens that random logits route. A training forward, and the
backward with all gradients, and inference on few tokens. "transformers" is its loop over the
experts, which waits for the GPU; "grouped_mm" its own use of torch's grouped product, and "compile"
that under torch.compile. Of the steps, "torch" is an index and a weighted sum in torch's operators,
behind a stable sort; a copy reads and writes as many rows as tokens have experts.

`--only` measures some groups of cases and adds their rows to the file.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import cudnn_ops
from benchmarks.bench_norms import random_tensor, verify
from benchmarks.harness import OURS, Rows, gpu_ms, main


class Model(NamedTuple):
    name: str
    experts: int
    top_k: int
    dim: int
    hidden: int
    training: tuple[int, ...]
    """Numbers of tokens."""
    inference: tuple[int, ...] = (1, 16, 256, 4096)


MODELS = (
    Model("Mixtral-8x7B", 8, 2, 4096, 14_336, (4096, 16_384)),
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768, (4096, 16_384)),
    Model("OLMoE-7B", 64, 8, 2048, 1024, (4096, 16_384)),
    Model("DeepSeek-V3", 256, 8, 7168, 2048, ()),
)
PARTS = (*(model.name for model in MODELS), "steps")


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    rounds = max(rounds // 5, 1)  # calls of many milliseconds
    torch.manual_seed(0)
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for model in MODELS:
            if part == model.name:
                measure_model(model, rows, rounds)
            elif part == "steps":
                for tokens in model.inference[-1:]:
                    measure_steps(model, tokens, rows, rounds)


def route(model: Model, tokens: int) -> tuple[Tensor, Tensor]:
    """The weights, which have a gradient, and the experts."""
    weights, experts = cudnn_ops.moe_route(random_tensor(tokens, model.experts), model.top_k)
    return weights.requires_grad_(), experts


def make_theirs(model: Model, gate_up: Tensor, down: Tensor) -> Any:
    """Transformers' module with these parameters."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=model.dim,
        intermediate_size=model.hidden,
        num_local_experts=model.experts,
        num_experts_per_tok=model.top_k,
    )
    with torch.device("meta"):
        theirs = MixtralExperts(config)
    theirs.gate_up_proj = torch.nn.Parameter(gate_up)
    theirs.down_proj = torch.nn.Parameter(down)
    return theirs


def measure_model(model: Model, rows: Rows, rounds: int) -> None:
    torch._dynamo.reset()
    scale = model.dim**-0.5
    gate_up = random_tensor(model.experts, 2 * model.hidden, model.dim).mul_(scale)
    down = random_tensor(model.experts, model.dim, model.hidden).mul_(scale)
    theirs = make_theirs(model, gate_up, down)

    def by(implementation: str, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        theirs.config._experts_implementation = implementation
        result: Tensor = theirs(x, experts, weights)
        return result

    def ours(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        parameters = theirs.gate_up_proj, theirs.down_proj
        return cudnn_ops.moe_experts(x, experts, weights, *parameters)

    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        OURS: ours,
        "transformers": partial(by, "eager"),
        "grouped_mm": partial(by, "grouped_mm"),
        "compile": torch.compile(partial(by, "grouped_mm"), dynamic=True),
    }
    for tokens in model.inference:
        add_inference(model, tokens, functions, rows, rounds)
    for tokens in model.training:
        add_training(model, tokens, functions, [*theirs.parameters()], rows, rounds)


def add_inference(model: Model, tokens: int, functions: Any, rows: Rows, rounds: int) -> None:
    x, (weights, experts) = random_tensor(tokens, model.dim), route(model, tokens)
    weights = weights.detach()
    with torch.no_grad():
        calls = {name: partial(f, x, experts, weights) for name, f in functions.items()}
        check(f"{model.name} {tokens}", {name: (call(),) for name, call in calls.items()})
        for name, ms in gpu_ms(calls, rounds=rounds).items():
            rows.add(f"{model.name} {tokens} inference", name, "gpu_ms", ms)


def add_training(
    model: Model,
    tokens: int,
    functions: Any,
    parameters: list[Tensor],
    rows: Rows,
    rounds: int,
) -> None:
    x, (weights, experts) = random_tensor(tokens, model.dim).requires_grad_(), route(model, tokens)
    grad, leaves = random_tensor(tokens, model.dim), [x, weights, *parameters]
    forward = {name: partial(f, x, experts, weights) for name, f in functions.items()}
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    expected: tuple[Tensor, ...] = ()
    for name, call in forward.items():
        out = call()
        backward[name] = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
        found = (out, *backward[name]())
        expected = expected or found
        verify(f"{model.name} {tokens}: {name}", found, expected)
        del out, found
    expected = ()
    for which, timed in (("fwd", forward), ("bwd", backward)):
        for name, ms in gpu_ms(timed, rounds=rounds).items():
            rows.add(f"{model.name} {tokens} {which}", name, "gpu_ms", ms)


def check(what: str, results: dict[str, tuple[Tensor, ...]]) -> None:
    for name, found in results.items():
        verify(f"{what}: {name}", found, results[OURS])


def permute_in_torch(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As transformers does it for a grouped product."""
    ordered, order = experts.flatten().sort(stable=True)
    rows = x[order // experts.shape[1]]
    counts = torch.histc(ordered.int(), bins=count, min=0, max=count - 1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return rows, counts.cumsum(0, dtype=torch.int32), places.view(experts.shape)


def combine_in_torch(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (rows[places] * weights.unsqueeze(2)).sum(1).to(rows.dtype)


def measure_steps(model: Model, tokens: int, rows: Rows, rounds: int) -> None:
    name = f"{model.name} {tokens}"
    x, (weights, experts) = random_tensor(tokens, model.dim).requires_grad_(), route(model, tokens)
    results = random_tensor(tokens * model.top_k, model.dim).requires_grad_()
    positions = cudnn_ops.moe_permute(x, experts, model.experts)[2]
    places = positions.long()
    target = torch.empty_like(results)
    copy: Callable[[], object] = partial(target.copy_, results.detach())
    steps: dict[str, tuple[dict[str, Callable[[], Any]], list[Tensor]]] = {
        "permute": (
            {
                OURS: lambda: cudnn_ops.moe_permute(x, experts, model.experts)[0],
                "torch": lambda: permute_in_torch(x, experts, model.experts)[0],
            },
            [x],
        ),
        "combine": (
            {
                OURS: lambda: cudnn_ops.moe_combine(results, positions, weights),
                "torch": lambda: combine_in_torch(results, places, weights),
            },
            [results, weights],
        ),
    }
    for step, (forward, leaves) in steps.items():
        backward: dict[str, Callable[[], object]] = {}
        expected: tuple[Tensor, ...] = ()
        for impl, call in forward.items():
            out = call()
            grad = torch.ones_like(out)
            backward[impl] = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
            found = (out, *torch.autograd.grad(out, leaves, grad, retain_graph=True))
            expected = expected or found
            verify(f"{name} {step}: {impl}", found, expected)
        for which, timed in (("fwd", forward), ("bwd", backward)):
            for impl, ms in gpu_ms({**timed, "copy": copy}, rounds=rounds).items():
                rows.add(f"{name} {step} {which}", impl, "gpu_ms", ms)


if __name__ == "__main__":
    main("moe", run, run_part, PARTS)
