"""Sharding rules of attention, dense and packed: over the batch, and over heads.

A process that has some query heads has their key heads too. One key head for all is replicated, and
its gradient is a sum over the processes. The forward chooses what is cheapest; its log-sum-exp
tells the backward what that was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cudnn_ops.distributed.sharding.keywords import register_with_keywords
from cudnn_ops.distributed.sharding.rules import (
    Call,
    Rule,
    call_of,
    cheapest,
    chosen,
    matching,
    name_of,
    placements_of,
)
from cudnn_ops.ops.arguments import bind

_ops = torch.ops.cudnn_ops


def _parts(size: int, count: int) -> list[int]:
    """The sizes of the parts that a dimension is sharded into, as torch.chunk makes them."""
    most = -(-size // count)
    return [max(0, min(most, size - i * most)) for i in range(count)]


def keeps_groups(heads: int, heads_kv: int, counts: Sequence[int]) -> bool:
    """Whether key heads lie where the query heads of their groups do, sharded so many times."""
    if heads == heads_kv or heads_kv == 1:
        return True
    parts = [(heads, heads_kv)]
    for count in counts:
        parts = [
            pair
            for one, other in parts
            for pair in zip(_parts(one, count), _parts(other, count), strict=True)
        ]
    return all(one * heads_kv == other * heads for one, other in parts)


def is_one_group(query: OpStrategy, key: OpStrategy, dim: int, dim_kv: int) -> bool:
    """Whether all query heads share one key head, which is replicated then."""
    return query.shape[dim] > 1 and key.shape[dim_kv] == 1


@dataclass(frozen=True)
class Groups:
    """How the heads of a call's query and key belong together.

    Attributes:
        op: the operator.
        query_name: of the argument.
        query: the argument.
        dim: where its heads are.
        key_name: of the argument.
        heads_kv: how many heads it has.
    """

    op: OpOverload
    query_name: str
    query: OpStrategy
    dim: int
    key_name: str
    heads_kv: int

    @property
    def heads(self) -> int:
        """How many heads the query has."""
        return self.query.shape[self.dim]

    def kept_by(self, query: DTensorSpec) -> bool:
        """Whether a query so sharded leaves groups together."""
        counts = [
            query.mesh.size(i)
            for i, placement in enumerate(query.placements)
            if placement == Shard(self.dim)
        ]
        return keeps_groups(self.heads, self.heads_kv, counts)

    def check(self) -> None:
        """Refuses a query that comes sharded over more heads than the key has."""
        spec = self.query.strategies[0].output_spec
        if self.kept_by(spec):
            return
        raise ValueError(
            f"{name_of(self.op)}: {self.query_name} has {self.heads} heads, sharded as "
            f"{spec.placements} over a mesh {tuple(spec.mesh.shape)}, and {self.key_name} has "
            f"{self.heads_kv}; each process needs whole groups of {self.heads // self.heads_kv} "
            "query heads and their key head. Shard the heads over fewer processes, or shard the "
            "batch there"
        )


def forward(
    rules: Callable[[Call], Sequence[Rule]], groups: Callable[[OpOverload, Call], Groups]
) -> Callable[[OpSchema], OpStrategy]:
    """The strategy of a forward: the cheapest that leaves groups of heads together."""

    def strategy(schema: OpSchema) -> OpStrategy:
        call = call_of(schema)
        of_call = groups(schema.op, call)
        of_call.check()
        return cheapest(schema, rules(call), lambda specs: of_call.kept_by(specs[0]))

    return strategy


def _backward(rules: Callable[[Call], Sequence[Rule]]) -> Callable[[OpSchema], OpStrategy]:
    def strategy(schema: OpSchema) -> OpStrategy:
        call = call_of(schema)
        return chosen(schema, matching(schema.op, rules(call), "lse", placements_of(call.lse)))

    return strategy


# Dense attention: [batch, heads, length, head size].


def _dense_groups(op: OpOverload, call: Call) -> Groups:
    return Groups(op, "query", call.query, 1, "key", call.key.shape[1])


def _mask(call: Call, dim: int) -> dict[str, Placement]:
    """The mask's placement where dimension ``dim`` of the scores is sharded.

    A mask that is the same for all of that dimension is replicated.
    """
    mask = call.attn_mask
    place = 0 if mask is None else len(mask.shape) - 4 + dim
    if mask is None or place < 0 or mask.shape[place] == 1:
        return {}
    return {"attn_mask": Shard(place)}


def _dense_inputs(call: Call) -> list[dict[str, Placement]]:
    of_batch = ("query", "key", "value", "seq_lens_q", "seq_lens_kv")
    is_one = is_one_group(call.query, call.key, 1, 1)
    of_heads = ("query",) if is_one else ("query", "key", "value")
    return [
        {**dict.fromkeys(of_batch, Shard(0)), **_mask(call, 0)},
        {
            **dict.fromkeys(of_heads, Shard(1)),
            **dict.fromkeys(("alibi_slopes", "sinks"), Shard(0)),
            **_mask(call, 1),
        },
    ]


def _dense_rules(returns: int) -> Callable[[Call], list[Rule]]:
    def rules(call: Call) -> list[Rule]:
        return [
            Rule(inputs, (Shard(dim),) * returns) for dim, inputs in enumerate(_dense_inputs(call))
        ]

    return rules


def _dense_backward_rules(call: Call) -> list[Rule]:
    rules = []
    for dim, inputs in enumerate(_dense_inputs(call)):
        of_tensors = [inputs.get(name, Partial()) for name in ("query", "key", "value")]
        of_mask = inputs.get("attn_mask", Partial()) if call.grad_mask else Replicate()
        of_sinks = inputs.get("sinks", Partial()) if call.sinks is not None else Replicate()
        saved = dict.fromkeys(("grad_out", "out", "lse"), Shard(dim))
        rules.append(Rule({**inputs, **saved}, (*of_tensors, of_mask, of_sinks)))
    return rules


def _is_dense(call: Call) -> bool:
    """Whether query, key and value agree in rank, batch size and heads, as the rules require."""
    shapes = [tensor.shape for tensor in (call.query, call.key, call.value)]
    return all(len(shape) == 4 for shape in shapes) and (
        shapes[0][0] == shapes[1][0] == shapes[2][0]
        and shapes[1][1] == shapes[2][1]
        and (call.enable_gqa or shapes[0][1] == shapes[1][1])
    )


def _as_regular(returns: int) -> Callable[..., object]:
    """Where autograd is skipped, calls come with any ranks and sizes that broadcast."""

    def compute(*args: Any, **kwargs: Any) -> object:
        if _is_dense(bind(_ops.sdpa.default, args, kwargs)):
            return NotImplemented
        out, lse = _ops._sdpa_as_regular.default.decompose(*args, **kwargs)
        return out if returns == 1 else (out, lse)

    return compute


for _returns, _op in enumerate((_ops.sdpa.default, _ops.sdpa_with_lse.default), 1):
    _rules = _dense_rules(_returns)
    register_with_keywords(
        _op, forward(_rules, _dense_groups), _rules, "query", _as_regular(_returns)
    )
register_with_keywords(
    _ops._sdpa_backward.default, _backward(_dense_backward_rules), _dense_backward_rules, "lse"
)


# FP8 attention. The largest magnitudes are those of all processes.


def _fp8_rules(call: Call) -> list[Rule]:
    is_one = is_one_group(call.query, call.key, 1, 1)
    sharded: list[tuple[str, ...]] = [
        ("query", "key", "value", "seq_lens_q", "seq_lens_kv"),
        ("query",) if is_one else ("query", "key", "value"),
    ]
    if math.prod(call.descale_v.shape) > 1:
        del sharded[1]  # one head alone has its amax_o in other units
    return [
        Rule(
            dict.fromkeys(names, Shard(dim)),
            (
                Shard(dim),
                Shard(dim) if call.with_lse else Replicate(),
                Partial("max"),
                Partial("max"),
            ),
        )
        for dim, names in enumerate(sharded)
    ]


register_with_keywords(
    _ops._sdpa_fp8.default, forward(_fp8_rules, _dense_groups), _fp8_rules, "query"
)


def _fp8_backward_rules(call: Call) -> list[Rule]:
    saved = ("grad_out", "out", "lse", "query")
    is_one = is_one_group(call.query, call.key, 1, 1)
    of_keys: Placement = Partial() if is_one else Shard(1)
    of_heads = saved if is_one else (*saved, "key", "value")
    of_batch = (*saved, "key", "value", "seq_lens_q", "seq_lens_kv")
    return [
        Rule(dict.fromkeys(of_batch, Shard(0)), (Shard(0),) * 3 + (Partial("max"),)),
        Rule(dict.fromkeys(of_heads, Shard(1)), (Shard(1), of_keys, of_keys, Partial("max"))),
    ]


register_with_keywords(
    _ops._sdpa_fp8_backward.default, _backward(_fp8_backward_rules), _fp8_backward_rules, "lse"
)


def _mxfp8_rules(call: Call) -> list[Rule]:
    every = ("query", "key", "value", "descale_q", "descale_k", "descale_v")
    is_one = is_one_group(call.query, call.key, 1, 1)
    sharded = (every, ("query", "descale_q") if is_one else every)
    return [
        Rule(dict.fromkeys(names, Shard(dim)), (Shard(dim), Shard(dim), Partial("max")))
        for dim, names in enumerate(sharded)
    ]


register_with_keywords(
    _ops._sdpa_mxfp8.default, forward(_mxfp8_rules, _dense_groups), _mxfp8_rules, "query"
)


# Packed attention: [tokens, heads, head size], its log-sum-exp [heads, tokens].


def _packed_groups(op: OpOverload, call: Call) -> Groups:
    return Groups(op, "q", call.q, 1, "k", call.k.shape[1])


def _packed_inputs(call: Call) -> dict[str, Placement]:
    of_heads = ("q",) if is_one_group(call.q, call.k, 1, 1) else ("q", "k", "v")
    return {
        **dict.fromkeys(of_heads, Shard(1)),
        **dict.fromkeys(("alibi_slopes", "sinks"), Shard(0)),
    }


def _packed_rules(returns: int) -> Callable[[Call], list[Rule]]:
    return lambda call: [Rule(_packed_inputs(call), (Shard(1), Shard(0))[:returns])]


def _packed_backward_rules(call: Call) -> list[Rule]:
    inputs = _packed_inputs(call)
    of_tensors = [inputs.get(name, Partial()) for name in ("q", "k", "v")]
    of_sinks = Shard(0) if call.sinks is not None else Replicate()
    saved = {"grad_out": Shard(1), "out": Shard(1), "lse": Shard(0)}
    return [Rule({**inputs, **saved}, (*of_tensors, of_sinks))]


for _returns, _op in enumerate(
    (_ops.varlen_attention.default, _ops.varlen_attention_with_lse.default), 1
):
    _rules = _packed_rules(_returns)
    register_with_keywords(_op, forward(_rules, _packed_groups), _rules, "q")


def _packed_fp8_rules(call: Call) -> list[Rule]:
    return [Rule(_packed_inputs(call), (Shard(1), Partial("max"), Partial("max")))]


register_with_keywords(
    _ops._varlen_fp8.default, forward(_packed_fp8_rules, _packed_groups), _packed_fp8_rules, "q"
)
register_with_keywords(
    _ops._varlen_backward.default, _backward(_packed_backward_rules), _packed_backward_rules, "lse"
)


def _draw_rng_state(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One state for all processes, the first one's, whatever state their generators are in."""
    query = args[0]
    mesh = query.device_mesh
    state: Tensor = op_call(query._local_tensor, *args[1:], **kwargs)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            state = collectives.wait_tensor(collectives.broadcast(state, 0, (mesh, dim)))
    meta = TensorMeta(state.shape, state.stride(), state.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(state, spec, requires_grad=False)


DTensor._op_dispatcher._custom_op_handlers[_ops._attention_rng_state.default] = _draw_rng_state
