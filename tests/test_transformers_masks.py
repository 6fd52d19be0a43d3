"""What the adapter for transformers says is hidden, and how it calls attention."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Llama4TextConfig, LlamaConfig, MistralConfig
from transformers import masking_utils as masks

import cudnn_ops
from cudnn_ops.integrations.transformers import (
    CompactMask,
    cudnn_ops_attention,
    cudnn_ops_mask,
    register,
)
from tests.cases.models import (
    LENGTHS,
    SIZES,
    TOKENS,
    make_inputs,
    make_model,
    make_tokens,
    padding,
    positions,
)
from tests.conftest import DEVICES

register()


def visible_pairs(
    mask: Tensor | CompactMask | None, batch: int, length: int, length_kv: int
) -> Tensor:
    """[batch, 1, length, length_kv], True where a query sees a key."""
    if isinstance(mask, Tensor):
        return mask
    mask = mask or CompactMask()
    rows = torch.arange(length).view(-1, 1) + length_kv - length
    columns = torch.arange(length_kv)
    visible = (columns <= rows).expand(batch, 1, -1, -1)
    if mask.window[0] >= 0:
        visible = visible & (columns >= rows - mask.window[0])
    if mask.padding is not None:
        visible = visible & mask.padding[:, None, None, :]
    if mask.lengths is not None:
        visible = visible & (columns < mask.lengths.view(-1, 1, 1, 1))
    if mask.cu_seqlens is not None:
        lengths = mask.cu_seqlens.diff()
        assert mask.longest == lengths.max()
        index = torch.arange(len(lengths)).repeat_interleave(lengths).view(batch, length)
        visible = visible & (index.unsqueeze(-1) == index.unsqueeze(-2)).unsqueeze(1)
    return visible


@pytest.mark.parametrize("seed", range(60))
def test_masks_hide_what_those_of_transformers_do(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kind = draw("causal", "window", "chunks")
    config = {
        "causal": LlamaConfig(**SIZES),
        "window": MistralConfig(**SIZES, sliding_window=draw(3, 8)),
        "chunks": Llama4TextConfig(**SIZES, attention_chunk_size=draw(3, 8)),
    }[kind]
    create = {
        "causal": masks.create_causal_mask,
        "window": masks.create_sliding_window_causal_mask,
        "chunks": masks.create_chunked_causal_mask,
    }[kind]
    batch, length, past = draw(1, 3), draw(1, 2, 7, 12), draw(None, 0, 5, 11)
    cache, seen = None, past or 0
    if past is not None:
        cache = DynamicCache(config=config)
        if past:
            for layer in range(2):
                cache.update(
                    torch.zeros(batch, 2, past, 16), torch.zeros(batch, 2, past, 16), layer
                )
    there = torch.ones(batch, seen + length, dtype=torch.bool)
    side, count = draw("none", "left", "right", "both"), draw(0, 1, 4)
    place = torch.arange(seen + length)
    if side in ("left", "both"):
        there[0] &= place >= count
    if side in ("right", "both"):
        there[-1] &= place < max(seen + length - count, 1)
    arguments = {
        "config": config,
        "inputs_embeds": torch.empty(batch, length, 0),
        "attention_mask": None if side == "none" else there,
        "past_key_values": cache,
    }
    if side == "none" and cache is None and draw(True, False):
        restarts = torch.rand(batch, length, generator=generator) < 0.3
        place = torch.arange(length).expand(batch, -1)
        arguments["position_ids"] = place - place.masked_fill(~restarts, 0).cummax(-1).values
    config._attn_implementation = "sdpa"
    expected = create(**arguments, allow_is_causal_skip=False)
    config._attn_implementation = "cudnn_ops"
    found = create(**arguments)
    # What a query that is padding sees is nobody's concern.
    rows = there[:, seen:].view(batch, 1, length, 1)
    pairs = visible_pairs(found, batch, length, expected.shape[-1])
    assert torch.equal(pairs & rows, expected & rows)


def test_masks_are_told_by_a_few_numbers():
    def create(**arguments: Any) -> Any:
        config = MistralConfig(**SIZES, sliding_window=arguments.pop("window", TOKENS))
        config._attn_implementation = "cudnn_ops"
        given = {"attention_mask": None, "past_key_values": None, **arguments}
        embeddings = torch.empty(2, TOKENS, 0)
        return masks.create_sliding_window_causal_mask(config, embeddings, **given)

    assert create() is None
    assert create(attention_mask=torch.ones(2, TOKENS)) is None
    assert create(window=7) == CompactMask((6, 0))
    right = create(attention_mask=padding("right", "cpu"))
    assert right.lengths.tolist() == [TOKENS, TOKENS - 6]
    assert right.padding is None
    left = create(attention_mask=padding("left", "cpu"))
    assert left.padding.shape == (2, TOKENS)
    packed = create(position_ids=positions("cpu"), window=7)
    assert packed.cu_seqlens.diff().tolist() == [*LENGTHS, *LENGTHS[::-1]]
    assert packed.window == (6, 0)
    blocks = torch.zeros(2, TOKENS, dtype=torch.long)
    assert create(block_sequence_ids=blocks).shape == (2, 1, TOKENS, TOKENS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["causal", "window", "cache", "packed"])
def test_the_host_does_not_wait(kind, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    length = 1 if kind == "cache" else 64
    query = torch.randn(1, 4, length, 64, device=device, dtype=dtype, requires_grad=True)
    key, value = torch.randn(2, 1, 2, 64, 64, device=device, dtype=dtype)
    offsets = torch.tensor([0, 40, 64], device=device, dtype=torch.int32)
    packing = {}
    if kind == "packed":
        packing = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
        packing |= dict.fromkeys(("max_length_q", "max_length_k"), 40)

    def step() -> None:
        local = 16 if kind in ("window", "cache") else None
        mask = cudnn_ops_mask(1, length, 64, 64 - length, local_size=local, device=device)
        module = nn.Identity()  # causal, as layers are that do not say
        cudnn_ops_attention(module, query, key, value, mask, **packing)[0].sum().backward()

    step()  # builds plans
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


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
    with pytest.raises(NotImplementedError, match="position_bias"):
        attention_of((1, 2, 9, 16), position_bias=torch.zeros(1, 2, 9, 9))
    inputs = make_inputs("packed by offsets", "cpu")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -1] = 0
    with pytest.raises(ValueError, match="leave attention_mask out"):
        model(**inputs)


def test_transformers_is_imported_by_the_adapter_alone():
    code = """
import sys
import cudnn_ops
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    import cudnn_ops.integrations.transformers
except ImportError as error:
    assert "pip install 'transformers>=5.17'" in str(error)
else:
    raise AssertionError("imported without transformers")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
