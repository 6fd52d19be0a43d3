"""vmap rules of adaptive norms: samples are one more dimension in front."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_ops.ops._vmap import Results, Samples, register_composites, register_rule

_ROWS = ("grad_out", "grad_sum", "input", "update", "mean", "rstd")
_MODULATIONS = ("gate", "scale", "shift")


def _in_front(samples: Samples) -> dict[str, Any]:
    """The arguments of one call, which has the samples in the first dimension."""
    call = vars(samples.call)
    rank = samples.call.input.dim() - samples.has("input")
    changes = {name: samples.full(name) for name in _ROWS if call.get(name) is not None}
    for name in {"mean", "rstd"} & changes.keys():
        changes[name] = changes[name].contiguous()
    for name in _MODULATIONS:
        modulation = call[name]
        if modulation is None:
            continue
        if not samples.has(name):
            modulation = modulation.unsqueeze(0)
        if modulation.dim() == 3 and rank > 2:  # [V, B, C]
            modulation = modulation.reshape(
                *modulation.shape[:2], *(1,) * (rank - 2), modulation.shape[2]
            )
        changes[name] = modulation
    return changes


def _adaptive_norm(samples: Samples) -> Results:
    if samples.has("weight", "bias"):
        return samples.each()
    results = samples.run(**_in_front(samples))
    return tuple(samples.none(one) if one.dim() == 1 else one for one in results)


def _adaptive_norm_backward(samples: Samples) -> Results:
    mask = list(samples.call.output_mask)
    # Each sample has gradients of its own of what is one for all, and of weight and bias.
    is_shared = any(
        is_wanted and not samples.has(name)
        for name, is_wanted in zip(_MODULATIONS, mask[2:5], strict=True)
    )
    if is_shared or any(mask[5:]) or samples.has("weight", "bias"):
        return samples.each()
    results: tuple[Tensor, ...] = samples.run(**_in_front(samples))
    shapes = [getattr(samples.call, name) for name in ("input", "update", *_MODULATIONS)]
    return tuple(
        one.reshape(samples.size, *like.shape[samples.has(name) :])
        if is_wanted
        else samples.none(one)
        for one, is_wanted, like, name in zip(
            results,
            mask,
            (*shapes, None, None),
            ("input", "update", *_MODULATIONS, "weight", "bias"),
            strict=True,
        )
    )


register_rule("_adaptive_norm", _adaptive_norm)
register_rule("_adaptive_norm_backward", _adaptive_norm_backward)
register_composites("adaptive_layer_norm", "gate_add_adaptive_layer_norm")
register_composites("adaptive_rms_norm", "gate_add_adaptive_rms_norm", "_adaptive_norm_check")
