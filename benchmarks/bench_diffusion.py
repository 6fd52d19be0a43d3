"""Inference of models of diffusers: adapted by cudnn_ops, in eager mode, and compiled.

bf16, random weights; models and inputs are those of the benchmark `zoo`. A step is one call, from
an idle GPU to the end of its last kernel. Results are held to the same model in float32: at most
twice the error of eager mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.bench_zoo import FLOOR, TIMES_EAGER, error, in_float32, results_of, step_of
from benchmarks.harness import OURS, Rows, main, step_ms
from benchmarks.zoo_models import ZOO, Entry
from cudnn_ops.integrations.optimize import optimize_

LIBRARY = "diffusers"
#: By their names: VAE decoder 4 x 4 x 64 x 64, SD 1.5 U-Net 8 x 4 x 64 x 64, DiT 32 x 4 x 32 x 32.
MODELS = {entry.name: entry for entry in ZOO if entry.library == LIBRARY}
COMPILERS: Mapping[str, dict[str, Any]] = {
    "compile": {},
    f"compile, {OURS}": {"backend": "cudnn_ops"},
}


def run(rows: Rows, rounds: int) -> None:
    for name in MODELS:
        run_part(name, rows, rounds)


def run_part(name: str, rows: Rows, rounds: int) -> None:
    if find_spec(LIBRARY) is None:
        print(f"{name}: {LIBRARY} is not installed")
        return
    measure(MODELS[name], rows, rounds)


def measure(entry: Entry, rows: Rows, rounds: int, device: str = "cuda") -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = entry.make().to(device).eval().requires_grad_(False)
    inputs = entry.inputs(torch.device(device))
    model = copy.deepcopy(reference).to(torch.bfloat16)
    (exact,) = results_of(entry, reference, in_float32(inputs), trains=False)
    del reference
    (eager,) = results_of(entry, model, inputs, trains=False)
    allowed = TIMES_EAGER * error(eager, exact) + FLOOR
    steps: dict[str, Callable[[], object]] = {}
    for name, variant in variants(model).items():
        (result,) = results_of(entry, variant, inputs, trains=False)
        found = error(result, exact)
        if not found <= allowed:  # written so that NaN fails
            raise RuntimeError(
                f"{entry.name}: {name} is off by {found:.2g}, eager by {allowed:.2g} / 2"
            )
        steps[name] = step_of(entry, variant, inputs, trains=False)
    if device == "cuda":
        for name, ms in step_ms(steps, rounds=rounds).items():
            rows.add(entry.name, name, "step_ms", ms)


def variants(model: nn.Module) -> dict[str, Any]:
    """Ours first, and those that it is compared with."""
    adapted = copy.deepcopy(model)
    report = optimize_(adapted)
    print(f"{len(report.diffusers)} modules are adapted", *report.notes, sep="\n", flush=True)
    compiled: dict[str, Any] = {
        name: torch.compile(model, dynamic=False, **options) for name, options in COMPILERS.items()
    }
    return {OURS: report.model, "eager": model, **compiled}


if __name__ == "__main__":
    main("diffusion", run, run_part, list(MODELS))
