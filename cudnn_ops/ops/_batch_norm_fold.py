"""Batch norms in evaluation, folded into the convolutions before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def fold_batch_norms(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    means: Sequence[Tensor],
    vars: Sequence[Tensor],
    norm_weights: Sequence[Tensor | None],
    norm_biases: Sequence[Tensor | None],
    eps: Sequence[float],
) -> list[Tensor]:
    r"""Weights and biases of convolutions that do what their batch norms did, many at once.

    .. math::
        w' = s w, \quad b' = s (b - \mathrm{mean}) + b_\mathrm{norm}, \quad
        s = w_\mathrm{norm} / \sqrt{\mathrm{var} + \epsilon}

    (Ioffe and Szegedy, "Batch Normalization", section 3.1.) It has no gradient. On a GPU one kernel
    serves up to 48 of them, and computes in float32.

    Args:
        weights: of convolutions, [outputs, inputs, ...], of one dtype: float16, bfloat16 or
            float32, on a CPU float64 too.
        biases: [outputs]; None stands for 0. As all that follows, of the weights' dtype.
        means: of what the norms divide by their deviation, [outputs].
        vars: likewise.
        norm_weights: [outputs]; None stands for 1.
        norm_biases: [outputs]; None stands for 0.
        eps: added to the variances.

    Returns:
        the weights, with their inputs last in memory, then the biases.
    """
    found: list[Tensor] = _ops._fold_batch_norms.default(
        list(weights),
        list(biases),
        list(means),
        list(vars),
        list(norm_weights),
        list(norm_biases),
        list(eps),
    )
    return found


def scale_and_shift(
    bias: Tensor | None, mean: Tensor, var: Tensor, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """What a norm multiplies a convolution's outputs by, and adds then but for its own bias."""
    scale = (var + eps).rsqrt()
    if norm_weight is not None:
        scale = scale * norm_weight
    return scale, -mean * scale if bias is None else (bias - mean) * scale


def for_each_output(scale: Tensor, weight: Tensor) -> Tensor:
    """A number for each output, as a factor of the weight."""
    return scale.reshape(-1, *(1 for _ in weight.shape[1:]))


def in_format(weight: Tensor) -> Tensor:
    """With its inputs last in memory, as an operator of images wants it."""
    return weight.contiguous(memory_format=_format_of(weight))


def _format_of(weight: Tensor) -> torch.memory_format:
    return _FORMATS.get(weight.dim(), torch.contiguous_format)


def _fold_fake(weights: Sequence[Tensor], *others: Sequence[Tensor | float | None]) -> list[Tensor]:
    return [
        *(torch.empty_like(weight, memory_format=_format_of(weight)) for weight in weights),
        *(weight.new_empty(weight.shape[:1]) for weight in weights),
    ]


def _fold_cpu(weights: Sequence[Tensor], *others: Sequence[Tensor | float | None]) -> list[Tensor]:
    return [
        tensor for part in zip(*map(_folded_cpu, weights, *others), strict=True) for tensor in part
    ]


def _folded_cpu(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(weight.dtype, torch.float32)
    of_norm = (None if x is None else x.to(wide) for x in (bias, mean, var, norm_weight))
    scale, shift = scale_and_shift(*of_norm, eps)  # type: ignore[arg-type]
    shift = shift if norm_bias is None else shift + norm_bias
    result = torch.empty_like(weight, memory_format=_format_of(weight))
    result.copy_(weight.to(wide) * for_each_output(scale, weight))
    return result, shift.to(weight.dtype)


register("_fold_batch_norms", fake=_fold_fake, cpu=_fold_cpu)
