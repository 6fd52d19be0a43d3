"""Meshes and process groups: which ranks take part in a call, and whether they agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def group_of(op: str, mesh: DeviceMesh | ProcessGroup, mesh_dim: int | str | None) -> ProcessGroup:
    """The ranks that share a sequence."""
    if isinstance(mesh, ProcessGroup):
        if mesh_dim is not None:
            raise ValueError(f"{op}: mesh_dim is for a DeviceMesh, and mesh is a process group")
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{op}: mesh must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}"
        )
    if mesh_dim is None and mesh.ndim != 1:
        names: tuple[int | str, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"{op}: mesh has {mesh.ndim} dimensions, {names}; name the one that the sequence is "
            f"split over, as in mesh_dim={names[-1]!r}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{op}: this rank is not in the mesh")
    return mesh.get_group() if mesh_dim is None else mesh.get_group(mesh_dim)


@contextmanager
def naming_the_ranks(op: str, group: ProcessGroup, doing: str) -> Iterator[None]:
    """What torch says of a rank that does not answer, with what it was asked for."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: rank {group.rank()} of {group.size()} gave up while {doing}. All ranks of the "
            "group must make the same calls in the same order; how long a rank is waited for is "
            "the timeout of torch.distributed.init_process_group or new_group. torch says: "
            f"{error}"
        ) from error


_agreed: WeakKeyDictionary[ProcessGroup, set[tuple[str, ...]]] = WeakKeyDictionary()


def check_agreement(op: str, group: ProcessGroup, device: torch.device, facts: list[str]) -> None:
    """Raises ValueError, on all ranks, if they call with different arguments.

    Asks the other ranks the first time that the group sees these arguments, which waits for the
    device, and never again. So a rank that comes with new ones while another repeats an old call is
    not found here; the group's timeout ends that.

    Args:
        op: the public function's name.
        group: the ranks.
        device: where the group's backend expects tensors.
        facts: what must be the same on all ranks, in words.
    """
    agreed = _agreed.setdefault(group, set())
    signature = (op, device.type, *facts)
    if signature in agreed:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: the first call with new shapes, dtypes or options compares them over all "
            "ranks, which a CUDA graph cannot capture; run the call once before the capture"
        )
    digest = hashlib.sha256(repr(signature).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
    with naming_the_ranks(op, group, "comparing shapes and dtypes with the other ranks"):
        if not _is_same(own, group):
            said: list[list[str]] = [[] for _ in range(group.size())]
            distributed.all_gather_object(said, facts, group=group)
            raise ValueError(_difference(op, said))
    agreed.add(signature)


def _is_same(own: Tensor, group: ProcessGroup) -> bool:
    all_of_them = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(all_of_them, own, group=group)
    return len(set(torch.cat(all_of_them).tolist())) == 1


def _difference(op: str, said: list[list[str]]) -> str:
    for rank, facts in enumerate(said):
        for first, other in zip(said[0], facts, strict=True):
            if first != other:
                return (
                    f"{op}: rank 0 was called with {first}, and rank {rank} with {other}. All "
                    "ranks must hold equal parts: a sequence whose length the number of ranks, "
                    f"{len(said)}, does not divide must be padded"
                )
    return f"{op}: the ranks were called on different types of device"
