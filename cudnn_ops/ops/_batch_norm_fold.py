"""Batch norms in evaluation, folded into the convolutions before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class ConvNorm(NamedTuple):
    """The parameters of a convolution, and those of the batch norm behind it.

    Attributes:
        weight: [outputs, inputs, ...].
        bias: [outputs], as all that follows; None stands for 0.
        mean: what the norm subtracts.
        var: whose root, with ``eps``, it divides by.
        norm_weight: None stands for 1.
        norm_bias: None stands for 0.
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float

    def with_each(self, change: Callable[[Tensor], Tensor]) -> ConvNorm:
        """With all tensors changed."""
        changed: list[Any] = [change(x) if isinstance(x, Tensor) else x for x in self]
        return ConvNorm(*changed)

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """What the convolution's outputs are multiplied by, and what is added but for norm_bias."""
        scale = (self.var + self.eps).rsqrt()
        if self.norm_weight is not None:
            scale = scale * self.norm_weight
        return scale, -self.mean * scale if self.bias is None else (self.bias - self.mean) * scale


def fold_batch_norms(norms: Sequence[ConvNorm]) -> list[Tensor]:
    r"""Weights and biases of convolutions that do what their batch norms did, many at once.

    .. math::
        w' = s w, \quad b' = s (b - \mathrm{mean}) + b_\mathrm{norm}, \quad
        s = w_\mathrm{norm} / \sqrt{\mathrm{var} + \epsilon}

    (Ioffe and Szegedy, "Batch Normalization", section 3.1.) It has no gradient. On a GPU one kernel
    serves up to 48 of them, and computes in float32.

    Args:
        norms: one or more, whose tensors have one dtype: float16, bfloat16 or float32, on a CPU
            float64 too.

    Returns:
        the weights, with their inputs last in memory, then the biases.
    """
    lists = (list(field) for field in zip(*norms, strict=True))
    found: list[Tensor] = _ops._fold_batch_norms.default(*lists)
    return found


def for_each_output(scale: Tensor, weight: Tensor) -> Tensor:
    """A number for each output, as a factor of the weight."""
    return scale.reshape(-1, *(1 for _ in weight.shape[1:]))


def in_format(weight: Tensor) -> Tensor:
    """With its inputs last in memory, as an operator of images wants it."""
    return weight.contiguous(memory_format=_format_of(weight))


def _format_of(weight: Tensor) -> torch.memory_format:
    return _FORMATS.get(weight.dim(), torch.contiguous_format)


def _fold_fake(weights: Sequence[Tensor], *others: Sequence[Any]) -> list[Tensor]:
    return [
        *(torch.empty_like(weight, memory_format=_format_of(weight)) for weight in weights),
        *(weight.new_empty(weight.shape[:1]) for weight in weights),
    ]


def _fold_cpu(*lists: Sequence[Any]) -> list[Tensor]:
    folded = [_folded_cpu(ConvNorm(*fields)) for fields in zip(*lists, strict=True)]
    return [tensor for part in zip(*folded, strict=True) for tensor in part]


def _folded_cpu(norm: ConvNorm) -> tuple[Tensor, Tensor]:
    dtype = norm.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    norm = norm.with_each(lambda x: x.to(wide))
    scale, shift = norm.scale_and_shift()
    shift = shift if norm.norm_bias is None else shift + norm.norm_bias
    weight = torch.empty_like(norm.weight, dtype=dtype, memory_format=_format_of(norm.weight))
    return weight.copy_(norm.weight * for_each_output(scale, weight)), shift.to(dtype)


register("_fold_batch_norms", fake=_fold_fake, cpu=_fold_cpu)
