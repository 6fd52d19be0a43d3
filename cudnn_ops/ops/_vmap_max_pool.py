"""vmap rules of max pooling: samples are more of the batch."""

from __future__ import annotations

from torch import Tensor

from cudnn_ops.ops._vmap import Samples, register_composites, register_rule


def _of_batch(samples: Samples, result: Tensor) -> Tensor:
    """A result with the samples in front."""
    if result.dim() == 1:
        return samples.none(result)
    return result.unflatten(0, (samples.size, result.shape[0] // samples.size))


def _forward(samples: Samples) -> tuple[Tensor, ...]:
    results = samples.run(input=samples.folded("input"))
    return tuple(_of_batch(samples, result) for result in results)


def _backward(samples: Samples) -> Tensor:
    images = {name: samples.folded(name) for name in ("grad_out", "offsets", "grad_more")}
    return _of_batch(samples, samples.run(**images))


register_rule("_max_pool2d", _forward)
register_rule("_max_pool2d_backward", _backward)
register_composites("max_pool2d", "_max_pool2d_size", "_max_pool2d_backward_check")
