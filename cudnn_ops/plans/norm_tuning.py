"""Measuring norms, by our kernels and by cuDNN: ``python -m cudnn_ops tune norms``.

Our kernels support any number of rows; a plan of cuDNN supports exactly one. The package's table
``tuned/norms_sm<architecture>.json`` says for some row sizes and numbers of rows which of the two
is faster, and with which of cuDNN's engines. For sizes in between, cuDNN counts as faster if it is
at all measured sizes around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops import _C
from cudnn_ops.plans import timing
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.plans.tables import EngineTable, NormTiming, load_tables

#: Row sizes and numbers of rows that the package's table is measured with, in bfloat16. Below 4 MiB
#: calls always use our kernels, for only the host's time matters there.
_STANDARD_ROWS = {
    64: (1 << 20,),
    128: (1 << 17, 1 << 20),
    256: (1 << 18,),
    512: (1 << 15, 1 << 18),
    1024: (8192, 1 << 17),
    2048: (2048, 8192, 1 << 16),
    4096: (2048, 8192, 1 << 15),
    8192: (2048, 8192, 1 << 15),
    16384: (2048, 8192),
    32768: (512, 4096),
}
STANDARD_SIZES = tuple((size, rows) for size, of_it in _STANDARD_ROWS.items() for rows in of_it)


def _make_calls(is_layer: bool, columns: int, rows: int) -> dict[str, Callable[[], object]]:
    """Calls with tensors of one size, by the name of their plan."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    shape = (columns,)
    input, grad_out, weight = draw(rows, columns), draw(rows, columns), draw(columns)
    parameters = (shape, weight, draw(columns) if is_layer else None, 1e-5)

    def forward(with_stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.ops.cudnn_ops._norm(input, None, *parameters, is_layer, False, with_stats)

    saved = (input, shape, weight, *forward(True)[2:])
    options = (is_layer, False, (True, True, is_layer))
    return {
        "inference": lambda: forward(False),
        "training": lambda: forward(True),
        "backward": lambda: torch.ops.cudnn_ops._norm_backward(grad_out, None, *saved, *options),
    }


def _fastest_engines(size: tuple[bool, int, int]) -> dict[str, str]:
    """The engine for each plan, all that cuDNN offers tried; the winners go to the store."""
    with using_plan_policy("polymorphic"):
        calls = _make_calls(*size)
    before = _C.autotune()
    _C.take_measurements()
    engines = {}
    _C.set_autotune(2)
    try:
        with using_plan_policy("exact"):
            for plan, call in calls.items():
                call()
                ((_, times),) = _C.take_measurements()
                engines[plan] = min(times, key=lambda item: item[1])[0]
    finally:
        _C.set_autotune(before)
    return engines


def tune_norms(
    sizes: Iterable[tuple[int, int]] = STANDARD_SIZES, workers: int = 1
) -> list[NormTiming]:
    """Measures RMS norm and layer norm with random values on this GPU.

    Args:
        sizes: pairs of a row size and a number of rows.
        workers: processes that try engines at once; they mostly compile on the CPU.

    Returns:
        One result for each size, norm and kind of plan.

    Raises:
        RuntimeError: there is no GPU.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from tqdm.auto import tqdm

    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs a GPU, and torch sees none")
    all_sizes = [(is_layer, *size) for is_layer in (False, True) for size in sizes]
    # Another process's CUDA cannot be inherited.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        tried = tqdm(pool.map(_fastest_engines, all_sizes), total=len(all_sizes), desc="engines")
        engines = list(tried)
    return [
        timing
        for size, by_plan in zip(tqdm(all_sizes, desc="timings"), engines, strict=True)
        for timing in _compare(size, by_plan)
    ]


def _compare(size: tuple[bool, int, int], engines: dict[str, str]) -> list[NormTiming]:
    version, sm = _C.cudnn_version(), _sm()
    winners = [NormTiming(plan, *size, engine, 0.0, 0.0) for plan, engine in engines.items()]
    _C.set_norm_table(sm, version, [timing.as_choice() for timing in winners])
    _C.cache_clear()
    try:
        with using_plan_policy("polymorphic"):
            calls = _make_calls(*size)
        times = {plan: _gpu_ms(call) for plan, call in calls.items()}
    finally:
        _C.set_norm_table(sm, 0, [])
        load_tables()
    return [
        NormTiming(plan, *size, engines[plan], cudnn_ms, ours_ms)
        for plan, (cudnn_ms, ours_ms) in times.items()
    ]


def _gpu_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of one call by cuDNN and by our kernels."""
    calls = {"exact": call, "polymorphic": call}
    ms = timing.gpu_ms(calls, rounds=11, around=using_plan_policy)  # type: ignore[arg-type]
    return ms["exact"], ms["polymorphic"]


def _sm() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def write_table(path: Path, timings: Iterable[NormTiming]) -> None:
    """Writes a table of this machine's GPU."""
    table = EngineTable.of_this_machine()
    table.entries = [
        asdict(timing)
        | {"cudnn_ms": round(timing.cudnn_ms, 5), "ours_ms": round(timing.ours_ms, 5)}
        for timing in timings
    ]
    table.write(path)
