"""FLOP formulas of attention over a split sequence: a rank's share of the whole.

Imported when torch's flop counter is, as ``cudnn_ops/ops/flops.py``.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.flops import holds_numbers, visible_pairs

_ops = torch.ops.cudnn_ops


def _pairs(call: SimpleNamespace) -> float:
    """Pairs of a query and a key in the whole sequence, for each rank, over its heads."""
    ranks = _resolve_process_group(GroupName(call.group)).size()
    lengths = [(ranks * call.q.shape[2], ranks * call.k.shape[2])]
    if call.cu_seqlens is not None and holds_numbers(call.cu_seqlens):
        starts = call.cu_seqlens.tolist()
        lengths = [(end - start, end - start) for start, end in pairwise(starts)]
    pairs = sum(
        visible_pairs(*both, call.window_size, call.is_causal, call.bottom_right)
        for both in lengths
    )
    return call.q.shape[0] * call.q.shape[1] * pairs / ranks


@register_flop_formula(_ops._ring_attention, get_raw=True)
def _ring_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._ring_attention.default, args, kwargs)
    return round(2 * _pairs(call) * (call.q.shape[3] + call.v.shape[3]))


@register_flop_formula(_ops._ring_attention_backward, get_raw=True)
def _ring_backward_flop(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(_ops._ring_attention_backward.default, args, kwargs)
    if not any(call.wanted[:2]):
        return 0
    return round(2 * _pairs(call) * (3 * call.q.shape[3] + 2 * call.v.shape[3]))
