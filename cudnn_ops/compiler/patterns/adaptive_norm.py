"""Adaptive norms, ``norm(x) * (1 + scale) + shift``; with the gated residual that they are of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.match import Bound, Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.pattern import Found, Pattern, is_tensor, shape_of, spread
from cudnn_ops.compiler.patterns.layer_norm import layer_norms
from cudnn_ops.compiler.patterns.rms_norm import rms_norms


def _is_each_sample(index: Any, _: Any) -> bool:
    """``[:, None]`` and ``[:, None, :]``, of numbers of each sample."""
    return index in ((slice(None), None), (slice(None), None, slice(None)))


def _of_tokens(of_samples: Any) -> list[Any]:
    """Numbers of each sample, with a dimension of tokens."""
    numbers = Cast(of_samples)
    return [Op("unsqueeze", numbers, 1), Op("getitem", numbers, _is_each_sample)]


def _modulation(name: str) -> Cast:
    """A scale, shift or gate, under its name; ``..._of_samples`` for one without that dimension."""
    of_samples = Var(f"{name}_of_samples", is_tensor)
    return Cast(OneOf(*_of_tokens(of_samples), Var(name, is_tensor)))


_ONE = Number(value=1)
_FACTOR = Cast(
    OneOf(
        Op("add", _modulation("scale"), _ONE),
        *_of_tokens(Op("add", Cast(Var("scale_of_samples", is_tensor)), _ONE)),
    )
)
_NORM, _SHIFT = Cast(Var("norm", is_tensor)), _modulation("shift")
_SCALED = Op("mul", _NORM, _FACTOR)
_MODULATED = Cast(
    OneOf(Op("add", Cast(_SCALED), _SHIFT), Op("addcmul", _SHIFT, _NORM, _FACTOR), _SCALED)
)
_RESIDUAL, _UPDATE = Cast(Var("residual", is_tensor)), Cast(Var("update", is_tensor))
_GATE = _modulation("gate")
_GATED_SUM = Cast(
    OneOf(
        Op("add", _RESIDUAL, Cast(Op("mul", _GATE, _UPDATE))),
        Op("addcmul", _RESIDUAL, _GATE, _UPDATE),
        Op("addcmul", _RESIDUAL, _UPDATE, _GATE),
    )
)
_UNCAST = Cast(Var("source"))


class _Norm(NamedTuple):
    x: fx.Node
    scale: fx.Node | None
    shift: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    is_layer: bool
    nodes: list[fx.Node]


class AdaptiveNorm(Pattern):
    """Layer norm or RMS norm with scale and shift of each sample or token."""

    name = "adaptive_norm"
    ends_in = frozenset({"add", "mul", "div", "addcmul", "cast", "layer_norm", "rms_norm"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        # A norm without scale and shift counts where it is of a gated residual.
        for norm in itertools.chain(_modulated(node), _norms(node)):
            optional = [norm.scale, norm.shift, norm.weight, norm.bias]
            has = [one is not None for one in optional]
            given = [one for one in optional if one is not None]
            for total in match(_GATED_SUM, norm.x):
                residual, update = total["residual"], total["update"]
                gate = _modulation_of(total, "gate", norm.x)
                is_sum = shape_of(residual) == shape_of(update) == shape_of(norm.x)
                if is_sum and gate is not None:
                    nodes = [*dict.fromkeys((*total.nodes, *norm.nodes))]
                    inputs = [residual, update, gate, *given]
                    yield Found(nodes, [node, norm.x], inputs, _gated(norm, has))
            if norm.scale is not None:
                yield Found(norm.nodes, [node], [norm.x, *given], _alone(norm, has))


def _modulated(node: fx.Node) -> Iterator[_Norm]:
    for bound in match(_MODULATED, node):
        for norm in _norms(bound["norm"]):
            scale, shift = (_modulation_of(bound, name, norm.x) for name in ("scale", "shift"))
            has_shift = not bound.keys().isdisjoint(("shift", "shift_of_samples"))
            # Layer norms without a shift are not among the operators.
            if scale is not None and (shift is not None or not (has_shift or norm.is_layer)):
                nodes = [*dict.fromkeys((*norm.nodes, *bound.nodes))]
                yield norm._replace(scale=scale, shift=shift, nodes=nodes)


def _norms(node: fx.Node) -> Iterator[_Norm]:
    for layer in layer_norms(node):
        for x, weight, bias, nodes in _uncast(layer.x, (layer.weight, layer.bias), layer.nodes):
            yield _Norm(x, None, None, weight, bias, layer.eps, True, nodes)
    for rms in rms_norms(node):
        if not rms.zero_centered:
            for x, weight, nodes in _uncast(rms.x, (rms.weight,), rms.nodes):
                yield _Norm(x, None, None, weight, None, rms.eps, False, nodes)


def _uncast(
    x: fx.Node, weights: Sequence[fx.Node | None], nodes: Sequence[fx.Node]
) -> Iterator[list[Any]]:
    """The inputs behind any number of their casts, the most first; with the nodes of it all."""
    bare = [next(match(_UNCAST, one)) if one is not None else Bound() for one in weights]
    casts = [node for bound in bare for node in bound.nodes]
    for source in match(_UNCAST, x):
        if casts:
            behind = [bound.get("source") for bound in bare]
            yield [source["source"], *behind, [*source.nodes, *casts, *nodes]]
        yield [source["source"], *weights, [*source.nodes, *nodes]]


def _modulation_of(bound: Bound, name: str, x: fx.Node) -> fx.Node | None:
    """What has the name, where the operator broadcasts it along the same dimensions as torch.

    Of a tensor with fewer dimensions than x it takes the first for samples.
    """
    sizes = shape_of(x)
    if name in bound:
        return bound[name] if len(shape_of(bound[name])) == len(sizes) > 1 else None
    if f"{name}_of_samples" not in bound or len(sizes) != 3:
        return None
    of_samples: fx.Node = bound[f"{name}_of_samples"]
    samples, *rest = shape_of(of_samples)
    return of_samples if len(rest) == 1 and statically_known_true(samples == sizes[0]) else None


def _gated(norm: _Norm, has: Sequence[bool]) -> Any:
    ops = torch.ops.cudnn_ops

    def build(residual: Any, update: Any, gate: Any, *optional: Any) -> Any:
        scale, shift, weight, bias = spread(optional, has)
        given = residual, update, gate, scale, shift
        if norm.is_layer:
            return ops.gate_add_adaptive_layer_norm.default(
                *given, weight=weight, bias=bias, eps=norm.eps
            )
        return ops.gate_add_adaptive_rms_norm.default(*given, weight=weight, eps=norm.eps)

    return build


def _alone(norm: _Norm, has: Sequence[bool]) -> Any:
    ops = torch.ops.cudnn_ops

    def build(x: Any, *optional: Any) -> Any:
        scale, shift, weight, bias = spread(optional, has)
        if norm.is_layer:
            return ops.adaptive_layer_norm.default(
                x, scale, shift, weight=weight, bias=bias, eps=norm.eps
            )
        return ops.adaptive_rms_norm.default(x, scale, shift, weight=weight, eps=norm.eps)

    return build
