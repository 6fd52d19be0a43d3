"""Gated activations: silu or gelu of one tensor times another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from cudnn_ops.compiler.match import Cast, Op, Var, match
from cudnn_ops.compiler.nodes import memory_of_result, value_of
from cudnn_ops.compiler.pattern import Found, Pattern, is_tensor, shape_of, through_dropout
from cudnn_ops.compiler.patterns.activations import gelu, gelu_tanh, silu

_GATE, _UP = Cast(Var("gate", is_tensor)), Cast(Var("up", is_tensor))
_GATED = {
    name: Cast(Op("mul", Cast(activation(_GATE)), _UP))
    for name, activation in (("silu", silu), ("gelu", gelu), ("gelu_tanh", gelu_tanh))
}


#: What :meth:`Gated.find` puts in, with the number that C++ has for the activation.
_NUMBERS: dict[tuple[object, object], int] = {
    (torch.ops.cudnn_ops.swiglu.default, None): 0,
    (torch.ops.cudnn_ops.geglu.default, "none"): 1,
    (torch.ops.cudnn_ops.geglu.default, "tanh"): 2,
}
#: Those that keep what they are given.
_NORMS = (torch.ops.cudnn_ops.layer_norm.default, torch.ops.cudnn_ops.rms_norm.default)


class Gated(Pattern):
    """SwiGLU and GEGLU."""

    name = "gated"
    ends_in = frozenset({"mul", "cast"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for activation, gated in _GATED.items():
            for bound in match(gated, node):
                gate, up = bound["gate"], bound["up"]
                if gate is not up and shape_of(gate) == shape_of(up):
                    yield Found(list(bound.nodes), [node], [gate, up], _build(activation))

    def finish(
        self, graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
    ) -> None:
        """Saves memory, as inductor does: gate and up are the largest tensors of most models.

        A result is put where its gate was, if nothing else reads that. One that only norms read,
        which would keep it for their gradients beside gate and up, is computed again for these.
        """
        having = Counter(memory for node in graph.nodes for memory in memory_of_result(node))
        for node in list(graph.nodes):
            number = _NUMBERS.get((node.target, node.kwargs.get("approximate")))
            # A model's own call of the operator may name its arguments.
            if number is None or len(node.args) != 2:
                continue
            gate, up = node.args
            if all(having[memory] == 1 for memory in memory_of_result(gate)) and _is_own(
                gate, node
            ):
                with graph.inserting_before(node):
                    graph.call_function(torch.ops.cudnn_ops._gated_.default, (gate, up, number))
                node.replace_all_uses_with(gate)
                graph.erase_node(node)
                continue
            for again in _only_for_norms(node):
                # The partitioner of a training graph reads it, as it does in checkpointed modules.
                again.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def _is_own(gate: fx.Node, node: fx.Node) -> bool:
    """Whether a gate is a result that nothing but ``node`` reads, now or for a gradient."""
    value, result = value_of(gate), value_of(node)
    if value is None or result is None:  # within a transform of torch.func
        return False
    return (
        gate.op in ("call_function", "call_method")
        and list(gate.users) == [node]
        and not value.requires_grad
        and not result.requires_grad
        and not is_traceable_wrapper_subclass(value)  # of whose parts the operator knows nothing
        and is_contiguous_or_false(value)
    )


def _only_for_norms(node: fx.Node) -> list[fx.Node]:
    """A result that has a gradient and that norms alone read, with what leaves it as it is."""
    value = value_of(node)
    if value is None or not value.requires_grad:
        return []
    same = [node]
    for one in same:
        same += (user for user in one.users if through_dropout(user)[1])
    readers = [(one, user) for one in same for user in one.users if user not in same]
    are_norms = all(user.target in _NORMS and user.args[0] is one for one, user in readers)
    return same if readers and are_norms else []


def _build(activation: str) -> Any:
    def build(gate: Any, up: Any) -> Any:
        ops = torch.ops.cudnn_ops
        if activation == "silu":
            return ops.swiglu.default(gate, up)
        approximate = "none" if activation == "gelu" else "tanh"
        return ops.geglu.default(gate, up, approximate=approximate)

    return build
