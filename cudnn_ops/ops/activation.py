"""Activations by torch's functions, and their gradients: for CPU kernels and decompositions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

Activation = Literal[
    "none", "relu", "silu", "gelu", "gelu_tanh", "relu6", "hardswish", "leaky_relu"
]
#: In the order in which C++ counts them (csrc/kernels/activation_list.h).
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
#: A gradient's activation of which the slope was kept, in schemas.
SLOPE = len(ACTIVATIONS)


def require_activation(
    owner: object, activation: str, known: Collection[str] = ACTIVATIONS
) -> None:
    """Raises ValueError, in the name of the owner's class, for an activation that is not known."""
    if activation not in known:
        raise ValueError(
            f"{type(owner).__name__}: activation must be one of {', '.join(known)}, got "
            f"{activation!r}"
        )


class _ByTorch(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """A function of the gradient and the saved tensor: see :func:`needs_before`."""


_BY_TORCH: dict[Activation, _ByTorch] = {
    "none": _ByTorch(lambda x: x, lambda grad, _: grad),
    "relu": _ByTorch(F.relu, lambda grad, saved: _aten.threshold_backward(grad, saved, 0)),
    "silu": _ByTorch(F.silu, _aten.silu_backward),
    "gelu": _ByTorch(F.gelu, _aten.gelu_backward),
    "gelu_tanh": _ByTorch(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, saved: _aten.gelu_backward(grad, saved, approximate="tanh"),
    ),
    "relu6": _ByTorch(F.relu6, lambda grad, saved: _aten.hardtanh_backward(grad, saved, 0, 6)),
    "hardswish": _ByTorch(F.hardswish, _aten.hardswish_backward),
    "leaky_relu": _ByTorch(
        F.leaky_relu, lambda grad, saved: _aten.leaky_relu_backward(grad, saved, 0.01, False)
    ),
}


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def activate(before: Tensor, activation: Activation) -> Tensor:
    return _BY_TORCH[activation].forward(before)


def before_activation(grad: Tensor, saved: Tensor | None, activation: Activation) -> Tensor:
    """The gradient of what the activation is of."""
    return grad if saved is None else _BY_TORCH[activation].backward(grad, saved)


def slope(before: Tensor, activation: Activation) -> Tensor:
    """The activation's derivative there."""
    return before_activation(torch.ones_like(before), before, activation)


def needs_before(activation: Activation) -> bool:
    """Whether an activation's slope is computed from what it is of, and not from its result."""
    return activation not in ("none", "relu")
