"""Linear layers with their activation, and pairs of them around one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import match
from cudnn_ops.compiler.nodes import Call, call_of
from cudnn_ops.compiler.pattern import (
    Found,
    Pattern,
    is_tensor,
    shape_of,
    spread,
    tensor,
    terms_of,
    through_dropout,
)
from cudnn_ops.compiler.patterns.activations import ENDS, EPILOGUES
from cudnn_ops.compiler.patterns.keeping import kept_beside_input
from cudnn_ops.ops.activation import Activation


class _Layer(NamedTuple):
    """``input @ weight.T + bias``, or ``input @ weight + bias`` where the weight is transposed."""

    nodes: tuple[fx.Node, ...]
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_transposed: bool = False

    def weight_of(self, given: Any) -> Any:
        """[outputs, inputs] of what is given for the weight."""
        return given.t() if self.is_transposed else given


class _Activated(NamedTuple):
    """A linear layer and its activation."""

    layer: _Layer
    activation: Activation
    nodes: tuple[fx.Node, ...]


class Linear(Pattern):
    """``activation(x @ weight.T + bias)``, and what is added to it; a layer alone is torch's."""

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
            found = _activated(source) or _bare(source)
            if found is not None and shape_of(residual) == shape_of(node):
                yield _found(node, found._replace(nodes=(*found.nodes, node)), residual)


class Mlp(Pattern):
    """Two linear layers around an activation, where there are gradients.

    Without any the first layer by itself (:class:`Linear`) is as fast, and frees its input before
    the second one begins.
    """

    name = "mlp"
    ends_in = frozenset({"linear", "addmm", "reshape", "matmul", "add"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        second = _layer(node)
        if second is None or not tensor(node).requires_grad:
            return
        hidden, passed = through_dropout(second.input)
        found = _activated(hidden) if is_tensor(hidden) else None
        if found is None:
            return
        first = found.layer
        tensors = [first.input, first.weight, first.bias, second.weight, second.bias]
        has = [tensor is not None for tensor in tensors]
        inputs = list(dict.fromkeys(tensor for tensor in tensors if tensor is not None))
        if len(inputs) != sum(has):
            return

        def build(*given: Any) -> Any:
            x, w1, b1, w2, b2 = spread(given, has)
            w1, w2 = first.weight_of(w1), second.weight_of(w2)
            return torch.ops.cudnn_ops.mlp.default(x, w1, b1, w2, b2, found.activation)

        yield Found((*found.nodes, *passed, *second.nodes), [node], inputs, build)


def _layer(node: fx.Node) -> _Layer | None:
    """The linear layer that ends with a node.

    ``F.linear``; ``addmm`` as GPT-2 has it; a matrix product, with or without a bias.
    """
    call = call_of(node)
    if call is None:
        return None
    if call.name == "linear":
        return _Layer((node,), call["input"], call["weight"], call["bias"])
    if call.name == "addmm":
        return _of_addmm(node, call)
    if call.name == "matmul":
        return _of_matmul(node, call)
    if call.name == "add":
        return _with_bias(node)
    if call.name != "reshape" or not isinstance(call["input"], fx.Node):
        return None
    rows = call_of(call["input"])
    layer = _of_addmm(call["input"], rows) if rows is not None and rows.name == "addmm" else None
    flat = call_of(layer.input) if layer is not None else None
    if layer is None or flat is None or flat.name != "reshape":
        return None
    source = flat["input"]
    *sizes, inputs = shape_of(source)
    is_rows = shape_of(layer.input)[-1] == inputs and shape_of(node)[:-1] == tuple(sizes)
    if not is_rows or shape_of(node)[-1] != shape_of(layer.weight)[-1]:
        return None
    return layer._replace(nodes=(layer.input, *layer.nodes, node), input=source)


def _of_addmm(node: fx.Node, call: Call) -> _Layer | None:
    """``bias + input @ weight``, where the bias is a row."""
    if call["alpha"] != 1 or call["beta"] != 1:
        return None
    bias, weight = call["input"], call["mat2"]
    if not is_tensor(weight) or shape_of(bias) != shape_of(weight)[1:]:
        return None
    return _Layer((node,), call["mat1"], weight, bias, is_transposed=True)


def _of_matmul(node: fx.Node, call: Call) -> _Layer | None:
    """``input @ weight``, where the weight is a matrix."""
    rows, weight = call["input"], call["other"]
    if not is_tensor(rows) or len(shape_of(rows)) < 2 or len(shape_of(weight)) != 2:
        return None
    return _Layer((node,), rows, weight, None, is_transposed=True)


def _with_bias(node: fx.Node) -> _Layer | None:
    for product, bias in terms_of(node):
        call = call_of(product)
        layer = _of_matmul(product, call) if call is not None and call.name == "matmul" else None
        if layer is not None and shape_of(bias) == shape_of(layer.weight)[1:]:
            return layer._replace(nodes=(*layer.nodes, node), bias=bias)
    return None


def _activated(node: fx.Node) -> _Activated | None:
    for activation, expression in EPILOGUES.items():
        for bound in match(expression, node):
            layer = _layer(bound["before"])
            if layer is not None:
                return _Activated(layer, activation, (*layer.nodes, *bound.nodes))
    return None


def _bare(node: fx.Node) -> _Activated | None:
    source, passed = through_dropout(node)
    layer = _layer(source)
    return None if layer is None else _Activated(layer, "none", (*layer.nodes, *passed))


def _found(node: fx.Node, found: _Activated, residual: fx.Node | None) -> Found:
    layer = found.layer
    tensors = [layer.input, layer.weight, layer.bias, residual]
    has = [tensor is not None for tensor in tensors]
    inputs = [tensor for tensor in tensors if tensor is not None]

    def build(*given: Any) -> Any:
        x, weight, bias, added = spread(given, has)
        weight = layer.weight_of(weight)
        return torch.ops.cudnn_ops.linear.default(x, weight, bias, found.activation, added)

    # A gate that is multiplied: Gemma 3 would keep 1.09 times as much. Of a ReLU the result says
    # enough, and is all that is kept.
    why = "" if found.activation in ("none", "relu") else kept_beside_input(node)
    return Found(found.nodes, [node], inputs, build, only_asked=why)
