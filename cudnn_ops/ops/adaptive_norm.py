"""Adaptive layer norm and RMS norm: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/adaptive_norm*``, the derivative and the autocast rule in
``csrc/ops/adaptive_norm*.cpp``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_layer_op = _ops.adaptive_layer_norm.default
_rms_op = _ops.adaptive_rms_norm.default
_gate_add_layer_op = _ops.gate_add_adaptive_layer_norm.default
_gate_add_rms_op = _ops.gate_add_adaptive_rms_norm.default
_layer, _rms = fast(_layer_op), fast(_rms_op)
_gate_add_layer, _gate_add_rms = fast(_gate_add_layer_op), fast(_gate_add_rms_op)


def adaptive_layer_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    r"""Layer norm of the last dimension, scaled and shifted by numbers of each sample.

    .. math::
        \mathrm{out} = \left(\frac{x - \mathrm{mean}(x)}
            {\sqrt{\mathrm{var}(x) + \varepsilon}} \cdot w + b\right)
            \cdot (1 + \mathrm{scale}) + \mathrm{shift}

    (Peebles and Xie, "Scalable diffusion models with transformers", section 3.2: the adaLN of DiT,
    Stable Diffusion 3, Flux, Wan and others.) Computed in float32. Differentiable once; the
    gradients of what a sample's tokens share are added up in a fixed order.

    Args:
        input: ``[B, ..., C]``, float16, bfloat16 or float32; on a CPU also float64. Rows of C
            numbers may be anywhere in memory.
        scale: ``[B, C]``, numbers of each sample; or of as many dimensions as the input, each of
            the input's size or 1 and the last one C: ``[B, 1, C]``, or ``[B, S, C]`` for numbers of
            each token. In the input's dtype or float32. Strided views, such as the chunks of one
            projection ``[B, 6 * C]``, are read as they lie.
        shift: likewise.
        weight: ``[C]``, in the input's dtype or float32; None stands for ones.
        bias: likewise; None stands for zeros.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the input's shape and dtype; float32 under CUDA autocast.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: an unsupported dtype; an argument of a wrong type.
        NotImplementedError: the GPU is older than the A100.

    Example:
        >>> import torch, cudnn_ops
        >>> x, modulation = torch.randn(2, 16, 64), torch.randn(2, 2 * 64)
        >>> scale, shift = modulation.chunk(2, -1)
        >>> out = cudnn_ops.adaptive_layer_norm(x, scale, shift)
        >>> normed = torch.nn.functional.layer_norm(x, (64,), eps=1e-6)
        >>> torch.allclose(out, normed * (1 + scale[:, None]) + shift[:, None], atol=1e-5)
        True
    """
    try:
        return _layer(input, scale, shift, weight=weight, bias=bias, eps=eps)
    except RuntimeError:
        refuse_wrong_types(_layer_op, locals())
        raise


def adaptive_rms_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    r"""RMS norm of the last dimension, scaled and shifted by numbers of each sample.

    .. math::
        \mathrm{out} = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \varepsilon}} \cdot w
            \cdot (1 + \mathrm{scale}) + \mathrm{shift}

    As in Lumina and its relatives, which have no shift.

    Args:
        input: as in :func:`adaptive_layer_norm`, and so are the rest.
        scale: as there.
        shift: as there; None stands for zeros.
        weight: as there.
        eps: added to the mean of the squares.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        ValueError: as :func:`adaptive_layer_norm`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, scale = torch.randn(2, 16, 64), torch.randn(2, 64)
        >>> out = cudnn_ops.adaptive_rms_norm(x, scale)
        >>> normed = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
        >>> torch.allclose(out, normed * (1 + scale[:, None]), atol=1e-5)
        True
    """
    try:
        return _rms(input, scale, shift, weight=weight, eps=eps)
    except RuntimeError:
        refuse_wrong_types(_rms_op, locals())
        raise


def gate_add_adaptive_layer_norm(
    input: Tensor,
    update: Tensor,
    gate: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """:func:`adaptive_layer_norm` of ``input + gate * update``, and that sum: the next input.

    Args:
        input: as in :func:`adaptive_layer_norm`: what the block adds to.
        update: of the input's shape and dtype: what attention or the feed-forward gave.
        gate: as ``scale`` there.
        scale: as there; None stands for zeros, and the norm is not scaled.
        shift: likewise.
        weight: as there, and so are the rest.
        bias: as there.
        eps: as there.

    Returns:
        The norm, and the sum, contiguous. Under autocast, where the tensors' dtypes differ, all are
        cast to the one that ``input + gate * update`` has in torch.

    Raises:
        ValueError: as the norm without the sum, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, attention = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
        >>> gate, scale, shift = torch.randn(2, 3 * 64).chunk(3, -1)
        >>> out, total = cudnn_ops.gate_add_adaptive_layer_norm(x, attention, gate, scale, shift)
        >>> torch.allclose(total, x + gate[:, None] * attention, atol=1e-6)
        True
        >>> torch.allclose(out, cudnn_ops.adaptive_layer_norm(total, scale, shift))
        True
    """
    try:
        return _gate_add_layer(input, update, gate, scale, shift, weight=weight, bias=bias, eps=eps)
    except RuntimeError:
        refuse_wrong_types(_gate_add_layer_op, locals())
        raise


def gate_add_adaptive_rms_norm(
    input: Tensor,
    update: Tensor,
    gate: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """:func:`adaptive_rms_norm` of ``input + gate * update``, and that sum: the next input.

    Args:
        input: as in :func:`gate_add_adaptive_layer_norm`, and so are the rest.
        update: as there.
        gate: as there.
        scale: as there.
        shift: as there.
        weight: as there.
        eps: as in :func:`adaptive_rms_norm`.

    Returns:
        The norm, and the sum, as there.

    Raises:
        ValueError: as the norm without the sum, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, update, gate = torch.randn(2, 16, 64), torch.randn(2, 16, 64), torch.randn(2, 64)
        >>> out, total = cudnn_ops.gate_add_adaptive_rms_norm(x, update, gate)
        >>> torch.allclose(out, torch.nn.functional.rms_norm(total, (64,), eps=1e-6), atol=1e-5)
        True
    """
    try:
        return _gate_add_rms(input, update, gate, scale, shift, weight=weight, eps=eps)
    except RuntimeError:
        refuse_wrong_types(_gate_add_rms_op, locals())
        raise


#: The differentiable arguments, in the order of the backward's mask and results.
_INPUTS = ("input", "update", "gate", "scale", "shift", "weight", "bias")


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _adaptive_norm_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._adaptive_norm_check.default(*args[:-1])
    call = bind(_ops._adaptive_norm.default, args, {})
    input = call.input

    def stats(is_wanted: bool) -> Tensor:
        shape = input.shape[:-1] if is_wanted else (0,)
        return input.new_empty(shape, dtype=_stats_dtype(input.dtype))

    return (
        input.new_empty(input.shape),
        input.new_empty(0 if call.update is None else input.shape),
        stats(call.with_stats and call.is_layer),
        stats(call.with_stats),
    )


def _adaptive_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _ops._adaptive_norm_backward_check.default(*args)
    call = bind(_ops._adaptive_norm_backward.default, args, {})

    def gradient(name: str, is_wanted: bool) -> Tensor:
        if not is_wanted:
            return call.input.new_empty(0, dtype=_stats_dtype(call.input.dtype))
        like = getattr(call, name)
        return like.new_empty(like.shape)

    return tuple(map(gradient, _INPUTS, call.output_mask))


def _beside(input: Tensor, modulation: Tensor) -> Tensor:
    """Gate, scale or shift, with as many dimensions as the input."""
    if modulation.dim() == input.dim():
        return modulation
    return modulation.reshape(modulation.shape[0], *(1,) * (input.dim() - 2), modulation.shape[1])


def adaptive_norm_in_torch(
    call: SimpleNamespace, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``_adaptive_norm`` by torch's operators, computed in ``dtype``."""
    input = call.input
    x, total = input.to(dtype), input.new_empty(0)
    if call.update is not None:
        gate = _beside(input, call.gate).to(dtype)
        total = (x + gate * call.update.to(dtype)).to(input.dtype)
        x = total.to(dtype)
    mean = None
    if call.is_layer:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        out = (x - mean) * (rstd := (var + call.eps).rsqrt())
    else:
        out = x * (rstd := (x.square().mean(-1, keepdim=True) + call.eps).rsqrt())
    if call.weight is not None:
        out = out * call.weight.to(dtype)
    if call.bias is not None:
        out = out + call.bias.to(dtype)
    if call.scale is not None:
        out = out * (1 + _beside(input, call.scale).to(dtype))
    if call.shift is not None:
        out = out + _beside(input, call.shift).to(dtype)
    kept = _stats_dtype(input.dtype)

    def stats(part: Tensor | None) -> Tensor:
        if part is None or not call.with_stats:
            return input.new_empty(0, dtype=kept)
        return part.squeeze(-1).to(kept)

    return out.to(input.dtype).contiguous(), total.contiguous(), stats(mean), stats(rstd)


def _adaptive_norm_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _adaptive_norm_fake(*args)
    call = bind(_ops._adaptive_norm.default, args, {})
    if call.input.numel() > 0:
        # A mean in float64, or equal numbers would be far from it where eps is small, and the sum
        # of large ones infinite.
        return adaptive_norm_in_torch(call, torch.float64)
    return results


def _adaptive_norm_backward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _adaptive_norm_backward_fake(*args)
    call = bind(_ops._adaptive_norm_backward.default, args, {})
    input = call.input
    if input.numel() == 0:
        for result in results:
            result.zero_()
        return results
    dtype = _stats_dtype(input.dtype)

    def wide(tensor: Tensor | None, otherwise: float) -> Tensor:
        """In the dtype of the sums, beside the input; a number where there is no tensor."""
        if tensor is None:
            return input.new_full((), otherwise, dtype=dtype)
        return (tensor if tensor.dim() == 1 else _beside(input, tensor)).to(dtype)

    grad, x = call.grad_out.to(dtype), input.to(dtype)
    weight, bias = wide(call.weight, 1), wide(call.bias, 0)
    factor = 1 + wide(call.scale, 0)
    rstd = call.rstd.unsqueeze(-1)
    normed = (x - call.mean.unsqueeze(-1) if call.is_layer else x) * rstd
    slopes = grad * weight * factor
    of_sum = slopes - normed * (slopes * normed).mean(-1, keepdim=True)
    if call.is_layer:
        of_sum = of_sum - slopes.mean(-1, keepdim=True)
    of_sum = of_sum * rstd + wide(call.grad_sum, 0)
    terms = {
        "input": lambda: of_sum,
        "update": lambda: of_sum * wide(call.gate, 1),
        "gate": lambda: of_sum * wide(call.update, 1),
        "scale": lambda: grad * (normed * weight + bias),
        "shift": lambda: grad,
        "weight": lambda: grad * factor * normed,
        "bias": lambda: grad * factor,
    }
    for name, is_wanted, result in zip(_INPUTS, call.output_mask, results, strict=True):
        if is_wanted:
            like = getattr(call, name)
            shape = like.shape if like.dim() == 1 else _beside(input, like).shape
            result.copy_(terms[name]().sum_to_size(shape).reshape(result.shape))
    return results


register("_adaptive_norm", fake=_adaptive_norm_fake, cpu=_adaptive_norm_cpu)
register(
    "_adaptive_norm_backward", fake=_adaptive_norm_backward_fake, cpu=_adaptive_norm_backward_cpu
)
