"""Sharding rules of convolutions: over the batch, and over output channels without groups.

Over output channels the weight is sharded as by ``ColwiseParallel``, that of a transposed one by
its second dimension, and the output by channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Rule, call_of, cheapest, register
from cudnn_ops.ops.conv import is_transposed

_ops = torch.ops.cudnn_ops


def _outputs(geometry: Sequence[int]) -> Shard:
    """Of the weight, by output channels."""
    return Shard(1) if is_transposed(geometry) else Shard(0)


def _forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def sharded(dim: int) -> tuple[Placement, Placement]:
        return Shard(dim), Shard(dim) if call.with_before else Replicate()

    rules = [Rule({"input": Shard(0), "residual": Shard(0)}, sharded(0))]
    if call.geometry[-1] == 1:
        inputs = {"weight": _outputs(call.geometry), "bias": Shard(0), "residual": Shard(1)}
        rules.append(Rule(inputs, sharded(1)))
    return cheapest(schema, rules)


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def wanted(*placements: Placement) -> Sequence[Placement]:
        # An empty tensor stands for a gradient that is not.
        return [
            placement if is_wanted else Replicate()
            for placement, is_wanted in zip(placements, call.output_mask, strict=True)
        ]

    rules = [
        Rule(
            {"grad_out": Shard(0), "input": Shard(0), "saved": Shard(0)},
            tuple(wanted(Shard(0), Partial(), Partial(), Shard(0))),
        )
    ]
    if call.geometry[-1] == 1:
        rules.append(
            Rule(
                {"grad_out": Shard(1), "weight": _outputs(call.geometry), "saved": Shard(1)},
                tuple(wanted(Partial(), _outputs(call.geometry), Shard(0), Shard(1))),
            )
        )
    return cheapest(schema, rules)


register(_ops._conv.default, _forward)
register(_ops._conv_backward.default, _backward)
