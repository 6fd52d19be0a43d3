"""RMS norm: torch's function, or written out as models do; with the sum before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.nodes import call_of, number_of
from cudnn_ops.compiler.pattern import Found, Pattern, is_last_dim, is_tensor, shape_of, tensor
from cudnn_ops.compiler.patterns.norm_inputs import is_last, is_scale, with_sum

_X = Cast(Var("x", is_tensor))
_SQUARE = OneOf(Op("pow", _X, 2), Op("square", _X), Op("mul", _X, _X))
_MEAN = Cast(Op("mean", _SQUARE, is_last_dim, True))
_BELOW = Op("add", _MEAN, Number("eps"))
_ROOT = Op("sqrt", _BELOW)
_INVERSE = OneOf(
    *(Op("rsqrt", _BELOW), Op("pow", _BELOW, -0.5), Op("div", 1, _ROOT), Op("reciprocal", _ROOT))
)
_WEIGHT = Cast(Var("weight", is_tensor))
_NORMED = OneOf(
    Op("mul", _X, Cast(_INVERSE)),
    Op("div", _X, Cast(_ROOT)),
    Op("rms_norm", _X, is_last, None, Number("eps")),
)
_WRITTEN_OUT = Cast(
    OneOf(
        Op("rms_norm", _X, is_last, _WEIGHT, Number("eps")),
        Op("mul", Cast(_NORMED), Cast(Op("add", _WEIGHT, Number("one", 1)))),
        Op("mul", Cast(_NORMED), _WEIGHT),
        _NORMED,
    )
)


class RmsNormCall(NamedTuple):
    """An RMS norm, and the nodes that compute it."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    zero_centered: bool
    nodes: list[fx.Node]


class RmsNorm(Pattern):
    """``weight * x / sqrt(mean(x ** 2) + eps)``, the weight as it is or above 1."""

    name = "rms_norm"
    ends_in = frozenset({"mul", "div", "cast", "rms_norm"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for norm in rms_norms(node):
            sizes = shape_of(norm.x)[-1:]
            weights = [] if norm.weight is None else [norm.weight]
            added = _added(sizes, norm.eps, norm.zero_centered)
            yield from with_sum(node, norm.x, weights, norm.nodes, added)
            alone = _alone(sizes, norm.eps, norm.zero_centered)
            yield Found(norm.nodes, [node], [norm.x, *weights], alone)


def rms_norms(node: fx.Node) -> Iterator[RmsNormCall]:
    """The RMS norms that a node is the result of."""
    call = call_of(node)
    if call is not None and call.name == "rms_norm":
        if len(call["normalized_shape"]) == 1:
            eps = number_of(call["eps"])
            if call["eps"] is None:  # the machine epsilon of the dtype that torch computes in
                computed_in = torch.promote_types(tensor(call["input"]).dtype, torch.float32)
                eps = torch.finfo(computed_in).eps
            if eps is not None:
                yield RmsNormCall(call["input"], call["weight"], eps, False, [node])
        return
    for bound in match(_WRITTEN_OUT, node):
        weight = bound.get("weight")
        if weight is None or is_scale(weight, bound["x"]):
            eps = float(bound["eps"])
            yield RmsNormCall(bound["x"], weight, eps, "one" in bound, list(bound.nodes))


def _alone(sizes: tuple[Any, ...], eps: float, zero_centered: bool) -> Any:
    def build(x: Any, weight: Any = None) -> Any:
        return torch.ops.cudnn_ops.rms_norm.default(
            x, sizes, weight, eps, zero_centered=zero_centered
        )

    return build


def _added(sizes: tuple[Any, ...], eps: float, zero_centered: bool) -> Any:
    def build(x: Any, residual: Any, weight: Any = None) -> Any:
        return torch.ops.cudnn_ops.add_rms_norm.default(
            x, residual, sizes, weight, eps, zero_centered=zero_centered
        )

    return build
