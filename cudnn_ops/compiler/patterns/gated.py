"""Gated activations: silu or gelu of one tensor times another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Op, Var, match
from cudnn_ops.compiler.pattern import Found, Pattern, is_tensor, shape_of
from cudnn_ops.compiler.patterns.activations import gelu, gelu_tanh, silu

_GATE, _UP = Cast(Var("gate", is_tensor)), Cast(Var("up", is_tensor))
_GATED = {
    name: Cast(Op("mul", Cast(activation(_GATE)), _UP))
    for name, activation in (("silu", silu), ("gelu", gelu), ("gelu_tanh", gelu_tanh))
}


class Gated(Pattern):
    """SwiGLU and GEGLU."""

    name = "gated"
    ends_in = frozenset({"mul", "cast"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for activation, gated in _GATED.items():
            for bound in match(gated, node):
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
