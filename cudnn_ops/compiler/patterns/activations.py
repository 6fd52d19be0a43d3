"""Activations as models write them: torch's functions, and their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from cudnn_ops.compiler.match import Expression, OneOf, Op, Var
from cudnn_ops.compiler.nodes import number_of
from cudnn_ops.compiler.pattern import is_tensor, tensor
from cudnn_ops.ops.activation import Activation

#: Constants are written with eight digits and more.
_CLOSE = 1e-7


def about(constant: float) -> Callable[[Any, Any], bool]:
    """A number that is this one, in as many digits as float32 has."""

    def is_about(value: Any, _: Any) -> bool:
        number = number_of(value)
        return number is not None and math.isclose(number, constant, rel_tol=_CLOSE)

    return is_about


def silu(x: Expression) -> Expression:
    """``x / (1 + exp(-x))``."""
    sigmoid_below = Op("add", Op("exp", Op("neg", x)), 1)
    return OneOf(Op("silu", x), Op("mul", x, Op("sigmoid", x)), Op("div", x, sigmoid_below))


def gelu(x: Expression) -> Expression:
    """``x / 2 * (1 + erf(x / sqrt(2)))``."""
    scaled = OneOf(Op("div", x, about(math.sqrt(2))), Op("mul", x, about(math.sqrt(0.5))))
    return OneOf(Op("gelu", x, "none"), _half_of(x, Op("add", Op("erf", scaled), 1)))


def gelu_tanh(x: Expression) -> Expression:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``."""
    factor, scale = about(0.044715), about(math.sqrt(2 / math.pi))
    cube = OneOf(Op("pow", x, 3), Op("mul", Op("mul", x, x), x))
    third = OneOf(Op("mul", factor, cube), Op("mul", Op("mul", Op("mul", factor, x), x), x))
    second = Op("mul", Op("mul", factor, x), x)
    inner = OneOf(
        Op("mul", scale, Op("add", x, third)),
        Op("mul", Op("mul", x, scale), Op("add", second, 1)),
    )
    return OneOf(Op("gelu", x, "tanh"), _half_of(x, Op("add", Op("tanh", inner), 1)))


def _half_of(x: Expression, other: Expression) -> Expression:
    """``x * other / 2``."""
    return OneOf(
        Op("mul", Op("mul", x, 0.5), other),
        Op("mul", x, Op("mul", other, 0.5)),
        Op("mul", Op("mul", x, other), 0.5),
    )


def hardswish(x: Expression) -> Expression:
    """``x * relu6(x + 3) / 6``."""
    gate = relu6(Op("add", x, 3))
    return OneOf(
        Op("hardswish", x),
        Op("div", Op("mul", x, gate), 6),
        Op("mul", x, Op("div", gate, 6)),
    )


def relu6(x: Expression) -> Expression:
    """``min(max(x, 0), 6)``."""
    clamp = Op("clamp", x, _without_gradient(0), _without_gradient(6))
    return OneOf(Op("relu6", x), Op("hardtanh", x, 0, 6), clamp)


def relu(x: Expression) -> Expression:
    """``max(x, 0)``."""
    return OneOf(Op("relu", x), Op("clamp", x, _without_gradient(0)))


def _without_gradient(limit: float) -> Callable[[Any, fx.Node], bool]:
    """A limit of a clamp that nothing needs the gradient of.

    At its limits a clamp's gradient is 1, where those of ReLU and hardtanh are 0.
    """

    def is_limit(value: Any, clamp: fx.Node) -> bool:
        return number_of(value) == limit and not tensor(clamp).requires_grad

    return is_limit


def leaky_relu(x: Expression) -> Expression:
    """``x``, or ``0.01 * x`` where it is negative: torch's slope by default."""
    return Op("leaky_relu", x, 0.01)


_BEFORE = Var("before", is_tensor)
#: Those that products and convolutions can end with, of ``before``.
EPILOGUES: dict[Activation, Expression] = {
    "relu": relu(_BEFORE),
    "relu6": relu6(_BEFORE),
    "silu": silu(_BEFORE),
    "hardswish": hardswish(_BEFORE),
    "leaky_relu": leaky_relu(_BEFORE),
    "gelu": gelu(_BEFORE),
    "gelu_tanh": gelu_tanh(_BEFORE),
}
#: The names of what can be the last node of these.
ENDS = frozenset(
    {"relu", "relu6", "hardtanh", "clamp", "silu", "hardswish", "leaky_relu", "gelu", "mul", "div"}
)
