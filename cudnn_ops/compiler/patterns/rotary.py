"""Rotary embedding, in the order of halves: ``x * cos + rotate_half(x) * sin``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cudnn_ops.compiler.match import Cast, Number, OneOf, Op, Var, match
from cudnn_ops.compiler.nodes import value_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, is_tensor, shape_of, tensor

_X = Cast(Var("x", is_tensor))


def _is_last(dim: Any, _: Any) -> bool:
    return dim in (-1, 3)


def _half(which: int) -> OneOf:
    """``x[..., :n]`` and ``x[..., n:]``, or what ``chunk`` and ``split`` give."""

    def is_slice(index: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        if not isinstance(index, tuple) or source is None:
            return False
        *before, last = index
        if not isinstance(last, slice) or last.step not in (None, 1):
            return False
        whole = all(part in (..., slice(None, None, None)) for part in before)
        is_last_dim = ... in before or len(before) == source.dim() - 1
        size = source.shape[-1]
        bounds = (last.start or 0, size if last.stop is None else last.stop)
        expected = (0, size // 2) if which == 0 else (size // 2, size)
        return whole and is_last_dim and bounds == expected

    def is_half(size: Any, node: fx.Node) -> bool:
        source = value_of(node.args[0])
        if source is None:
            return False
        half = source.shape[-1] // 2
        return size == half or (isinstance(size, (tuple, list)) and list(size) == [half, half])

    return OneOf(
        Op("getitem", _X, is_slice),
        Op(
            "getitem",
            OneOf(Op("chunk", _X, 2, _is_last), Op("split", _X, is_half, _is_last)),
            which,
        ),
    )


_NEGATED = OneOf(Op("neg", _half(1)), Op("mul", _half(1), Number(value=-1)))
_TURNED = Op("cat", [_NEGATED, _half(0)], _is_last)
_COS, _SIN = Cast(Var("cos", is_tensor)), Cast(Var("sin", is_tensor))
_ROTARY = Cast(Op("add", Cast(Op("mul", _X, _COS)), Cast(Op("mul", Cast(_TURNED), _SIN))))


class Rotary(Pattern):
    """Of queries or keys [batch, heads, length, head size]."""

    name = "rotary"
    ends_in = frozenset({"add", "cast"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        for bound in match(_ROTARY, node):
            x, cos, sin = bound["x"], bound["cos"], bound["sin"]
            if len(shape_of(x)) != 4 or any(len(shape_of(one)) != 4 for one in (cos, sin)):
                continue
            batch, _, length, size = shape_of(x)
            if any(shape_of(one)[1:] != (1, length, size) for one in (cos, sin)):
                continue
            if any(shape_of(one)[0] not in (1, batch) for one in (cos, sin)):
                continue
            angles = [tensor(one) for one in (cos, sin)]
            if any(one.requires_grad for one in angles):
                raise Refusal("cos or sin requires a gradient")
            yield Found(list(bound.nodes), [node], [x, cos, sin], _build)


def _build(x: Any, cos: Any, sin: Any) -> Any:
    return torch.ops.cudnn_ops.rotary_embedding.default(x, cos.squeeze(1), sin.squeeze(1))
