"""Convolutions with what follows them: batch norm in evaluation, a residual, an activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.nodes import Call, call_of, value_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, activation_of, is_tensor, shape_of
from cudnn_ops.ops.activation import Activation

_CONVS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


class _Parts(NamedTuple):
    """A convolution, and from it to the last node what its epilogue is made of."""

    conv: fx.Node
    nodes: tuple[fx.Node, ...]
    norm: fx.Node | None = None
    residual: fx.Node | None = None
    activation: Activation = "none"


class Convolution(Pattern):
    """``activation(batch_norm(conv(x)) + residual)``, as much of it as there is."""

    name = "convolution"
    ends_in = frozenset(
        {*_CONVS, "batch_norm", "add", "relu", "relu6", "silu", "hardswish", "leaky_relu", "gelu"}
    )

    def find(self, node: fx.Node) -> Iterator[Found]:
        for parts in _with_activation(node):
            yield _found(node, parts)


def _with_activation(node: fx.Node) -> Iterator[_Parts]:
    call = call_of(node)
    assert call is not None
    if (activation := activation_of(call)) is None:
        yield from _with_residual(node)
        return
    source = call["input"]
    if isinstance(source, fx.Node):
        for parts in _with_residual(source):
            yield parts._replace(nodes=(*parts.nodes, node), activation=activation)


def _with_residual(node: fx.Node) -> Iterator[_Parts]:
    call = call_of(node)
    if call is not None and call.name == "add" and call["alpha"] == 1:
        for one, other in (("input", "other"), ("other", "input")):
            source, residual = call[one], call[other]
            if not is_tensor(source) or not is_tensor(residual):
                continue
            # Of two convolutions, both terms of the sum, the later one takes the other.
            if shape_of(residual) == shape_of(node):
                for parts in _with_norm(source):
                    yield parts._replace(nodes=(*parts.nodes, node), residual=residual)
    yield from _with_norm(node)


def _with_norm(node: fx.Node) -> Iterator[_Parts]:
    call = call_of(node)
    if call is None:
        return
    if call.name in _CONVS:
        yield _Parts(node, (node,))
    elif call.name == "batch_norm" and call["training"] is False:
        source = call["input"]
        known = call["running_mean"] is not None and call["running_var"] is not None
        conv = call_of(source) if isinstance(source, fx.Node) else None
        if known and conv is not None and conv.name in _CONVS:
            yield _Parts(source, (source, node), norm=node)


def _found(node: fx.Node, parts: _Parts) -> Found:
    conv = call_of(parts.conv)
    assert conv is not None
    _check(conv)
    dims = _CONVS[conv.name]
    geometry = [conv[name] for name in ("stride", "padding", "dilation", "groups")]
    norm = call_of(parts.norm) if parts.norm is not None else None
    statistics = () if norm is None else ("running_mean", "running_var", "weight", "bias")
    tensors = {name: conv[name] for name in ("input", "weight", "bias")}
    tensors |= {f"norm {name}": norm[name] for name in statistics if norm is not None}
    tensors["residual"] = parts.residual
    names = [name for name, one in tensors.items() if one is not None]
    eps = 0.0 if norm is None else float(norm["eps"])

    def build(*given: Any) -> Any:
        named = dict(zip(names, given, strict=True))
        weight, bias = named["weight"], named.get("bias")
        if norm is not None:
            weight, bias = _folded(weight, bias, named, eps, dims)
        x = named["input"]
        if dims in _FORMATS:
            # Of all that the graph does for the layout, inductor makes one pass, or none.
            x = x.contiguous(memory_format=_FORMATS[dims])
            weight = weight.contiguous(memory_format=_FORMATS[dims])
        op = getattr(torch.ops.cudnn_ops, conv.name)
        overload = op.padding if isinstance(geometry[1], str) else op.default
        lists = [_as_list(one) for one in geometry[:3]]
        return overload(
            x, weight, bias, *lists, geometry[3], parts.activation, named.get("residual")
        )

    inputs = list(dict.fromkeys(tensors[name] for name in names))
    if len(inputs) != len(names):
        raise Refusal("two of its tensors are the same")
    return Found(parts.nodes, [node], inputs, build)


def _as_list(numbers: Any) -> Any:
    return [numbers] if isinstance(numbers, int) else numbers


def _check(conv: Call) -> None:
    value = value_of(conv["input"])
    if value is None or value.dim() != _CONVS[conv.name] + 2:
        raise Refusal("the input has no batch dimension")
    if value.is_cuda and value.dtype == torch.float64:
        raise Refusal("on a GPU convolutions support float16, bfloat16 and float32")


def _folded(weight: Any, bias: Any, named: dict[str, Any], eps: float, dims: int) -> Any:
    """The convolution that has the batch norm in its weights; both stay differentiable."""
    mean, variance = named["norm running_mean"], named["norm running_var"]
    scale = (variance + eps).rsqrt()
    if "norm weight" in named:
        scale = scale * named["norm weight"]
    shift = -mean if bias is None else bias - mean
    shift = shift * scale
    if "norm bias" in named:
        shift = shift + named["norm bias"]
    column = scale.reshape(-1, *(1 for _ in range(dims + 1)))
    return (weight * column).to(weight.dtype), shift.to(weight.dtype)
