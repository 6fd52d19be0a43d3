"""Sharding rules of adaptive norms: over the batch, and over the tokens of a sample."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.rules import Call, Rule, call_of, cheapest, register

_ops = torch.ops.cudnn_ops
_ROWS = ("grad_out", "grad_sum", "input", "update")
_MODULATIONS = ("gate", "scale", "shift")


def _modulation(call: Call, name: str, dim: int) -> Placement:
    """Of gate, scale or shift, where the input is sharded over a dimension."""
    tensor, rank = getattr(call, name), len(call.input.shape)
    # [B, C] has numbers of the samples alone.
    is_counted = tensor is not None and (dim == 0 or len(tensor.shape) == rank)
    return Shard(dim) if is_counted and tensor.shape[dim] != 1 else Replicate()


def _inputs(call: Call, dim: int) -> dict[str, Placement]:
    modulations = {name: _modulation(call, name, dim) for name in _MODULATIONS}
    return {**dict.fromkeys(_ROWS, Shard(dim)), **modulations}


def _dims(call: Call) -> range:
    return range(len(call.input.shape) - 1)


def _forward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def rule(dim: int) -> Rule:
        def if_there(is_there: bool) -> Placement:
            return Shard(dim) if is_there else Replicate()

        outputs = (
            Shard(dim),
            if_there(call.update is not None),
            if_there(call.with_stats and call.is_layer),
            if_there(call.with_stats),
        )
        return Rule(_inputs(call, dim), outputs)

    return cheapest(schema, [rule(dim) for dim in _dims(call)])


def _backward(schema: OpSchema) -> OpStrategy:
    call = call_of(schema)

    def rule(dim: int) -> Rule:
        inputs = _inputs(call, dim)
        stats = {"rstd": Shard(dim), "mean": Shard(dim) if call.is_layer else Replicate()}
        # What is one for all shards is added up over them.
        of_modulations = (
            placement if isinstance(placement := inputs[name], Shard) else Partial()
            for name in _MODULATIONS
        )
        gradients = (Shard(dim), Shard(dim), *of_modulations, Partial(), Partial())
        # An empty tensor stands for a gradient that is not wanted.
        outputs = tuple(
            placement if is_wanted else Replicate()
            for placement, is_wanted in zip(gradients, call.output_mask, strict=True)
        )
        return Rule({**inputs, **stats}, outputs)

    return cheapest(schema, [rule(dim) for dim in _dims(call)])


register(_ops._adaptive_norm.default, _forward)
register(_ops._adaptive_norm_backward.default, _backward)
