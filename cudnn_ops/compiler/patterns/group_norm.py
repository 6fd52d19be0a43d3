"""Group norm: torch's functions; with the SiLU behind it and the sum before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.pattern import (
    Found,
    Pattern,
    Refusal,
    anything,
    is_tensor,
    shape_of,
    spread,
    tensor,
)
from cudnn_ops.compiler.patterns.activations import silu
from cudnn_ops.compiler.patterns.norm_inputs import with_sum
from cudnn_ops.ops.group_norm import NormActivation


def _is_size(dim: int) -> Callable[[Any, fx.Node], bool]:
    """An argument that is this size of what the node reads."""

    def is_size(value: Any, node: fx.Node) -> bool:
        call = call_of(node)
        sizes = () if call is None else shape_of(call["input"])
        if isinstance(value, fx.Node):
            value = value.meta.get("example_value")
        return dim < len(sizes) and statically_known_true(value == sizes[dim])

    return is_size


_X = Cast(Var("x", is_tensor))
_WEIGHT = OneOf(Cast(Var("weight", is_tensor)), None)
_BIAS = OneOf(Cast(Var("bias", is_tensor)), None)
_GROUPS, _EPS = Number("groups"), Number("eps")
# Of other sizes than the input's own it has groups across samples, or parts of rows for channels.
_SIZES = _is_size(0), _is_size(1), anything
_NATIVE = Op("native_group_norm", _X, _WEIGHT, _BIAS, *_SIZES, _GROUPS, _EPS)
_NORM = Cast(
    OneOf(
        Op("group_norm", _X, _GROUPS, _WEIGHT, _BIAS, _EPS, cudnn_enabled=anything),
        # Behind the norm are the groups' mean and deviation.
        Op("getitem", _NATIVE, 0),
    )
)
_SILU = Cast(silu(Cast(Var("norm", is_tensor))))


class _Norm(NamedTuple):
    x: fx.Node
    groups: int
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    activation: NormActivation
    nodes: list[fx.Node]


class GroupNorm(Pattern):
    """``F.group_norm`` and the SiLU of it."""

    name = "group_norm"
    of_images = True
    ends_in = frozenset({"group_norm", "getitem", "silu", "mul", "div", "cast"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for norm in _norms(node):
            weights = [norm.weight, norm.bias]
            inputs = [norm.x, *(weight for weight in weights if weight is not None)]
            yield from with_sum(node, norm.x, weights, norm.nodes, _added(norm))
            yield Found(norm.nodes, [node], inputs, _alone(norm))


def _norms(node: fx.Node) -> Iterator[_Norm]:
    # In two steps: of `norm(x) * sigmoid(norm(x, weight))` one norm has no weight.
    for activated in match(_SILU, node):
        for norm in _without_activation(activated["norm"]):
            nodes = [*norm.nodes, *activated.nodes]
            yield norm._replace(activation="silu", nodes=nodes)
    yield from _without_activation(node)


def _without_activation(node: fx.Node) -> Iterator[_Norm]:
    for bound in match(_NORM, node):
        x, weight, bias = bound["x"], bound.get("weight"), bound.get("bias")
        if tensor(x).is_cuda and tensor(x).dtype == torch.float64:
            raise Refusal("on a GPU group norm supports float16, bfloat16 and float32")
        eps = float(bound["eps"])
        yield _Norm(x, bound["groups"], weight, bias, eps, "none", list(bound.nodes))


def _alone(norm: _Norm) -> Any:
    has = norm.weight is not None, norm.bias is not None

    def build(x: Any, *weights: Any) -> Any:
        weight, bias = spread(weights, has)
        return torch.ops.cudnn_ops.group_norm.default(
            x, norm.groups, weight, bias, norm.eps, activation=norm.activation
        )

    return build


def _added(norm: _Norm) -> Any:
    has = norm.weight is not None, norm.bias is not None

    def build(x: Any, residual: Any, *weights: Any) -> Any:
        weight, bias = spread(weights, has)
        return torch.ops.cudnn_ops.add_group_norm.default(
            x, residual, norm.groups, weight, bias, norm.eps, activation=norm.activation
        )

    return build
