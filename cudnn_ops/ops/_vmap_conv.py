"""vmap rules of convolutions: samples are more images, or more groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cudnn_ops.ops._vmap import Samples, register_composites, register_rule
from cudnn_ops.ops.conv import is_transposed


def _as_channels(samples: Samples, name: str) -> Any:
    """[V, N, C, *size] as [N, V * C, *size], channels last in memory; None stays None."""
    tensor = samples.full(name)
    if tensor is None:
        return None
    return tensor.movedim((0, 2), (-2, -1)).flatten(-2).movedim(-1, 1)


def _from_channels(samples: Samples, tensor: Tensor) -> Tensor:
    """The way back."""
    channels = tensor.shape[1] // samples.size
    return tensor.unflatten(1, (samples.size, channels)).movedim(1, 0)


def _from_batch(samples: Samples, tensor: Tensor) -> Tensor:
    """[V * N, ...] as [V, N, ...]."""
    return tensor.unflatten(0, (samples.size, tensor.shape[0] // samples.size))


def _grouped(samples: Samples) -> list[int]:
    """The geometry of a convolution with the groups of all samples."""
    *geometry, groups = samples.call.geometry
    return [*geometry, groups * samples.size]


def _conv(samples: Samples) -> tuple[Tensor, Tensor]:
    call = samples.call
    if samples.has("weight", "bias"):
        # An image that is one for all is read by one group: each sample's weight is more of that.
        # A transposed one's weight has its output channels second.
        is_one_for_all = (
            not samples.has("input") and call.geometry[-1] == 1 and not is_transposed(call.geometry)
        )
        results = samples.run(
            input=call.input if is_one_for_all else _as_channels(samples, "input"),
            weight=samples.folded("weight"),
            bias=samples.folded("bias"),
            residual=_as_channels(samples, "residual"),
            geometry=call.geometry if is_one_for_all else _grouped(samples),
        )
        back = _from_channels
    else:
        folded = {name: samples.folded(name) for name in ("input", "residual")}
        results = samples.run(**folded)
        back = _from_batch
    out, before = results
    has_before = before.dim() == out.dim()
    return back(samples, out), back(samples, before) if has_before else samples.none(before)


def _conv_backward(samples: Samples) -> tuple[Tensor, ...]:
    of_input, of_weight, of_bias, of_residual = samples.call.output_mask
    if samples.has("weight"):
        return _backward_by_channels(samples, samples.call.output_mask)
    # A weight that is one for all has a gradient for each sample.
    of_images, of_parameters = (of_input, of_residual), (of_weight, of_bias)
    grad_input = grad_weight = grad_bias = grad_residual = samples.none(samples.call.input)
    if any(of_images):
        names = ("grad_out", "input", "saved")
        grads = samples.run(
            **{name: samples.folded(name) for name in names},
            output_mask=[of_input, False, False, of_residual],
        )
        grad_input = _from_batch(samples, grads[0]) if of_input else grad_input
        grad_residual = _from_batch(samples, grads[3]) if of_residual else grad_residual
    if any(of_parameters):
        mask = [False, of_weight, of_bias, False]
        _, grad_weight, grad_bias, _ = _backward_by_channels(samples, mask)
    return grad_input, grad_weight, grad_bias, grad_residual


def _backward_by_channels(samples: Samples, mask: Sequence[bool]) -> tuple[Tensor, ...]:
    grads = samples.run(
        **{name: _as_channels(samples, name) for name in ("grad_out", "input", "saved")},
        weight=samples.folded("weight"),
        geometry=_grouped(samples),
        output_mask=mask,
    )
    back = (_from_channels, _from_batch, _from_batch, _from_channels)
    return tuple(
        way(samples, grad) if wanted else samples.none(grad)
        for way, grad, wanted in zip(back, grads, mask, strict=True)
    )


register_rule("_conv", _conv)
register_rule("_conv_backward", _conv_backward)
register_composites("conv1d", "conv2d", "conv3d", "_conv1d", "_conv2d", "_conv3d")
register_composites(
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("_conv_transpose1d", "_conv_transpose2d", "_conv_transpose3d"),
)
