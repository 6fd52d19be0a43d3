"""FLOP formulas of the operators, for ``torch.utils.flop_counter``.

Every pair of a query and a key that a window leaves is counted, as torch counts its own attention.
Lengths that lie on a device are read where they can be; otherwise each counts as the longest.

Imported when the flop counter is: that takes long, and most programs do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from cudnn_ops.ops.varlen import call_options

_ops = torch.ops.cudnn_ops


def holds_numbers(tensor: Tensor) -> bool:
    """Whether its numbers can be read: FLOPs are counted without them too."""
    return not (tensor.is_meta or is_fake(tensor))


def visible_pairs(
    length: int, length_kv: int, window_size: Sequence[int], is_causal: bool, bottom_right: bool
) -> int:
    """How many pairs of a query and a key a window leaves.

    Without one it is all of them, causal or not: torch's own convention for attention, so that
    models can be compared.
    """
    left, right = window_size
    if left < 0 and right < 0:
        return length * length_kv
    right = 0 if is_causal else right
    shift = length_kv - length if bottom_right else 0
    pairs = 0
    for i in range(length):
        first = max(0, i + shift - left) if left >= 0 else 0
        last = min(length_kv - 1, i + shift + right) if right >= 0 else length_kv - 1
        pairs += max(0, last - first + 1)
    return pairs


def _pairs(
    query: Sequence[int],
    key: Sequence[int],
    out: Sequence[int],
    is_causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    bottom_right: bool = False,
    **_: Any,
) -> int:
    """``out`` has the heads and the batch that the others broadcast to."""
    pairs = visible_pairs(query[-2], key[-2], window_size, is_causal, bottom_right)
    return math.prod(out[:-2]) * pairs


@register_flop_formula([_ops.sdpa, _ops.sdpa_with_lse], get_raw=True)
def _sdpa_flop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    out_val: Tensor | tuple[Tensor, Tensor],
    **options: Any,
) -> int:
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    pairs = _pairs(query.shape, key.shape, out.shape, is_causal, **options)
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


@register_flop_formula(_ops._sdpa_backward)
def _sdpa_backward_flop(
    grad_out: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    out: Sequence[int],
    lse: Sequence[int],
    attn_mask: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    bottom_right: bool = False,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = _pairs(query, key, out, is_causal, window_size, bottom_right)
    # The scores again, and the gradients of query and key; of the weights and of value.
    return 2 * pairs * (3 * query[3] + 2 * value[3])


def _packed_pairs(q: Tensor, options: dict[str, Any]) -> int:
    """Pairs of a query and a key, over all sequences."""
    longest = (int(options["max_seqlen_q"]), int(options["max_seqlen_k"]))
    if not holds_numbers(options["cu_seqlens_q"]):
        lengths = [longest] * (options["cu_seqlens_q"].shape[0] - 1)
    else:
        sides = [
            (options[f"cu_seqlens_{side}"].diff() if used is None else used).tolist()
            for side, used in (("q", options["seqused_q"]), ("k", options["seqused_k"]))
        ]
        lengths = list(zip(*sides, strict=True))
    return q.shape[1] * sum(
        visible_pairs(
            length,
            length_kv,
            options["window_size"],
            options["causal"],
            options["bottom_right"],
        )
        for length, length_kv in lengths
    )


@register_flop_formula([_ops.varlen_attention, _ops.varlen_attention_with_lse], get_raw=True)
def _varlen_flop(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return 2 * _packed_pairs(q, call_options(args, kwargs)) * (q.shape[2] + v.shape[2])


@register_flop_formula(_ops._varlen_backward, get_raw=True)
def _varlen_backward_flop(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *args: Any,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 2 * _packed_pairs(q, call_options(args, kwargs)) * (3 * q.shape[2] + 2 * v.shape[2])


@register_flop_formula(
    [_ops.paged_attention, _ops.paged_attention_with_lse, _ops._paged_attention_out], get_raw=True
)
def _paged_flop(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    window_size: tuple[int, int] = (-1, -1),
    is_causal: bool = False,
    bottom_right: bool = True,
    head_major: bool = False,
    out_val: Any = None,
    **options: Any,
) -> int:
    heads, size = query.shape[-2:]
    batch, width = page_table.shape
    if holds_numbers(seq_lens_kv):
        keys = seq_lens_kv.tolist()
        queries = [query.shape[1]] * batch if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
    else:
        keys = [width * key_cache.shape[2 if head_major else 1]] * batch
        queries = [query.shape[1] if cu_seqlens_q is None else int(max_seqlen_q)] * batch
    pairs = sum(
        visible_pairs(*lengths, window_size, is_causal, bottom_right)
        for lengths in zip(queries, keys, strict=True)
    )
    return 2 * heads * pairs * (size + value_cache.shape[3])


@register_flop_formula(_ops._conv)
def _conv_flop(
    input: Sequence[int],
    weight: Sequence[int],
    *args: Any,
    out_shape: tuple[Sequence[int], Sequence[int]],
    **kwargs: Any,
) -> int:
    return _products(out_shape[0], weight)


@register_flop_formula(_ops._conv_backward)
def _conv_backward_flop(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight: Sequence[int],
    saved: Sequence[int] | None,
    geometry: Sequence[int],
    activation: int,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    return (output_mask[0] + output_mask[1]) * _products(grad_out, weight)


def _products(out: Sequence[int], weight: Sequence[int]) -> int:
    """Multiplications and additions of a convolution with this result, or of a gradient of it."""
    return 2 * math.prod(out) * math.prod(weight[1:])
