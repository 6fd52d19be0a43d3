"""Mistakes with pages: each is told on every path, and what only the GPU knows when asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_ops
from tests.cases import paged as cases
from tests.conftest import DEVICES
from tests.test_paged import DECODE, PREFILL

_ops = torch.ops.cudnn_ops

#: A change of a good call (query, key_cache, value_cache, page_table, seq_lens_kv, then options),
#: the error and what it says.
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": lambda t: t[:, 0]}, ValueError, r"query must be \[batch, length, heads, head size"),
    ({"query": lambda t: t[..., :32]}, ValueError, "query has head size 32 and key_cache 64"),
    ({"query": lambda t: t[:, :, :3]}, ValueError, "query has 3 heads and key_cache 2"),
    ({"query": lambda t: t.half()}, TypeError, "query has dtype Half and key_cache BFloat16"),
    ({"key_cache": lambda t: t[0]}, ValueError, r"key_cache must be \[pages, page size, heads"),
    ({"key_cache": lambda t: t[1:]}, ValueError, "pages, page size and heads must be equal"),
    ({"value_cache": lambda t: t[..., ::2]}, ValueError, "value_cache must be .* last stride of 1"),
    ({"page_table": lambda t: t.long()}, ValueError, "page_table must be an int32 tensor"),
    ({"page_table": lambda t: t[1:]}, ValueError, "for 5 sequences"),
    ({"seq_lens_kv": lambda t: t.float()}, ValueError, "seq_lens_kv must be an int32 tensor"),
    ({"seq_lens_kv": lambda t: t[:, None]}, ValueError, "seq_lens_kv must be an int32 tensor"),
    ({"head_major": True}, ValueError, r"heads and key_cache 16 \(as \[pages, heads, page size"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite"),
    ({"window_size": (-2, 0)}, ValueError, "window_size must be"),
    ({"softcap": -1.0}, ValueError, "softcap must be"),
    ({"sinks": lambda q: q.new_ones(2)}, ValueError, r"for each query head, \[4\]"),
    (
        {"key_cache": lambda t: t[:, :12], "value_cache": lambda t: t[:, :12]},
        ValueError,
        r"key_cache has pages of 12 tokens \(as \[pages, page size, .* must be a power of 2",
    ),
    (
        {
            "key_cache": lambda t: t[:, :6].transpose(1, 2),
            "value_cache": lambda t: t[:, :6].transpose(1, 2),
            "head_major": True,
        },
        ValueError,
        r"key_cache has pages of 6 tokens \(as \[pages, heads, page size, .* must be a power of 2",
    ),
    (
        {"key_cache": lambda t: t[:, :, :0], "value_cache": lambda t: t[:, :, :0]},
        ValueError,
        "query has 4 heads and key_cache 0",
    ),
]
#: Of the public functions: what the dispatcher would misread, or refuse in words of its own.
MISREAD: list[tuple[dict[str, Any], str]] = [
    ({"seq_lens_kv": [1, 2, 3, 4, 5]}, r"seq_lens_kv must be a tensor .* got a list: torch.tensor"),
    ({"page_table": [[1]] * 5}, "page_table must be a tensor .* got a list"),
    ({"cu_seqlens_q": (0, 1, 2, 3, 4, 5)}, "cu_seqlens_q must be a tensor .* got a tuple"),
    ({"sinks": [0.0] * 4}, "sinks must be a tensor .* got a list"),
    ({"window_size": 128}, r"window_size must be \(left, right\), got 128"),
]


def call(change: dict[str, Any], device: str):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    names = ("query", "key_cache", "value_cache", "page_table", "seq_lens_kv")
    arguments = dict(zip(names, t.arguments, strict=True))
    options = dict(t.options)
    for name, new in change.items():
        if name in arguments:
            arguments[name] = new(arguments[name])
        else:
            options[name] = new(t.query) if callable(new) else new
    return arguments, options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[2])
def test_mistakes(mistake, device):
    change, error, match = mistake
    arguments, options = call(change, device)
    for op in (_ops.paged_attention, _ops.paged_attention_with_lse):
        with pytest.raises(error, match=match):
            op(**arguments, **options)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in arguments.items()}
        for name, option in options.items():
            if isinstance(option, torch.Tensor):
                options[name] = mode.from_tensor(option)
        with pytest.raises(error, match=match):
            _ops.paged_attention(**fakes, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("change", "match"), MISREAD, ids=lambda one: str(one)[:20])
def test_what_the_dispatcher_would_misread(change, match, device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    names = ("query", "key_cache", "value_cache", "page_table", "seq_lens_kv")
    arguments = dict(zip(names, t.arguments, strict=True)) | change
    for function in (cudnn_ops.paged_attention, cudnn_ops.paged_attention_with_lse):
        with pytest.raises(TypeError, match=match):
            function(**arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_out_that_does_not_fit(device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    good = torch.empty_like(t.query)
    assert cudnn_ops.paged_attention(*t.arguments, out=good) is good
    for bad in (good[1:], good.float(), good.transpose(0, 2).contiguous().transpose(0, 2)):
        with pytest.raises(ValueError, match="out must be"):
            cudnn_ops.paged_attention(*t.arguments, out=bad)


@pytest.mark.parametrize("device", DEVICES)
def test_an_unknown_layout(device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    with pytest.raises(ValueError, match='kv_layout must be "NHD" or "HND"'):
        cudnn_ops.paged_attention(*t.arguments, kv_layout="nhd")


APPEND = ("key_cache", "value_cache", "key", "value", "slot_mapping")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("slot_mapping", lambda t: t.int(), ValueError, "slot_mapping must be an int64"),
        ("slot_mapping", lambda t: t[1:], ValueError, "slot_mapping must be an int64"),
        ("key", lambda t: t[0], ValueError, r"key must be \[tokens, heads, head size\]"),
        ("value", lambda t: t[..., :32], ValueError, "value must be .* as value_cache has them"),
        ("value", lambda t: t.float(), TypeError, "value has dtype Float and value_cache BFloat16"),
        ("key_cache", lambda t: t[1:], ValueError, "pages, page size and heads must be equal"),
    ],
)
def test_appending(name, change, error, match, device):
    t = cases.make(DECODE, torch.bfloat16, device, seed=1)
    tokens = (t.keys[0], t.values[0], torch.arange(len(t.keys[0]), device=device))
    arguments = dict(zip(APPEND, (t.key_cache, t.value_cache, *tokens), strict=True))
    arguments[name] = change(arguments[name])
    before = t.value_cache.clone()
    with pytest.raises(error, match=match):
        cudnn_ops.paged_kv_append_(**arguments)
    assert torch.equal(t.value_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.fixture
def checked(monkeypatch, request):
    """What tensors hold is checked: on a CPU always, on a GPU when asked."""
    if request.node.callspec.params["device"] == "cuda":
        monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    else:
        monkeypatch.delenv("CUDNN_OPS_CHECK", raising=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_contents_are_checked(case, device, checked):
    t = cases.make(case, torch.bfloat16, device, seed=1)
    _ops.paged_attention(*t.arguments, **t.options)  # numbers beyond a length are nobody's business
    query, *caches, table, lengths = t.arguments

    def wrong(table: torch.Tensor, lengths: torch.Tensor, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            _ops.paged_attention(query, *caches, table, lengths, **t.options)

    pages = caches[0].shape[0]
    for number, (row, column) in itertools.product((pages, -1), ((0, 0), (4, 0))):
        bad = table.clone()
        bad[row, column] = number
        wrong(bad, lengths, f"page_table holds page {number}, and there are {pages} pages")
    reach = table.shape[1] * 16
    for number, match in ((reach + 1, f"reaches {reach} tokens"), (-1, "must not be negative")):
        bad = lengths.clone()
        bad[2] = number
        wrong(table, bad, match)


@pytest.mark.parametrize("device", DEVICES)
def test_values_behind_the_end_are_checked(device, checked):
    t = cases.make(PREFILL, torch.bfloat16, device, seed=1)
    sequence = 2
    assert PREFILL.lengths_kv[sequence] == 33  # the third page has one token
    t.value_cache[t.page_table[sequence, 2].long(), 1, 0, 3] = torch.inf
    with pytest.raises(ValueError, match="sequence 2 ends inside a page, and value_cache has NaN"):
        _ops.paged_attention(*t.arguments, **t.options)


@pytest.mark.parametrize("device", DEVICES)
def test_slots_are_checked(device, checked):
    t = cases.make(replace(DECODE), torch.bfloat16, device, seed=1)
    slots = t.key_cache.shape[0] * 16
    for slot in (slots, -2):
        with pytest.raises(ValueError, match=f"slot_mapping holds {slot}, and there are slots 0"):
            cudnn_ops.paged_kv_append_(
                t.key_cache,
                t.value_cache,
                t.keys[0][:1],
                t.values[0][:1],
                torch.tensor([slot], device=device),
            )
