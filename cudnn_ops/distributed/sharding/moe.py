"""Sharding rules of mixtures of experts: over the columns of tokens and the sizes of experts.

Tokens that are sharded would have to be sent to their experts: they are gathered first.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register, wanted

_ops = torch.ops.cudnn_ops
_REPLICATE, _PARTIAL, _COLUMNS = Replicate(), Partial(), Shard(1)


def _permute(schema: OpSchema) -> OpStrategy:
    rules = [
        Rule({"input": placement}, (placement, _REPLICATE, _REPLICATE))
        for placement in (_COLUMNS, _PARTIAL)
    ]
    return cheapest(schema, rules)


def _combine(schema: OpSchema) -> OpStrategy:
    """Linear in the rows."""
    rules = [Rule({"rows": placement}, (placement,)) for placement in (_COLUMNS, _PARTIAL)]
    return cheapest(schema, rules)


def _combine_backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    by_columns = {"grad_out": _COLUMNS, "rows": _COLUMNS}
    rules = [
        Rule(by_columns, wanted(call, _COLUMNS, _PARTIAL)),
        Rule({"grad_out": _PARTIAL}, wanted(call, _PARTIAL, _PARTIAL)),
    ]
    return cheapest(schema, rules)


def _linear(schema: OpSchema) -> OpStrategy:
    rules = [
        Rule({"weight": Shard(1)}, (_COLUMNS,)),
        Rule({"input": _COLUMNS, "weight": Shard(2)}, (_PARTIAL,)),
        Rule({"input": _PARTIAL}, (_PARTIAL,)),
    ]
    return cheapest(schema, rules)


def _linear_backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    rules = [
        Rule(
            {"grad_out": _COLUMNS, "weight": Shard(1)},
            wanted(call, _PARTIAL, Shard(1)),
        ),
        Rule(
            {"input": _COLUMNS, "weight": Shard(2)},
            wanted(call, _COLUMNS, Shard(2)),
        ),
    ]
    return cheapest(schema, rules)


register(_ops._moe_permute.default, _permute)
register(_ops._moe_combine.default, _combine)
register(_ops._moe_combine_backward.default, _combine_backward)
register(_ops._grouped_linear.default, _linear)
register(_ops._grouped_linear_backward.default, _linear_backward)
