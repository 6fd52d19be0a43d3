"""Sharding rules of gated activations and rotary embedding."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops._pointwise_ops import pointwise_strategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register

_ops = torch.ops.cudnn_ops


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


register(_ops._gated.default, pointwise_strategy)
register(_ops._gated_backward.default, pointwise_strategy)
register(_ops._rotary.default, _rotary)
