"""Clocks for functions that are compared: samples in turns, and their medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import permutations

import torch

WARM_UP_CALLS = 10
GPU_CALLS = 10  # a sample
SLEEP_CYCLES = 4_000_000  # about 2 ms
MOST_SLEEP_CYCLES = SLEEP_CYCLES << 7

Functions = Mapping[str, Callable[[], object]]
Around = Callable[[str], AbstractContextManager[object]]
#: Whether medians of a few samples will do.
IsEnough = Callable[[Mapping[str, float]], bool]
FEW_ROUNDS = 3
_FEW = 4  # functions, whose orders are few


def gpu_ms(
    functions: Functions,
    *,
    rounds: int,
    around: Around | None = None,
    is_enough: IsEnough | None = None,
) -> dict[str, float]:
    """Median GPU time of one call of each function, in milliseconds, with no host time in it.

    A sample is GPU_CALLS calls in a row over the same tensors; every function gives one sample a
    round. ``around(name)`` is a context entered around a sample, outside the timed part.
    ``is_enough(medians)`` is asked after each of the rounds from :data:`FEW_ROUNDS` on, and ends
    them.
    """
    return medians(functions, GpuSample(), rounds, around, rehearses=True, is_enough=is_enough)


def host_ms(
    functions: Functions,
    *,
    rounds: int,
    calls: int = 10,
    around: Around | None = None,
    is_enough: IsEnough | None = None,
) -> dict[str, float]:
    """Median host time of one call of each function, in milliseconds, without synchronization.

    A sample is ``calls`` calls in a row that start on an idle GPU. ``around`` and ``is_enough`` are
    as for :func:`gpu_ms`.
    """
    sample = partial(_host_sample, calls=calls)
    return medians(functions, sample, rounds, around, is_enough=is_enough)


def cpu_ms(functions: Functions, *, rounds: int) -> dict[str, float]:
    """Median time of one call of each function, in milliseconds, of functions that run on a CPU."""
    return medians(functions, _cpu_sample, rounds, warm_up_calls=1)


def medians(
    functions: Functions,
    sample: Callable[[Callable[[], object]], float],
    rounds: int,
    around: Around | None = None,
    warm_up_calls: int = WARM_UP_CALLS,
    rehearses: bool = False,
    is_enough: IsEnough | None = None,
) -> dict[str, float]:
    """The median of each function's samples, one a round.

    With ``rehearses`` each gives one more before the first round, which does not count.
    ``is_enough`` is as for :func:`gpu_ms`.
    """
    enter = around or (lambda _: nullcontext())

    def take(name: str) -> float:
        try:
            return sample(functions[name])
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from error

    for name, function in functions.items():
        with enter(name):
            for _ in range(warm_up_calls):
                function()
            if rehearses:
                take(name)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    found: dict[str, float] = {}
    for count, name in enumerate(interleaved(functions, rounds), 1):
        with enter(name):
            samples[name].append(take(name))
        if count % len(functions) == 0:
            found = {name: statistics.median(values) for name, values in samples.items()}
            if is_enough is not None and count >= FEW_ROUNDS * len(functions) and is_enough(found):
                break
    return found


def interleaved(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Every name once a round, in another order each round.

    In a fixed order one function would always run on the GPU that the same other one has heated. Of
    a few, all orders have had their turn before one comes again: at the GPU's power limit samples
    fall into those behind a hot function and those behind a cool one, and a median is of whichever
    are more.
    """
    order, draw = list(names), random.Random(0)
    orders = list(permutations(order)) if len(order) <= _FEW else []
    for index in range(rounds):
        if orders:
            if index % len(orders) == 0:
                draw.shuffle(orders)
            yield from orders[index % len(orders)]
        else:
            draw.shuffle(order)
            yield from order


class GpuSample:
    """Samples of GPU time, behind a sleep that is as long for one function as for all others.

    The GPU sleeps until the host has launched a sample's calls. If each function had a sleep of its
    own length, the one with the slowest launches would run on the GPU that has rested the longest,
    and a GPU at its power limit is faster after a rest.
    """

    def __init__(self) -> None:
        self._cycles = SLEEP_CYCLES

    def __call__(self, function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while self._cycles <= MOST_SLEEP_CYCLES:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._cycles)
            start.record()
            for _ in range(GPU_CALLS):
                function()
            end.record()
            # Had the sleep ended before the last launch, the GPU could have waited for the host.
            all_queued = not start.query()
            end.synchronize()
            if all_queued:
                elapsed: float = start.elapsed_time(end)
                return elapsed / GPU_CALLS
            self._cycles *= 2
        raise RuntimeError("the function waits for the GPU, which hides its GPU time")


def _host_sample(function: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return elapsed / calls / 1e6


def _cpu_sample(function: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1e6
