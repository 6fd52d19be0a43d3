"""Layer norm: torch's function, or written out; with the sum before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.nodes import call_of, number_of
from cudnn_ops.compiler.pattern import Found, Pattern, is_last_dim, is_tensor, shape_of, spread
from cudnn_ops.compiler.patterns.norm_inputs import is_last, is_scale, with_sum

_X = Cast(Var("x", is_tensor))
_MEAN = Op("mean", _X, is_last_dim, True)
_CENTERED = Cast(Op("sub", _X, _MEAN))


def _is_biased(value: Any, _: Any) -> bool:
    return value in (False, 0)


_VARIANCE = Cast(
    OneOf(
        Op("mean", OneOf(Op("pow", _CENTERED, 2), Op("square", _CENTERED)), is_last_dim, True),
        Op("mean", Op("mul", _CENTERED, _CENTERED), is_last_dim, True),
        Op("var", _X, is_last_dim, unbiased=False, keepdim=True),
        Op("var", _X, is_last_dim, correction=_is_biased, keepdim=True),
    )
)
_BELOW = Op("add", _VARIANCE, Number("eps"))
_NORMED = OneOf(
    Op("div", _CENTERED, Op("sqrt", _BELOW)),
    Op("mul", _CENTERED, OneOf(Op("rsqrt", _BELOW), Op("pow", _BELOW, -0.5))),
    Op("layer_norm", _X, is_last, None, None, Number("eps")),
)
_WEIGHT, _BIAS = Cast(Var("weight", is_tensor)), Cast(Var("bias", is_tensor))
_SCALED = OneOf(Op("mul", Cast(_NORMED), _WEIGHT), _NORMED)
_WRITTEN_OUT = Cast(
    OneOf(
        Op("layer_norm", _X, is_last, _WEIGHT, _BIAS, Number("eps")),
        Op("layer_norm", _X, is_last, _WEIGHT, None, Number("eps")),
        Op("add", Cast(_SCALED), _BIAS),
        _SCALED,
    )
)


class LayerNormCall(NamedTuple):
    """A layer norm, and the nodes that compute it."""

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    nodes: list[fx.Node]


class LayerNorm(Pattern):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, over the last dimension."""

    name = "layer_norm"
    ends_in = frozenset({"layer_norm", "add", "mul", "div", "cast"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for norm in layer_norms(node):
            weights = [norm.weight, norm.bias]
            sizes = shape_of(norm.x)[-1:]
            has = tuple(weight is not None for weight in weights)
            inputs = [norm.x, *(weight for weight in weights if weight is not None)]
            added = _added(sizes, norm.eps, has)
            yield from with_sum(node, norm.x, weights, norm.nodes, added)
            yield Found(norm.nodes, [node], inputs, _alone(sizes, norm.eps, has))


def layer_norms(node: fx.Node) -> Iterator[LayerNormCall]:
    """The layer norms that a node is the result of."""
    call = call_of(node)
    if call is not None and call.name == "layer_norm":
        eps = number_of(call["eps"])
        if len(call["normalized_shape"]) == 1 and eps is not None:
            yield LayerNormCall(call["input"], call["weight"], call["bias"], eps, [node])
        return
    for bound in match(_WRITTEN_OUT, node):
        weight, bias = bound.get("weight"), bound.get("bias")
        if all(one is None or is_scale(one, bound["x"]) for one in (weight, bias)):
            yield LayerNormCall(bound["x"], weight, bias, float(bound["eps"]), list(bound.nodes))


def _alone(sizes: tuple[Any, ...], eps: float, has: tuple[bool, ...]) -> Any:
    def build(x: Any, *weights: Any) -> Any:
        weight, bias = spread(weights, has)
        return torch.ops.cudnn_ops.layer_norm.default(x, sizes, weight, bias, eps)

    return build


def _added(sizes: tuple[Any, ...], eps: float, has: tuple[bool, ...]) -> Any:
    def build(x: Any, residual: Any, *weights: Any) -> Any:
        weight, bias = spread(weights, has)
        return torch.ops.cudnn_ops.add_layer_norm.default(x, residual, sizes, weight, bias, eps)

    return build
