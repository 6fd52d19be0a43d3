"""Tells inductor of our operators before it meets them in a graph.

Inductor calls an operator that it cannot generate code for as it is: by a fallback. It makes the
fallback of an unknown operator when a graph first has it, and formats a message for its log, even
where the log is off. The message holds the operator's arguments with everything that computes them,
and each residual connection before the operator doubles it: behind 18 of them compiling took 25
seconds longer. An operator that has its fallback already needs no message. (vLLM met the same: vllm
42129.)

Where there is a fast call of an operator, generated code makes that call.
"""

from __future__ import annotations

from types import ModuleType

import torch

from cudnn_ops.ops.call import has_graph_call


def register(lowering: ModuleType) -> None:
    """Makes the fallback of each operator that is defined by now, as inductor itself would.

    Args:
        lowering: ``torch._inductor.lowering``.
    """
    if not hasattr(lowering, "make_fallback"):
        return  # it is being imported, and at its end this is called once more
    from cudnn_ops.ops.inductor_kernel import lowering_of  # it imports inductor

    for operator in operators():
        if operator in lowering.lowerings or operator in lowering.decompositions:
            continue
        tag = lowering.get_layout_constraint_tag(operator, with_default=True)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
        if has_graph_call(operator):
            place = lowering.register_lowering(operator, type_promotion_kind=None)
            place(lowering_of(operator))


def operators() -> list[torch._ops.OpOverload]:
    """All overloads of ``torch.ops.cudnn_ops`` that are defined by now."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("cudnn_ops::"):
            packet, _, overload = name.removeprefix("cudnn_ops::").partition(".")
            found.append(getattr(getattr(torch.ops.cudnn_ops, packet), overload or "default"))
    return found
