"""vmap rules of mixtures of experts: each sample sorts its own tokens, and sums are one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops._vmap import Results, Samples, register_composites, register_rule

_ops = torch.ops.cudnn_ops


def _each(samples: Samples) -> Results:
    """Offsets are of one sample: a call for each."""
    return samples.each()


def _places(samples: Samples) -> Tensor:
    """Those of all samples among the rows of all, for one call."""
    positions = samples.full("positions")
    rows = positions.shape[1] * positions.shape[2]
    shift = torch.arange(samples.size, device=positions.device, dtype=torch.int32) * rows
    shift = shift[:, None, None]
    return torch.where(positions >= 0, positions + shift, positions - shift).flatten(0, 1)


def _combine(samples: Samples) -> Tensor:
    out = samples.run(
        rows=samples.folded("rows"),
        positions=_places(samples),
        weights=samples.folded("weights"),
    )
    return out.unflatten(0, (samples.size, -1))


def _combine_backward(samples: Samples) -> tuple[Tensor, ...]:
    changes: dict[str, Any] = {
        name: samples.folded(name) for name in ("grad_out", "rows", "weights")
    }
    results = samples.run(positions=_places(samples), **changes)
    return tuple(
        result.unflatten(0, (samples.size, -1)) if is_wanted else samples.none(result)
        for result, is_wanted in zip(results, samples.call.output_mask, strict=True)
    )


register_rule("_moe_permute", _each)
register_rule("_moe_combine", _combine)
register_rule("_moe_combine_backward", _combine_backward)
register_rule("_grouped_linear", _each)
register_rule("_grouped_linear_backward", _each)
register_composites("moe_permute", "moe_combine", "grouped_linear")
