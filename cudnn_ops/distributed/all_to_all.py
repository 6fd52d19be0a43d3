"""Attention over a split sequence by exchanging it for a split of the heads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.distributed.arguments import (
    Options,
    autocast,
    batched,
    check_tensors,
    check_window,
    checked_starts,
    options_of,
    refuse_mask_and_dropout,
)
from cudnn_ops.distributed.group import check_agreement, group_of
from cudnn_ops.distributed.order import CHUNKS, by_rank, check_order, in_sequence

_ops = torch.ops.cudnn_ops
_OP = "cudnn_ops.distributed.all_to_all_attention"


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh | ProcessGroup, **options: Any
) -> Tensor:
    """Attention over a sequence that is split over ranks: heads are exchanged for the sequence.

    An all-to-all gives each rank the whole sequence of some heads, which are attended to as on one
    GPU, and another brings the output back (Jacobs et al., "DeepSpeed Ulysses"). It passes less
    than :func:`ring_attention` and has equal work for all ranks under any mask, but no more ranks
    can share a sequence than there are query heads, and nothing is computed while tensors pass.
    Differentiable once; made of torch's functional collectives, which compilers see.

    Args:
        q: [batch, heads, length, head size], this rank's part, or [tokens, heads, head size] with
            ``cu_seqlens``; ``heads`` must be a multiple of the number of ranks.
        k: likewise. ``heads_kv`` must be a multiple of the number of ranks, or divide it: each of
            them is then sent to several ranks.
        v: likewise.
        mesh: as in :func:`ring_attention`.
        options: the keyword arguments of :func:`ring_attention`. ``alibi_slopes`` are supported.
            The gradient of ``sinks`` is that of this rank's heads, and 0 for the others: sum it
            over the ranks, as there. Under ``torch.compile`` ``cu_seqlens`` is read on the host,
            which breaks the graph.

    Returns:
        As :func:`ring_attention`.

    Raises:
        ValueError: heads that the ranks cannot share; else as :func:`ring_attention`, and so are
            TypeError, NotImplementedError and RuntimeError.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group, group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> q = torch.randn(2, 8, 10, 64)
        >>> cudnn_ops.distributed.all_to_all_attention(q, q, q, group.WORLD, is_causal=True).shape
        torch.Size([2, 8, 10, 64])
        >>> torch.distributed.destroy_process_group()
    """
    return all_to_all_attention_with_lse(q, k, v, mesh, **options)[0]


def all_to_all_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh | ProcessGroup, **options: Any
) -> tuple[Tensor, Tensor]:
    """Like :func:`all_to_all_attention`, and returns the log-sum-exp of the scores too.

    Args:
        q: as in :func:`all_to_all_attention`, like all arguments below.
        k: as there.
        v: as there.
        mesh: as there.
        options: as there.

    Returns:
        As :func:`ring_attention_with_lse`.

    Raises:
        ValueError: as :func:`all_to_all_attention`, and so are TypeError, NotImplementedError and
            RuntimeError.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group, group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> q = torch.randn(2, 8, 10, 64)
        >>> attend = cudnn_ops.distributed.all_to_all_attention_with_lse
        >>> attend(q, q, q, group.WORLD)[1].shape
        torch.Size([2, 8, 10])
        >>> torch.distributed.destroy_process_group()
    """
    given = options_of(_OP, options)
    group = group_of(_OP, mesh, given.mesh_dim)
    check_order(_OP, given.order)
    check_window(_OP, given.window_size)
    refuse_mask_and_dropout(_OP, given)
    is_packed = given.cu_seqlens is not None
    q, k, v = batched(_OP, *autocast(q, k, v), given.cu_seqlens)
    check_tensors(_OP, q, k, v, given.enable_gqa or is_packed, given.sinks)
    _check_shares(q, k, group.size(), given.order)
    if not torch.compiler.is_compiling():
        tensors = {"q": q, "k": k, "v": v}
        facts = [f"{name} of shape {list(t.shape)} and {t.dtype}" for name, t in tensors.items()]
        check_agreement(_OP, group, q.device, facts)
    exchange = _Exchange(group, given.order)
    k, v = (_enough_heads(tensor, group.size()) for tensor in (k, v))
    q, k, v = (exchange.to_sequence(tensor) for tensor in (q, k, v))
    out, lse = (_packed if is_packed else _dense)(q, k, v, given, exchange)
    out, lse = exchange.to_heads(out), exchange.to_heads(lse.unsqueeze(3)).squeeze(3)
    return (out[0].transpose(0, 1), lse[0]) if is_packed else (out, lse)


def _check_shares(q: Tensor, k: Tensor, ranks: int, order: str) -> None:
    if q.shape[1] % ranks:
        raise ValueError(
            f"{_OP}: q has {q.shape[1]} heads, which {ranks} ranks cannot share: they must be a "
            "multiple; ring_attention has no such rule"
        )
    if k.shape[1] % ranks and ranks % max(k.shape[1], 1):
        raise ValueError(
            f"{_OP}: k has {k.shape[1]} heads, which {ranks} ranks cannot share: they must be a "
            f"multiple of {ranks} or divide it; ring_attention has no such rule"
        )
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[2] % CHUNKS[order]:
            raise ValueError(
                f"{_OP}: {name} has {tensor.shape[2]} tokens on this rank; zigzag order has two "
                "equal chunks a rank"
            )


def _enough_heads(tensor: Tensor, ranks: int) -> Tensor:
    """At least one head for each rank: those that are too few are repeated."""
    heads = tensor.shape[1]
    return tensor.repeat_interleave(ranks // heads, 1) if 0 < heads < ranks else tensor


class _Exchange:
    """Between all heads of a part of the sequence and a part of the heads of all of it."""

    def __init__(self, group: ProcessGroup, order: str) -> None:
        self._group, self._order = group, order
        self.ranks, self.rank = group.size(), group.rank()

    def _all_to_all(self, parts: Tensor) -> Tensor:
        if self.ranks == 1:
            return parts
        return all_to_all_single_autograd(parts.contiguous(), None, None, self._group)

    def to_sequence(self, tensor: Tensor) -> Tensor:
        """[B, H, S / ranks, D] as [B, H / ranks, S, D]."""
        heads = tensor.transpose(1, 2).unflatten(2, (self.ranks, -1)).movedim(2, 0)
        parts = self._all_to_all(heads)
        return in_sequence(parts.unbind(0), 1, self._order).transpose(1, 2)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """[B, H / ranks, S, D] as [B, H, S / ranks, D]."""
        parts = torch.stack(by_rank(tensor.transpose(1, 2), 1, self._order, self.ranks))
        return self._all_to_all(parts).movedim(0, 2).flatten(2, 3).transpose(1, 2)

    def own_heads(self, per_head: Tensor | None) -> Tensor | None:
        """Those of this rank, of one number for each head."""
        return None if per_head is None else per_head.chunk(self.ranks)[self.rank]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, given: Options, exchange: _Exchange
) -> tuple[Tensor, Tensor]:
    return _ops.sdpa_with_lse.default(
        q,
        k,
        v,
        is_causal=given.is_causal,
        scale=given.scale,
        enable_gqa=True,
        window_size=given.window_size,
        bottom_right=given.bottom_right,
        softcap=given.softcap,
        alibi_slopes=exchange.own_heads(given.alibi_slopes),
        sinks=exchange.own_heads(given.sinks),
        deterministic=given.deterministic,
    )


def _packed(
    q: Tensor, k: Tensor, v: Tensor, given: Options, exchange: _Exchange
) -> tuple[Tensor, Tensor]:
    assert given.cu_seqlens is not None
    starts = checked_starts(_OP, given.cu_seqlens, q.shape[2])
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    offsets = given.cu_seqlens.to(q.device, non_blocking=True)
    out, lse = _ops.varlen_attention_with_lse.default(
        *(tensor[0].transpose(0, 1) for tensor in (q, k, v)),
        offsets,
        offsets,
        longest,
        longest,
        softmax_scale=given.scale,
        causal=given.is_causal,
        window_size=given.window_size,
        softcap=given.softcap,
        alibi_slopes=exchange.own_heads(given.alibi_slopes),
        sinks=exchange.own_heads(given.sinks),
        deterministic=given.deterministic,
    )
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
