"""Scaled dot-product attention: public functions, fake kernels, CPU kernels, FLOP formulas.

The CUDA kernel, the derivative and the autocast rule are in ``csrc/ops/sdpa*.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_ops = torch.ops.cudnn_ops


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention by cuDNN; replaces ``torch.nn.functional.scaled_dot_product_attention`` by name.

    .. math:: \mathrm{out} = \mathrm{softmax}(\mathrm{scale} \cdot Q K^T + M)\, V

    with :math:`M_{ij} = -\infty` where ``is_causal`` and :math:`j > i`, else 0 (Vaswani et al.,
    "Attention is all you need", equation 1). Differentiable once; the gradients are the same bits
    at every run under ``torch.use_deterministic_algorithms(True)``.

    Args:
        query: [batch, heads, length, head size]. Any strides with a last one of 1; memory in
            the order [batch, length, heads, head size], seen through ``transpose(1, 2)``, is
            the fast path. float16 or bfloat16; on a CPU float32 and float64 too.
        key: [batch, heads_kv, length_kv, head size], of the query's dtype and device.
        value: [batch, heads_kv, length_kv, value head size].
        attn_mask: must be None.
        dropout_p: must be 0.0.
        is_causal: query ``i`` attends to keys ``0..i`` (aligned top-left, as torch does it).
        scale: factor of the scores; None stands for ``1 / sqrt(head size)``. No plan is built
            anew for another value.
        enable_gqa: allows ``heads`` to be a multiple of ``heads_kv``; each key head then serves
            ``heads // heads_kv`` consecutive query heads, and is not expanded.

    Returns:
        [batch, heads, length, value head size]; dense, with the query's order of dimensions in
        memory. Zero where there is nothing to attend to (``length_kv == 0``).

    Raises:
        ValueError: shapes, strides, devices or scale that do not fit; head sizes that are not
            multiples of 8.
        TypeError: a dtype that cuDNN does not take, or two different ones.
        NotImplementedError: cuDNN has no kernel for this on this GPU; the message has its reason.
    """
    return _ops.sdpa.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def scaled_dot_product_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Like :func:`scaled_dot_product_attention`, and returns the log-sum-exp of the scores too.

    .. math:: \mathrm{lse}_i = \log \sum_j \exp(\mathrm{scale} \cdot q_i \cdot k_j + M_{ij})

    Both results are differentiable; a gradient of the log-sum-exp costs one more forward and
    one more backward pass, for cuDNN's own backward does not take one.

    Returns:
        The output, and the log-sum-exp: [batch, heads, length], float32 (float64 for float64
        inputs), contiguous, natural logarithm, ``-inf`` where there is nothing to attend to.
    """
    return _ops.sdpa_with_lse.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _empty_like_order(sizes: Sequence[int], like: Tensor) -> Tensor:
    """A dense tensor of ``sizes`` whose dimensions lie in memory in the order of ``like``'s.

    The same rule as ``dense_strides_like`` in csrc/ops/sdpa.cpp, for sizes that may be symbolic.
    """

    def lies_inside(a: int, b: int) -> bool:
        strides = like.stride()
        if guard_or_false(strides[a] == 0):  # broadcast: says nothing of an order, outermost
            return False
        return guard_or_false(strides[b] == 0) or guard_or_false(strides[a] < strides[b])

    order = [0, 1, 2]
    for end in (1, 2):  # insertion sort, outermost first, stable
        for i in range(end, 0, -1):
            if lies_inside(order[i - 1], order[i]):
                order[i - 1], order[i] = order[i], order[i - 1]
    order.append(3)
    inverse = [order.index(dim) for dim in range(4)]
    return like.new_empty([sizes[dim] for dim in order]).permute(inverse)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    _ops._sdpa_check.default(query, key, value, attn_mask, dropout_p, scale, enable_gqa)


def _sdpa_with_lse_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    sizes = [*query.shape[:3], value.shape[3]]
    lse = query.new_empty(sizes[:3], dtype=_lse_dtype(query.dtype))
    return _empty_like_order(sizes, query), lse


def _sdpa_fake(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _sdpa_with_lse_fake(query, key, value, *args, **kwargs)[0]


def _sdpa_backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_like_order(query.shape, query),
        _empty_like_order(key.shape, key),
        _empty_like_order(value.shape, value),
    )


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """Masked scores in the accumulation type, [B, Hkv, group, Sq, Skv]."""
    batch, heads, length, head_size = query.shape
    heads_kv, length_kv = key.shape[1:3]
    group = heads // heads_kv
    dtype = _lse_dtype(query.dtype)
    factor = 1.0 / math.sqrt(head_size) if scale is None else scale
    # Query heads that share a key head are rows of one product: the keys are not expanded.
    rows = query.to(dtype).reshape(batch, heads_kv, group * length, head_size)
    scores = (rows @ key.to(dtype).transpose(-1, -2)).mul_(factor)
    scores = scores.view(batch, heads_kv, group, length, length_kv)
    if is_causal:
        future = torch.ones(length, length_kv, dtype=torch.bool).triu_(1)
        scores.masked_fill_(future, -math.inf)
    return scores


def _sdpa_with_lse_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    sizes = [*query.shape[:3], value.shape[3]]
    out = _empty_like_order(sizes, query)
    lse = query.new_empty(sizes[:3], dtype=_lse_dtype(query.dtype))
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    scores = _scores(query, key, is_causal, scale)
    lse_rows = scores.logsumexp(-1, keepdim=True)
    probabilities = scores.sub_(lse_rows).exp_().flatten(2, 3)
    out.copy_((probabilities @ value.to(scores.dtype)).view(sizes))
    return out, lse.copy_(lse_rows.view(lse.shape))


def _sdpa_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _sdpa_with_lse_cpu(query, key, value, *args, **kwargs)[0]


def _sdpa_backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 1 to 5 of Dao et al., "FlashAttention", appendix B.2, without the tiles."""
    grads = _sdpa_backward_fake(grad_out, query, key, value, out, lse, is_causal, scale)
    grad_query, grad_key, grad_value = grads
    if out.numel() == 0 or key.shape[2] == 0:
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_()
    batch, heads, length, head_size = query.shape
    heads_kv = key.shape[1]
    dtype = _lse_dtype(query.dtype)
    factor = 1.0 / math.sqrt(head_size) if scale is None else scale

    def by_kv_head(tensor: Tensor) -> Tensor:  # [B, Hq, Sq, *] -> [B, Hkv, group * Sq, *]
        return tensor.to(dtype).reshape(batch, heads_kv, -1, tensor.shape[-1])

    grad_rows, out_rows, query_rows = by_kv_head(grad_out), by_kv_head(out), by_kv_head(query)
    lse_rows = by_kv_head(lse.unsqueeze(-1))
    scores = _scores(query, key, is_causal, scale).flatten(2, 3)
    probabilities = scores.sub_(lse_rows).exp_()
    delta = (grad_rows * out_rows).sum(-1, keepdim=True)
    grad_probabilities = grad_rows @ value.to(dtype).transpose(-1, -2)
    grad_scores = grad_probabilities.sub_(delta).mul_(probabilities).mul_(factor)
    grad_value.copy_(probabilities.transpose(-1, -2) @ grad_rows)
    grad_key.copy_(grad_scores.transpose(-1, -2) @ query_rows)
    grad_query.copy_((grad_scores @ key.to(dtype)).view(batch, heads, length, head_size))
    return grad_query, grad_key, grad_value


torch.library.register_fake("cudnn_ops::sdpa", _sdpa_fake)
torch.library.register_fake("cudnn_ops::sdpa_with_lse", _sdpa_with_lse_fake)
torch.library.register_fake("cudnn_ops::_sdpa_backward", _sdpa_backward_fake)
torch.library.impl("cudnn_ops::sdpa", "CPU", _sdpa_cpu)
torch.library.impl("cudnn_ops::sdpa_with_lse", "CPU", _sdpa_with_lse_cpu)
torch.library.impl("cudnn_ops::_sdpa_backward", "CPU", _sdpa_backward_cpu)


# torch's own convention for attention, so that models can be compared: the whole rectangle of
# scores counts, whatever the mask. Grouped heads count once for each query head.
@register_flop_formula([_ops.sdpa, _ops.sdpa_with_lse])
def _sdpa_flop(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return sdpa_flop_count(query, _per_query_head(query, key), _per_query_head(query, value))


@register_flop_formula(_ops._sdpa_backward)
def _sdpa_backward_flop(
    grad_out: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    key, value = _per_query_head(query, key), _per_query_head(query, value)
    return sdpa_backward_flop_count(grad_out, query, key, value)


def _per_query_head(query: Sequence[int], shape: Sequence[int]) -> list[int]:
    return [shape[0], query[1], *shape[2:]]
