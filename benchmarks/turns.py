"""Turns: of processes that measure beside each other, one is timed while the others stand still.

Compiling takes most of the time of some benchmarks, and a CPU's. `benchmarks.side_by_side` starts
several at a time; the package's clock, by which benchmarks measure and its compile backend chooses,
takes a turn, in which the others, with all that they have started, are stopped: those of that GPU
for its time alone, those of all GPUs where the host's time counts, which others' compiling makes
longer. What inductor tunes is timed by one process of a GPU at a time, too. A stopwatch leaves out
the seconds in which a process stood still or waited for its turn.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

#: Names the folder in which the processes of a GPU know of each other, beside those of other GPUs;
#: without it there is nobody else.
FOLDER_VARIABLE = "CUDNN_OPS_BENCHMARK_TURNS"
#: A process that is told to stop does so meanwhile.
STOP_S = 0.02
#: By which an idle GPU is known: each is far shorter than what the GPU gives to another process.
_SLEEPS, _SLEEP_CYCLES = 50, 200_000
#: What the longest of them may take, of the shortest, and how long to wait for that.
_EVEN, _MOST_WAIT_S = 1.5, 5.0
_PREFIX = "gpu-"
#: Of a GPU's folder: a line a turn, with who had it, its begin and its end.
_TURNS = "turns"
#: When this process began to wait for others' turns, and when it went on.
_waited: list[tuple[float, float]] = []


def is_alone() -> bool:
    """Whether this process has the machine for itself, in all that it does."""
    return FOLDER_VARIABLE not in os.environ


@contextmanager
def turn(*, of_all_gpus: bool = True) -> Iterator[None]:
    """Inside it the other processes stand still; alone there is nothing to do."""
    if is_alone():
        yield
        return
    own = Path(os.environ[FOLDER_VARIABLE])
    with ExitStack() as locks:
        # In one order: no two wait for each other.
        folders = sorted(own.parent.glob(f"{_PREFIX}*")) if of_all_gpus else [own]
        for folder in folders:
            locks.enter_context(between_turns(folder))
        others = [group for folder in folders for group in members(folder)]
        others = [group for group in others if group != os.getpgid(0)]
        # In reverse: it is written down before the others go on, who go on in any case.
        locks.callback(send, others, signal.SIGCONT)
        locks.callback(_write_down, folders, time.monotonic())
        send(others, signal.SIGSTOP)
        time.sleep(STOP_S)
        wait_until_idle()
        yield


def wait_until_idle() -> None:
    """Until the GPU has done what processes launched before they stopped.

    While it has others' work, too, some of a row of short sleeps take longer than the rest.
    """
    if not torch.cuda.is_available():
        return
    end = time.monotonic() + _MOST_WAIT_S
    while time.monotonic() < end:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_SLEEPS + 1)]
        events[0].record()
        for event in events[1:]:
            torch.cuda._sleep(_SLEEP_CYCLES)
            event.record()
        torch.cuda.synchronize()
        took = [one.elapsed_time(next_one) for one, next_one in pairwise(events)]
        if max(took) < _EVEN * min(took):
            return


def _write_down(folders: list[Path], begin: float) -> None:
    """A turn that ends now, for the stopwatches of those that stood still."""
    line = f"{os.getpgid(0)} {begin} {time.monotonic()}\n"
    for folder in folders:
        with open(folder / _TURNS, "a") as had:
            had.write(line)


def clock_in_turns() -> None:
    """From now on the package's clock takes turns."""
    from cudnn_ops.plans import timing

    def in_turn(functions: Any, sample: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        with turn(of_all_gpus=not isinstance(sample, timing.GpuSample)):
            return medians(functions, sample, *args, **kwargs)

    medians = timing.medians
    timing.medians = in_turn


def tune_one_by_one() -> None:
    """From now on inductor times its candidates while no other process does so, nor has a turn.

    Nobody is stopped: there are hundreds of candidates, and who compiles does not use the GPU. A
    candidate is called once before: that loads its kernel, for which the others need not wait.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    def one_by_one(candidate: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
        candidate()
        with nobody_timed():
            return benchmark(candidate, *args, **kwargs)

    benchmark = benchmarker.benchmark_gpu
    benchmarker.benchmark_gpu = one_by_one  # type: ignore[method-assign]


def folder_of(gpu: int, folder: Path) -> Path:
    """Where the processes of a GPU know of each other."""
    return folder / f"{_PREFIX}{gpu}"


@contextmanager
def between_turns(folder: Path) -> Iterator[None]:
    """Waits until nobody has a turn; inside it nobody gets one."""
    with open(folder / "turn", "w") as lock:
        begin = time.monotonic()
        fcntl.flock(lock, fcntl.LOCK_EX)
        _waited.append((begin, time.monotonic()))
        yield


@contextmanager
def nobody_timed() -> Iterator[None]:
    """Inside it no other process of this GPU is timed; alone there is nothing to do."""
    if is_alone():
        yield
        return
    with between_turns(Path(os.environ[FOLDER_VARIABLE])):
        yield


def stopwatch() -> Callable[[], float]:
    """Starts one. What it returns tells the seconds since, without those that others' turns took.

    These are the seconds in which this process stood still or waited to be timed.
    """

    def seconds() -> float:
        now = time.monotonic()
        lost, seen = 0.0, start
        for begin, end in sorted([*_waited, *_turns_of_others()]):
            lost += max(min(end, now) - max(begin, seen), 0.0)
            seen = max(seen, end)
        return now - start - lost

    start = time.monotonic()
    return seconds


def _turns_of_others() -> list[tuple[float, float]]:
    """Begin and end of those in which this process stood still."""
    if is_alone():
        return []
    had = Path(os.environ[FOLDER_VARIABLE], _TURNS)
    lines = [line.split() for line in had.read_text().splitlines()] if had.exists() else []
    own = str(os.getpgid(0))
    return [(float(begin), float(end)) for who, begin, end in lines if who != own]


def join(folder: Path, group: int) -> None:
    """A process group takes part."""
    (folder / f"{group}.member").touch()


def leave(folder: Path, group: int) -> None:
    """It has ended. Had it a turn, the others go on."""
    (folder / f"{group}.member").unlink(missing_ok=True)
    with between_turns(folder):
        send(members(folder), signal.SIGCONT)


def members(folder: Path) -> list[int]:
    """The process groups that take part."""
    return sorted(int(path.stem) for path in folder.glob("*.member"))


def send(groups: list[int], what: signal.Signals) -> None:
    for group in groups:
        with suppress(ProcessLookupError):  # it has ended since
            os.killpg(group, what)
