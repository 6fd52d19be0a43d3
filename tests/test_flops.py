"""FLOPs of attention, by lengths where they can be read, else the longest; of linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops

HEADS, SIZE = 4, 16


def _flops(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **options)
    assert len(counter.get_flop_counts()["Global"]) == 1
    return counter.get_total_flops()


def _int(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _paged(queries: int = 1) -> list[Tensor]:
    query, cache = torch.randn(2, queries, HEADS, SIZE), torch.randn(6, 4, 2, SIZE)
    return [query, cache, cache, _int(0, 1, 2, 3, 4, 5).view(2, 3), _int(3, 7)]


@pytest.mark.parametrize(
    ("queries", "options", "pairs"),
    [
        (1, {}, 3 + 7),
        (1, {"window_size": (1, 0)}, 2 + 2),
        (2, {"is_causal": True}, 2 * (3 + 7)),
        (2, {"is_causal": True, "window_size": (2, -1)}, (2 + 3) + (3 + 3)),
    ],
)
def test_paged(queries, options, pairs):
    args = _paged(queries)
    expected = 2 * HEADS * pairs * 2 * SIZE
    assert _flops(cudnn_ops.paged_attention, *args, **options) == expected
    assert _flops(cudnn_ops.paged_attention_with_lse, *args, **options) == expected
    out = torch.empty_like(args[0])
    assert _flops(cudnn_ops.paged_attention, *args, **options, out=out) == expected


def test_paged_queries_that_are_packed():
    query, *rest = _paged()
    packed = query.new_empty(5, HEADS, SIZE)
    options = {"cu_seqlens_q": _int(0, 1, 5), "max_seqlen_q": 4}
    found = _flops(cudnn_ops.paged_attention, packed, *rest, **options)
    assert found == 2 * HEADS * (1 * 3 + 4 * 7) * 2 * SIZE


def test_packed_sequences_that_are_used_in_part():
    q = torch.randn(10, HEADS, SIZE, requires_grad=True)
    starts = _int(0, 4, 10)
    args = (q, q, q, starts, starts, 6, 6)
    found = _flops(cudnn_ops.varlen_attention, *args, seqused_k=_int(1, 5))
    assert found == 2 * HEADS * (4 * 1 + 6 * 5) * 2 * SIZE
    out = cudnn_ops.varlen_attention(*args, seqused_q=_int(3, 0))
    assert _flops(out.sum().backward) == 2 * HEADS * 3 * 4 * 5 * SIZE


def test_without_numbers_sequences_are_as_long_as_they_may_be():
    with FakeTensorMode() as mode:
        paged = [mode.from_tensor(tensor) for tensor in _paged(2)]
        q, starts = torch.empty(10, HEADS, SIZE), torch.empty(3, dtype=torch.int32)
        expected = 2 * HEADS * 2 * (2 * 12) * 2 * SIZE
        assert _flops(cudnn_ops.paged_attention, *paged) == expected
        packed = {"cu_seqlens_q": starts, "max_seqlen_q": 3}
        expected = 2 * HEADS * 2 * (3 * 12) * 2 * SIZE
        assert _flops(cudnn_ops.paged_attention, q, *paged[1:], **packed) == expected
        expected = 2 * HEADS * 2 * (6 * 7) * 2 * SIZE
        assert _flops(cudnn_ops.varlen_attention, q, q, q, starts, starts, 6, 7) == expected
    meta = [tensor.to("meta") for tensor in _paged()]
    assert _flops(cudnn_ops.paged_attention, *meta) == 2 * HEADS * 2 * 12 * 2 * SIZE


def _layer_tensors() -> list[Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in ((3, 5, 8), (12, 8), (6, 12))]


def test_a_layer_as_torchs_own():
    x, weight, _ = _layer_tensors()
    one = 2 * 15 * 8 * 12
    assert _flops(cudnn_ops.linear, x, weight, activation="relu") == one
    assert _flops(torch.nn.functional.linear, x, weight) == one
    out = cudnn_ops.linear(x, weight, activation="relu").sum()
    assert _flops(out.backward) == 2 * one
    out = cudnn_ops.linear(x.detach(), weight).sum()
    assert _flops(out.backward) == one


def test_two_layers():
    x, w1, w2 = _layer_tensors()
    one, two = 2 * 15 * 8 * 12, 2 * 15 * 12 * 6
    assert _flops(cudnn_ops.mlp, x, w1, None, w2, None) == one + two
    assert _flops(cudnn_ops.mlp(x, w1, None, w2, None).sum().backward) == 2 * (one + two)
    only_last = cudnn_ops.mlp(x.detach(), w1.detach(), None, w2, None).sum()
    assert _flops(only_last.backward) == two
    half = w2[:, :6]
    gated = cudnn_ops.mlp(x, w1, None, half, None, "silu", gated=True)
    assert _flops(gated.sum().backward) == 2 * (one + two // 2)
