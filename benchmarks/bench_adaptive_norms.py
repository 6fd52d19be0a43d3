"""Adaptive norms, as diffusion transformers have them: GPU time beside that of a copy.

bf16; scale, shift and gate are chunks of one projection. A training forward, and the backward with
all gradients. A copy reads one tensor and writes one, as a forward without a gated sum must; its
backward must read two and write one. With the sum a forward reads two and writes two, and a
backward reads four and writes two.

`--only` measures some groups of cases and adds their rows to the file.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_norms import random_tensor, verify
from benchmarks.harness import OURS, Rows, gpu_ms, main

_EPS = 1e-6


class Case(NamedTuple):
    group: str
    batch: int
    tokens: int
    columns: int
    gated: bool = False
    is_layer: bool = True
    of_each_token: bool = False

    def __str__(self) -> str:
        size = f"{self.batch},{self.tokens},{self.columns}"
        words = ["" if self.is_layer else " rms", " gated sum" * self.gated]
        return f"{self.group} {size}{''.join(words)}{' by token' * self.of_each_token}"


def with_sums(*cases: Case) -> tuple[Case, ...]:
    return tuple(case._replace(gated=gated) for case in cases for gated in (False, True))


CASES = (
    *with_sums(
        Case("DiT-XL/2", 32, 256, 1152),
        Case("DiT-XL/2", 256, 256, 1152),
        Case("PixArt", 4, 4096, 1152),
        Case("SD3", 2, 4250, 1536),
        Case("SD3", 16, 1178, 1536),
        Case("Flux", 1, 4608, 3072),
        Case("Flux", 4, 4096, 3072),
        Case("Wan", 1, 32_760, 5120),
        Case("Wan", 1, 8190, 5120, of_each_token=True),
        Case("Lumina", 2, 4096, 2304, is_layer=False),
        Case("other", 1, 512, 3072),
        Case("other", 8, 1024, 8192),
        Case("odd", 3, 1001, 1021),
    ),
)
PARTS = tuple(dict.fromkeys(case.group for case in CASES))


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    rounds = max(rounds // 5, 1)  # as for the other norms
    torch.manual_seed(0)
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for case in CASES:
            if case.group == part:
                measure(case, rows, rounds)


def in_torch(
    case: Case, scale: Tensor, shift: Tensor, x: Tensor, update: Tensor, gate: Tensor
) -> tuple[Tensor, ...]:
    total = x + gate * update if case.gated else x
    size = (case.columns,)
    norm = F.layer_norm if case.is_layer else F.rms_norm
    out = norm(total, size, eps=_EPS) * (1 + scale) + shift
    return (out, total) if case.gated else (out,)


def ours(
    case: Case, scale: Tensor, shift: Tensor, x: Tensor, update: Tensor, gate: Tensor
) -> tuple[Tensor, ...]:
    kind = "layer" if case.is_layer else "rms"
    if case.gated:
        gated = getattr(cudnn_ops, f"gate_add_adaptive_{kind}_norm")
        results: tuple[Tensor, ...] = gated(x, update, gate, scale, shift)
        return results
    return (getattr(cudnn_ops, f"adaptive_{kind}_norm")(x, scale, shift),)


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    shape = (case.batch, case.tokens, case.columns)
    counted = case.tokens if case.of_each_token else 1
    chunks = random_tensor(case.batch, counted, 3 * case.columns).chunk(3, -1)
    scale, shift, gate = (chunk.detach().requires_grad_() for chunk in chunks)
    x, update = (random_tensor(*shape).requires_grad_() for _ in range(2))
    by = [random_tensor(*shape) for _ in range(1 + case.gated)]
    leaves = (scale, shift, x, update, gate)
    wanted = leaves if case.gated else leaves[:3]
    # One function's shapes would run into dynamo's limit of recompilations.
    torch._dynamo.reset()
    functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        OURS: partial(ours, case),
        "eager": partial(in_torch, case),
        "compile": torch.compile(partial(in_torch, case), dynamic=False),
    }
    forward: dict[str, Callable[[], object]] = {
        name: partial(f, *leaves) for name, f in functions.items()
    }
    backward: dict[str, Callable[[], object]] = {}
    expected: tuple[Tensor, ...] = ()
    for name, function in functions.items():
        results = function(*leaves)
        grad = partial(torch.autograd.grad, results, wanted, by, retain_graph=True)
        try:
            found = (*results, *grad())
        except RuntimeError as error:
            # AOTAutograd of torch 2.11 gives the gradient of a [1, 1, columns] another shape.
            if name != "compile":
                raise
            print(f"{case}: {name} is left out: {error}")
            del forward[name]
            continue
        expected = expected or found
        verify(f"{case}: {name}", found, expected)
        backward[name] = grad
    data, target = x.detach(), torch.empty_like(by[0])
    for which, timed in (("fwd", forward), ("bwd", backward)):
        timed["copy"] = partial(target.copy_, data)
        for name, ms in gpu_ms(timed, rounds=rounds).items():
            rows.add(f"{case} {which}", name, "gpu_ms", ms)


if __name__ == "__main__":
    main("adaptive_norms", run, run_part, PARTS)
