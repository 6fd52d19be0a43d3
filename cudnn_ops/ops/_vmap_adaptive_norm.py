"""vmap rules of adaptive norms: samples are one more dimension in front."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops._vmap import Results, Samples, register_composites, register_rule

_ops = torch.ops.cudnn_ops
_ROWS = ("grad_out", "grad_sum", "input", "update", "mean", "rstd")
_MODULATIONS = ("gate", "scale", "shift")
_INPUTS = ("input", "update", *_MODULATIONS, "weight", "bias")


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


def _wide(samples: Samples, name: str, changes: dict[str, Any]) -> Tensor | None:
    """Scale or shift, or weight or bias beside them, with the samples in front, in float32."""
    call = samples.call
    value = changes.get(name)
    if name in ("weight", "bias") and getattr(call, name) is not None:
        rank = call.input.dim() - samples.has("input")
        value = samples.full(name).reshape(samples.size, *(1,) * (rank - 1), -1)
    return None if value is None else value.to(torch.promote_types(call.input.dtype, torch.float32))


def _with_parameters(samples: Samples, changes: dict[str, Any]) -> dict[str, Any]:
    """Weight and bias of each sample as a part of its scale and shift."""
    scale, shift, weight, bias = (
        _wide(samples, name, changes) for name in ("scale", "shift", "weight", "bias")
    )
    factor = 1 if scale is None else 1 + scale
    if bias is not None:
        shift = bias * factor + (0 if shift is None else shift)
    if weight is not None:
        scale = weight * factor - 1
    return {**changes, "scale": scale, "shift": shift, "weight": None, "bias": None}


def _adaptive_norm(samples: Samples) -> Results:
    changes = _in_front(samples)
    if samples.has("weight", "bias"):
        one = samples.arguments_of(0)
        del one["with_stats"]
        _ops._adaptive_norm_check.default(**one)  # products and sums below would broadcast
        changes = _with_parameters(samples, changes)
    results = samples.run(**changes)
    return tuple(samples.none(one) if one.dim() == 1 else one for one in results)


def _adaptive_norm_backward(samples: Samples) -> Results:
    call = samples.call
    changes = _in_front(samples)
    wanted = dict(zip(_INPUTS, call.output_mask, strict=True))
    # Each sample has gradients of its own of what is one for all.
    for name in _MODULATIONS:
        if wanted[name]:
            changes[name] = changes[name].expand(samples.size, *changes[name].shape[1:])
    if wanted["weight"] or wanted["bias"] or samples.has("weight", "bias"):
        found = _gradients_of_parameters(samples, changes, wanted)
    else:
        found = dict(zip(_INPUTS, samples.run(**changes), strict=True))

    def of(name: str) -> Tensor:
        like = getattr(call, name)
        if not wanted[name]:
            return samples.none(call.input)
        shape = like.shape[samples.has(name) :]
        return found[name].reshape(samples.size, *shape).to(like.dtype)

    return tuple(map(of, _INPUTS))


def _gradients_of_parameters(
    samples: Samples, changes: dict[str, Any], wanted: dict[str, bool]
) -> dict[str, Tensor]:
    """All gradients, by those of a scale and a shift that weight and bias are a part of."""
    names = ("scale", "shift", "weight", "bias")
    own = {name: _wide(samples, name, changes) for name in names}
    # Of as many numbers as the finer one has.
    there = [one for one in own.values() if one is not None]
    shape = torch.broadcast_shapes(
        *(one.shape for one in there), (samples.size,) + (1,) * (there[0].dim() - 1)
    )
    scale, weight, bias = own["scale"], own["weight"], own["bias"]
    factor = torch.ones_like(there[0]) if scale is None else 1 + scale
    all_of_it = ((factor if weight is None else factor * weight) - 1).expand(shape)
    mask = [*(wanted[name] for name in ("input", "update", "gate")), True, True, False, False]
    changes |= {"scale": all_of_it, "shift": all_of_it, "weight": None, "bias": None}
    results = samples.run(**changes, output_mask=mask)
    found = dict(zip(_INPUTS, results, strict=True))
    along, plain = found["scale"], found["shift"]
    terms = {
        "scale": along * (1 if weight is None else weight) + plain * (0 if bias is None else bias),
        "shift": plain,
        "weight": along * factor,
        "bias": plain * factor,
    }
    for name, like in own.items():
        if wanted[name] and like is not None:
            found[name] = terms[name].sum_to_size(like.shape)
    return found


register_rule("_adaptive_norm", _adaptive_norm)
register_rule("_adaptive_norm_backward", _adaptive_norm_backward)
register_composites("adaptive_layer_norm", "gate_add_adaptive_layer_norm")
register_composites("adaptive_rms_norm", "gate_add_adaptive_rms_norm", "_adaptive_norm_check")
