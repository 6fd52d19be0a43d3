"""Whole models, nothing rewritten: backend="cudnn_ops" beside eager mode and torch.compile.

bf16, random weights. A step is one call, in training with its backward, from an idle GPU to the end
of its last kernel. Compiling is timed from nothing to the end of the first step, and the peak of
memory is that of a step. Results are held to the same model in float32: at most twice the error of
eager mode. `--only` measures some models and adds their rows to the file.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import cudnn_ops
from benchmarks.harness import OURS, Rows, main, peak_bytes, step_ms
from benchmarks.zoo_models import ZOO, Entry

# Of a result's error in eager mode, with a floor for what eager mode gets right by chance.
TIMES_EAGER, FLOOR = 2.0, 1e-3
COMPILERS: Mapping[str, dict[str, Any]] = {
    OURS: {"backend": "cudnn_ops"},
    "compile": {},
    "compile max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


def run(rows: Rows, rounds: int) -> None:
    for entry in ZOO:
        measure(entry, rows, rounds)


def run_part(name: str, rows: Rows, rounds: int) -> None:
    measure(next(entry for entry in ZOO if entry.name == name), rows, rounds)


def measure(entry: Entry, rows: Rows, rounds: int) -> None:
    if find_spec(entry.library) is None:
        print(f"{entry.name}: {entry.library} is not installed")
        return
    for trains in (False, True) if entry.trains else (False,):
        torch._dynamo.reset()
        cudnn_ops.compile_report().clear()
        measure_case(entry, trains, rows, rounds)
        print(cudnn_ops.compile_report(), flush=True)


def measure_case(entry: Entry, trains: bool, rows: Rows, rounds: int, device: str = "cuda") -> None:
    """One model, in inference or training, by every compiler."""
    case = f"{entry.name}, {'training' if trains else 'inference'}"
    torch.manual_seed(0)
    reference = entry.make().to(device).train(trains)
    # The parts of a step that draw random numbers would differ from compiler to compiler.
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = entry.inputs(torch.device(device))
    model = copy.deepcopy(reference).to(torch.bfloat16)
    exact = result_of(entry, reference, in_float32(inputs))
    del reference
    eager = result_of(entry, model, inputs)
    allowed = TIMES_EAGER * error(eager, exact) + FLOOR
    steps: dict[str, Callable[[], object]] = {"eager": step_of(entry, model, inputs, trains)}
    for name, options in COMPILERS.items():
        compiled = torch.compile(model, dynamic=False, **options)
        step = step_of(entry, compiled, inputs, trains)
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        rows.add(case, name, "compile_s", time.perf_counter() - start)
        found = error(result_of(entry, compiled, inputs), exact)
        if not found <= allowed:  # written so that NaN fails
            raise RuntimeError(f"{case}: {name} is off by {found:.2g}, eager by {allowed:.2g} / 2")
        steps[name] = step
    if device != "cuda":
        return
    for name, ms in step_ms(steps, rounds=rounds).items():
        rows.add(case, name, "step_ms", ms)
    for name, step in steps.items():
        rows.add(case, name, "peak_mib", peak_bytes(step) / 2**20)


def step_of(
    entry: Entry, model: Callable[..., Any], inputs: Mapping[str, Any], trains: bool
) -> Callable[[], object]:
    def infer() -> object:
        with torch.no_grad():
            return model(**inputs)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        entry.result(model(**inputs)).float().mean().backward()

    parameters = list(getattr(model, "parameters", list)())
    return train if trains else infer


def result_of(entry: Entry, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return entry.result(model(**inputs)).float()


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def error(result: Tensor, exact: Tensor) -> float:
    """As a share of the exact result's norm."""
    return float((result - exact).norm() / exact.norm())


if __name__ == "__main__":
    main("zoo", run, run_part, [entry.name for entry in ZOO])
