"""What a backward would keep of an operator's result, where inductor computes it again."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.memory_order import CONVOLUTIONS
from cudnn_ops.compiler.nodes import call_of, target_name, value_of
from cudnn_ops.compiler.patterns.activations import ENDS

#: Functions whose gradients need what they are given: activations but ReLU, and powers.
#: Convolutions with a gradient of their weight are others, here and as our operators.
_KEEPING = ENDS - {"relu", "mul", "div"} | {"pow", "square"}
_KEEPING_FUNCTIONS = (F.mish, F.elu, F.celu, F.hardsigmoid, F.softplus, F.prelu)
_OUR_CONVOLUTIONS = {
    getattr(getattr(torch.ops.cudnn_ops, name), overload)
    for name in CONVOLUTIONS
    for overload in ("default", "padding")
}


def kept_beside_input(node: fx.Node) -> str:
    """Why a result would be kept for a gradient beside what it is computed from; empty if not.

    Inductor keeps one of the two, and computes what is behind it again. An operator of ours that
    keeps its input for its own gradient adds its result, where what reads that needs it.
    """
    value = value_of(node)
    if value is None or not value.requires_grad:
        return ""
    for user in node.users:
        if name := _keeper(user, node):
            return f"its result would be kept for the gradient of {name}, beside its input"
    return ""


def _keeper(user: fx.Node, node: fx.Node) -> str:
    """The name of what reads it, where that needs it for a gradient; empty where it does not."""
    if _is_convolved(user, node):
        return "a convolution"
    call = call_of(user)
    name = call.name if call is not None else target_name(user)
    is_kept = name in _KEEPING or user.target in _KEEPING_FUNCTIONS or _is_scaled(user, node)
    return name if is_kept else ""


def _is_convolved(user: fx.Node, node: fx.Node) -> bool:
    """Whether it is the input of a convolution, torch's or ours, whose weight has a gradient."""
    call = call_of(user)
    if call is not None and call.name == "contiguous":
        return any(_is_convolved(one, user) for one in user.users)
    is_ours = user.target in _OUR_CONVOLUTIONS
    if not is_ours and (call is None or call.name not in CONVOLUTIONS):
        return False
    source, weight = user.args[:2] if call is None else (call["input"], call["weight"])
    while isinstance(weight, fx.Node) and (call := call_of(weight)) and call.name == "contiguous":
        weight = call["input"]
    value = value_of(weight)
    return source is node and value is not None and value.requires_grad


def _is_scaled(user: fx.Node, node: fx.Node) -> bool:
    """Whether it is a product with something that has a gradient, for which it is needed."""
    call = call_of(user)
    if call is None or call.name != "mul":
        return False
    other = call["other"] if call["input"] is node else call["input"]
    value = value_of(other) if isinstance(other, fx.Node) else None
    return value is not None and value.requires_grad
