"""vmap rules of batch norm: samples are more channels, or more of the batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_ops.ops._vmap import Samples, register_composites, register_rule

_IMAGES = ("grad_out", "grad_more", "input", "residual", "out")
_VECTORS = ("running_mean", "running_var", "weight", "bias", "mean", "rstd")


def _as_channels(samples: Samples) -> dict[str, Any]:
    """The arguments with the samples as part of the channels."""
    call = vars(samples.call)
    images = [name for name in _IMAGES if call.get(name) is not None]
    changes = {name: samples.full(name).movedim(0, 1).flatten(1, 2) for name in images}
    for name in _VECTORS:
        if call.get(name) is not None:
            changes[name] = samples.folded(name).contiguous()
    return changes


def _of_channels(samples: Samples, result: Tensor) -> Tensor:
    """A result with the samples in front, of an image or of a number for each channel."""
    if result.numel() == 0 and result.dim() == 1:
        return samples.none(result)
    if result.dim() == 1:
        return result.unflatten(0, (samples.size, -1))
    return result.unflatten(1, (samples.size, result.shape[1] // samples.size)).movedim(1, 0)


def _training(samples: Samples) -> tuple[Tensor, ...]:
    if samples.call.running_mean is not None:
        raise NotImplementedError(
            "cudnn_ops.batch_norm: under vmap all samples would change the same running "
            "statistics; make a norm without them (track_running_stats=False), or norm by them "
            "(eval())"
        )
    return tuple(_of_channels(samples, result) for result in samples.run(**_as_channels(samples)))


def _inference(samples: Samples) -> Tensor:
    if samples.has(*_VECTORS):
        return _of_channels(samples, samples.run(**_as_channels(samples)))
    images = {name: samples.folded(name) for name in ("input", "residual")}
    result: Tensor = samples.run(**images)
    return result.unflatten(0, (samples.size, result.shape[0] // samples.size))


def _backward(samples: Samples) -> tuple[Tensor, ...]:
    # Each sample has gradients of weight and bias of its own.
    return tuple(_of_channels(samples, result) for result in samples.run(**_as_channels(samples)))


register_rule("_batch_norm_training", _training)
register_rule("_batch_norm_inference", _inference)
register_rule("_batch_norm_backward", _backward)
register_composites("batch_norm", "_batch_norm_check")
