"""Which part of a sequence each rank holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.distributed.group import group_of

#: Orders, and into how many chunks each splits a rank's part.
CHUNKS = {"contiguous": 1, "zigzag": 2}


class Chunk(NamedTuple):
    """Neighbouring tokens of the whole sequence that lie side by side on a rank."""

    local: int
    """Where they begin on the rank."""
    start: int
    """Where they begin in the whole sequence."""
    size: int


def chunks_of(order: str, rank: int, ranks: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of a rank that holds ``length`` tokens, in ascending positions."""
    if order == "contiguous":
        return (Chunk(0, rank * length, length),)
    half = length // 2
    return (Chunk(0, rank * half, half), Chunk(half, (2 * ranks - 1 - rank) * half, half))


def check_order(op: str, order: str) -> None:
    if order not in CHUNKS:
        raise ValueError(f'{op}: order must be "contiguous" or "zigzag", got {order!r}')


def zigzag_shard(
    x: Tensor, mesh: DeviceMesh | ProcessGroup, dim: int, *, mesh_dim: int | str | None = None
) -> Tensor:
    """This rank's part of a sequence in zigzag order, which balances causal attention.

    Of ``2 * ranks`` equal chunks rank ``r`` holds the chunks ``r`` and ``2 * ranks - 1 - r``: an
    early one, whose queries see few keys, and a late one, whose queries see many. It is the order
    of torch's ``context_parallel``. What depends on positions (rotary angles, labels, position
    numbers) must be split likewise. Differentiable; nothing is communicated.

    Args:
        x: the whole tensor, the same on every rank.
        mesh: the ranks that share the sequence: a device mesh or a process group.
        dim: the dimension of ``x`` to split.
        mesh_dim: the dimension of a mesh that has several.

    Returns:
        A new tensor with ``x.shape[dim] // ranks`` along ``dim``.

    Raises:
        ValueError: a length that is not a multiple of ``2 * ranks``.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group, group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> cudnn_ops.distributed.zigzag_shard(torch.arange(6), group.WORLD, 0)
        tensor([0, 1, 2, 3, 4, 5])
        >>> torch.distributed.destroy_process_group()
    """
    group = group_of("cudnn_ops.distributed.zigzag_shard", mesh, mesh_dim)
    ranks, rank, length = group.size(), group.rank(), x.shape[dim]
    if length % (2 * ranks):
        raise ValueError(
            f"cudnn_ops.distributed.zigzag_shard: dimension {dim} has length {length}, which "
            f"{ranks} ranks cannot share: it must be a multiple of {2 * ranks}, two chunks a rank; "
            "pad the sequence"
        )
    chunks = x.tensor_split(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def zigzag_unshard(
    x: Tensor, mesh: DeviceMesh | ProcessGroup, dim: int, *, mesh_dim: int | str | None = None
) -> Tensor:
    """Gathers the whole sequence from parts in zigzag order; undoes :func:`zigzag_shard`.

    Not differentiable: for results that are to be looked at.

    Args:
        x: this rank's part; of one shape and dtype on all ranks.
        mesh: as in :func:`zigzag_shard`.
        dim: the dimension that is split.
        mesh_dim: as there.

    Returns:
        The whole tensor, on every rank.

    Raises:
        ValueError: an odd length, which is not of two chunks.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group, group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> cudnn_ops.distributed.zigzag_unshard(torch.arange(6), group.WORLD, 0)
        tensor([0, 1, 2, 3, 4, 5])
        >>> torch.distributed.destroy_process_group()
    """
    op = "cudnn_ops.distributed.zigzag_unshard"
    group = group_of(op, mesh, mesh_dim)
    if x.shape[dim] % 2:
        raise ValueError(
            f"{op}: dimension {dim} has length {x.shape[dim]} on this rank; zigzag order has two "
            "equal chunks a rank"
        )
    with torch.no_grad():
        parts = all_gather_tensor(x.contiguous(), dim, group).chunk(group.size(), dim)
        return in_sequence(parts, dim, "zigzag")


def in_sequence(parts: tuple[Tensor, ...], dim: int, order: str) -> Tensor:
    """The whole of what the ranks hold in an order."""
    if order == "contiguous":
        return torch.cat(parts, dim)
    halves = [part.chunk(2, dim) for part in parts]
    early, late = [half[0] for half in halves], [half[1] for half in reversed(halves)]
    return torch.cat([*early, *late], dim)


def by_rank(whole: Tensor, dim: int, order: str, ranks: int) -> list[Tensor]:
    """What each rank holds of the whole."""
    chunks = whole.tensor_split(CHUNKS[order] * ranks, dim)
    if order == "contiguous":
        return list(chunks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(ranks)]
