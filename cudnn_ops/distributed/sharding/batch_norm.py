"""Sharding rules of batch norm: over the channels; by running statistics also over all others.

In training the statistics are those of the whole batch, of which no process has more than a part:
an input that is sharded over it is gathered first. A norm that keeps it sharded, and joins what the
processes find, is :class:`cudnn_ops.nn.SyncBatchNorm`.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import (
    Rule,
    call_of,
    cheapest,
    chosen,
    matching,
    placements_of,
    register,
)

_ops = torch.ops.cudnn_ops

_VECTORS = ("running_mean", "running_var", "weight", "bias", "mean", "rstd")
_IMAGES = ("grad_out", "grad_more", "input", "residual", "out")
_OVER_CHANNELS: dict[str, Placement] = {
    **dict.fromkeys(_VECTORS, Shard(0)),
    **dict.fromkeys(_IMAGES, Shard(1)),
}


def _training(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)
    rule = Rule(_OVER_CHANNELS, (Shard(1), Shard(0), Shard(0)))
    if call.running_mean is None:
        return cheapest(schema, [rule])
    # They are changed in place: nothing else may come in their place.
    placements = placements_of(call.running_mean)
    return chosen(schema, matching(schema.op, [rule], "running_mean", placements))


def _others(call: object) -> list[int]:
    """The dimensions other than the channels."""
    return [dim for dim in range(len(call.input.shape)) if dim != 1]  # type: ignore[attr-defined]


def _inference(schema: OpSchema) -> OpStrategy:
    rules = [
        Rule(dict.fromkeys(_IMAGES, Shard(dim)), (Shard(dim),)) for dim in _others(call_of(schema))
    ]
    return cheapest(schema, [Rule(_OVER_CHANNELS, (Shard(1),)), *rules])


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def outputs(of_image: Placement, of_vector: Placement) -> tuple[Placement, ...]:
        placements = (of_image, of_vector, of_vector, of_image)
        # An empty tensor stands for a gradient that is not wanted.
        return tuple(
            placement if is_wanted else Replicate()
            for placement, is_wanted in zip(placements, call.output_mask, strict=True)
        )

    rules = [Rule(_OVER_CHANNELS, outputs(Shard(1), Shard(0)))]
    if not call.training:
        rules += [
            Rule(dict.fromkeys(_IMAGES, Shard(dim)), outputs(Shard(dim), Partial()))
            for dim in _others(call)
        ]
    return cheapest(schema, rules)


register(_ops._batch_norm_training.default, _training)
register(_ops._batch_norm_inference.default, _inference)
register(_ops._batch_norm_backward.default, _backward)
