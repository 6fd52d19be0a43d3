"""Group norm: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/group_norm*``, the derivative and the autocast rule in
``csrc/ops/group_norm*.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
#: To look up an overload takes a tenth of a microsecond.
_group_norm_op = _ops.group_norm.default
_add_group_norm_op = _ops.add_group_norm.default
_group_norm = fast(_group_norm_op)
_add_group_norm = fast(_add_group_norm_op)

#: What group norm can end with.
NormActivation = Literal["none", "silu"]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: NormActivation = "none",
) -> Tensor:
    r"""Group norm, with an activation; replaces ``torch.nn.functional.group_norm`` by name.

    .. math::
        \mathrm{out} = \mathrm{act}\!\left(\frac{x - \mathrm{mean}(x)}
            {\sqrt{\mathrm{var}(x) + \varepsilon}} \cdot w + b\right)

    (Wu and He, "Group normalization", equations 1 to 4.) Mean and biased variance are those of a
    sample's group of ``C / num_groups`` channels, over all positions; one group makes it a layer
    norm of each sample, C groups an instance norm. Computed in float32. Differentiable once.

    Args:
        input: ``[N, C, ...]`` with any number of dimensions behind the channels, float16, bfloat16
            or float32; on a CPU also float64. Channels may be last in memory
            (``torch.channels_last``) or not, both are read as they lie; what is dense in neither
            order is copied to the nearer one.
        num_groups: a divisor of C.
        weight: ``[C]``, in the input's dtype or float32; None stands for ones.
        bias: likewise; None stands for zeros.
        eps: added to the variance.
        activation: ``"silu"`` or ``"none"``.

    Returns:
        A tensor of the input's shape, dtype and memory order; float32 under CUDA autocast.

    Raises:
        ValueError: shapes, devices, groups or an activation that do not fit; a group of one number,
            as in torch.
        TypeError: an unsupported dtype; an argument of a wrong type.
        NotImplementedError: the GPU is older than the A100.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 64, 8, 8).contiguous(memory_format=torch.channels_last)
        >>> weight, bias = torch.ones(64), torch.zeros(64)
        >>> out = cudnn_ops.group_norm(x, 32, weight, bias, activation="silu")
        >>> expected = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 32, weight, bias))
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    try:
        if activation == "none":  # a keyword argument costs half a microsecond
            return _group_norm(input, num_groups, weight, bias, eps)
        return _group_norm(input, num_groups, weight, bias, eps, activation=activation)
    except RuntimeError:
        refuse_wrong_types(_group_norm_op, locals())
        raise


def add_group_norm(
    input: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: NormActivation = "none",
) -> tuple[Tensor, Tensor]:
    """:func:`group_norm` of ``input + residual``, and that sum: the next residual.

    Args:
        input: as in :func:`group_norm`.
        residual: of the input's shape and dtype; copied to the input's memory order if it has
            another one. Under autocast, where the dtypes differ, all tensors are cast to the one
            that ``input + residual`` has in torch.
        num_groups: as there, and so are the rest.
        weight: as there.
        bias: as there.
        eps: as there.
        activation: as there.

    Returns:
        The norm, and the sum, in the input's memory order.

    Raises:
        ValueError: as the norm without the sum, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, residual = torch.randn(2, 64, 8, 8), torch.randn(2, 64, 8, 8)
        >>> out, residual_next = cudnn_ops.add_group_norm(x, residual, 32, activation="silu")
        >>> torch.equal(residual_next, x + residual)
        True
    """
    try:
        return _add_group_norm(
            input, residual, num_groups, weight, bias, eps, activation=activation
        )
    except RuntimeError:
        refuse_wrong_types(_add_group_norm_op, locals())
        raise


def _group_norm_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._group_norm_check.default(*args[:-1])
    call = bind(_ops._group_norm.default, args, {})
    input = call.input
    shape = (input.shape[0], call.num_groups) if call.with_stats else (0,)
    mean, rstd = (input.new_empty(shape, dtype=stats_dtype(input.dtype)) for _ in range(2))
    total = input.new_empty(0) if call.residual is None else empty_in_order_of(input)
    return empty_in_order_of(input), total, mean, rstd


def _group_norm_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._group_norm_backward_check.default(*args)
    call = bind(_ops._group_norm_backward.default, args, {})
    wants_input, *wants_parameters = call.output_mask

    def none() -> Tensor:
        return call.input.new_empty(0, dtype=stats_dtype(call.input.dtype))

    of_weight, of_bias = (
        like.new_empty(like.shape) if is_wanted else none()
        for like, is_wanted in zip((call.weight, call.bias), wants_parameters, strict=True)
    )
    return empty_in_order_of(call.input) if wants_input else none(), of_weight, of_bias


def _in_groups(tensor: Tensor, num_groups: int) -> Tensor:
    """[N, C, ...] as [N, groups, numbers of a group]."""
    samples, channels = tensor.shape[:2]
    numbers = channels // num_groups * math.prod(tensor.shape[2:])
    return tensor.reshape(samples, num_groups, numbers)


def group_norm_in_torch(
    call: SimpleNamespace, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``_group_norm`` by torch's operators, computed in ``dtype``."""
    input = call.input
    total = input.new_empty(0)
    if call.residual is not None:
        total = in_order_of(input, input + call.residual)
    source = input if call.residual is None else total
    groups = _in_groups(source.to(dtype), call.num_groups)
    var, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    rstd = (var + call.eps).rsqrt()
    out = ((groups - mean) * rstd).reshape(input.shape)
    if call.weight is not None:
        out = out * per_channel(call.weight.to(dtype), input)
    if call.bias is not None:
        out = out + per_channel(call.bias.to(dtype), input)
    kept = stats_dtype(input.dtype)
    return (
        in_order_of(input, activate(out, ACTIVATIONS[call.activation]).to(input.dtype)),
        total,
        *(
            part.squeeze(-1).to(kept) if call.with_stats else input.new_empty(0, dtype=kept)
            for part in (mean, rstd)
        ),
    )


def _group_norm_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _group_norm_fake(*args)
    call = bind(_ops._group_norm.default, args, {})
    if call.input.numel() > 0:
        # A mean in float64, or equal numbers would be far from it where eps is small, and the sum
        # of large ones infinite.
        return group_norm_in_torch(call, torch.float64)
    return results


def _group_norm_backward_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = _group_norm_backward_fake(*args)
    call = bind(_ops._group_norm_backward.default, args, {})
    input, groups = call.input, call.num_groups
    if input.numel() == 0:
        for result in results:
            result.zero_()
        return results
    dtype = stats_dtype(input.dtype)
    grad, mean, rstd = call.grad_out.to(dtype), call.mean.unsqueeze(-1), call.rstd.unsqueeze(-1)
    normed = (_in_groups(input.to(dtype), groups) - mean) * rstd
    normed_image = normed.reshape(input.shape)
    weight = None if call.weight is None else per_channel(call.weight.to(dtype), input)
    before = normed_image if weight is None else normed_image * weight
    if call.bias is not None:
        before = before + per_channel(call.bias.to(dtype), input)
    grad = before_activation(grad, before, ACTIVATIONS[call.activation])
    if call.output_mask[0]:
        weighed = _in_groups(grad if weight is None else grad * weight, groups)
        along = (weighed * normed).mean(-1, keepdim=True)
        of_input = (weighed - weighed.mean(-1, keepdim=True) - normed * along) * rstd
        of_input = of_input.reshape(input.shape)
        more = 0 if call.grad_sum is None else call.grad_sum.to(dtype)
        results[0].copy_(of_input + more)
    dims: Sequence[int] = [0, *range(2, input.dim())]
    for wanted, result, terms in zip(
        call.output_mask[1:], results[1:], (grad * normed_image, grad), strict=True
    ):
        if wanted:
            result.copy_(terms.sum(dims))
    return results


register("_group_norm", fake=_group_norm_fake, cpu=_group_norm_cpu)
register("_group_norm_backward", fake=_group_norm_backward_fake, cpu=_group_norm_backward_cpu)
