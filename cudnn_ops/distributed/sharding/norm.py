"""Sharding rules of norms: over every dimension but the normalized ones.

The input decides, as for torch's own norms, and what a process has normalized it also
differentiates: the statistics of its rows stay where they are. Their placement says no more than
that they are sharded, for rows of a sequence's part are no contiguous part of all rows.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.placement_types import _StridedShard

from cudnn_ops.distributed.sharding.rules import (
    Call,
    Rule,
    call_of,
    chosen,
    placements_of,
    register,
    replicated,
)

_ops = torch.ops.cudnn_ops


def _leading_shards(call: Call, tensor: OpStrategy) -> list[Placement | None]:
    """For each dimension of the mesh, how a tensor's rows are sharded there, if they are."""
    first = len(call.input.shape) - len(call.normalized_shape)
    return [
        placement
        if isinstance(placement, Shard | _StridedShard) and placement.dim < first
        else None
        for placement in placements_of(tensor)
    ]


def _forward_rule(call: Call, shard: Placement | None) -> Rule:
    if shard is None:
        return replicated(_ops._norm.default)

    def if_there(is_there: bool) -> Placement:
        return Shard(0) if is_there else Replicate()

    total = shard if call.residual is not None else Replicate()
    mean, rstd = if_there(call.with_stats and call.is_layer), if_there(call.with_stats)
    return Rule({"input": shard, "residual": shard}, (shard, total, mean, rstd))


def _forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    shards = _leading_shards(call, call.input)
    if call.residual is not None:
        of_residual = _leading_shards(call, call.residual)
        shards = [one or other for one, other in zip(shards, of_residual, strict=True)]
    return chosen(schema, [_forward_rule(call, shard) for shard in shards])


def _backward_rule(call: Call, shard: Placement | None) -> Rule:
    if shard is None:
        return replicated(_ops._norm_backward.default)
    inputs = {
        "grad_out": shard,
        "grad_sum": shard,
        "input": shard,
        "rstd": Shard(0),
        "mean": Shard(0) if call.is_layer else Replicate(),
    }
    placements = (shard, Partial(), Partial())
    outputs = tuple(
        placement if is_wanted else Replicate()
        for placement, is_wanted in zip(placements, call.output_mask, strict=True)
    )
    return Rule(inputs, outputs)


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    shards = _leading_shards(call, call.input)
    return chosen(schema, [_backward_rule(call, shard) for shard in shards])


register(_ops._norm.default, _forward)
register(_ops._norm_backward.default, _backward)
