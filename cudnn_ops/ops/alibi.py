"""Slopes of ALiBi, for the ``alibi_slopes`` of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    r"""The slopes of attention with linear biases, one for each head.

    .. math::
        \mathrm{slope}_i = 2^{-8 i / \mathrm{heads}}, \quad i = 1, \dots, \mathrm{heads}

    for a power of two (Press et al., "Train short, test long", section 3). Other numbers of heads
    take the slopes of the next smaller power of two, and then every other slope of twice that, from
    the first, as the authors' code does; so do BLOOM and MPT.

    Args:
        heads: query heads, at least 1.
        device: where the slopes shall be; None stands for torch's default device.

    Returns:
        float32 [heads].

    Raises:
        ValueError: ``heads`` is not a whole number, or less than 1.

    Example:
        >>> import torch, cudnn_ops
        >>> cudnn_ops.alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])
        >>> q = torch.randn(1, 3, 10, 16)
        >>> slopes = cudnn_ops.alibi_slopes(3)
        >>> cudnn_ops.scaled_dot_product_attention(q, q, q, alibi_slopes=slopes).shape
        torch.Size([1, 3, 10, 16])
    """
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"alibi_slopes: heads must be a whole number, at least 1, got {heads!r}")
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * index / power for index in range(1, power + 1)]
    # Those of twice the power, without those that are there already.
    exponents += [4 * index / power for index in range(1, 2 * (heads - power), 2)]
    # Python's powers are in float64: each slope is rounded once.
    return torch.tensor([2.0**-each for each in exponents], dtype=torch.float32, device=device)
