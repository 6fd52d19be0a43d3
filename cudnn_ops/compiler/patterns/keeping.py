"""What a backward would keep of an operator's result, where inductor computes it again."""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.memory_order import CONVOLUTIONS, OUR_CONVOLUTIONS
from cudnn_ops.compiler.nodes import call_of, target_name, value_of
from cudnn_ops.compiler.patterns.activations import ENDS
from cudnn_ops.compiler.patterns.dense_groups import dense
from cudnn_ops.ops.arguments import bind

#: Functions whose gradients need what they are given: activations but ReLU, and powers.
#: Convolutions with a gradient of their weight are others, here and as our operators.
_KEEPING = ENDS - {"relu", "mul", "div"} | {"pow", "square"}
_KEEPING_FUNCTIONS = (F.mish, F.elu, F.celu, F.hardsigmoid, F.softplus, F.prelu)
#: What inductor keeps the factors of, by the names of torch's functions and of our operators.
_PRODUCTS = {
    *(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"),
}
_VIEWS = {"contiguous", "reshape", "flatten", "unflatten", "permute", "transpose", "unsqueeze"}


def kept_beside_input(node: fx.Node) -> str:
    """Why a result would be kept for a gradient beside what it is computed from; empty if not.

    Inductor keeps one of the two, and computes what is behind it again. An operator of ours that
    keeps its input for its own gradient adds its result, where what reads that needs it.
    """
    keepers = [name for user in _readers(node) if (name := _keeper(user, node))]
    return _reason(keepers[0]) if keepers else ""


def relu_kept_beside_input(node: fx.Node, *, for_itself: bool) -> str:
    """The same of a ReLU's result, where inductor does not keep it, too.

    That it does for a convolution or another product; what a graph returns is there.

    Args:
        node: the result.
        for_itself: whether our operator keeps it to know what the ReLU has let pass.
    """
    readers = _readers(node)
    if any(user.op == "output" or _is_factor(node, user) for user in readers):
        return ""
    return _reason("its ReLU") if readers and for_itself else kept_beside_input(node)


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a result that has a gradient."""
    value = value_of(node)
    return [] if value is None or not value.requires_grad else list(node.users)


def _reason(name: str) -> str:
    return f"its result would be kept for the gradient of {name}, beside its input"


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
    if user.target in OUR_CONVOLUTIONS:
        ours = bind(user.target, user.args, user.kwargs)
        source, weight = ours.input, ours.weight
    elif call is not None and call.name in CONVOLUTIONS:
        source, weight = call["input"], call["weight"]
    else:
        return False
    while isinstance(weight, fx.Node) and (call := call_of(weight)) and call.name == "contiguous":
        weight = call["input"]
    value = value_of(weight)
    return source is node and value is not None and value.requires_grad


def _is_factor(node: fx.Node, user: fx.Node) -> bool:
    """Whether it is multiplied, maybe through views, with what has a gradient."""
    call = call_of(user)
    name = call.name if call is not None else target_name(user).partition(".")[0]
    if name in _VIEWS:
        return any(_is_factor(user, one) for one in user.users)
    return name in _PRODUCTS and any(map(_is_learned, {*user.all_input_nodes} - {node}))


def _is_learned(node: fx.Node) -> bool:
    """Whether it has a gradient, or is what a replacement makes of a weight that has one."""
    value = value_of(node)
    if value is None or value.requires_grad:
        return value is not None
    call = call_of(node)
    is_made = node.target is dense or (call is not None and call.name in _VIEWS)
    return is_made and any(map(_is_learned, node.all_input_nodes))


def _is_scaled(user: fx.Node, node: fx.Node) -> bool:
    """Whether it is a product with something that has a gradient, for which it is needed."""
    call = call_of(user)
    if call is None or call.name != "mul":
        return False
    other = call["other"] if call["input"] is node else call["input"]
    value = value_of(other) if isinstance(other, fx.Node) else None
    return value is not None and value.requires_grad
