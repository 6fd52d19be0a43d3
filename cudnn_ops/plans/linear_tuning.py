"""Measuring linear layers, by cuBLASLt's epilogues, our kernels and cuDNN: ``tune linear``.

The package's table ``tuned/linear_sm<architecture>.json`` says for some products which of these is
the fastest, and with which of cuDNN's engines. A call runs by what was the fastest for the nearest
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cudnn_ops import _C
from cudnn_ops.ops.activation import ACTIVATIONS, SLOPE, Activation
from cudnn_ops.ops.linear import KEEP_INPUT, KEEP_SLOPE
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
_Slope = Activation | Literal["slope"]
#: What is measured: the step, its activation, and the engines that it can run by. The last ones go
#: by what was found for the others.
_STEPS: tuple[tuple[str, _Slope, tuple[str, ...]], ...] = (
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
    ("hidden_gradient", "slope", ("ours", "graph")),
    ("weight_gradient", "none", ("ours", "epilogue_sum")),
    ("training_slope", "gelu", ("ours", "graph")),
    ("training_slope", "silu", ("ours", "graph")),
    ("training_slope", "gelu_tanh", ("ours", "graph")),
)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def make_pair(number: int, rows: int, columns: int, depth: int) -> dict[str, Callable[[], object]]:
    """Two layers, forward and backward, by what they keep: the engines of "training_slope".

    ``number`` is the activation's.
    """
    x, w1, b1 = _draw(rows, depth), _draw(columns, depth), _draw(columns)
    w2, b2, grad = _draw(depth, columns), _draw(depth), _draw(rows, depth)

    def run(keep: int) -> object:
        _, hidden, kept = _ops._mlp.default(x, w1, b1, w2, b2, number, False, keep)
        through = SLOPE if keep == KEEP_SLOPE else number
        arguments = grad, x, w1, w2, hidden, kept, through, False, (True,) * 5
        return _ops._mlp_backward.default(*arguments)

    return {"ours": partial(run, KEEP_INPUT), "graph": partial(run, KEEP_SLOPE)}


def _number(activation: _Slope) -> int:
    return SLOPE if activation == "slope" else ACTIVATIONS.index(activation)


def make_call(
    step: str, activation: _Slope, rows: int, columns: int, depth: int
) -> Callable[[], object]:
    """A call of one step, with random tensors: a product of [rows, depth] and [depth, columns]."""
    number, draw = _number(activation), _draw
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
    if step == "training_slope":
        second = draw(8, columns)
        return lambda: _ops._mlp.default(x, weight, bias, second, None, number, False, KEEP_SLOPE)
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
    # What engine is the best depends on the size, and on whether the activation is the exact GELU,
    # whose polynomial or erf takes as long as part of the product: the first activation of either
    # sort finds it for all.
    best: dict[tuple[str, bool], str] = {}
    done: list[LinearTiming] = []
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
        if step == "training_slope":
            pair = make_pair(_number(activation), *size)
            calls = {e: _by(found, e, pair[e], done) for e in found.engine_ms}
        else:
            calls = {engine: _by(found, engine, call) for engine in found.engine_ms}
        with using_plan_policy("exact"):
            found.engine_ms.update(timing.gpu_ms(calls, rounds=rounds))
        done.append(found)
        yield found


def _by(
    found: LinearTiming,
    engine: str,
    call: Callable[[], object],
    others: Iterable[LinearTiming] = (),
) -> Callable[[], object]:
    """The call by one engine, for any product; what else it needs by the fastest of the others."""
    table = [found.as_choice(engine), *(other.as_choice() for other in others)]

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
