"""Runs a function in several processes that form a process group: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

#: Parametrize with this: gloo everywhere, NCCL with ``-m gpu``.
BACKENDS = ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.alone])]

#: A process that waits for one that does not call gives up after this time.
TIMEOUT = timedelta(seconds=180)


def run_in_processes(
    function: Callable[..., Any], size: int, *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What ``function(*args)`` returns in each of ``size`` processes, its tensors on the CPU.

    Raises what the first failure raised.

    Args:
        function: of a module, for it is found by its name in the processes.
        size: how many processes.
        args: what can be pickled.
        backend: one of ``BACKENDS``.
    """
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start, (size, Path(folder), backend, function, args), nprocs=size)
        return [
            torch.load(Path(folder) / str(rank), map_location="cpu", weights_only=False)
            for rank in range(size)
        ]


def _start(
    rank: int,
    size: int,
    folder: Path,
    backend: str,
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
        timeout=TIMEOUT,
    )
    torch.save(function(*args), folder / str(rank))
    # Not where it raised: NCCL would wait here for the ranks that wait for this one.
    distributed.destroy_process_group()


def device() -> torch.device:
    """The device of this process."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all processes, or of this shape, of their devices."""
    sizes = shape or (distributed.get_world_size(),)
    return init_device_mesh(device().type, sizes, mesh_dim_names=names)
