"""Batch norms folded into convolutions: cases, and the formula in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights

from cudnn_ops.ops._batch_norm_fold import ConvNorm, fold_batch_norms

#: [outputs, inputs of a group, kernel]: of all dimensions; depthwise; of one pixel, one input, one
#: output, and none; rows longer than a block has threads, and shorter.
SHAPES = (
    *((8, 4, 3, 3), (16, 1, 5, 5), (6, 64, 1, 1), (1, 7, 3, 3), (5, 3, 7, 7), (3, 130, 3, 3)),
    *((4, 3, 5), (5, 2, 3, 3, 3), (4, 300, 1), (0, 4, 3, 3), (4, 0, 3, 3), (2, 1, 1, 1)),
)
LAYOUTS = ("first", "last", "strided")
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Case:
    """A call: convolutions of all shapes, so often."""

    dtype: torch.dtype
    layout: str
    has_bias: bool
    is_affine: bool
    turns: int = 1

    def __str__(self) -> str:
        words = [str(self.dtype)[6:], self.layout]
        words += (
            ["bias"] * self.has_bias + ["affine"] * self.is_affine + ["many"] * (self.turns > 1)
        )
        return " ".join(words)


CASES = (
    *itertools.starmap(
        Case,
        itertools.product(
            (torch.float16, torch.bfloat16, torch.float32), LAYOUTS, (False, True), (False, True)
        ),
    ),
    # More than the parameters of one kernel have room for.
    Case(torch.bfloat16, "first", True, True, turns=9),
)


def _laid_out(weight: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return weight.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "last" and weight.dim() in _LAST:
        return weight.contiguous(memory_format=_LAST[weight.dim()])
    return weight


def check(
    case: Case, to_device: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> None:
    """Beside the formula in float64: within a unit in the last place, and laid out as promised."""
    torch.manual_seed(0)
    shapes = SHAPES * case.turns
    weights = [_laid_out(torch.randn(shape).to(case.dtype), case.layout) for shape in shapes]

    def vectors(is_there: bool = True, least: float | None = None) -> list[Tensor | None]:
        def draw(size: int) -> Tensor:
            return torch.randn(size) if least is None else torch.rand(size) + least

        return [draw(shape[0]).to(case.dtype) if is_there else None for shape in shapes]

    given = [
        *(vectors(case.has_bias), vectors(), vectors(least=0.1)),
        *(vectors(case.is_affine), vectors(case.is_affine)),
    ]
    eps = [10.0 ** -(place % 5) for place in range(len(shapes))]
    norms = list(map(ConvNorm, weights, *given, eps))
    found = [back(x) for x in fold_batch_norms([norm.with_each(to_device) for norm in norms])]

    room = 2.0 ** -{torch.float16: 10, torch.bfloat16: 7, torch.float32: 20}[case.dtype]
    for place, norm in enumerate(norms):
        weight, bias, mean, var, scale, shift, _ = norm.with_each(Tensor.double)
        right, right_bias = fuse_conv_bn_weights(weight, bias, mean, var, norm.eps, scale, shift)
        terms = [x.abs() for x in (bias, mean) if x is not None]
        size = sum(terms) * (var + norm.eps).rsqrt() * (1 if scale is None else scale.abs())
        size = size if shift is None else size + shift.abs()
        of_weight, of_bias = found[place], found[len(shapes) + place]
        layout = _LAST.get(weight.dim(), torch.contiguous_format)
        assert of_weight.stride() == torch.empty_like(weight, memory_format=layout).stride()
        assert of_weight.dtype == of_bias.dtype == case.dtype
        assert ((of_weight.double() - right).abs() <= room * right.abs() + 1e-7).all(), weight.shape
        assert ((of_bias.double() - right_bias).abs() <= room * size + 1e-7).all(), weight.shape
