"""Sharding rules of gated activations and rotary embedding."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.placement_types import _StridedShard

from cudnn_ops.distributed.sharding.rules import (
    Rule,
    call_of,
    cheapest,
    chosen,
    placements_of,
    register,
)

_ops = torch.ops.cudnn_ops


def _gated(schema: OpSchema) -> OpStrategy:
    """All tensors have one shape: where one is sharded, they all are."""
    tensors = {
        name: value
        for name, value in vars(call_of(schema)).items()
        if isinstance(value, OpStrategy)
    }
    results = len(schema.op._schema.returns)
    rules = []
    for placements in zip(*map(placements_of, tensors.values()), strict=True):
        shards = [one for one in placements if isinstance(one, Shard | _StridedShard)]
        shard = shards[0] if shards else Replicate()
        rules.append(Rule(dict.fromkeys(tensors, shard), (shard,) * results))
    return chosen(schema, rules)


def _rotary(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    angles = ("cos", "sin") if call.positions is None else ("positions",)  # a table is of no token
    axis = 1 if len(call.layout) > 2 else 0  # of the batch, behind that of the sections

    def rule(heads: Placement, of_angles: dict[str, Placement]) -> Rule:
        none = Replicate()
        return Rule(
            {"input": heads, "key": heads, **of_angles},
            (heads, none if call.key is None else heads),
        )

    rules = [
        rule(Shard(1), {}),  # heads
        rule(Shard(2), dict.fromkeys(angles, Shard(axis + 1))),  # tokens
        rule(Partial(), {}),  # a rotation is linear
    ]
    has_batch = getattr(call, angles[0]).shape[axis] != 1
    rules.append(rule(Shard(0), dict.fromkeys(angles, Shard(axis)) if has_batch else {}))
    return cheapest(schema, rules)


register(_ops._gated.default, _gated)
register(_ops._gated_backward.default, _gated)
register(_ops._rotary.default, _rotary)
