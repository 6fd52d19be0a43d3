"""Real cuDNN plans of attention for GPUs that are not there, forward and backward.

What is expected was read off cuDNN itself, 9.19 where no other version is named: a change here is a
change of cuDNN.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_ops import _C
from cudnn_ops.support import explain

GPUS = {"a100": 80, "h200": 90, "b200": 100}
DTYPES = [torch.float16, torch.bfloat16]
HEAD_SIZES = [(8, 8), (32, 32), (64, 64), (80, 80), (128, 128), (64, 128), (192, 128), (256, 256)]
LAYOUTS = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}

#: Head sizes (query and key, value) over 128 that cuDNN 9.19 differentiates, by GPU.
LARGE_BACKWARD = {"a100": set(), "h200": {(192, 128), (256, 256)}, "b200": {(192, 128)}}
if _C.cudnn_version() >= 92300:
    LARGE_BACKWARD["b200"].add((256, 256))


def tensor(batch, heads, length, size, dtype, layout):
    order = LAYOUTS[layout]
    memory = [(batch, heads, length, size)[dim] for dim in order]
    return torch.empty(memory, dtype=dtype, device="meta").permute(order)


def ask(op, sizes, dtype, layout, is_causal, device, heads_kv=4, length=200, length_kv=200):
    query = tensor(2, 4, length, sizes[0], dtype, layout)
    key = tensor(2, heads_kv, length_kv, sizes[0], dtype, layout)
    value = tensor(2, heads_kv, length_kv, sizes[1], dtype, layout)
    return explain(op, query, key, value, is_causal=is_causal, with_lse=True, device=device)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
def test_forward(sizes, device):
    for dtype, layout, is_causal in itertools.product(DTYPES, LAYOUTS, (False, True)):
        answer = ask("sdpa", sizes, dtype, layout, is_causal, device)
        assert answer.supported, (dtype, layout, is_causal, answer.reason)
        assert answer.engine.startswith("eng")
        assert answer.workspace_bytes >= 0


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
def test_backward(sizes, device):
    expected = max(sizes) <= 128 or sizes in LARGE_BACKWARD[device]
    for dtype, layout, is_causal in itertools.product(DTYPES, LAYOUTS, (False, True)):
        answer = ask("sdpa_backward", sizes, dtype, layout, is_causal, device)
        assert answer.supported == expected, (dtype, layout, is_causal, answer.reason)
        assert expected or "hidden_dim" in answer.reason


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize(
    ("length", "length_kv", "heads_kv"),
    [
        (1, 129, 4),
        (129, 1, 4),
        (77, 577, 4),
        (577, 77, 2),
        (63, 63, 1),
        (65, 65, 2),
        (4096, 4096, 1),
    ],
)
def test_lengths_and_groups(length, length_kv, heads_kv, op, device):
    answer = ask(op, (64, 64), torch.bfloat16, "bshd", True, device, heads_kv, length, length_kv)
    # A single query over fewer than 8 key heads.
    is_known_bad = device == "b200" and op == "sdpa" and length == 1
    assert answer.supported != is_known_bad, answer.reason


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize(("length", "right"), [(131, 5), (45, 5), (45, 7), (41, 0)])
def test_more_queries_than_keys_at_the_bottom_right(length, right, op, device):
    """A plan for these lengths alone, which a family's first call asks for."""
    query = tensor(2, 4, length, 64, torch.bfloat16, "bshd")
    key = tensor(2, 4, 40, 64, torch.bfloat16, "bshd")
    band = {"window_size": (-1, right), "bottom_right": True}
    answer = explain(op, query, key, key, **band, with_lse=True, polymorphic=False, device=device)
    assert answer.supported, answer.reason
