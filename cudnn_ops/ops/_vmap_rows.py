"""vmap rules of norms, gated activations and rotary embedding: samples are more rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_ops.ops._vmap import Results, Samples, register_composites, register_rule

_ops = torch.ops.cudnn_ops


def _gated(samples: Samples) -> Tensor:
    return samples.run(gate=samples.full("gate"), up=samples.full("up"))


def _gated_backward(samples: Samples) -> tuple[Tensor, ...]:
    full = {name: samples.full(name) for name in ("grad_out", "gate", "up")}
    return samples.run(**full)


def _rotary(samples: Samples) -> Results:
    call = samples.call
    is_table = call.positions is not None
    if is_table and samples.has("cos", "sin"):
        return samples.each()  # a table of its own for each
    x = samples.full("input")
    batch = x.shape[1]
    names = ("positions",) if is_table else ("cos", "sin")
    axis = 1 if len(call.layout) > 2 else 0  # of the batch, behind that of the sections
    is_one_for_all = not samples.has(*names) and getattr(call, names[0]).shape[axis] == 1

    def of_rows(name: str) -> Tensor:
        if is_one_for_all:
            return getattr(call, name)
        full = samples.full(name)
        sizes = [-1] * full.dim()
        sizes[axis + 1] = batch
        return full.expand(sizes).movedim(0, axis).flatten(axis, axis + 1)

    changes = {name: of_rows(name) for name in names}
    out, key_out = samples.run(input=x.flatten(0, 1), key=samples.folded("key"), **changes)
    out = out.unflatten(0, (samples.size, batch))
    if call.key is None:
        return out, samples.none(out)
    return out, key_out.unflatten(0, (samples.size, batch))


def _rows_fp8(samples: Samples) -> Results:
    call = samples.call
    if call.scale is not None or samples.has("weight"):
        return samples.each()  # the largest magnitude, or the norm, is a sample's own
    out, descale, amax, total = samples.run(
        input=samples.full("input"), other=samples.full("other")
    )
    has_sum = call.kind == 1 and call.other is not None
    return out, descale, amax, total if has_sum else samples.none(total)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _factor(samples: Samples, rank: int) -> Tensor:
    """What each sample multiplies its rows with, for samples of ``rank`` dimensions."""
    weight = _wide(samples.full("weight"))
    return _beside_rows(weight + 1 if samples.call.zero_centered else weight, rank)


def _beside_rows(parameter: Tensor, rank: int) -> Tensor:
    """[V, *normalized_shape] with as many dimensions as samples of ``rank`` dimensions have."""
    ones = [1] * (rank + 1 - parameter.dim())
    return parameter.reshape(parameter.shape[0], *ones, *parameter.shape[1:])


def _norm(samples: Samples) -> tuple[Tensor, ...]:
    call = samples.call
    if samples.has("weight", "bias"):
        return _norm_with_parameters(samples)
    out, total, mean, rstd = samples.run(
        input=samples.full("input"), residual=samples.full("residual")
    )
    if call.residual is None:
        total = samples.none(total)
    return out, total, *(stats.reshape(samples.size, -1) for stats in (mean, rstd))


def _norm_with_parameters(samples: Samples) -> tuple[Tensor, ...]:
    """Each sample has a weight or a bias of its own: applied in float32, before the rounding."""
    call = samples.call
    one = samples.arguments_of(0)
    del one["with_stats"]
    _ops._norm_check.default(**one)  # products and sums below would broadcast
    x = samples.full("input") if samples.has("input", "residual") else call.input
    total = samples.none(x)
    if call.residual is not None:
        x = total = x + call.residual
    rank = x.dim() - samples.has("input", "residual")
    changes = {"residual": None, "weight": None, "bias": None, "zero_centered": False}
    out, _, *stats = samples.run(input=_wide(x), **changes)
    if call.weight is not None:
        out = out * _factor(samples, rank)
    if call.bias is not None:
        out = out + _beside_rows(_wide(samples.full("bias")), rank)
    if not samples.has("input", "residual"):
        mean, rstd = (part.expand(samples.size, -1) for part in stats)
        total = total if call.residual is None else total.expand(samples.size, *total.shape)
    else:
        mean, rstd = (part.reshape(samples.size, -1) for part in stats)
    return out.to(call.input.dtype), total, mean, rstd


def _norm_backward(samples: Samples) -> tuple[Tensor, ...]:
    call = samples.call
    wants_input, wants_weight, wants_bias = call.output_mask
    grad_input = _grad_input_of_norm(samples) if wants_input else samples.none(call.input)
    like = call.input if call.weight is None else call.weight
    grad_weight, grad_bias = samples.none(like), samples.none(like)
    if wants_weight or wants_bias:
        grad = _wide(samples.full("grad_out"))
        # The dimensions that each sample's sum is over.
        leading = tuple(range(1, grad.dim() - len(call.normalized_shape)))

        def summed(terms: Tensor) -> Tensor:
            return (terms.sum(leading) if leading else terms).to(like.dtype)

        grad_weight = summed(grad * _normed(samples)) if wants_weight else grad_weight
        grad_bias = summed(grad) if wants_bias else grad_bias
    return grad_input, grad_weight, grad_bias


def _grad_input_of_norm(samples: Samples) -> Tensor:
    call = samples.call
    changes = {
        name: samples.full(name) for name in ("grad_out", "grad_sum", "input", "mean", "rstd")
    }
    changes |= {name: changes[name].flatten().contiguous() for name in ("mean", "rstd")}
    changes["output_mask"] = [True, False, False]
    if samples.has("weight"):
        # By the chain rule, in float32.
        for name in ("grad_out", "grad_sum", "input"):
            changes[name] = None if changes[name] is None else _wide(changes[name])
        changes["grad_out"] = changes["grad_out"] * _factor(samples, changes["input"].dim() - 1)
        changes |= {"weight": None, "zero_centered": False}
    return samples.run(**changes)[0].to(call.input.dtype)


def _normed(samples: Samples) -> Tensor:
    """The rows before they are multiplied by the weight."""
    call = samples.call
    x = _wide(samples.full("input"))
    normalized = len(call.normalized_shape)
    column = (*x.shape[: x.dim() - normalized], *(1,) * normalized)
    if call.is_layer:
        x = x - samples.full("mean").reshape(column)
    return x * samples.full("rstd").reshape(column)


register_rule("_gated", _gated)
register_rule("_gated_backward", _gated_backward)
register_rule("_rotary", _rotary)
register_rule("_quantize_fp8", Samples.each)  # the largest magnitude is a sample's own
register_rule("_dequantize_fp8", Samples.each)
register_rule("_rotary_fp8", Samples.each)  # likewise
register_rule("_rows_fp8", _rows_fp8)
register_rule("_norm", _norm)
register_rule("_norm_backward", _norm_backward)
register_composites("swiglu", "geglu", "rotary_embedding", "rotary_embedding_qk")
register_composites("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
register_composites("_norm_check")
