"""Processes that form a process group, gloo on CPUs or NCCL on GPUs, and what each returns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn


def run_on_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: timedelta = timedelta(minutes=2),
) -> list[Any]:
    """What ``function(*args)`` returns in each of ``size`` processes, its tensors on the CPU.

    Args:
        function: of a module, for the processes find it by its name.
        size: how many processes.
        args: what can be pickled.
        backend: "gloo" or "nccl".
        timeout: for how long a rank waits for another.
    """
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start, (size, Path(folder), backend, timeout, function, args), nprocs=size)
        return [
            torch.load(Path(folder) / str(rank), map_location="cpu", weights_only=False)
            for rank in range(size)
        ]


def _start(
    rank: int,
    size: int,
    folder: Path,
    backend: str,
    timeout: timedelta,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    try:
        torch.save(function(*args), folder / str(rank))
    finally:
        distributed.destroy_process_group()


def device_type() -> str:
    """Where this process has its tensors."""
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
