"""Sharding rules of max pooling: over the batch or the channels."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register

_ops = torch.ops.cudnn_ops


def _forward(schema: OpSchema) -> OpStrategy:
    # An empty tensor stands for offsets that are not wanted.
    with_offsets = call_of(schema).with_offsets
    rules = [
        Rule({"input": shard}, (shard, shard if with_offsets else Replicate()))
        for shard in (Shard(0), Shard(1))
    ]
    return cheapest(schema, rules)


def _backward(schema: OpSchema) -> OpStrategy:
    names = ("grad_out", "offsets", "grad_more")
    rules = [Rule(dict.fromkeys(names, shard), (shard,)) for shard in (Shard(0), Shard(1))]
    return cheapest(schema, rules)


register(_ops._max_pool2d.default, _forward)
register(_ops._max_pool2d_backward.default, _backward)
