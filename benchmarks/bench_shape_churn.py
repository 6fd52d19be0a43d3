"""Training on sequences of ever new lengths: what the plan policies cost.

Part one: 1,000 random lengths between 1 and 4096, forward + backward, [B, S, H, D] memory. Some of
the first build the plans; for the others, how much more host time a call takes when its length is
new than when it comes again. torch's cuDNN backend builds a plan for each.

Part two: GPU time of polymorphic and of promoted plans beside that of exact ones.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor

import cudnn_ops
from benchmarks import peers
from benchmarks.bench_sdpa import SHAPES, Shape, tensors
from benchmarks.harness import Rows, gpu_ms, main
from cudnn_ops.plans.policy import Policy

BATCH, HEADS, KV_HEADS, DIM = 4, 32, 8, 128
LONGEST = 4096
LENGTHS = 1000
TORCH_LENGTHS = 60  # each takes it 60 ms
# The longest call's tensors and workspaces, and some: blocks of any size are cut from this.
RESERVE_BYTES = 6 * 2**30
POLICIES: dict[str, Policy] = {"exact": "exact", "polymorphic": "polymorphic", "promoted": "auto"}
PROMOTE_AFTER = 3  # calls; warming up is more


class Call(NamedTuple):
    built: bool
    """Whether it made a plan."""
    added_ms: float
    """Host time of its first run beyond that of its second."""


def run(rows: Rows, rounds: int) -> None:
    full = rounds > 10
    rng = random.Random(0)
    lengths = [rng.randint(1, LONGEST) for _ in range(LENGTHS if full else 40)]
    churn(rows, lengths, lengths[: TORCH_LENGTHS if full else 5])
    for shape in SHAPES:
        polymorphic_against_exact(shape, rows, max(rounds // 2, 1))


def churn(rows: Rows, lengths: list[int], torch_lengths: list[int]) -> None:
    attentions = peers.sdpa("cudnn_ops", "torch_cudnn")
    # Fresh memory takes milliseconds to get, whoever asks for it.
    torch.empty(RESERVE_BYTES, dtype=torch.uint8, device="cuda")
    cudnn_ops.cache_clear()
    with cudnn_ops.record_shapes() as plans:
        calls = measured(attentions["cudnn_ops"], lengths)
    case = f"{len(lengths)} lengths"
    for op in ("sdpa", "sdpa_backward"):
        rows.add(f"{case}, {op}", "cudnn_ops", "plans_built", sum(plan.op == op for plan in plans))
    add_cost(rows, case, "cudnn_ops", [call for call in calls if not call.built])
    with peers.backend("torch_cudnn"):
        add_cost(rows, case, "torch_cudnn", measured(attentions["torch_cudnn"], torch_lengths))


def add_cost(rows: Rows, case: str, impl: str, calls: list[Call]) -> None:
    ms = [call.added_ms for call in calls]
    rows.add(f"{case}, median", impl, "new_shape_ms", median(ms))
    rows.add(f"{case}, 99th percentile", impl, "new_shape_ms", quantiles(ms, n=100)[98])


def measured(attention: peers.Attention, lengths: list[int]) -> list[Call]:
    """Forward + backward at each length, twice."""
    calls = []
    for length in lengths:
        step = training_step(attention, length)
        before = cudnn_ops.cache_info()
        first, again = host_ms(step), host_ms(step)
        after = cudnn_ops.cache_info()
        made = (after.builds, after.loads) != (before.builds, before.loads)
        calls.append(Call(made, max(first - again, 0.0)))
    return calls


def host_ms(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def training_step(attention: peers.Attention, length: int) -> Callable[[], tuple[Tensor, ...]]:
    def draw(heads: int) -> Tensor:
        sizes = (BATCH, length, heads, DIM)
        return torch.randn(sizes, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    inputs = [draw(heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    grad_out = draw(HEADS)

    def step() -> tuple[Tensor, ...]:
        out = attention(*inputs, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, inputs, grad_out)

    return step


def polymorphic_against_exact(shape: Shape, rows: Rows, rounds: int) -> None:
    query, key, value, grad_out = tensors(shape, "cuda")
    inputs = (query, key, value)
    attend = partial(torch.ops.cudnn_ops.sdpa, is_causal=shape.causal, enable_gqa=shape.group > 1)
    inference = partial(attend, *(tensor.detach() for tensor in inputs))
    training = partial(attend, *inputs)
    backward = partial(torch.autograd.grad, training(), inputs, grad_out, retain_graph=True)

    for which, function in (("fwd, inference", inference), ("fwd", training), ("bwd", backward)):
        times = gpu_ms(
            dict.fromkeys(POLICIES, function),
            rounds=rounds,
            around=lambda name: cudnn_ops.using_plan_policy(
                POLICIES[name], promote_after=PROMOTE_AFTER
            ),
        )
        for name, ms in times.items():
            rows.add(f"{shape} {which}", name, "gpu_ms", ms)


if __name__ == "__main__":
    main("shape_churn", run)
