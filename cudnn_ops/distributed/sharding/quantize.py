"""Sharding rules of rounding to 8 bits, alone or behind a rotation, and back.

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


def _rotary_fp8(schema: OpSchema) -> OpStrategy:
    """Where the scales are known, as the rotation; the value's heads may have scales of their own.

    Those stand behind the query's and the key's in one tensor, which no sharding cuts there.
    """
    call = call_of(schema)
    angles = ("cos", "sin") if call.positions is None else ("positions",)  # a table is of no token
    axis = 1 if len(call.layout) > 2 else 0  # of the batch, behind that of the sections

    def rule(shard: Shard, of_angles: dict[str, Shard]) -> Rule:
        heads = dict.fromkeys(("query", "key", "value"), shard)
        return Rule({**heads, **of_angles}, (*heads.values(), Replicate(), Partial("max")))

    if call.scales is None:
        return cheapest(schema, [])
    has_batch = getattr(call, angles[0]).shape[axis] != 1
    rules = [
        rule(Shard(0), dict.fromkeys(angles, Shard(axis)) if has_batch else {}),
        rule(Shard(2), dict.fromkeys(angles, Shard(axis + 1))),
    ]
    if not call.per_head:
        rules.append(rule(Shard(1), {}))
    return cheapest(schema, rules)


def _rows_fp8(schema: OpSchema) -> OpStrategy:
    """By rows; one scale of all of them has one descale and one largest magnitude."""
    call = call_of(schema)
    has_sum = call.kind == 1 and call.other is not None
    rules = []
    for dim in range(len(call.input.shape) - 1):
        rows = Shard(dim)
        descale, amax = (rows, rows) if call.scale is None else (Replicate(), Partial("max"))
        results = (rows, descale, amax, rows if has_sum else Replicate())
        rules.append(Rule(dict.fromkeys(("input", "other"), rows), results))
    return cheapest(schema, rules)


register(_ops._rows_fp8.default, _rows_fp8)
register(_ops._rotary_fp8.default, _rotary_fp8)
register(_ops._quantize_fp8.default, _quantize)
register(_ops._dequantize_fp8.default, _dequantize)
