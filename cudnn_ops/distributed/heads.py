"""Heads that are split over ranks: how many each has, and which ranks these are."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.distributed.group import group_of


def heads_of_rank(heads: int, heads_kv: int, mesh: DeviceMesh | ProcessGroup) -> tuple[int, int]:
    """How many query and key heads each rank has where a mesh splits a model's heads.

    Each rank has whole groups of query heads together with their key head. A single key head is
    copied to all ranks, as sharded tensors have it too.

    Args:
        heads: the model's query heads.
        heads_kv: its key heads.
        mesh: of one dimension: ``mesh["tp"]`` of several. Or a process group.

    Returns:
        The query heads and the key heads of a rank. The latter are ``heads_kv`` of its
        :class:`cudnn_ops.PagedKVCache`.

    Raises:
        TypeError: ``mesh`` is something else.
        ValueError: the ranks cannot share the heads evenly; ``heads`` is no multiple of
            ``heads_kv``; the mesh has several dimensions.

    Example:
        >>> from torch import distributed
        >>> from cudnn_ops.distributed import heads_of_rank
        >>> distributed.init_process_group(
        ...     "gloo", store=distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> heads_of_rank(32, 8, distributed.group.WORLD)  # with 4 ranks: (8, 2)
        (32, 8)
        >>> distributed.destroy_process_group()
    """
    op = "cudnn_ops.distributed.heads_of_rank"
    size = group_of_heads(op, mesh).size()
    if heads_kv < 1 or heads < 1 or heads % heads_kv:
        raise ValueError(
            f"{op}: heads must be a multiple of heads_kv, both at least 1; got {heads} and "
            f"{heads_kv}"
        )
    if heads_kv == 1:
        if heads % size:
            raise ValueError(f"{op}: {size} ranks cannot share {heads} heads evenly")
        return heads // size, 1
    if heads_kv % size:
        raise ValueError(
            f"{op}: {size} ranks cannot share {heads_kv} key heads evenly, and each needs whole "
            f"groups of query heads with their key head; use a number of ranks that divides "
            f"{heads_kv}"
        )
    return heads // size, heads_kv // size


def group_of_heads(op: str, mesh: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """The ranks that share the heads; raises as :func:`heads_of_rank`."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        names: tuple[int | str, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"{op}: mesh has {mesh.ndim} dimensions, {names}; pass the one that the heads are "
            f"split over, as in mesh[{names[-1]!r}]"
        )
    return group_of(op, mesh, None)
