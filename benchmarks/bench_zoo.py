"""Whole models, nothing rewritten: backend="cudnn_ops" beside eager mode and torch.compile.

bf16, random weights. A step is one call, in training with its backward, from an idle GPU to the end
of its last kernel. Compiling is timed from nothing to the end of the first step, and the peak of
memory is that of a step. Results, and in training gradients, are held to the same model in float32:
at most twice the error of eager mode, with nothing dropped, since each compiler draws numbers of
its own. What is timed drops what the model drops. `--only` measures some models and adds their rows
to the file.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import cudnn_ops
from benchmarks.harness import OURS, Rows, main, peak_bytes, step_ms
from benchmarks.zoo_models import ZOO, Entry

# Of a result's error in eager mode, with a floor for what eager mode gets right by chance.
TIMES_EAGER, FLOOR = 2.0, 1e-3
#: What models call the probability by which they drop numbers, rows or whole branches.
PROBABILITIES = ("p", "drop_prob", "dropout")
COMPILERS: Mapping[str, dict[str, Any]] = {
    OURS: {"backend": "cudnn_ops"},
    "compile": {},
    "compile max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


def run(rows: Rows, rounds: int) -> None:
    failed: list[str] = []
    for entry in ZOO:
        try:
            measure(entry, rows, rounds)
        except RuntimeError as error:  # hours of others' compiling would be lost
            failed.append(f"{entry.name}: {error}")
            print(failed[-1], flush=True)
    if failed:
        raise RuntimeError("\n".join(failed))


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
    inputs = entry.inputs(torch.device(device))
    model = copy.deepcopy(reference).to(torch.bfloat16)
    with nothing_dropped(reference), nothing_dropped(model):
        exact = results_of(entry, reference, in_float32(inputs), trains)
        eager = results_of(entry, model, inputs, trains)
    del reference
    allowed = [TIMES_EAGER * error(*pair) + FLOOR for pair in zip(eager, exact, strict=True)]
    steps: dict[str, Callable[[], object]] = {"eager": step_of(entry, model, inputs, trains)}
    for name, options in COMPILERS.items():
        compiled = torch.compile(model, dynamic=False, **options)
        step = step_of(entry, compiled, inputs, trains)
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        rows.add(case, name, "compile_s", time.perf_counter() - start)
        with nothing_dropped(model):
            found = results_of(entry, compiled, inputs, trains)
        for what, mine, right, most in zip(
            ("result", "gradients"), found, exact, allowed, strict=False
        ):
            off = error(mine, right)
            if not off <= most:  # written so that NaN fails
                raise RuntimeError(
                    f"{case}: the {what} of {name} differ by {off:.2g}; allowed: {most:.2g}"
                )
        steps[name] = step
    if device != "cuda":
        return
    for name, ms in step_ms(steps, rounds=rounds).items():
        rows.add(case, name, "step_ms", ms)
    for name, call in steps.items():
        rows.add(case, name, "peak_mib", peak_bytes(call) / 2**20)


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model drops nothing at random."""
    kept: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name in PROBABILITIES:
            value = getattr(module, name, None)
            if isinstance(value, float) and (name != "p" or is_dropout(module)):
                kept.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def is_dropout(module: nn.Module) -> bool:
    """Whether its ``p`` is a probability: poolings have exponents of that name."""
    kind = type(module).__name__
    return "Drop" in kind or kind == "StochasticDepth"


def step_of(
    entry: Entry, model: Any, inputs: Mapping[str, Any], trains: bool
) -> Callable[[], Tensor]:
    def infer() -> Tensor:
        with torch.no_grad():
            return entry.result(model(**inputs))

    def train() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        result = entry.result(model(**inputs))
        # The sum of what a norm returns does not depend on what it is given, nor does that of
        # the squares.
        result.float().sin().mean().backward()
        return result.detach()

    parameters = list(model.parameters()) if trains else []
    return train if trains else infer


def results_of(entry: Entry, model: Any, inputs: Mapping[str, Any], trains: bool) -> list[Tensor]:
    """The result in float32, and in training all gradients as one vector."""
    found = [step_of(entry, model, inputs, trains)().float()]
    if trains:
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(grads).float())
    return found


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
