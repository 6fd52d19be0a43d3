"""Measuring linear layers, by cuBLASLt's epilogues, our kernels and cuDNN: ``tune linear``.

The package's table ``tuned/linear_sm<architecture>.json`` says for some products which of these is
the fastest, and with which of cuDNN's engines. A call runs by what was the fastest for the nearest
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops import _C
from cudnn_ops.ops.activation import ACTIVATIONS, Activation
from cudnn_ops.plans import timing
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.plans.tables import EngineTable, LinearTiming, load_tables
from cudnn_ops.plans.warmup import record_shapes

_ops = torch.ops.cudnn_ops

#: Rows, columns and depth of the products that the package's table is measured with, in bfloat16.
STANDARD_SIZES = (
    (256, 1024, 1024),
    (1024, 4096, 1024),
    (1024, 8192, 2048),
    (2048, 4096, 4096),
    (4096, 4096, 1024),
    (4096, 8192, 8192),
    (8192, 3072, 768),
    (8192, 16384, 4096),
    (12608, 3072, 768),
    (12608, 4096, 1024),
    (16384, 4608, 1152),
    (16384, 8192, 2048),
    (32768, 1024, 1024),
)
#: What is measured: the step, its activation, and the engines that it can run by.
_STEPS: tuple[tuple[str, Activation, tuple[str, ...]], ...] = (
    ("inference", "gelu", ("ours", "graph")),
    ("inference", "silu", ("ours", "graph")),
    ("inference", "relu", ("ours", "epilogue", "graph")),
    ("inference", "gelu_tanh", ("ours", "epilogue", "graph")),
    ("training", "gelu", ("ours", "graph")),
    ("training", "silu", ("ours", "graph")),
    ("training", "gelu_tanh", ("ours", "epilogue", "graph")),
    ("hidden_gradient", "gelu", ("ours", "graph")),
    ("hidden_gradient", "silu", ("ours", "graph")),
    ("hidden_gradient", "relu", ("ours", "graph")),
    ("hidden_gradient", "gelu_tanh", ("ours", "epilogue", "epilogue_sum", "graph")),
    ("weight_gradient", "none", ("ours", "epilogue_sum")),
)


def make_call(
    step: str, activation: Activation, rows: int, columns: int, depth: int
) -> Callable[[], object]:
    """A call of one step, with random tensors: a product of [rows, depth] and [depth, columns]."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    number = ACTIVATIONS.index(activation)
    if step == "weight_gradient":
        grad, x = draw(depth, rows), draw(depth, columns)
        mask = (False, True, True)
        weight = draw(rows, columns)
        return lambda: _ops._linear_backward.default(grad, x, weight, None, number, mask)
    if step == "hidden_gradient":
        least = 8
        grad, x, before = draw(rows, depth), draw(rows, least), draw(rows, columns)
        w1, w2 = draw(columns, least), draw(depth, columns)
        only_bias = (False, False, True, False, False)
        arguments = (grad, x, w1, w2, before, before, number, False, only_bias)
        return lambda: _ops._mlp_backward.default(*arguments)
    x, weight, bias = draw(rows, depth), draw(columns, depth), draw(columns)
    keeps = step == "training"
    return lambda: _ops._linear.default(x, weight, bias, None, number, keeps)


def tune_linear(
    sizes: Iterable[tuple[int, int, int]] = STANDARD_SIZES, rounds: int = 11
) -> list[LinearTiming]:
    """Measures linear layers with random values on this GPU.

    Clears the plan cache first. Every engine that cuDNN has for a size is tried.

    Args:
        sizes: of the products: rows, columns and depth.
        rounds: how many samples a time is the median of.

    Returns:
        One result for each size and step.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs a GPU, and torch sees none")
    _C.cache_clear()
    try:
        return [found for size in sizes for found in _measure_size(size, rounds)]
    finally:
        _C.set_linear_table(_sm(), 0, [])
        load_tables()


def _measure_size(size: tuple[int, int, int], rounds: int) -> Iterator[LinearTiming]:
    # What engine is the best depends on the size, and on whether the activation has an erf, which
    # takes as long as part of the product: the first activation of either sort finds it for all.
    best: dict[tuple[str, bool], str] = {}
    for step, activation, engines in _STEPS:
        found = LinearTiming(step, activation, *size, engine_ms=dict.fromkeys(engines, 0.0))
        call = make_call(step, activation, *size)
        if "graph" in engines:
            sort = step, activation == "gelu"
            if sort not in best:
                best[sort] = _fastest_plan_engine(_by(found, "graph", call))
            found = replace(found, plan_engine=best[sort])
            if not _runs_by_plan(_by(found, "graph", call)):
                del found.engine_ms["graph"]
        calls = {engine: _by(found, engine, call) for engine in found.engine_ms}
        with using_plan_policy("exact"):
            found.engine_ms.update(timing.gpu_ms(calls, rounds=rounds))
        yield found


def _by(found: LinearTiming, engine: str, call: Callable[[], object]) -> Callable[[], object]:
    """The call by one engine, for any product."""
    table = [found.as_choice(engine)]

    def run() -> object:
        _C.set_linear_table(_sm(), _C.cudnn_version(), table)
        return call()

    return run


def _fastest_plan_engine(run: Callable[[], object]) -> str:
    """Of those that cuDNN offers for the graph of a call; empty where it offers none."""
    before = _C.autotune()
    _C.take_measurements()
    _C.set_autotune(2)
    try:
        with using_plan_policy("exact"):
            run()
    finally:
        _C.set_autotune(before)
    measured = [times for _, times in _C.take_measurements()]
    return min(measured[0], key=lambda item: item[1])[0] if measured else ""


def _runs_by_plan(run: Callable[[], object]) -> bool:
    with using_plan_policy("exact"), record_shapes() as requests:
        run()
    return bool(requests)


def _sm() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def write_linear_table(path: Path, timings: Iterable[LinearTiming]) -> None:
    """Writes a table of this machine's GPU."""
    table = EngineTable.of_this_machine()
    for found in timings:
        ms = {engine: round(ms, 5) for engine, ms in found.engine_ms.items()}
        table.entries.append(asdict(found) | {"engine_ms": ms})
    table.write(path)
