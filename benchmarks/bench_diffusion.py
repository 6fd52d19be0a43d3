"""Inference of models of diffusers: adapted by cudnn_ops, in eager mode, compiled, and both.

bf16, random weights; models and inputs are those of the benchmark `zoo`. A step is one call, from
an idle GPU to the end of its last kernel. Results are held to the same model in float32: at most
twice the error of eager mode.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.harness import OURS, Rows, main, step_ms
from benchmarks.whole_models import checked_steps
from benchmarks.zoo_models import ZOO, Entry
from cudnn_ops.integrations.optimize import optimize_

LIBRARY = "diffusers"
#: By their names: VAE decoder 4 x 4 x 64 x 64, SD 1.5 U-Net 8 x 4 x 64 x 64, DiT 32 x 4 x 32 x 32.
MODELS = {entry.name: entry for entry in ZOO if entry.library == LIBRARY}
PARTS = list(MODELS)
#: The adapted model, and compiled by this package.
BOTH = f"adapted, compile, {OURS}"
COMPILERS: Mapping[str, dict[str, Any]] = {
    "compile": {},
    f"compile, {OURS}": {"backend": "cudnn_ops"},
    BOTH: {"backend": "cudnn_ops"},
}


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(name: str, rows: Rows, rounds: int) -> None:
    if find_spec(LIBRARY) is None:
        print(f"{name}: {LIBRARY} is not installed")
        return
    measure(MODELS[name], rows, rounds)


def measure(entry: Entry, rows: Rows, rounds: int, device: str = "cuda") -> None:
    torch._dynamo.reset()
    steps, _ = checked_steps(entry.name, entry, False, device, variants)
    if device == "cuda":
        for name, ms in step_ms(steps, rounds=rounds).items():
            rows.add(entry.name, name, "step_ms", ms)


def variants(model: nn.Module) -> dict[str, Any]:
    """Ours first, and those that it is compared with."""
    adapted = copy.deepcopy(model.requires_grad_(False))
    report = optimize_(adapted)
    print(f"{len(report.diffusers)} modules are adapted", *report.notes, sep="\n", flush=True)
    compiled: dict[str, Any] = {
        name: torch.compile(report.model if name == BOTH else model, dynamic=False, **options)
        for name, options in COMPILERS.items()
    }
    return {OURS: report.model, "eager": model, **compiled}


if __name__ == "__main__":
    main("diffusion", run, run_part, PARTS)
