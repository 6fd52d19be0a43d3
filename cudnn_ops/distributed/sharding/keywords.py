"""Operators with tensors among their keywords, which torch leaves as they are: they follow.

torch redistributes positional arguments alone. Here the keywords' tensors get the placements of the
rule that torch has chosen for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OpStrategy
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from cudnn_ops.distributed.sharding.rules import (
    Call,
    Rule,
    call_of,
    matching,
    name_of,
    register,
)
from cudnn_ops.ops.arguments import bind

#: 2**64 divided by the golden ratio, to an odd number: its multiples lie far from each other.
_SEED_STEP = 0x9E3779B97F4A7C15


def register_with_keywords(
    op: OpOverload,
    strategy: Callable[[OpSchema], OpStrategy],
    rules: Callable[[Call], Sequence[Rule]],
    leader: str,
    instead: Callable[..., object] = lambda *args, **kwargs: NotImplemented,
) -> None:
    """Registers a strategy whose choice a positional argument's placement tells.

    Args:
        op: the operator.
        strategy: as for :func:`register`.
        rules: the rules that it chooses from, each with another placement of ``leader``.
        leader: the argument's name.
        instead: computes calls that the rules do not speak of, and returns NotImplemented for
            others.
    """

    def run(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = instead(*args, **kwargs)
        if result is not NotImplemented:
            return result
        dispatcher = DTensor._op_dispatcher
        info = dispatcher.unwrap_to_op_info(op_call, args, kwargs)
        dispatcher.sharding_propagator.propagate(info)
        if info.compute_mesh._is_current_rank_part_of_mesh():
            _follow(op_call, info, rules, leader)
        assert info.output_sharding is not None
        results = dispatcher._dispatch_get_local_results_slow_path(op_call, args, info)
        return dispatcher.wrap(results, info.output_sharding.output_spec)

    register(op, strategy)
    DTensor._op_dispatcher._custom_op_handlers[op] = run


def _follow(
    op: OpOverload, info: OpInfo, rules: Callable[[Call], Sequence[Rule]], leader: str
) -> None:
    """Gives the keywords' tensors the placements that the others are about to get."""
    schema, sharding = info.schema, info.output_sharding
    assert schema is not None
    assert sharding is not None
    keywords = {
        name: spec for name, spec in schema.kwargs_schema.items() if isinstance(spec, DTensorSpec)
    }
    call = call_of(schema)
    drops = call.__dict__.get("dropout_p", 0.0) != 0.0
    if not keywords and not drops:
        return
    positional = (sharding.redistribute_schema or schema).args_schema
    placements = bind(op, positional, {}).__dict__[leader].placements
    chosen = matching(op, rules(call), leader, placements)
    for name, spec in keywords.items():
        wanted = tuple(rule.of(name) for rule in chosen)
        local = cast(Tensor, info.local_kwargs[name])
        info.local_kwargs[name] = _redistributed(op, name, local, spec, wanted)
    if drops:
        _drop_apart(op, info, chosen)


def _redistributed(
    op: OpOverload, name: str, local: Tensor, spec: DTensorSpec, wanted: tuple[Placement, ...]
) -> Tensor:
    if spec.placements == wanted:
        return local
    if _is_written(op, name):
        raise ValueError(
            f"{name_of(op)}: {name} is written in place and has the placements {spec.placements}; "
            f"with these arguments it must have {wanted}"
        )
    return redistribute_local_tensor(
        local, spec, DTensorSpec(spec.mesh, wanted, tensor_meta=spec.tensor_meta)
    )


def _is_written(op: OpOverload, name: str) -> bool:
    argument = next(argument for argument in op._schema.arguments if argument.name == name)
    return argument.alias_info is not None and argument.alias_info.is_write


def _drop_apart(op: OpOverload, info: OpInfo, rules: Sequence[Rule]) -> None:
    """Gives each part of what is sharded a seed of its own; copies have the same.

    Dropout of the batch entries and heads of one process must not repeat that of another's.
    """
    mesh = info.compute_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = 0
    for dim, rule in enumerate(rules):
        if any(placement != Replicate() for placement in rule.outputs):
            part = part * mesh.size(dim) + coordinate[dim]
    if part == 0:
        return
    step = (part * _SEED_STEP) % (1 << 63)

    def of_part(state: object) -> Tensor:
        seed, offset = cast(Tensor, state).unbind()
        return torch.stack([seed + step, offset])

    if "rng_state" in info.local_kwargs:
        info.local_kwargs["rng_state"] = of_part(info.local_kwargs["rng_state"])
        return
    place = [argument.name for argument in op._schema.arguments].index("rng_state")
    local = list(info.local_args)
    local[place] = of_part(local[place])
    info.local_args = tuple(local)
