"""What the adapter for transformers says is hidden."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)
from transformers import masking_utils as masks

from cudnn_ops.integrations.transformers import (
    CompactMask,
    cudnn_ops_attention,
    cudnn_ops_mask,
    register,
)
from cudnn_ops.integrations.transformers_masks import packed_sequences
from tests.cases.masks import compact_masks, visible_pairs
from tests.cases.models import (
    LENGTHS,
    SIZES,
    TOKENS,
    make_tokens,
    padding,
    positions,
)
from tests.conftest import DEVICES

register()


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
    if isinstance(found, CompactMask):
        assert torch.equal(found.to_tensor(), pairs)


def test_masks_are_told_by_a_few_numbers():
    def create(**arguments: Any) -> Any:
        config = MistralConfig(**SIZES, sliding_window=arguments.pop("window", TOKENS))
        config._attn_implementation = "cudnn_ops"
        given = {"attention_mask": None, "past_key_values": None, **arguments}
        embeddings = torch.empty(2, TOKENS, 0)
        return masks.create_sliding_window_causal_mask(config, embeddings, **given)

    causal = CompactMask(sizes=(2, TOKENS, TOKENS), device=torch.device("cpu"))
    assert create() == causal
    assert create(attention_mask=torch.ones(2, TOKENS)) == causal
    assert create(window=7) == causal._replace(window=(6, 0))
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


def remap_positions_for_packed_sequence(mask_function, position_ids):
    """As transformers 5.23 has it."""

    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        q_idx, kv_idx = position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx]
        return mask_function(batch_idx, head_idx, q_idx, kv_idx)

    return inner_mask


@pytest.mark.parametrize("is_remapped", [False, True])
def test_packed_sequences_are_found_in_every_version(is_remapped):
    """What the create_ functions of transformers 5.17, and of 5.23, hand to the mask function."""
    index = positions("cpu").diff(dim=-1, prepend=torch.full((2, 1), -1)).ne(1).cumsum(-1)

    def found_in(base: Any) -> Tensor | None:
        packed = masks.packed_sequence_mask_function(index)
        if is_remapped:
            remapped = remap_positions_for_packed_sequence(base, positions("cpu"))
            return packed_sequences(masks.and_masks(packed, remapped))
        return packed_sequences(masks.and_masks(base, packed))

    assert found_in(masks.causal_mask_function) is index
    assert found_in(masks.sliding_window_causal_mask_function(7)) is index
    chunks = masks.chunked_causal_mask_function(7, torch.zeros(2, dtype=torch.long))
    assert found_in(chunks) is None
    assert found_in(masks.bidirectional_mask_function) is None
    assert packed_sequences(masks.causal_mask_function) is None


@pytest.mark.parametrize("kind", compact_masks())
def test_a_compact_mask_is_a_tensor_to_who_wants_one(kind):
    compact = compact_masks()[kind]
    batch, length, length_kv = compact.sizes
    expected = visible_pairs(compact, batch, length, length_kv - compact.unwritten)
    expected = torch.nn.functional.pad(expected, (0, compact.unwritten))
    tensors = {
        "itself": compact.to_tensor(),
        "operators": compact & True,
        "operators, second": True & compact,
        "inverted": ~~compact,
        "of a tensor": torch.ones((), dtype=torch.bool) & compact,
        "function": torch.where(compact, 1, 0).bool(),
        "method": compact.logical_not().logical_not(),
        "index": compact[:, :, :, :],
        "argument": torch.ones(expected.shape).masked_fill(~compact, 0).bool(),
        "joined": torch.cat([compact, compact], -1)[..., :length_kv],
        "dtype": compact.to(torch.float32).bool(),
    }
    for how, tensor in tensors.items():
        assert type(tensor) is Tensor, how
        assert torch.equal(tensor, expected), how
    assert (compact.shape, compact.ndim, compact.dtype) == (expected.shape, 4, torch.bool)
    assert compact.contiguous() is compact
    assert compact.to("cpu").to_tensor().equal(expected)
    assert isinstance(compact.to("meta"), CompactMask)
    assert compact.to("meta").to_tensor().is_meta
    assert not hasattr(compact, "no_tensor_has_this")
    assert compact[0] == compact.window


def test_an_empty_static_cache_is_told_by_a_few_numbers():
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "cudnn_ops"
    cache = StaticCache(config=config, max_cache_len=TOKENS + 5)
    created = masks.create_masks_for_generate(config, torch.empty(2, TOKENS, 0), None, cache)
    assert isinstance(created, CompactMask)
    assert (created.unwritten, created.sizes) == (5, (2, TOKENS, TOKENS + 5))


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


def test_models_with_an_attention_of_their_own_are_refused():
    config = BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cudnn_ops")
    with pytest.raises(NotImplementedError, match="BloomPreTrainedModel computes its attention by"):
        model(make_tokens("cpu"))


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
