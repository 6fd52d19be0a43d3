"""Sharding rules of attention over a paged cache and of writing into it: over heads.

Each process has the pages of its heads, and the same page table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.attention import Groups, forward, is_one_group
from cudnn_ops.distributed.sharding.keywords import register_with_keywords
from cudnn_ops.distributed.sharding.rules import (
    Call,
    Rule,
    call_of,
    cheapest,
    chosen,
    matching,
    placements_of,
    register,
)

_ops = torch.ops.cudnn_ops


def _head_dim(call: Call) -> int:
    """Where the heads of a page are."""
    return 1 if call.head_major else 2


def _groups(op: OpOverload, call: Call) -> Groups:
    dim = len(call.query.shape) - 2
    heads_kv = call.key_cache.shape[_head_dim(call)]
    return Groups(op, "query", call.query, dim, "key_cache", heads_kv)


def _of_heads(call: Call, name: str) -> Placement:
    """Of descales: one for each head goes where the heads do."""
    descale = getattr(call, name)
    has_each = descale is not None and len(descale.shape) == 1 and descale.shape[0] > 1
    return Shard(0) if has_each else Replicate()


def _rules(returns: int) -> Callable[[Call], list[Rule]]:
    def rules(call: Call) -> list[Rule]:
        dim, dim_kv = len(call.query.shape) - 2, _head_dim(call)
        inputs: dict[str, Placement] = {
            "query": Shard(dim),
            "sinks": Shard(0),
            "out": Shard(dim),
        }
        if not is_one_group(call.query, call.key_cache, dim, dim_kv):
            inputs |= dict.fromkeys(("key_cache", "value_cache"), Shard(dim_kv))
            inputs |= {name: _of_heads(call, name) for name in ("descale_k", "descale_v")}
        elif call.plan is not None:
            return []  # the heads of a group are a part of what it was made for
        # The log-sum-exp is [batch, heads, length], or packed [heads, tokens].
        return [Rule(inputs, (Shard(dim), Shard(dim - 1))[:returns])]

    return rules


def _append(schema: OpSchema) -> OpStrategy:
    """The caches stay as they are, and what is written into them follows."""
    call = call_of(schema)
    cache = Shard(_head_dim(call))
    inputs = {"key_cache": cache, "value_cache": cache, "key": Shard(1), "value": Shard(1)}
    rule = Rule(inputs | {name: _of_heads(call, name) for name in ("descale_k", "descale_v")}, ())
    found = [
        matching(schema.op, [rule], name, placements_of(getattr(call, name)))
        for name in ("key_cache", "value_cache")
    ]
    if found[0] != found[1]:
        raise ValueError(
            "cudnn_ops.paged_kv_append_: key_cache and value_cache must be sharded alike, got "
            f"{placements_of(call.key_cache)} and {placements_of(call.value_cache)}"
        )
    return chosen(schema, found[0])


for _op, _returns in (
    (_ops.paged_attention.default, 1),
    (_ops.paged_attention_with_lse.default, 2),
    (_ops._paged_attention_out.default, 0),
):
    register_with_keywords(_op, forward(_rules(_returns), _groups), _rules(_returns), "query")
register(_ops.paged_kv_append_.default, _append)
# All of it depends on the lengths of all sequences.
register(_ops._paged_plan.default, lambda schema: cheapest(schema, []))
