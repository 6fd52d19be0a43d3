"""Batch norm: the public function, fake and CPU kernels.

The CUDA kernels, the derivative and the checks are in ``csrc/ops/batch_norm``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS, activate, before_activation
from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.image_order import (
    empty_in_order_of,
    in_order_of,
    per_channel,
    stats_dtype,
)
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_batch_norm_op = _ops.batch_norm.default
_batch_norm = fast(_batch_norm_op)

#: What batch norm can end with.
BatchNormActivation = Literal["none", "relu"]


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: BatchNormActivation = "none",
) -> Tensor:
    r"""Batch norm, a sum and an activation; replaces ``torch.nn.functional.batch_norm`` by name.

    .. math::
        \mathrm{out} = \mathrm{act}\!\left(\frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \cdot w
            + b + \mathrm{residual}\right)

    (Ioffe and Szegedy, "Batch normalization", algorithm 1.) In training :math:`\mu` and
    :math:`\sigma^2` are mean and biased variance of each channel over the batch and all positions,
    and the running statistics, where they are given, change in place by

    .. math::
        r \leftarrow (1 - \mathrm{momentum}) \cdot r + \mathrm{momentum} \cdot s

    with the batch's mean and its unbiased variance as :math:`s`; else they are the running
    statistics. Computed in float32. Differentiable once.

    Args:
        input: ``[N, C, ...]`` with any number of dimensions behind the channels, float16, bfloat16
            or float32; on a CPU also float64. Channels last in memory
            (``torch.channels_last``) is the fast order; channels first is read as it lies; what is
            dense in neither order is copied to the nearer one.
        running_mean: ``[C]``, in the input's dtype or float32; None in training: not kept.
        running_var: likewise, both or neither.
        weight: ``[C]``, in the input's dtype or float32; None stands for ones.
        bias: likewise; None stands for zeros.
        training: norm by the batch's own statistics, and change the running ones.
        momentum: how much of the batch's statistics the running ones take over.
        eps: added to the variance.
        residual: of the input's shape and dtype, added before the activation. Under autocast it
            may have another dtype; the sum then has the one that it has in torch.
        activation: ``"relu"`` or ``"none"``.

    Returns:
        A tensor of the input's shape, dtype and memory order.

    Raises:
        ValueError: shapes, devices or an activation that do not fit; no running statistics where
            ``training`` is False; one value a channel in training, as in torch.
        TypeError: an unsupported dtype; an argument of a wrong type.
        NotImplementedError: the GPU is older than the A100.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(8, 64, 7, 7).contiguous(memory_format=torch.channels_last)
        >>> mean, var = torch.zeros(64), torch.ones(64)
        >>> out = cudnn_ops.batch_norm(x, mean, var, training=True, residual=x, activation="relu")
        >>> expected = torch.nn.functional.batch_norm(x, None, None, training=True)
        >>> torch.allclose(out, (expected + x).relu(), atol=1e-5)
        True
        >>> torch.allclose(mean, 0.1 * x.mean((0, 2, 3)), atol=1e-6)
        True
    """
    try:
        return _batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            residual=residual,
            activation=activation,
        )
    except RuntimeError:
        refuse_wrong_types(_batch_norm_op, locals())
        raise


def _channels(input: Tensor) -> Tensor:
    """For a number of each channel."""
    return input.new_empty(input.shape[1], dtype=stats_dtype(input.dtype))


def _training_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._batch_norm_check.default(*args, True)
    input = args[0]
    return empty_in_order_of(input), _channels(input), _channels(input)


def _inference_fake(*args: Any) -> Tensor:
    _ops._batch_norm_check.default(*args, False)
    return empty_in_order_of(args[0])


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._batch_norm_backward_check.default(*args)
    call = bind(_ops._batch_norm_backward.default, args, {})
    input = call.input
    dtype = input.dtype if call.params_in_input_dtype else stats_dtype(input.dtype)
    wants_input, wants_weight, wants_bias, wants_residual = call.output_mask
    return (
        empty_in_order_of(input) if wants_input else input.new_empty(0),
        input.new_empty(input.shape[1] if wants_weight else 0, dtype=dtype),
        input.new_empty(input.shape[1] if wants_bias else 0, dtype=dtype),
        empty_in_order_of(input) if wants_residual else input.new_empty(0),
    )


def over_batch(input: Tensor) -> list[int]:
    """The dimensions that a channel's statistics are of."""
    return [0, *range(2, input.dim())]


def _scaled(call: SimpleNamespace, normed: Tensor) -> Tensor:
    """Times weight and plus bias, in its dtype."""
    if call.weight is not None:
        normed = normed * per_channel(call.weight.to(normed.dtype), normed)
    if call.bias is not None:
        normed = normed + per_channel(call.bias.to(normed.dtype), normed)
    return normed


def norm_in_torch(call: SimpleNamespace, mean: Tensor, var: Tensor) -> Tensor:
    """The output by torch's operators, by these statistics and in their dtype."""
    input, dtype = call.input, mean.dtype
    out = (input.to(dtype) - per_channel(mean, input)) * per_channel(
        (var + call.eps).rsqrt(), input
    )
    out = _scaled(call, out)
    if call.residual is not None:
        out = out + call.residual.to(dtype)
    out = activate(out, ACTIVATIONS[call.activation])
    return in_order_of(input, out.to(input.dtype))


def inference_in_torch(call: SimpleNamespace, dtype: torch.dtype) -> Tensor:
    """The result of ``_batch_norm_inference`` by torch's operators, computed in ``dtype``."""
    return norm_in_torch(call, call.running_mean.to(dtype), call.running_var.to(dtype))


def update_running(
    running: tuple[Tensor | None, Tensor | None],
    mean: Tensor,
    var: Tensor,
    count: int | Tensor,
    momentum: float,
) -> None:
    """Changes running statistics by those of a batch of ``count`` values a channel."""
    for statistic, of_batch in zip(running, (mean, var * (count / (count - 1))), strict=True):
        if statistic is not None:
            old = statistic.to(of_batch.dtype)
            statistic.copy_(old + momentum * (of_batch - old))


def _training_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = _training_fake(*args)
    call = bind(_ops._batch_norm_training.default, args, {})
    input = call.input
    if input.numel() == 0:
        return out, mean.zero_(), rstd.zero_()
    # In float64, or equal numbers would be far from their mean where eps is small, and the sum of
    # large ones infinite.
    wide = input.to(torch.float64)
    batch_var, batch_mean = torch.var_mean(wide, over_batch(input), correction=0)
    count = input.numel() // input.shape[1]
    running = (call.running_mean, call.running_var)
    update_running(running, batch_mean, batch_var, count, call.momentum)
    mean.copy_(batch_mean)
    rstd.copy_((batch_var + call.eps).rsqrt())
    return norm_in_torch(call, batch_mean, batch_var), mean, rstd


def _inference_cpu(*args: Any) -> Tensor:
    out = _inference_fake(*args)
    if out.numel() == 0:
        return out
    return inference_in_torch(bind(_ops._batch_norm_inference.default, args, {}), torch.float64)


def _backward_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _backward_fake(*args)
    call = bind(_ops._batch_norm_backward.default, args, {})
    input, dims = call.input, over_batch(call.input)
    if input.numel() == 0:
        for result in results:
            result.zero_()
        return results
    dtype = stats_dtype(input.dtype)
    rstd = per_channel(call.rstd, input)
    normed = (input.to(dtype) - per_channel(call.mean, input)) * rstd
    activation, out = ACTIVATIONS[call.activation], call.out
    if out is None and activation != "none":
        out = _scaled(call, normed)
    of_out = call.grad_out
    if call.grad_more is not None:
        of_out = of_out.to(dtype) + call.grad_more
    grad = before_activation(of_out, out, activation).to(dtype)
    of_input = grad
    if call.training:
        along = (grad * normed).mean(dims, keepdim=True)
        of_input = grad - grad.mean(dims, keepdim=True) - normed * along
    if call.weight is not None:
        of_input = of_input * per_channel(call.weight.to(dtype), input)
    gradients = (
        lambda: of_input * rstd,
        lambda: (grad * normed).sum(dims),
        lambda: grad.sum(dims),
        lambda: grad,
    )
    for is_wanted, result, gradient in zip(call.output_mask, results, gradients, strict=True):
        if is_wanted:
            result.copy_(gradient())
    return results


register("_batch_norm_training", fake=_training_fake, cpu=_training_cpu)
register("_batch_norm_inference", fake=_inference_fake, cpu=_inference_cpu)
register("_batch_norm_backward", fake=_backward_fake, cpu=_backward_cpu)
