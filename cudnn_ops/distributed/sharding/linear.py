"""Sharding rules of linear layers: over the rows, over the outputs, and over the inputs.

Over the inputs each process has a share of the sum (as by ``RowwiseParallel``), of which an
activation is none: without one the result is a partial sum, to which one process adds the bias and
the residual; with one the shards are gathered first. Of a pair of layers the first is sharded over
its outputs and the second over its inputs, so that the activation is of whole sums.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import (
    Call,
    Rule,
    call_of,
    cheapest,
    if_wanted,
    register,
    wanted,
)
from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.ops.linear import keeps_before, mlp_needs_before

_ops = torch.ops.cudnn_ops


def _last(call: Call) -> int:
    """The dimension of the columns."""
    return len(call.input.shape) - 1


def _forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    last, keeps = _last(call), keeps_before(call)
    rules = [
        Rule({"input": rows, "residual": rows}, (rows, if_wanted(keeps, rows)))
        for rows in map(Shard, range(last))
    ]
    columns = Shard(last)
    rules.append(
        Rule(
            {"weight": Shard(0), "bias": Shard(0), "residual": columns},
            (columns, if_wanted(keeps, columns)),
        )
    )
    if ACTIVATIONS[call.activation] == "none":
        inputs = {"input": columns, "weight": Shard(1), "bias": Partial(), "residual": Partial()}
        rules.append(Rule(inputs, (Partial(), Replicate())))
    return cheapest(schema, rules)


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    last = _last(call)
    rules = [
        Rule(
            dict.fromkeys(("grad_out", "input", "saved"), rows),
            wanted(call, rows, Partial(), Partial()),
        )
        for rows in map(Shard, range(last))
    ]
    columns = Shard(last)
    rules.append(
        Rule(
            {"grad_out": columns, "saved": columns, "weight": Shard(0)},
            wanted(call, Partial(), Shard(0), Shard(0)),
        )
    )
    rules.append(
        Rule(
            {"input": columns, "weight": Shard(1)},
            wanted(call, columns, Shard(1), Replicate()),
        )
    )
    return cheapest(schema, rules)


def _mlp_forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def kept(placement: Placement) -> tuple[Placement, Placement]:
        keeps = bool(call.keep) and mlp_needs_before(call)
        return if_wanted(bool(call.keep), placement), if_wanted(keeps, placement)

    rules = [Rule({"input": rows}, (rows, *kept(rows))) for rows in map(Shard, range(_last(call)))]
    if not call.gated:  # of which a shard would have a part of gate and none of up
        inputs = {
            **{"weight1": Shard(0), "bias1": Shard(0)},
            **{"weight2": Shard(1), "bias2": Partial()},
        }
        rules.append(Rule(inputs, (Partial(), *kept(Shard(_last(call))))))
    return cheapest(schema, rules)


def _mlp_backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    rules = [
        Rule(
            dict.fromkeys(("grad_out", "input", "hidden", "before"), rows),
            wanted(call, rows, *[Partial()] * 4),
        )
        for rows in map(Shard, range(_last(call)))
    ]
    if not call.gated:
        columns = Shard(_last(call))
        inputs = {
            **{"weight1": Shard(0), "weight2": Shard(1)},
            **{"hidden": columns, "before": columns},
        }
        placements = (Partial(), Shard(0), Shard(0), Shard(1), Replicate())
        rules.append(Rule(inputs, wanted(call, *placements)))
    return cheapest(schema, rules)


register(_ops._linear.default, _forward)
register(_ops._linear_backward.default, _backward)
register(_ops._mlp.default, _mlp_forward)
register(_ops._mlp_backward.default, _mlp_backward)
