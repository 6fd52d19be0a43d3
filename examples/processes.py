"""The process group of programs that torchrun starts: joined at the beginning, gone at the end."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed.nn  # defaults of its functions keep the group that it is imported in
from torch import distributed


@contextmanager
def process_group(kind: str) -> Iterator[None]:
    """The processes that torchrun has started, as the default group within the context.

    Whoever enters it should keep no mesh and no group beyond it. Gloo's threads end with the last
    reference to their group; one that still lets go of a tensor while the interpreter ends aborts
    the process.

    Args:
        kind: "cpu", or "cuda" for a GPU each.
    """
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()
        # Models and their hooks refer to one another. Where a cache of torch keeps a group, this
        # gives its threads the time to let go.
        gc.collect()
