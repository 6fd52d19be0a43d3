"""Sharding rules of gated activations and rotary embedding."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
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
    rules = [
        Rule({"input": Shard(1)}, (Shard(1),)),  # heads
        Rule({"input": Shard(2), "cos": Shard(1), "sin": Shard(1)}, (Shard(2),)),  # tokens
        Rule({"input": Partial()}, (Partial(),)),  # a rotation is linear
    ]
    if call.cos.shape[0] == 1:
        rules.append(Rule({"input": Shard(0)}, (Shard(0),)))
    else:
        rules.append(Rule({"input": Shard(0), "cos": Shard(0), "sin": Shard(0)}, (Shard(0),)))
    return cheapest(schema, rules)


register(_ops._gated.default, _gated)
register(_ops._gated_backward.default, _gated)
register(_ops._rotary.default, _rotary)
