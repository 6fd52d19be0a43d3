"""How the adapter for transformers calls attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cudnn_ops
from cudnn_ops.integrations.transformers import (
    CompactMask,
    cudnn_ops_attention,
    cudnn_ops_mask,
    register,
)
from tests.cases.masks import compact_masks, visible_pairs
from tests.cases.models import check, make_inputs, make_model, make_tokens
from tests.conftest import DEVICES

register()


def attention_of(sizes: tuple[int, int, int, int], mask: Any = None, **options: Any) -> Tensor:
    query, key, value = torch.randn(3, *sizes, generator=torch.Generator().manual_seed(1))
    module = nn.Identity()  # causal, as layers are that do not say
    return cudnn_ops_attention(module, query, key, value, mask, **options)[0]


def test_output_is_contiguous_by_token():
    out = attention_of((2, 4, 9, 16))
    assert out.shape == (2, 9, 4, 16)
    assert out.is_contiguous()


def test_padding_at_the_end_is_not_computed():
    out = attention_of((2, 4, 9, 16), CompactMask(lengths=torch.tensor([9, 5], dtype=torch.int32)))
    assert not out[1, 5:].any()
    out[1, 5:] = attention_of((2, 4, 9, 16))[1, 5:]
    torch.testing.assert_close(out, attention_of((2, 4, 9, 16)))


def test_window_of_the_mask():
    sizes = (1, 2, 9, 16)
    found = attention_of(sizes, CompactMask((2, 0)))
    torch.testing.assert_close(found, attention_of(sizes, sliding_window=3))
    assert not torch.allclose(found, attention_of(sizes))


def test_dropout():
    sizes = (2, 4, 64, 16)
    torch.manual_seed(1)
    first = attention_of(sizes, dropout=0.5)
    assert not torch.equal(first, attention_of(sizes, dropout=0.5))
    torch.manual_seed(1)
    assert torch.equal(first, attention_of(sizes, dropout=0.5))
    many = torch.stack([attention_of(sizes, dropout=0.2) for _ in range(200)]).mean(0)
    torch.testing.assert_close(many, attention_of(sizes), rtol=0, atol=0.4)
    model = make_model("llama", "cpu")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    tokens = make_tokens("cpu")
    still = model(tokens).logits
    assert torch.equal(model(tokens).logits, still)
    assert not torch.equal(model.train()(tokens).logits, still)


def biased(given, visible):
    """Attention by its formula; a query that sees nothing gets 0."""
    query, key, value, bias = given
    scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights.nan_to_num(0.0) @ value).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in compact_masks() if kind != "packed"),
        "bool",
        "added",
        "none",
        "none, causal",
    ],
)
def test_position_bias(kind, device):
    """T5's: a bias of every layer, whose gradient goes to its embedding."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    compact = compact_masks().get(kind)
    batch, length, length_kv = (2, 9, 9) if compact is None else compact.sizes
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(sizes, generator=generator).to(device, dtype)
        return drawn.requires_grad_()

    query, bias = draw(batch, 4, length, 16), draw(1, 4, length, length_kv)
    key, value = draw(batch, 4, length_kv, 16), draw(batch, 4, length_kv, 16)
    given = [query, key, value, bias]
    visible = torch.ones(batch, 1, length, length_kv, dtype=torch.bool)
    module, mask = nn.Identity(), None
    module.is_causal = kind != "none"
    if compact is not None:
        mask = compact.to(device)
        visible = visible_pairs(compact, batch, length, length_kv - compact.unwritten)
        visible = torch.nn.functional.pad(visible, (0, compact.unwritten))
        if compact.lengths is not None:  # and queries of padding are not computed
            visible = visible & (torch.arange(length) < compact.lengths.view(-1, 1)).unsqueeze(
                1
            ).unsqueeze(-1)
    elif kind in ("bool", "added"):
        visible = torch.rand(visible.shape, generator=generator) < 0.7
        visible[..., 0] = True
        mask = visible.to(device)
        if kind == "added":
            mask = torch.zeros(visible.shape, device=device, dtype=dtype)
            mask.masked_fill_(~visible.to(device), torch.finfo(dtype).min)
    elif kind == "none, causal":
        visible = visible.tril()
    visible = visible.to(device)
    found = cudnn_ops_attention(module, query, key, value, mask, position_bias=bias)[0]
    grad = torch.randn(found.shape, generator=generator).to(device, dtype)
    results = [found, *torch.autograd.grad(found, given, grad)]

    def formula(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        out = biased(leaves, visible)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    names = ("out", "query", "key", "value", "bias")
    for name, *parts in zip(names, results, formula(torch.float64), formula(dtype), strict=True):
        check(*parts, name)


def test_not_causal():
    sizes = (1, 2, 9, 16)
    query, key, value = torch.randn(3, *sizes, generator=torch.Generator().manual_seed(1))
    expected = cudnn_ops.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(attention_of(sizes, is_causal=False), expected)
    expected = cudnn_ops.scaled_dot_product_attention(query, key, value, window_size=(2, 2))
    found = attention_of(sizes, is_causal=False, sliding_window=3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_what_it_does_not_do_raises():
    model = make_model("llama", "cpu")
    with pytest.raises(ValueError, match='set_attn_implementation\\("eager"\\)'):
        model(make_tokens("cpu"), output_attentions=True)
    packed = CompactMask(cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32), longest=5)
    with pytest.raises(NotImplementedError, match="a row of its own"):
        attention_of((1, 2, 9, 16), packed, position_bias=torch.zeros(1, 2, 9, 9))
    with pytest.raises(NotImplementedError, match="one logit for each head, and Identity has one"):
        attention_of((1, 2, 9, 16), sinks=torch.zeros(1, 2, 9, 1))
    with pytest.raises(NotImplementedError, match="one of 9 queries and 7 keys, and Identity has"):
        attention_of((1, 2, 9, 16), CompactMask(sizes=(1, 9, 7)))
    inputs = make_inputs("packed by offsets", "cpu")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -1] = 0
    with pytest.raises(ValueError, match="leave attention_mask out"):
        model(**inputs)


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("kind", ["masked", "told by the layer"])
def test_compiled_for_every_length(kind, past):
    """Whether there are several queries, and as many as keys, is no number of the graph."""

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, length_kv = query.shape[2], key.shape[2]
        mask = None
        if kind == "masked":
            mask = cudnn_ops_mask(1, length, length_kv, length_kv - length, local_size=6)
        return cudnn_ops_attention(nn.Identity(), query, key, value, mask)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    generator = torch.Generator().manual_seed(1)
    for length in (9, 12, 17):
        query = torch.randn(1, 2, length, 16, generator=generator)
        key, value = torch.randn(2, 1, 2, length + past, 16, generator=generator)
        torch.testing.assert_close(compiled(query, key, value), step(query, key, value))


def test_keys_of_any_strides():
    sizes = (2, 4, 9, 16)
    query, key, value = torch.randn(3, *sizes, generator=torch.Generator().manual_seed(1))
    query, key, value = (x.mT.contiguous().mT for x in (query, key, value))
    assert key.stride(-1) != 1
    found = cudnn_ops_attention(nn.Identity(), query, key, value, None)[0]
    torch.testing.assert_close(found, attention_of(sizes))
    packed = CompactMask(cu_seqlens=torch.tensor([0, 9, 18], dtype=torch.int32), longest=9)
    found = cudnn_ops_attention(nn.Identity(), query, key, value, packed)[0]
    torch.testing.assert_close(found, attention_of(sizes))
