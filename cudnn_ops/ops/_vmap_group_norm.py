"""vmap rules of group norm: samples are more channels, and have groups of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_ops.ops._vmap import Samples, register_composites, register_rule

_IMAGES = ("grad_out", "grad_sum", "input", "residual", "mean", "rstd")


def _as_channels(samples: Samples, with_parameters: bool) -> dict[str, Any]:
    """The arguments with the samples as part of the channels, or of the batch."""
    call = vars(samples.call)
    images = [name for name in _IMAGES if call.get(name) is not None]
    if not with_parameters:
        return {name: samples.folded(name) for name in images}
    changes = {name: samples.full(name).movedim(0, 1).flatten(1, 2) for name in images}
    for name in {"mean", "rstd"} & changes.keys():
        changes[name] = changes[name].contiguous()
    for name in ("weight", "bias"):
        if call[name] is not None:
            changes[name] = samples.folded(name)
    return {**changes, "num_groups": samples.size * samples.call.num_groups}


def _image(samples: Samples, result: Tensor, with_parameters: bool) -> Tensor:
    """A result with the samples in front; one that is not wanted has one dimension."""
    if result.dim() == 1:
        return samples.none(result)
    if not with_parameters:
        return result.unflatten(0, (samples.size, result.shape[0] // samples.size))
    return result.unflatten(1, (samples.size, result.shape[1] // samples.size)).movedim(1, 0)


def _group_norm(samples: Samples) -> tuple[Tensor, ...]:
    with_parameters = samples.has("weight", "bias")
    results = samples.run(**_as_channels(samples, with_parameters))
    return tuple(_image(samples, result, with_parameters) for result in results)


def _group_norm_backward(samples: Samples) -> tuple[Tensor, ...]:
    # Each sample has gradients of weight and bias of its own.
    of_input, *of_parameters = samples.run(**_as_channels(samples, with_parameters=True))
    parameters = [
        result.unflatten(0, (samples.size, -1)) if wanted else samples.none(result)
        for wanted, result in zip(samples.call.output_mask[1:], of_parameters, strict=True)
    ]
    return (_image(samples, of_input, with_parameters=True), *parameters)


register_rule("_group_norm", _group_norm)
register_rule("_group_norm_backward", _group_norm_backward)
register_composites("group_norm", "add_group_norm", "_group_norm_check")
