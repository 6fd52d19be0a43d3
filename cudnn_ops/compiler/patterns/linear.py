"""Linear layers with their activation, and pairs of them around one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import match
from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.pattern import Found, Pattern, is_tensor, shape_of, spread, through_dropout
from cudnn_ops.compiler.patterns.activations import ENDS, EPILOGUES
from cudnn_ops.ops.activation import Activation


class _Activated(NamedTuple):
    """A linear layer and its activation."""

    linear: fx.Node
    activation: Activation
    nodes: tuple[fx.Node, ...]


class Linear(Pattern):
    """``activation(x @ weight.T + bias)``, and what is added to it."""

    name = "linear"
    ends_in = ENDS | {"add"}

    def find(self, node: fx.Node) -> Iterator[Found]:
        call = call_of(node)
        assert call is not None
        if call.name != "add":
            if (found := _activated(node)) is not None:
                yield _found(node, found, None)
            return
        if call["alpha"] != 1:
            return
        for one, other in (("input", "other"), ("other", "input")):
            source, residual = call[one], call[other]
            if not is_tensor(source) or not is_tensor(residual):
                continue
            found = _activated(source)
            if found is not None and shape_of(residual) == shape_of(node):
                yield _found(node, found._replace(nodes=(*found.nodes, node)), residual)


class Mlp(Pattern):
    """Two linear layers around an activation."""

    name = "mlp"
    ends_in = frozenset({"linear"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        second = call_of(node)
        assert second is not None
        hidden, passed = through_dropout(second["input"])
        found = _activated(hidden) if is_tensor(hidden) else None
        if found is None:
            return
        first = call_of(found.linear)
        assert first is not None
        tensors = [first["input"], *(c[n] for c in (first, second) for n in ("weight", "bias"))]
        has = [tensor is not None for tensor in tensors]
        inputs = list(dict.fromkeys(tensor for tensor in tensors if tensor is not None))
        if len(inputs) != sum(has):
            return

        def build(*given: Any) -> Any:
            x, w1, b1, w2, b2 = spread(given, has)
            return torch.ops.cudnn_ops.mlp.default(x, w1, b1, w2, b2, found.activation)

        yield Found((*found.nodes, *passed, node), [node], inputs, build)


def _activated(node: fx.Node) -> _Activated | None:
    for activation, expression in EPILOGUES.items():
        for bound in match(expression, node):
            call = call_of(bound["before"])
            if call is not None and call.name == "linear":
                return _Activated(bound["before"], activation, (bound["before"], *bound.nodes))
    return None


def _found(node: fx.Node, found: _Activated, residual: fx.Node | None) -> Found:
    call = call_of(found.linear)
    assert call is not None
    tensors = [call["input"], call["weight"], call["bias"], residual]
    has = [tensor is not None for tensor in tensors]
    inputs = [tensor for tensor in tensors if tensor is not None]

    def build(*given: Any) -> Any:
        x, weight, bias, added = spread(given, has)
        return torch.ops.cudnn_ops.linear.default(x, weight, bias, found.activation, added)

    return Found(found.nodes, [node], inputs, build)
