"""Batch norms folded into convolutions: cases, and the formula in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_ops.ops._batch_norm_fold import fold_batch_norms

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
    moved = [[x if x is None else to_device(x) for x in one] for one in (weights, *given)]
    found = [back(tensor) for tensor in fold_batch_norms(*moved, eps)]  # type: ignore[arg-type]

    room = 2.0 ** -{torch.float16: 10, torch.bfloat16: 7, torch.float32: 20}[case.dtype]
    for place, (weight, bias, mean, var, scale, shift) in enumerate(
        zip(weights, *given, strict=True)
    ):
        assert mean is not None
        assert var is not None
        factor = (var.double() + eps[place]).rsqrt()
        factor = factor if scale is None else factor * scale.double()
        moving = -mean.double() if bias is None else bias.double() - mean.double()
        right = weight.double() * factor.view(-1, *(1 for _ in weight.shape[1:]))
        terms = [moving * factor] + ([] if shift is None else [shift.double()])
        of_weight, of_bias = found[place], found[len(shapes) + place]
        expected = torch.empty_like(
            weight, memory_format=_LAST.get(weight.dim(), torch.contiguous_format)
        )
        assert of_weight.stride() == expected.stride()
        assert of_weight.dtype == of_bias.dtype == case.dtype
        assert ((of_weight.double() - right).abs() <= room * right.abs() + 1e-7).all(), weight.shape
        size = sum(term.abs() for term in terms)
        assert ((of_bias.double() - sum(terms)).abs() <= room * size + 1e-7).all(), weight.shape
