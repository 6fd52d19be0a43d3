"""Convolutions with what follows them: batch norm in evaluation, a residual, an activation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from cudnn_ops.compiler.match import match
from cudnn_ops.compiler.memory_order import CONVOLUTIONS
from cudnn_ops.compiler.nodes import Call, call_of, value_of
from cudnn_ops.compiler.pattern import (
    Found,
    Inputs,
    Pattern,
    Refusal,
    applied,
    is_tensor,
    shape_of,
    tensor,
    terms_of,
    through_dropout,
)
from cudnn_ops.compiler.patterns.activations import ENDS, EPILOGUES
from cudnn_ops.compiler.patterns.dense_groups import MOST_GROUPS, MOST_INPUTS, dense
from cudnn_ops.compiler.patterns.folding import fold_together, folded, is_early
from cudnn_ops.compiler.patterns.recomputing import compute_again
from cudnn_ops.compiler.patterns.space_to_depth import MOST_CHANNELS, STEP, squares
from cudnn_ops.ops.activation import Activation

_CONVS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
#: How it is computed, if not as it is: what reports say of it.
_BY_SQUARES, _WITHOUT_GROUPS = "by squares of 2 x 2 pixels", "without its groups"
_STATISTICS = ("running_mean", "running_var", "weight", "bias")


class _Parts(NamedTuple):
    """A convolution, and from it to the last node what its epilogue is made of.

    Attributes:
        conv: the convolution.
        nodes: all of it.
        norm: a batch norm in evaluation.
        scale: a factor for each channel; there is a norm or this.
        shift: likewise, added.
        residual: of the result's shape.
        activation: behind all of these.
    """

    conv: fx.Node
    nodes: tuple[fx.Node, ...]
    norm: fx.Node | None = None
    scale: fx.Node | None = None
    shift: fx.Node | None = None
    residual: fx.Node | None = None
    activation: Activation = "none"

    def behind(self, *nodes: fx.Node, **changes: Any) -> _Parts:
        return self._replace(nodes=(*self.nodes, *nodes), **changes)


class Convolution(Pattern):
    """``activation(batch_norm(conv(x)) + residual)``, as much of it as there is."""

    name = "convolution"
    of_images = True
    ends_in = ENDS | {*_CONVS, "batch_norm", "add"}

    def find(self, node: fx.Node) -> Iterator[Found]:
        for parts in _with_activation(node):
            if _is_stem(parts.conv):
                yield _found(node, parts, _BY_SQUARES)
            if _has_few_groups(parts.conv):
                yield _found(node, parts, _WITHOUT_GROUPS)
            yield _found(node, parts)

    def finish(
        self, graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
    ) -> None:
        fold_together(graph, mode, mutated)
        compute_again(graph)


def _with_activation(node: fx.Node) -> Iterator[_Parts]:
    for activation, expression in EPILOGUES.items():
        for bound in match(expression, node):
            source, passed = through_dropout(bound["before"])
            for parts in _with_residual(source):
                yield parts.behind(*passed, *bound.nodes, activation=activation)
    yield from _with_residual(node)


def _with_residual(node: fx.Node) -> Iterator[_Parts]:
    for term, residual in terms_of(node):
        # Of two convolutions, both terms of the sum, the later one takes the other.
        if shape_of(residual) == shape_of(node):
            source, passed = through_dropout(term)
            for parts in _with_norm(source):
                yield parts.behind(*passed, node, residual=residual)
    yield from _with_norm(node)


def _with_norm(node: fx.Node) -> Iterator[_Parts]:
    call = call_of(node)
    if call is not None and call.name == "batch_norm" and call["training"] is False:
        source, passed = through_dropout(call["input"])
        known = call["running_mean"] is not None and call["running_var"] is not None
        if known and _is_conv(source):
            yield _Parts(source, (source, *passed, node), norm=node)
        return
    for term, shift in terms_of(node):
        if _is_row(shift, node):
            source, passed = through_dropout(term)
            for parts in _with_scale(source):
                yield parts.behind(*passed, node, shift=shift)
    yield from _with_scale(node)


def _with_scale(node: fx.Node) -> Iterator[_Parts]:
    """A norm written out, such as torchvision's ``FrozenBatchNorm2d``."""
    if _is_conv(node):
        yield _Parts(node, (node,))
        return
    call = call_of(node)
    if call is None or call.name != "mul":
        return
    for one, other in (("input", "other"), ("other", "input")):
        scale = call[other]
        if isinstance(call[one], fx.Node) and is_tensor(scale) and _is_row(scale, node):
            source, passed = through_dropout(call[one])
            if _is_conv(source):
                yield _Parts(source, (source, *passed, node), scale=scale)


def _is_conv(node: fx.Node) -> bool:
    call = call_of(node)
    return call is not None and call.name in _CONVS


def _is_row(row: fx.Node, node: fx.Node) -> bool:
    """Whether it is a number for each channel: [channels, 1, 1] or [1, channels, 1, 1]."""
    sizes = shape_of(node)
    row_of_channels = [sizes[1], *(1 for _ in sizes[2:])] if len(sizes) > 2 else []
    return bool(row_of_channels) and list(shape_of(row)) in (row_of_channels, [1, *row_of_channels])


def _is_stem(node: fx.Node) -> bool:
    """Whether it is one of few channels in steps of two (:mod:`.space_to_depth`)."""
    conv = call_of(node)
    if conv is None or conv.name != "conv2d":
        return False
    sizes = shape_of(conv["input"])
    if len(sizes) != 4 or sizes[1] > MOST_CHANNELS:
        return False
    geometry = [_pair(conv[name]) for name in ("stride", "dilation", "padding")]
    are_even = all(isinstance(size, int) and size % STEP == 0 for size in sizes[2:])
    is_known = geometry[:2] == [(STEP, STEP), (1, 1)] and geometry[2] is not None
    return are_even and is_known and conv["groups"] == 1


def _has_few_groups(node: fx.Node) -> bool:
    """Whether it may be faster with zeros between its groups (:mod:`.dense_groups`)."""
    conv = call_of(node)
    if conv is None or conv.name != "conv2d":
        return False
    sizes, kernel = shape_of(conv["weight"]), shape_of(conv["weight"])[2:]
    groups = conv["groups"]
    is_grouped = 1 < groups <= MOST_GROUPS and sizes[1] > 1
    return is_grouped and sizes[1] * groups <= MOST_INPUTS and any(size != 1 for size in kernel)


def _pair(numbers: Any) -> tuple[int, int] | None:
    """A number for each dimension; None where it is a word."""
    if isinstance(numbers, str):
        return None
    return (numbers, numbers) if isinstance(numbers, int) else tuple(numbers)


def _found(node: fx.Node, parts: _Parts, way: str = "") -> Found:
    conv = call_of(parts.conv)
    assert conv is not None
    _check(conv)
    dims, memory_format = _CONVS[conv.name], CONVOLUTIONS.get(conv.name)
    geometry = [conv[name] for name in ("stride", "padding", "dilation", "groups")]
    norm = call_of(parts.norm) if parts.norm is not None else None
    tensors: dict[str, Any] = {name: conv[name] for name in ("input", "weight", "bias")}
    if norm is not None:
        tensors |= {f"norm {name}": norm[name] for name in _STATISTICS}
    tensors |= {"scale": parts.scale, "shift": parts.shift, "residual": parts.residual}
    inputs = Inputs(tensors)
    eps = 0.0 if norm is None else float(norm["eps"])
    dtype = tensor(conv["weight"]).dtype
    sizes, kernel = shape_of(conv["input"]), shape_of(conv["weight"])[2:]

    def build(*given: Any) -> Any:
        named = inputs.named(given)
        weight, bias = _folded(named, eps, dims, dtype)
        x, lists, groups = named["input"], [_as_list(one) for one in geometry[:3]], geometry[3]
        if way == _BY_SQUARES:
            x, weight = squares(x, weight, sizes, kernel, _pair(geometry[1]) or ())
            lists = [[1, 1], [0, 0], [1, 1]]
        elif way == _WITHOUT_GROUPS:
            weight, groups = applied(dense, weight, groups), 1
        if memory_format is not None:
            # Of all that the graph does for the layout, inductor makes one pass, or none.
            x = x.contiguous(memory_format=memory_format)
            weight = weight.contiguous(memory_format=memory_format)
        op = getattr(torch.ops.cudnn_ops, conv.name)
        overload = op.padding if isinstance(geometry[1], str) else op.default
        return overload(x, weight, bias, *lists, groups, parts.activation, named.get("residual"))

    return Found(
        parts.nodes,
        [node],
        inputs.nodes,
        build,
        way,
        only_measured=way == _WITHOUT_GROUPS,
        beforehand=folded if norm is not None and _is_folded_early(conv, norm) else None,
    )


def _is_folded_early(conv: Call, norm: Call) -> bool:
    """Whether the graph folds it with others, and not for gradients of its parameters."""
    fields = (conv["weight"], conv["bias"], *(norm[name] for name in _STATISTICS))
    has_gradients = any(tensor(one).requires_grad for one in fields if is_tensor(one))
    return is_early(fields) and not (has_gradients and torch.is_grad_enabled())


def _as_list(numbers: Any) -> Any:
    return [numbers] if isinstance(numbers, int) else numbers


def _check(conv: Call) -> None:
    value = value_of(conv["input"])
    if value is None or value.dim() != _CONVS[conv.name] + 2:
        raise Refusal("the input has no batch dimension")
    if value.is_cuda and value.dtype == torch.float64:
        raise Refusal("on a GPU convolutions support float16, bfloat16 and float32")


def _folded(named: dict[str, Any], eps: float, dims: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Weight and bias with the norm in them; all of it stays differentiable."""
    weight, bias = named["weight"], named.get("bias")
    scale, shift = named.get("scale"), named.get("shift")
    if "norm running_var" in named:
        of_norm = (named.get(f"norm {name}") for name in _STATISTICS)
        both = applied(folded, weight, bias, *of_norm, eps)
        return both[0], both[1]
    if scale is not None:
        scale = scale.reshape(-1)
        weight = (weight * scale.reshape(-1, *(1 for _ in range(dims + 1)))).to(dtype)
        bias = None if bias is None else bias * scale
    if shift is not None:
        shift = shift.reshape(-1)
        bias = shift if bias is None else bias + shift
    return weight, None if bias is None else bias.to(dtype)
