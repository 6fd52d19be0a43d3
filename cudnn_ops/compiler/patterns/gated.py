"""Gated activations: silu or gelu of one tensor times another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.pattern import Found, Pattern, is_tensor, shape_of

_GATE = Cast(Var("gate", is_tensor))
_CUBED = Op("add", _GATE, Op("mul", Number(value=0.044715), Op("pow", _GATE, 3)))
_TANH = Op("tanh", Op("mul", Number(value=math.sqrt(2 / math.pi)), _CUBED))
_ACTIVATIONS = {
    "silu": OneOf(Op("silu", _GATE), Op("mul", _GATE, Op("sigmoid", _GATE))),
    "gelu": Op("gelu", _GATE, "none"),
    "gelu_tanh": OneOf(
        Op("gelu", _GATE, "tanh"),
        Op("mul", Op("mul", Number(value=0.5), _GATE), Op("add", Number(value=1), _TANH)),
    ),
}


class Gated(Pattern):
    """SwiGLU and GEGLU."""

    name = "gated"
    ends_in = frozenset({"mul"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for activation, gated in _ACTIVATIONS.items():
            for bound in match(Op("mul", Cast(gated), Var("up", is_tensor)), node):
                gate, up = bound["gate"], bound["up"]
                if gate is not up and shape_of(gate) == shape_of(up):
                    yield Found(list(bound.nodes), [node], [gate, up], _build(activation))


def _build(activation: str) -> Any:
    def build(gate: Any, up: Any) -> Any:
        ops = torch.ops.cudnn_ops
        if activation == "silu":
            return ops.swiglu.default(gate, up)
        approximate = "none" if activation == "gelu" else "tanh"
        return ops.geglu.default(gate, up, approximate=approximate)

    return build
