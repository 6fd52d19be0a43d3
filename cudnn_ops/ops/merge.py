"""Merging attention over parts of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Merges attention of the same queries over two disjoint sets of keys.

    .. math::
        \mathrm{lse} = \log(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}), \quad
        \mathrm{out} = e^{\mathrm{lse}_a - \mathrm{lse}} \mathrm{out}_a
                     + e^{\mathrm{lse}_b - \mathrm{lse}} \mathrm{out}_b

    (Ye et al., "FlashInfer", section 2.2.) Any number of parts can be merged, in any order; at most
    one of them may use ``sinks``. Differentiable; torch.compile fuses it.

    Args:
        out_a: [batch, heads, length, value head size], as
            :func:`cudnn_ops.scaled_dot_product_attention_with_lse` returns it, or [tokens, heads,
            value head size], as :func:`cudnn_ops.varlen_attention_with_lse` does.
        lse_a: its log-sum-exp, [batch, heads, length] or [heads, tokens].
        out_b: the output over the other part, of ``out_a``'s shape.
        lse_b: likewise.

    Returns:
        The output, in ``out_a``'s dtype, and the log-sum-exp over both parts; 0 and ``-inf`` where
        a query sees no key in either part.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import torch, cudnn_ops
        >>> q, kv = torch.randn(1, 8, 4, 64), torch.randn(1, 8, 20, 64)
        >>> attend = cudnn_ops.scaled_dot_product_attention_with_lse
        >>> parts = attend(q, kv[:, :, :12], kv[:, :, :12]), attend(q, kv[:, :, 12:], kv[:, :, 12:])
        >>> out, _ = cudnn_ops.merge_attention_states(*parts[0], *parts[1])
        >>> torch.allclose(out, attend(q, kv, kv)[0], atol=1e-5)
        True
    """
    if out_a.dim() not in (3, 4) or out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            "cudnn_ops.merge_attention_states: out_a and out_b must both be [batch, heads, length, "
            f"head size] or [tokens, heads, head size] of one shape, got {tuple(out_a.shape)} and "
            f"{tuple(out_b.shape)}, with log-sum-exps "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    rows = out_a.shape[:3] if out_a.dim() == 4 else (out_a.shape[1], out_a.shape[0])
    if tuple(lse_a.shape) != tuple(rows):
        raise ValueError(
            f"cudnn_ops.merge_attention_states: lse_a must be {tuple(rows)} for an output "
            f"{tuple(out_a.shape)}, got "
            f"{tuple(lse_a.shape)}"
        )
    share_a, share_b, lse = _shares(lse_a, lse_b)
    out = _beside(share_a, out_a) * out_a + _beside(share_b, out_b) * out_b
    return out.to(out_a.dtype), lse


def merge_attention_state_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the attention over more keys into ``out`` and ``lse``, in place.

    No second output is in memory, as it would be by :func:`merge_attention_states`. The sum is
    rounded once. On a GPU all of it is one kernel.

    Args:
        out: the output so far, [batch, heads, length, value head size], in ``part``'s dtype or in
            that of the log-sum-exp.
        lse: its log-sum-exp, [batch, heads, length].
        part: the output over the other keys, of ``out``'s shape.
        part_lse: likewise.
    """
    _ops._merge_attention_state_.default(out, lse, part, part_lse)


def _merge_fake(*args: Tensor) -> None:
    _ops._merge_attention_check.default(*args)


def _merge_cpu(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    _ops._merge_attention_check.default(out, lse, part, part_lse)
    *shares, both = _shares(lse, part_lse)
    # What has no share counts for nothing, whatever it holds.
    terms = [
        (share.unsqueeze(-1) * x).masked_fill_((share == 0).unsqueeze(-1), 0.0)
        for share, x in zip(shares, (out, part), strict=True)
    ]
    out.copy_(terms[0].add_(terms[1]))
    lse.copy_(both)


register("_merge_attention_state_", fake=_merge_fake, cpu=_merge_cpu)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What either part's output is multiplied with, and the log-sum-exp over both."""
    # Relative to the larger one; where both are -inf the difference would be NaN.
    peak = torch.maximum(lse_a, lse_b).detach()
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = weight_a + weight_b
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (total.log() + peak).masked_fill(nothing, -torch.inf)
    return weight_a / total, weight_b / total, lse


def _beside(share: Tensor, out: Tensor) -> Tensor:
    """A share of each row, laid beside the rows of ``out``."""
    return (share if out.dim() == 4 else share.t()).unsqueeze(-1)
