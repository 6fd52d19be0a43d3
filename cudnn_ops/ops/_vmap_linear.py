"""vmap rules of linear layers: samples are more rows, or more outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops._vmap import Results, Samples, register_composites, register_rule
from cudnn_ops.ops.activation import ACTIVATIONS, activate, before_activation, wide
from cudnn_ops.ops.linear import keeps_before

_ops = torch.ops.cudnn_ops


def _rows(tensor: Tensor) -> Tensor:
    """[V, ..., C] as [V, R, C]."""
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.unsqueeze(1)


def _linear(samples: Samples) -> tuple[Tensor, Tensor]:
    call = samples.call
    if not samples.has("weight", "bias"):
        out, before = samples.run(input=samples.full("input"), residual=samples.full("residual"))
    elif not samples.has("input"):
        out, before = _of_one_input(samples)
    else:
        out, before = _of_own_weights(samples)
    return out, before if keeps_before(call) else samples.none(out)


def _of_one_input(samples: Samples) -> tuple[Tensor, Tensor]:
    """Each sample's weight is more outputs of one layer."""
    call = samples.call
    residual = samples.full("residual")
    changes: dict[str, Any] = {name: samples.folded(name) for name in ("weight", "bias")}
    if residual is not None:
        changes["residual"] = residual.movedim(0, -2).flatten(-2)
    results = samples.run(**changes)

    def back(result: Tensor) -> Tensor:
        return result.unflatten(-1, (samples.size, call.weight.shape[-2])).movedim(-2, 0)

    return back(results[0]), back(results[1]) if keeps_before(call) else results[1]


def _of_own_weights(samples: Samples) -> tuple[Tensor, Tensor]:
    call = samples.call
    _ops._linear_check.default(
        **{n: v for n, v in samples.arguments_of(0).items() if n != "with_before"}
    )
    x, weight = samples.full("input"), samples.full("weight")
    factors = _rows(x), weight.transpose(1, 2)
    if call.bias is None:
        before = torch.bmm(*factors)
    else:
        before = torch.baddbmm(samples.full("bias").unsqueeze(1), *factors)
    before = before.unflatten(1, x.shape[1:-1]) if x.dim() > 2 else before.squeeze(1)
    out = activate(wide(before), ACTIVATIONS[call.activation])
    if call.residual is not None:
        out = out + samples.full("residual")
    return out.to(x.dtype), before


def _linear_backward(samples: Samples) -> tuple[Tensor, ...]:
    call = samples.call
    of_input, of_weight, of_bias = call.output_mask
    grad_input = grad_weight = grad_bias = samples.none(call.input)
    saved = samples.full("saved")
    if of_input and not samples.has("weight"):
        grad_input, _, _ = samples.run(
            grad_out=samples.full("grad_out"),
            input=samples.full("input"),
            saved=saved,
            output_mask=[True, False, False],
        )
        of_input = False
    if not (of_input or of_weight or of_bias):
        return grad_input, grad_weight, grad_bias
    # A weight that is one for all has a gradient for each sample.
    kept = None if saved is None else wide(saved)
    name, dtype = ACTIVATIONS[call.activation], call.input.dtype
    grad = before_activation(wide(samples.full("grad_out")), kept, name)
    rows, x = _rows(grad.to(dtype)), samples.full("input")
    if of_input:
        grad_input = torch.bmm(rows, samples.full("weight")).view(x.shape)
    if of_weight:
        grad_weight = torch.bmm(rows.transpose(1, 2), _rows(x))
    if of_bias:
        grad_bias = _rows(grad).sum(1).to(dtype)
    return grad_input, grad_weight, grad_bias


def _mlp(samples: Samples) -> Results:
    if samples.has("weight1", "bias1", "weight2", "bias2"):
        return samples.each()
    results = samples.run(input=samples.full("input"))
    return tuple(r if r.dim() > 1 else samples.none(r) for r in results)


def _mlp_backward(samples: Samples) -> Results:
    call = samples.call
    if samples.has("weight1", "weight2") or any(call.output_mask[1:]):
        return samples.each()
    names = ("grad_out", "input", "hidden", "before")
    grad_input, *others = samples.run(**{name: samples.full(name) for name in names})
    return (grad_input, *map(samples.none, others))


register_rule("_linear", _linear)
register_rule("_linear_backward", _linear_backward)
register_rule("_mlp", _mlp)
register_rule("_mlp_backward", _mlp_backward)
register_composites("linear", "mlp", "_linear_check")
