"""Rotary position embedding: the public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/rotary*``, the derivative in ``csrc/ops/rotary/rotary.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_ops.ops.activation import wide
from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_rotary_embedding = fast(_ops.rotary_embedding.default)
_with_options = fast(_ops.rotary_embedding.options)
_rotary_embedding_qk = fast(_ops.rotary_embedding_qk.default)


def rotary_embedding(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    sections: Sequence[int] | None = None,
) -> Tensor:
    r"""Turns pairs of each head's numbers, by an angle for each token and pair.

    .. math::
        (x_1, x_2) \mapsto (x_1 \cos - x_2 \sin,\; x_2 \cos + x_1 \sin)

    (Su et al., "RoFormer", equation 34.) A pair is a number of the first half and the one at the
    same place in the second, as in GPT-NeoX and Llama's models on Hugging Face:
    :math:`\mathrm{out} = x \cdot \cos + [-x_2, x_1] \cdot \sin` with the halves
    :math:`x_1, x_2` of x. With ``interleaved``, neighbours are pairs, as in the paper, in GPT-J, in
    Llama's original code and in many diffusion models.

    Computed in float32, with one kernel in each direction. Differentiable in the input, any number
    of times.

    Args:
        input: [B, H, S, D] with any strides, float16, bfloat16 or float32; on a CPU also float64.
        cos: [B or 1, S, D], a factor for each number, in the input's dtype or float32.
        sin: likewise.
        interleaved: whether pairs are (0, 1), (2, 3), ... instead of (0, D / 2), (1, D / 2 + 1),
            ...; the two factors of a pair are where its numbers are.
        rotary_dim: how many numbers at the start of each head turn, even; the others are copied.
            ``cos`` and ``sin`` then have that many columns, or half as many: one for each pair.
            None stands for D, with a column for each number.
        positions: int32 or int64 [B or 1, S]: ``cos`` and ``sin`` are tables [N, columns], and the
            token's rows are these. On a GPU, positions are checked only with
            ``CUDNN_OPS_CHECK=1``, which waits for the GPU; without it, one outside of the table
            takes the table's nearest row.
        sections: how many pairs belong to each of up to four axes, such as time, height and width
            (``mrope_section`` of Qwen2-VL); the sum is ``rotary_dim / 2``. The axes come first in
            ``positions``, [A, B or 1, S], or, without these, in ``cos`` and ``sin``, [A, B or 1, S,
            columns]. A pair takes its own columns, of the axis that its section is of.

    Returns:
        [B, H, S, D] in the input's dtype, stored as [B, S, H, D].

    Raises:
        ValueError: shapes or devices that do not fit; positions outside of the table.
        TypeError: unsupported dtypes.
        NotImplementedError: ``cos`` or ``sin`` requires a gradient.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(1, 8, 10, 64)
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** (-torch.arange(32) / 32)).repeat(1, 2)
        >>> cudnn_ops.rotary_embedding(q, angles.cos()[None], angles.sin()[None]).shape
        torch.Size([1, 8, 10, 64])
        >>> cos, sin = angles.cos()[:, :16], angles.sin()[:, :16]  # a table of 16 pairs
        >>> last = torch.tensor([[7, 8, 9]])
        >>> cudnn_ops.rotary_embedding(q[:, :, 7:], cos, sin, rotary_dim=32, positions=last).shape
        torch.Size([1, 8, 3, 64])
    """
    try:
        if not interleaved and rotary_dim is None and positions is None and sections is None:
            return _rotary_embedding(input, cos, sin)
        return _with_options(
            input,
            cos,
            sin,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            positions=positions,
            sections=sections,
        )
    except RuntimeError:
        refuse_wrong_types(_ops.rotary_embedding.options, locals())
        raise


def rotary_embedding_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    sections: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`rotary_embedding` of queries and keys, with one kernel for both in each direction.

    Args:
        query: [B, H, S, D], as the input there.
        key: [B, heads, S, D] with any number of heads, in the query's dtype.
        cos: as there.
        sin: as there.
        interleaved: as there.
        rotary_dim: as there.
        positions: as there.
        sections: as there.

    Returns:
        Both, each as there.

    Raises:
        ValueError: as there, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> q, k = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64)
        >>> angles = torch.randn(1, 10, 64)
        >>> q, k = cudnn_ops.rotary_embedding_qk(q, k, angles.cos(), angles.sin())
        >>> q.shape, k.shape
        (torch.Size([1, 8, 10, 64]), torch.Size([1, 2, 10, 64]))
    """
    try:
        return _rotary_embedding_qk(
            query,
            key,
            cos,
            sin,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            positions=positions,
            sections=sections,
        )
    except RuntimeError:
        refuse_wrong_types(_ops.rotary_embedding_qk.default, locals())
        raise


def _rotary_fake(
    input: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    layout: Sequence[int],
    is_backward: bool,
) -> tuple[Tensor, Tensor]:
    _ops._rotary_check.default(input, key, cos, sin, positions, layout, is_backward)

    def like(heads: Tensor) -> Tensor:
        batch, count, tokens, size = heads.shape
        return heads.new_empty((batch, tokens, count, size)).transpose(1, 2)

    return like(input), input.new_empty(0) if key is None else like(key)


def _unpacked(layout: Sequence[int], size: int) -> tuple[bool, int, Sequence[int]]:
    """Whether pairs are neighbours, how many numbers turn, and the pairs of each section.

    As in ``csrc/ops/rotary/rotary.h``.
    """
    interleaved, rotary_dim, *sections = layout
    return bool(interleaved), rotary_dim or size, sections


def _of_pairs(numbers: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second number of each pair in the last dimension."""
    if interleaved:
        return numbers[..., ::2], numbers[..., 1::2]
    first, second = numbers.chunk(2, -1)
    return first, second


def _factors(
    factors: Tensor, positions: Tensor | None, layout: Sequence[int], size: int
) -> tuple[Tensor, Tensor]:
    """What the numbers of each pair are multiplied by, [B or 1, 1, S, pairs] each."""
    interleaved, turned, sections = _unpacked(layout, size)
    rows = wide(factors if positions is None else factors[positions])
    first, second = _of_pairs(rows, interleaved) if rows.shape[-1] == turned else (rows, rows)
    if sections:
        first, second = (_of_sections(part, sections) for part in (first, second))
    return first.unsqueeze(1), second.unsqueeze(1)


def _of_sections(factors: Tensor, sections: Sequence[int]) -> Tensor:
    """Those of each section, [B or 1, S, pairs], from the axis that it is of."""
    parts = factors.split(tuple(sections), dim=-1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], -1)


def rotary_in_torch(
    input: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    layout: Sequence[int],
    is_backward: bool,
) -> tuple[Tensor, Tensor]:
    """The results of ``_rotary`` by torch's operators."""
    interleaved, turned, _ = _unpacked(layout, input.shape[-1])
    cos_first, cos_second = _factors(cos, positions, layout, input.shape[-1])
    sin_first, sin_second = _factors(sin, positions, layout, input.shape[-1])
    if is_backward:
        sin_first, sin_second = -sin_second, -sin_first

    def turn(heads: Tensor) -> Tensor:
        first, second = _of_pairs(wide(heads[..., :turned]), interleaved)
        parts = first * cos_first - second * sin_first, second * cos_second + first * sin_second
        both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        out = both.to(heads.dtype)
        if turned != heads.shape[-1]:
            out = torch.cat([out, heads[..., turned:]], -1)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    return turn(input), input.new_empty(0) if key is None else turn(key)


def _rotary_cpu(
    input: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    layout: Sequence[int],
    is_backward: bool,
) -> tuple[Tensor, Tensor]:
    _ops._rotary_check.default(input, key, cos, sin, positions, layout, is_backward)
    return rotary_in_torch(input, key, cos, sin, positions, layout, is_backward)


register("_rotary", fake=_rotary_fake, cpu=_rotary_cpu)
