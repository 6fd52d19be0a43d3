"""The contiguous cache of keys and values, against lists; with attention; compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cudnn_ops
from cudnn_ops import KVCache
from tests.conftest import DEVICES


def make_cache(device: str = "cpu", **options) -> KVCache:
    sizes: dict[str, Any] = {"layers": 2, "batch": 3, "length": 12, "heads_kv": 2, "head_size": 8}
    dtype = torch.float16 if device == "cuda" else torch.float32
    return KVCache(**(sizes | {"value_size": 16, "dtype": dtype, "device": device} | options))


def make_kv(cache: KVCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    like = cache.get(0).key
    key, value = (
        torch.randn(cache.batch, cache.heads_kv, tokens, size).to(like)
        for size in (cache.head_size, cache.value_size)
    )
    return key, value


def check(cache: KVCache, layer: int, expected: list[list[tuple]]) -> None:
    """The keys and values of a layer's sequences, token by token."""
    key, value, lengths = cache.get(layer)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [len(tokens) for tokens in expected]
    for row, tokens in enumerate(expected):
        for place, (k, v) in enumerate(tokens):
            assert torch.equal(key[row, :, place], k)
            assert torch.equal(value[row, :, place], v)
        assert not key[row, :, len(tokens) :].any()
        assert not value[row, :, len(tokens) :].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_updates_are_written_behind_each_other(device, dtype):
    """Padding is not, even if it is NaN."""
    cache = make_cache(device)
    memory = cache.get(1).key.data_ptr()
    expected: list[list[tuple]] = [[], [], []]
    for tokens, counts in ((4, [4, 1, 0]), (1, None), (5, [0, 2, 5]), (6, [6, 0, 0]), (1, None)):
        key, value = make_kv(cache, tokens)
        for row in range(3):
            count = tokens if counts is None else counts[row]
            key[row, :, count:] = value[row, :, count:] = math.nan
            expected[row] += [(key[row, :, i], value[row, :, i]) for i in range(count)]
        lengths = None if counts is None else torch.tensor(counts, dtype=dtype, device=device)
        before = cache.get(1).seq_lens_kv
        old = before.tolist()
        found = cache.update(1, key, value, lengths)
        assert before.tolist() == old
        assert found.key.data_ptr() == memory
        assert found.key.shape == (3, 2, 12, 8)
        assert found.value.shape == (3, 2, 12, 16)
        assert found.seq_lens_kv.tolist() == [len(row) for row in expected]
        check(cache, 1, expected)
    assert [len(row) for row in expected] == [12, 5, 7]
    check(cache, 0, [[], [], []])
    cache.reset()
    assert cache.get(1).seq_lens_kv.tolist() == [0, 0, 0]
    assert cache.state_dict() == {}


@pytest.mark.parametrize("device", DEVICES)
def test_attention_over_it_is_attention_over_all(device):
    """A padded prompt, a piece of another, then decoding, by the lengths that it returns."""
    torch.manual_seed(0)
    cache = make_cache(device, head_size=16, value_size=16)
    rows: list[list[torch.Tensor]] = [[], [], []]
    for tokens, counts in ((5, [5, 2, 4]), (3, [3, 1, 2]), *[(1, [1, 1, 1])] * 4):
        count = torch.tensor(counts, dtype=torch.int32, device=device)
        key, value = make_kv(cache, tokens)
        query = torch.randn(3, 4, tokens, 16).to(key)
        for row, kept in enumerate(counts):
            rows[row].append(torch.stack([key[row, :, :kept], value[row, :, :kept]]))
        found = cache.update(0, key, value, count)
        out = cudnn_ops.scaled_dot_product_attention(
            query,
            found.key,
            found.value,
            is_causal=tokens > 1,
            bottom_right=tokens > 1,
            enable_gqa=True,
            seq_lens_q=count,
            seq_lens_kv=found.seq_lens_kv,
        )
        for row, kept in enumerate(counts):
            k, v = torch.cat(rows[row], 2).double()
            is_seen = torch.ones(kept, k.shape[1], dtype=torch.bool, device=device)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[row, :, :kept].double(),
                *(k, v, is_seen.tril(k.shape[1] - kept)),
                enable_gqa=True,
            )
            bound = 2e-3 if device == "cuda" else 1e-5
            torch.testing.assert_close(out[row, :, :kept].double(), expected, atol=bound, rtol=0)


def test_compiled_steps_are_compiled_once_for_each_number_of_tokens():
    cache, twin = make_cache(), make_cache()
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    @torch.compile(fullgraph=True, backend=backend, dynamic=False)
    def step(key, value):
        return cache.update(0, key, value), cache.update(1, value[..., :8], value)

    for tokens in (3, 1, 1, 1, 3):
        key, value = make_kv(cache, tokens)
        found, other = step(key, value)
        expected = twin.update(0, key, value), twin.update(1, value[..., :8], value)
        for ours, right in zip((*found, *other), (*expected[0], *expected[1]), strict=True):
            assert torch.equal(ours, right)
    assert len(graphs) == 2


def test_compiled_by_inductor():
    cache, twin = make_cache(), make_cache()
    step = torch.compile(cache.update, fullgraph=True)
    for tokens, counts in ((4, [4, 1, 0]), (1, [1, 1, 1]), (1, [1, 0, 1])):
        key, value = make_kv(cache, tokens)
        lengths = torch.tensor(counts)
        for ours, right in zip(
            step(0, key, value, lengths), twin.update(0, key, value, lengths), strict=True
        ):
            assert torch.equal(ours, right)
    # There, nothing raises: what finds no room is not written.
    key, value = make_kv(cache, 12)
    found = step(0, key, value, torch.tensor([12, 12, 12]))
    assert found.seq_lens_kv.tolist() == [12, 12, 12]
    before = twin.get(0)
    for row, length in enumerate(before.seq_lens_kv.tolist()):
        assert torch.equal(found.key[row, :, :length], before.key[row, :, :length])
        assert torch.equal(found.key[row, :, length:], key[row, :, : 12 - length])


@pytest.mark.gpu
def test_replayed_from_a_cuda_graph():
    cache, twin = make_cache("cuda"), make_cache("cuda")
    key, value = make_kv(cache, 1)
    cache.update(0, key, value)
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cache.update(0, key, value)
    cache.reset()
    for _ in range(5):
        new = make_kv(cache, 1)
        key.copy_(new[0])
        value.copy_(new[1])
        graph.replay()
        expected = twin.update(0, *new)
        for ours, right in zip(found, expected, strict=True):
            assert torch.equal(ours, right)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"layer": 2}, ValueError, r"layer must be 0 to 1, got 2"),
        ({"layer": -1}, ValueError, r"layer must be 0 to 1, got -1"),
        ({"key": torch.zeros(3, 2, 4)}, ValueError, r"key must be \[3, 2, tokens, 8\], got \[3, 2"),
        ({"key": torch.zeros(3, 1, 4, 8)}, ValueError, r"key must be \[3, 2, 4, 8\], got \[3, 1"),
        ({"value": torch.zeros(3, 2, 3, 16)}, ValueError, r"value must be \[3, 2, 4, 16\], got"),
        ({"key": torch.zeros(3, 2, 13, 8)}, ValueError, r"key has 13 tokens, .* room for 12"),
        ({"value": torch.zeros(3, 2, 4, 16).half()}, TypeError, r"value must be torch\.float32"),
        ({"key": torch.zeros(3, 2, 4, 8, device="meta")}, ValueError, r"key must be on cpu, got"),
        ({"seq_lens": torch.ones(2, dtype=torch.int32)}, ValueError, r"seq_lens must be int32 or"),
        ({"seq_lens": torch.ones(3)}, ValueError, r"int64 \[3\], got torch\.float32 \[3\]"),
        ({"seq_lens": torch.tensor([1, 5, 0])}, ValueError, r"seq_lens must be 0 to 4, .*1, 5, 0"),
        ({"seq_lens": torch.tensor([1, -1, 0])}, ValueError, r"seq_lens must be 0 to 4, the toke"),
    ],
)
def test_updates_that_do_not_fit(change, error, sentence):
    cache = make_cache()
    key, value = make_kv(cache, 4)
    with pytest.raises(error, match=r"^KVCache\.update: .*" + sentence):
        cache.update(**({"layer": 0, "key": key, "value": value} | change))
    check(cache, 0, [[], [], []])


def test_a_cache_that_is_full():
    cache = make_cache()
    key, value = make_kv(cache, 8)
    cache.update(0, key, value, torch.tensor([8, 2, 0]))
    message = r"room for 12 tokens, and layer 0 has \[8, 2, 0\], with \[8, 8, 8\] to be written"
    with pytest.raises(ValueError, match=message):
        cache.update(0, key, value)
    assert cache.get(0).seq_lens_kv.tolist() == [8, 2, 0]
    with pytest.raises(ValueError, match=r"^KVCache\.get: layer must be 0 to 1, got 7"):
        cache.get(7)


@pytest.mark.parametrize("option", ["layers", "batch", "length", "heads_kv", "head_size"])
def test_sizes_out_of_range(option):
    with pytest.raises(ValueError, match=f"^{option} must be a whole number, at least 1, got 0"):
        make_cache(**{option: 0})
