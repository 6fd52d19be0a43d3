"""Sharding rules of rounding to 8 bits and back.

A scale that follows from the largest magnitude needs all that it is of; one that is given does not.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register

_ops = torch.ops.cudnn_ops


def _quantize(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    rules = []
    for dim in range(len(call.input.shape)):
        if dim == call.dim:
            each = {"input": Shard(dim), "scale": Shard(0)}
            rules.append(Rule(each, (Shard(dim), Shard(0), Shard(0))))
        elif call.scale is not None:
            rules.append(Rule({"input": Shard(dim)}, (Shard(dim), Replicate(), Partial("max"))))
    return cheapest(schema, rules)


def _dequantize(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    rules = [
        Rule(
            {"input": Shard(dim), **({"descale": Shard(0)} if dim == call.dim else {})},
            (Shard(dim),),
        )
        for dim in range(len(call.input.shape))
    ]
    return cheapest(schema, rules)


register(_ops._quantize_fp8.default, _quantize)
register(_ops._dequantize_fp8.default, _dequantize)
