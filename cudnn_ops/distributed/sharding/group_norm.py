"""Sharding rules of group norm: over the batch."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register

_ops = torch.ops.cudnn_ops


def _forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    total = Shard(0) if call.residual is not None else Replicate()
    stats = Shard(0) if call.with_stats else Replicate()
    inputs = {"input": Shard(0), "residual": Shard(0)}
    return cheapest(schema, [Rule(inputs, (Shard(0), total, stats, stats))])


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    names = ("grad_out", "grad_sum", "input", "mean", "rstd")
    # An empty tensor stands for a gradient that is not wanted.
    outputs = tuple(
        placement if is_wanted else Replicate()
        for placement, is_wanted in zip(
            (Shard(0), Partial(), Partial()), call.output_mask, strict=True
        )
    )
    return cheapest(schema, [Rule(dict.fromkeys(names, Shard(0)), outputs)])


register(_ops._group_norm.default, _forward)
register(_ops._group_norm_backward.default, _backward)
