"""What a backward would keep of an operator's result, where inductor computes it again."""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.nodes import call_of, value_of
from cudnn_ops.compiler.patterns.activations import ENDS

#: Functions whose gradients need what they are given: activations but ReLU, and powers.
_KEEPING = ENDS - {"relu", "mul", "div"} | {"pow", "square"}
_KEEPING_FUNCTIONS = (F.mish, F.elu, F.celu, F.hardsigmoid, F.softplus, F.prelu)


def kept_beside_input(node: fx.Node) -> str:
    """Why a result would be kept for a gradient beside what it is computed from; empty if not.

    Inductor keeps one of the two, and computes what is behind it again. An operator of ours that
    keeps its input for its own gradient adds its result, where what reads that needs it.
    """
    value = value_of(node)
    if value is None or not value.requires_grad:
        return ""
    for user in node.users:
        call = call_of(user)
        name = call.name if call is not None else getattr(user.target, "__name__", "")
        if name in _KEEPING or user.target in _KEEPING_FUNCTIONS or _is_scaled(user, node):
            return f"its result would be kept for the gradient of {name}, beside its input"
    return ""


def _is_scaled(user: fx.Node, node: fx.Node) -> bool:
    """Whether it is a product with something that has a gradient, for which it is needed."""
    call = call_of(user)
    if call is None or call.name != "mul":
        return False
    other = call["other"] if call["input"] is node else call["input"]
    value = value_of(other) if isinstance(other, fx.Node) else None
    return value is not None and value.requires_grad
