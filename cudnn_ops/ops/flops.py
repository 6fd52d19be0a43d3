"""FLOP formulas of the operators, for ``torch.utils.flop_counter``.

Every pair of a query and a key that a window leaves is counted, as torch counts its own attention.
Lengths that lie on a device are read where they can be; otherwise each counts as the longest.

Imported when torch's flop counter is, which is slow to import and seldom needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.conv import is_transposed

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


def _call_pairs(call: SimpleNamespace, batch_and_heads: Sequence[int]) -> int:
    lengths = call.query.shape[-2], call.key.shape[-2]
    mask = call.window_size, call.is_causal, call.bottom_right
    return math.prod(batch_and_heads) * visible_pairs(*lengths, *mask)


@register_flop_formula([_ops.sdpa, _ops.sdpa_with_lse], get_raw=True)
def _sdpa_flop(*args: Any, out_val: Tensor | tuple[Tensor, Tensor], **kwargs: Any) -> int:
    call = bind(_ops.sdpa.default, args, kwargs)
    # The result has the heads and the batch that the others broadcast to.
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    return 2 * _call_pairs(call, out.shape[:-2]) * (call.query.shape[-1] + call.value.shape[-1])


@register_flop_formula(_ops._sdpa_fp8, get_raw=True)
def _sdpa_fp8_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._sdpa_fp8.default, args, kwargs)
    sizes = call.query.shape[3] + call.value.shape[3]
    return 2 * _call_pairs(call, call.query.shape[:2]) * sizes


@register_flop_formula(_ops._sdpa_mxfp8, get_raw=True)
def _sdpa_mxfp8_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._sdpa_mxfp8.default, args, kwargs)
    sizes = call.query.shape[3] + call.value.shape[3]
    return 2 * _call_pairs(call, call.query.shape[:2]) * sizes


@register_flop_formula(_ops._sdpa_fp8_backward, get_raw=True)
def _sdpa_fp8_backward_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._sdpa_fp8_backward.default, args, kwargs)
    sizes = 3 * call.query.shape[3] + 2 * call.value.shape[3]
    return 2 * _call_pairs(call, call.query.shape[:2]) * sizes


@register_flop_formula(_ops._sdpa_backward, get_raw=True)
def _sdpa_backward_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._sdpa_backward.default, args, kwargs)
    # The scores again, and the gradients of query and key; of the weights and of value.
    sizes = 3 * call.query.shape[3] + 2 * call.value.shape[3]
    return 2 * _call_pairs(call, call.out.shape[:-2]) * sizes


def _packed_pairs(call: SimpleNamespace) -> int:
    """Pairs of a query and a key, over all sequences and heads."""
    offsets, used = (call.cu_seqlens_q, call.cu_seqlens_k), (call.seqused_q, call.seqused_k)
    if holds_numbers(offsets[0]):
        sides = [
            (starts.diff() if some is None else some).tolist()
            for starts, some in zip(offsets, used, strict=True)
        ]
        lengths: list[tuple[int, int]] = list(zip(*sides, strict=True))
    else:
        lengths = [(int(call.max_seqlen_q), int(call.max_seqlen_k))] * (offsets[0].shape[0] - 1)
    return call.q.shape[1] * sum(
        visible_pairs(*both, call.window_size, call.causal, call.bottom_right) for both in lengths
    )


@register_flop_formula([_ops.varlen_attention, _ops.varlen_attention_with_lse], get_raw=True)
def _varlen_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops.varlen_attention.default, args, kwargs)
    return 2 * _packed_pairs(call) * (call.q.shape[2] + call.v.shape[2])


@register_flop_formula(_ops._varlen_fp8, get_raw=True)
def _varlen_fp8_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._varlen_fp8.default, args, kwargs)
    return 2 * _packed_pairs(call) * (call.q.shape[2] + call.v.shape[2])


@register_flop_formula(_ops._varlen_backward, get_raw=True)
def _varlen_backward_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._varlen_backward.default, args, kwargs)
    return 2 * _packed_pairs(call) * (3 * call.q.shape[2] + 2 * call.v.shape[2])


@register_flop_formula(
    [_ops.paged_attention, _ops.paged_attention_with_lse, _ops._paged_attention_out], get_raw=True
)
def _paged_flop(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
    call = bind(_ops.paged_attention.default, args, kwargs)
    heads, size = call.query.shape[-2:]
    batch, width = call.page_table.shape
    offsets, lengths = call.cu_seqlens_q, call.seq_lens_kv
    if holds_numbers(lengths):
        keys = lengths.tolist()
        queries = [call.query.shape[1]] * batch if offsets is None else offsets.diff().tolist()
    else:
        keys = [width * call.key_cache.shape[2 if call.head_major else 1]] * batch
        queries = [call.query.shape[1] if offsets is None else int(call.max_seqlen_q)] * batch
    pairs = sum(
        visible_pairs(*both, call.window_size, call.is_causal, call.bottom_right)
        for both in zip(queries, keys, strict=True)
    )
    return 2 * heads * pairs * (size + call.value_cache.shape[3])


@register_flop_formula(_ops._conv)
def _conv_flop(
    input: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    residual: Sequence[int] | None,
    geometry: Sequence[int],
    *args: Any,
    out_shape: tuple[Sequence[int], Sequence[int]],
    **kwargs: Any,
) -> int:
    return _products(input if is_transposed(geometry) else out_shape[0], weight)


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
    # Each number on the side that the kernel's positions are of takes part in one product a tap.
    places = input if is_transposed(geometry) else grad_out
    return (output_mask[0] + output_mask[1]) * _products(places, weight)


@register_flop_formula(_ops._linear)
def _linear_flop(input: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return _layer(input, weight)


@register_flop_formula(_ops._linear_backward)
def _linear_backward_flop(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight: Sequence[int],
    saved: Sequence[int] | None,
    activation: int,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    return sum(output_mask[:2]) * _layer(input, weight)


@register_flop_formula(_ops._mlp)
def _mlp_flop(
    input: Sequence[int],
    weight1: Sequence[int],
    bias1: Sequence[int] | None,
    weight2: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    return _layer(input, weight1) + _layer([*input[:-1], weight2[1]], weight2)


@register_flop_formula(_ops._mlp_backward)
def _mlp_backward_flop(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight1: Sequence[int],
    weight2: Sequence[int],
    hidden: Sequence[int],
    before: Sequence[int] | None,
    activation: int,
    gated: bool,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    of_first = sum(output_mask[:2]) * _layer(input, weight1)
    return of_first + (any(output_mask[:3]) + output_mask[3]) * _layer(hidden, weight2)


@register_flop_formula(_ops._grouped_linear)
def _grouped_linear_flop(
    input: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _layer(input, weight[1:])


@register_flop_formula(_ops._grouped_linear_backward)
def _grouped_linear_backward_flop(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight: Sequence[int],
    offsets: Sequence[int],
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    return sum(output_mask) * _layer(input, weight[1:])


def _layer(input: Sequence[int], weight: Sequence[int]) -> int:
    """Multiplications and additions of a linear layer, or of a gradient of it."""
    return 2 * math.prod(input) * weight[0]


def _products(out: Sequence[int], weight: Sequence[int]) -> int:
    """Multiplications and additions of a convolution with this result, or of a gradient of it."""
    return 2 * math.prod(out) * math.prod(weight[1:])
