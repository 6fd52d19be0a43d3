"""Many families of transformers with ``attn_implementation="cudnn_ops"``, against eager attention.

Not one by one what each mask means (see test_transformers_masks.py), but that what each model does
with attention, masks and caches is what it does with its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_chunked_causal_mask

import cudnn_ops
from cudnn_ops.integrations.transformers import register
from tests.cases.families import tiny_model
from tests.cases.models import VOCABULARY

register()
register("cudnn_ops_full", compact_masks=False)

CAUSAL = [
    "bart",
    "bitnet",
    "cohere",
    "cohere2",
    "deepseek_v3",
    "doge",
    "ernie4_5",
    "exaone4",
    "gemma",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "granite",
    "helium",
    "jetmoe",
    "llama4_text",
    "minimax",
    "mixtral",
    "modernbert-decoder",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "starcoder2",
    "whisper",
]
SEQ2SEQ = ["bart", "bigbird_pegasus", "longt5", "mt5", "nllb-moe", "pegasus_x", "t5", "umt5"]
MASKED = ["bert", "electra", "eurobert", "modernbert", "roberta"]
CASES = [
    *((family, "causal") for family in CAUSAL),
    *((family, "seq2seq") for family in SEQ2SEQ),
    *((family, "masked") for family in MASKED),
]
TOKENS = 24


def tokens_and_padding(length: int, side: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, VOCABULARY, (2, length), generator=generator)
    if side == "none":
        return {"input_ids": tokens}
    there = torch.ones_like(tokens)
    there[1, : length // 4] = 0
    return {"input_ids": tokens, "attention_mask": there.flip(1) if side == "right" else there}


def results(model: Any, task: str, side: str) -> dict[str, Tensor]:
    """The logits of tokens that are not padding, and all gradients."""
    if task == "seq2seq":  # T5 does not scale its scores, and rounding shows
        model.double()
    inputs = tokens_and_padding(TOKENS, side)
    there = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)[:, :15]
        there = torch.ones(2, 15, dtype=torch.bool)
    model.zero_grad()
    logits = model(**inputs).logits[there]
    generator = torch.Generator().manual_seed(9)
    logits.backward(torch.randn(logits.shape, generator=generator))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators of attention that are called."""
    names: list[str] = []
    for name in ("scaled_dot_product_attention", "varlen_attention"):
        function = getattr(cudnn_ops, name)

        def counted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            names.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(cudnn_ops, name, counted)
    return names


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize(("family", "task"), CASES)
def test_logits_and_gradients(family, task, side, calls):
    expected = results(tiny_model(family, task), task, side)
    assert calls == []
    found = results(tiny_model(family, task, "cudnn_ops"), task, side)
    assert calls
    assert found.keys() == expected.keys()
    # The gradient of a key's bias is nothing but rounding.
    scale = max(tensor.norm() for tensor in expected.values())
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm()
        assert error <= 1e-4 * tensor.norm() + 1e-6 * scale, name


def test_keys_that_the_mask_does_not_know(calls):
    """DeepSeek-V4 adds compressed keys in each layer, and prolongs a mask that is a tensor."""
    inputs = tokens_and_padding(TOKENS, "left")
    there = inputs["attention_mask"].bool()
    with pytest.raises(NotImplementedError, match="compact_masks=False"):
        tiny_model("deepseek_v4", attention="cudnn_ops")(**inputs)
    expected = tiny_model("deepseek_v4")(**inputs).logits[there]
    found = tiny_model("deepseek_v4", attention="cudnn_ops_full")(**inputs).logits[there]
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("family", "task"), CASES[: len(CAUSAL) + len(SEQ2SEQ)])
@torch.no_grad()
def test_generate(family, task, cache, calls):
    inputs = tokens_and_padding(10, "left")
    is_chunked = (family, cache) == ("llama4_text", "static")
    if (
        is_chunked
        and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters
    ):
        # transformers before 5.20 hands its own function what that does not take.
        with pytest.raises(TypeError, match="block_sequence_ids"):
            tiny_model(family).generate(**inputs, max_new_tokens=1, cache_implementation=cache)
        return

    def generate(attention: str) -> Tensor:
        return tiny_model(family, task, attention).generate(
            **inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache
        )

    expected = generate("eager")
    assert torch.equal(generate("cudnn_ops"), expected)
    assert calls
