"""Tells inductor of our operators before it meets them in a graph.

It calls what it has no code for as it is, a fallback, and of an operator that it does not know it
makes one when it first meets it. On the way it writes the operator's arguments into a message for
its log, with what computes them, and what computes that, whether or not anybody reads the log.
Where layer by layer is added to what went before, each layer doubles the message: behind 18 of them
compiling took 25 seconds more, behind 30 it would take days. (vLLM met the same: vllm 42129.)
"""

from __future__ import annotations

from types import ModuleType

import torch


def register(lowering: ModuleType) -> None:
    """Makes a fallback of each operator that there is, as inductor does at the first meeting.

    Args:
        lowering: ``torch._inductor.lowering``.
    """
    if not hasattr(lowering, "make_fallback"):
        return  # what it imports has imported us; at its end this is called again
    for operator in _operators():
        if operator in lowering.lowerings or operator in lowering.decompositions:
            continue
        tag = lowering.get_layout_constraint_tag(operator, with_default=True)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(operator, layout_constraint=constraint, warn=False)


def _operators() -> list[torch._ops.OpOverload]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("cudnn_ops::"):
            packet, _, overload = name.removeprefix("cudnn_ops::").partition(".")
            found.append(getattr(getattr(torch.ops.cudnn_ops, packet), overload or "default"))
    return found
