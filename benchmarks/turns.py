"""Turns: of processes that measure beside each other, one is timed while the others stand still.

Compiling takes most of the time of some benchmarks, and a CPU's. `benchmarks.side_by_side` starts
several at a time; the package's clock, by which benchmarks measure and its compile backend chooses,
takes a turn, in which every other process of that GPU, with all that it has started, is stopped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Names the folder in which the processes know of each other; without it there is nobody else.
FOLDER_VARIABLE = "CUDNN_OPS_BENCHMARK_TURNS"
#: What was launched before a process stopped ends meanwhile.
SETTLE_S = 0.1


def is_alone() -> bool:
    """Whether this process has the machine for itself, in all that it does."""
    return FOLDER_VARIABLE not in os.environ


@contextmanager
def turn() -> Iterator[None]:
    """Inside it all other processes stand still; alone there is nothing to do."""
    if is_alone():
        yield
        return
    folder = Path(os.environ[FOLDER_VARIABLE])
    with between_turns(folder):
        others = [group for group in members(folder) if group != os.getpgid(0)]
        try:
            send(others, signal.SIGSTOP)
            time.sleep(SETTLE_S)
            yield
        finally:
            send(others, signal.SIGCONT)


def clock_in_turns() -> None:
    """From now on the package's clock takes turns."""
    from cudnn_ops.plans import timing

    def in_turn(*args: Any, **kwargs: Any) -> dict[str, float]:
        with turn():
            return medians(*args, **kwargs)

    medians = timing.medians
    timing.medians = in_turn


@contextmanager
def between_turns(folder: Path) -> Iterator[None]:
    """Waits until nobody has a turn; inside it nobody gets one."""
    with open(folder / "turn", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
