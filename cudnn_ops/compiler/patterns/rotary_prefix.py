"""Rotary embedding of all tokens but some in front: class tokens and registers (EVA, DINOv3).

Models take the tokens apart, turn those behind and put all together again. With cosines of 1 and
sines of 0 for the others, one kernel reads and writes each token once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from cudnn_ops.compiler.nodes import call_of, value_of
from cudnn_ops.compiler.pattern import shape_of
from cudnn_ops.compiler.patterns.rotary_spellings import Rotation, rotations, stretch


def rotations_of_all_tokens(node: fx.Node) -> Iterator[Rotation]:
    """Those that end there; first the ones of some tokens, with the others in front of them."""
    yield from _behind_others(node)
    yield from rotations(node)


def angles_of_all_tokens(cos: Tensor, sin: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """Those of tokens, [batch or 1, tokens, size], behind such that do not turn."""
    around = (0, 0, before, 0)
    return F.pad(cos, around, value=1.0), F.pad(sin, around)


def _behind_others(node: fx.Node) -> Iterator[Rotation]:
    call = call_of(node)
    if call is None or call.name != "cat" or len(call["tensors"]) != 2:
        return
    front, turned = call["tensors"]
    for rotation in rotations(turned):
        sizes = shape_of(rotation.x)
        tokens = -3 if rotation.heads == len(sizes) - 2 else -2
        if call["dim"] not in (tokens, tokens + len(sizes)):
            continue
        first, behind = stretch(front, tokens), stretch(rotation.x, tokens)
        if first is None or behind is None:
            continue
        (source, start, taken), (same, begin, rest) = first, behind
        before, dtypes = shape_of(front)[tokens], {_dtype(one) for one in (source, turned, node)}
        is_all = source is same and len(dtypes) == 1 and type(before) is int
        ends = (start, 0), (begin, before), (begin + sizes[tokens], shape_of(source)[tokens])
        if is_all and all(statically_known_true(one == other) for one, other in ends):
            nodes = dict.fromkeys((*taken, *rest, *rotation.nodes, node))
            yield rotation._replace(x=source, nodes=tuple(nodes), before=before)


def _dtype(node: fx.Node) -> Any:
    value = value_of(node)
    return None if value is None else value.dtype
