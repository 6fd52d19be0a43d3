"""What a sharding rule is, and how torch comes to know an operator's.

A rule speaks of one dimension of a mesh; torch combines them for meshes of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from cudnn_ops.ops.arguments import bind

#: The arguments of a call by name, as :func:`cudnn_ops.ops.arguments.bind` gives them. Tensors are
#: ``OpStrategy``, which have a shape and the placements that they come with.
Call = SimpleNamespace


@dataclass(frozen=True)
class Rule:
    """Placements with which an operator may run on each process's own tensors.

    Attributes:
        inputs: by the argument's name; tensors that are not named are replicated.
        outputs: in the order of the schema.
    """

    inputs: Mapping[str, Placement] = field(default_factory=dict)
    outputs: tuple[Placement, ...] = ()

    def of(self, name: str) -> Placement:
        """The placement of an argument."""
        return self.inputs.get(name, Replicate())


def replicated(op: OpOverload) -> Rule:
    """The rule that holds for every operator: all processes compute the same."""
    return Rule({}, (Replicate(),) * len(op._schema.returns))


def placements_of(tensor: OpStrategy) -> tuple[Placement, ...]:
    """Those that an argument comes with."""
    return tensor.strategies[0].output_spec.placements


def name_of(op: OpOverload) -> str:
    """The operator's name in messages."""
    return str(op._schema.name).replace("::", ".")


def call_of(schema: OpSchema) -> Call:
    """The arguments by name."""
    return bind(schema.op, schema.args_schema, schema.kwargs_schema)


def if_wanted(is_wanted: bool, placement: Placement) -> Placement:
    """An empty tensor stands for what nobody asks for."""
    return placement if is_wanted else Replicate()


def wanted(call: Call, *placements: Placement) -> tuple[Placement, ...]:
    """Those of a backward's results, of which ``output_mask`` says which are asked for."""
    pairs = zip(call.output_mask, placements, strict=True)
    return tuple(if_wanted(is_wanted, placement) for is_wanted, placement in pairs)


def _tensor_names(schema: OpSchema) -> list[str]:
    """Of the arguments that are tensors, in torch's order: by position, then by keyword."""
    arguments = schema.op._schema.arguments
    given = [
        *zip((argument.name for argument in arguments), schema.args_schema, strict=False),
        *schema.kwargs_schema.items(),
    ]
    return [name for name, value in given if isinstance(value, OpStrategy)]


def _tensors(schema: OpSchema) -> tuple[OpStrategy, ...]:
    return (*schema.args_strategy, *schema.kwargs_strategy)


def matching(
    op: OpOverload, rules: Sequence[Rule], leader: str, placements: Sequence[Placement]
) -> list[Rule]:
    """The rule for each dimension of the mesh, by the placement that one argument has there."""

    def find(placement: Placement) -> Rule:
        for rule in (replicated(op), *rules):
            if rule.of(leader) == placement:
                return rule
        accepted = ", ".join(str(rule.of(leader)) for rule in rules)
        raise ValueError(
            f"{name_of(op)}: {leader} has the placement {placement}; it accepts Replicate()"
            + (f" and {accepted}" if accepted else "")
        )

    return [find(placement) for placement in placements]


def cheapest(
    schema: OpSchema,
    rules: Sequence[Rule],
    is_valid: Callable[[Sequence[DTensorSpec]], bool] = lambda inputs: True,
) -> OpStrategy:
    """All combinations of the rules over the mesh, for torch to choose the cheapest one.

    Args:
        schema: the call.
        rules: those besides the one that replicates everything.
        is_valid: whether a combination may be chosen, by the inputs that it requires.
    """
    op, names = schema.op, _tensor_names(schema)
    lists: list[list[Placement | None]] = [
        [*rule.outputs, *(rule.of(name) for name in names)] for rule in (replicated(op), *rules)
    ]
    every = expand_to_full_mesh_op_strategy(
        _tensors(schema)[0].mesh, schema, lists, input_index=len(op._schema.returns)
    )
    # torch's own filter leaves out operators without results.
    return OpStrategy([one for one in every.strategies if is_valid(one.input_specs or ())])


def chosen(schema: OpSchema, rules: Sequence[Rule]) -> OpStrategy:
    """The one strategy that has these rules, one for each dimension of the mesh."""
    tensors = _tensors(schema)
    mesh = tensors[0].mesh
    outputs = [
        DTensorSpec(mesh, tuple(rule.outputs[i] for rule in rules))
        for i in range(len(schema.op._schema.returns))
    ]
    inputs = [
        DTensorSpec(mesh, tuple(rule.of(name) for rule in rules), tensor_meta=tensor.tensor_meta)
        for name, tensor in zip(_tensor_names(schema), tensors, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else tuple(outputs) or None
    return OpStrategy([OpSpec(output, inputs, redistribute_cost=[[0.0]] * len(inputs))])


def register(op: OpOverload, strategy: Callable[[OpSchema], OpStrategy]) -> None:
    """Makes DTensor use ``strategy``.

    All that a decision may depend on is part of torch's key for remembering it: every positional
    argument, and of the keywords those that are tensors or flags.
    """
    keywords = [
        argument.name
        for argument in op._schema.arguments
        if argument.kwarg_only and _is_tensor_or_flag(argument.type)
    ]
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
        op, strategy, RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keywords or None)
    )


def _is_tensor_or_flag(kind: Any) -> bool:
    inner = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
    return isinstance(inner, torch.TensorType | torch.BoolType)
