"""Batch norm by the statistics of all processes of a group, as torch's SyncBatchNorm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cudnn_ops.ops.activation import ACTIVATIONS, before_activation
from cudnn_ops.ops.batch_norm import BatchNormActivation, over_batch, update_running
from cudnn_ops.ops.image_order import in_order_of, per_channel, stats_dtype

_ops = torch.ops.cudnn_ops


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *,
    group: dist.ProcessGroup,
    residual: Tensor | None = None,
    activation: BatchNormActivation = "none",
) -> Tensor:
    """:func:`cudnn_ops.batch_norm` in training, of all processes' batches as one.

    Gradients of weight and bias are those of the process's own batch, as in torch: whoever trains
    on several processes adds them up.

    Args:
        input: of this process; the number of samples may be another in each, and 0.
        running_mean: as there, like the rest.
        running_var: as there.
        weight: as there.
        bias: as there.
        momentum: as there.
        eps: as there.
        group: the processes, all of which make the call, and then its backward.
        residual: as there.
        activation: as there.
    """
    if running_mean is not None or running_var is not None:
        vectors = (running_mean, running_var, weight, bias, residual)
        _ops._batch_norm_check.default(input, *vectors, momentum, eps, 0, False)
    with torch.no_grad():
        mean, var, counts = _joint_moments(input, group)
        update_running((running_mean, running_var), mean, var, counts.sum(), momentum)
    return _SyncBatchNorm.apply(
        *(input, weight, bias, residual, mean, var, counts, eps, activation, group)
    )


def _moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in the dtype of statistics; 0 of nothing."""
    dtype = stats_dtype(input.dtype)
    if input.numel() == 0:
        none = input.new_zeros(input.shape[1], dtype=dtype)
        return none, none
    if _has_kernels(input):
        return torch.batch_norm_update_stats(input, None, None, 0.0)
    wide = input.to(dtype if input.is_cuda else torch.float64)
    var, mean = torch.var_mean(wide, over_batch(input), correction=0)
    return mean.to(dtype), var.to(dtype)


def _has_kernels(input: Tensor) -> bool:
    """Torch has kernels of its SyncBatchNorm on GPUs, and no fake ones: they cannot be traced."""
    return input.is_cuda and not torch.compiler.is_compiling()


def _gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all processes. As a sum, which every backend has."""
    rows = row.new_zeros(dist.get_world_size(group), row.shape[0])
    rows[dist.get_rank(group)] = row
    dist.all_reduce(rows, group=group)
    return rows


def _joint_moments(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of all processes' values, and the number of each process's."""
    mean, var = _moments(input)
    count = mean.new_full((1,), input.numel() // max(input.shape[1], 1))
    channels = input.shape[1]
    rows = _gather(torch.cat([mean, var, count]), group)
    means, variances, counts = rows.split([channels, channels, 1], dim=1)
    shares = counts / counts.sum()
    joint = (means * shares).sum(0)
    return joint, ((variances + (means - joint).square()) * shares).sum(0), counts.squeeze(1)


class _Saved(NamedTuple):
    """What a backward reads. A tuple, since Dynamo traces no other class of ours there."""

    input: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    counts: Tensor


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        counts: Tensor,
        eps: float,
        activation: BatchNormActivation,
        group: dist.ProcessGroup,
    ) -> Tensor:
        number = ACTIVATIONS.index(activation)
        out: Tensor = _ops._batch_norm_inference.default(
            input, mean, var, weight, bias, residual, 0.0, eps, number
        )
        of_relu = out if activation == "relu" else None
        ctx.save_for_backward(input, weight, of_relu, mean, (var + eps).rsqrt(), counts)
        ctx.activation, ctx.group = activation, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, out, mean, rstd, counts = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
        grad = before_activation(grad_out, out, ctx.activation)
        sums = _ops._batch_norm_backward.default(
            *(grad, input, weight, None, None, mean, rstd, False, 0),
            (False, True, True, False),
            False,
        )
        of_weight, of_bias = sums[1:3]
        of_input = None
        if wants_input:
            joint = torch.cat([of_bias, of_weight])
            dist.all_reduce(joint, group=ctx.group)
            saved = _Saved(input, weight, mean, rstd, counts)
            of_input = _input_gradient(saved, grad, *joint.chunk(2))
        return (
            of_input,
            of_weight if wants_weight else None,
            of_bias if wants_bias else None,
            grad if wants_residual else None,
            *(None,) * 6,
        )


def _input_gradient(saved: _Saved, grad: Tensor, of_bias: Tensor, of_weight: Tensor) -> Tensor:
    """From the sums of all processes."""
    input, weight, mean, rstd = saved.input, saved.weight, saved.mean, saved.rstd
    if input.numel() == 0:
        return torch.empty_like(input)
    dtype = mean.dtype
    factor = None if weight is None else weight.to(dtype)
    if _has_kernels(input):
        order = in_order_of(input, grad)
        # Of the products with what is not divided by the deviation.
        products = of_weight / rstd
        return torch.batch_norm_backward_elemt(
            *(order, in_order_of(input, input), mean, rstd, factor, of_bias, products),
            saved.counts.to(torch.int32),
        )
    total = saved.counts.sum()
    normed = (input.to(dtype) - per_channel(mean, input)) * per_channel(rstd, input)
    centered = grad.to(dtype) - per_channel(of_bias / total, input)
    found = (centered - normed * per_channel(of_weight / total, input)) * per_channel(rstd, input)
    if factor is not None:
        found = found * per_channel(factor, input)
    return in_order_of(input, found.to(input.dtype))
