"""Rotary position embedding: the public function, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/rotary*``, the derivative in ``csrc/ops/rotary.cpp``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_ops.ops.activation import wide
from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_rotary_embedding_op = _ops.rotary_embedding.default


def rotary_embedding(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r"""Turns the halves of each head against each other, by an angle for each token.

    .. math::
        \mathrm{out} = x \cdot \cos + [-x_2, x_1] \cdot \sin

    where :math:`x_1` and :math:`x_2` are the halves of x (Su et al., "RoFormer", equation 34, in
    the order of GPT-NeoX and Llama). Computed in float32, with one kernel in each direction.
    Differentiable in the input, any number of times.

    Args:
        input: [B, H, S, D] with any strides, float16, bfloat16 or float32; on a CPU also float64.
        cos: [B or 1, S, D], in the input's dtype or float32.
        sin: likewise.

    Returns:
        [B, H, S, D] in the input's dtype, stored as [B, S, H, D].

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: unsupported dtypes.
        NotImplementedError: ``cos`` or ``sin`` requires a gradient.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(1, 8, 10, 64)
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** (-torch.arange(32) / 32)).repeat(1, 2)
        >>> cudnn_ops.rotary_embedding(q, angles.cos()[None], angles.sin()[None]).shape
        torch.Size([1, 8, 10, 64])
    """
    try:
        return _rotary_embedding_op(input, cos, sin)
    except RuntimeError:
        refuse_wrong_types(_rotary_embedding_op, locals())
        raise


def _rotary_fake(input: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    _ops._rotary_check.default(input, cos, sin)
    batch, heads, tokens, size = input.shape
    return input.new_empty((batch, tokens, heads, size)).transpose(1, 2)


def rotary_in_torch(input: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    """The result of ``_rotary`` by torch's operators."""
    x, c, s = wide(input), wide(cos).unsqueeze(1), wide(sin).unsqueeze(1)
    if is_backward:
        first, second = (x * s).chunk(2, -1)
        turned = torch.cat([second, -first], -1)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1) * s
    out = (x * c + turned).to(input.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _rotary_cpu(input: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    _ops._rotary_check.default(input, cos, sin)
    return rotary_in_torch(input, cos, sin, is_backward)


register("_rotary", fake=_rotary_fake, cpu=_rotary_cpu)
