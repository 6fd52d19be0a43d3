"""Whole models through the patterns: what fires in each, and that results and gradients stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
import transformers as hf
from torch import Tensor, nn
from transformers.models.janus import modeling_janus as janus

from tests.cases.compiler import Rewritten

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
PARTIAL: dict[str, Any] = SMALL | {"rotary_pct": 0.5}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def language(model: type[nn.Module], config: Any, **kwargs: Any) -> Callable[[], tuple[Any, ...]]:
    """The model, its arguments, and how its result becomes tensors."""

    def make() -> tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]:
        arguments = {"input_ids": IDS, "use_cache": False, **kwargs}
        return model(config), arguments, lambda out: out[0]

    return make


def padded() -> Tensor:
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0
    return mask


def llama4() -> tuple[Any, ...]:
    config = hf.Llama4TextConfig(
        **GROUPED, intermediate_size_mlp=48, moe_layers=[], attention_chunk_size=8,
        use_qk_norm=False,
    )  # fmt: skip
    arguments = {"input_ids": IDS, "use_cache": False}
    return hf.Llama4ForCausalLM(config), arguments, lambda out: out[0]


def bert() -> tuple[Any, ...]:
    config = hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertModel(config), {"input_ids": IDS, "attention_mask": padded()}, lambda out: out[0]


def gpt2() -> tuple[Any, ...]:
    config = hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.GPT2Model(config), {"input_ids": IDS, "use_cache": False}, lambda out: out[0]


def gptj() -> tuple[Any, ...]:
    config = hf.GPTJConfig(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.GPTJModel(config), {"input_ids": IDS, "use_cache": False}, lambda out: out[0]


def t5() -> tuple[Any, ...]:
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    arguments = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    return hf.T5Model(config), arguments, lambda out: out[0]


def vit() -> tuple[Any, ...]:
    model = torchvision.models.VisionTransformer(16, 4, 2, 4, 32, 48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model, {"x": torch.randn(2, 3, 16, 16)}, lambda out: out


def resnet() -> tuple[Any, ...]:
    model = torchvision.models.resnet18(num_classes=5).eval()
    return model, {"x": torch.randn(2, 3, 32, 32)}, lambda out: out


def mobilenet() -> tuple[Any, ...]:
    model = torchvision.models.mobilenet_v3_small(num_classes=5).eval()
    return model, {"x": torch.randn(2, 3, 32, 32)}, lambda out: out


def convnext() -> tuple[Any, ...]:
    block = torchvision.models.convnext.CNBlockConfig
    model = torchvision.models.ConvNeXt([block(8, 16, 1), block(16, None, 1)], num_classes=5)
    return model.eval(), {"x": torch.randn(2, 3, 32, 32)}, lambda out: out


def bit() -> tuple[Any, ...]:
    config = hf.BitConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4, hidden_act="silu"
    )  # fmt: skip
    return hf.BitModel(config), {"pixel_values": torch.randn(1, 3, 32, 32)}, lambda out: out[0]


def poolformer() -> tuple[Any, ...]:
    config = hf.PoolFormerConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
    model = hf.PoolFormerModel(config).eval()
    return model, {"pixel_values": torch.randn(1, 3, 64, 64)}, lambda out: out[0]


def autoencoder() -> tuple[Any, ...]:
    config = janus.JanusVQVAEConfig(
        base_channels=32, latent_channels=32, num_res_blocks=1, channel_multiplier=[1, 1]
    )
    return (
        janus.JanusVQVAEEncoder(config),
        {"pixel_values": torch.randn(1, 3, 16, 16)},
        lambda out: out,
    )


MODELS: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, int]]] = {
    "llama": (
        language(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "llama, padded": (
        language(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), attention_mask=padded()),
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "llama, eager attention": (
        language(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED, **EAGER)),
        {"attention_by_matmul": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "qwen3": (
        language(hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED)),
        {"attention": 2, "rms_norm": 9, "rotary_qk": 2, "gated": 2},
    ),
    "mistral, windows": (
        language(hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, sliding_window=4)),
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "gemma 3": (
        language(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**GROUPED, sliding_window=4)),
        {"attention": 2, "rms_norm": 13, "rotary_qk": 2, "gated": 2},
    ),
    "phi 3": (
        language(hf.Phi3ForCausalLM, hf.Phi3Config(**(GROUPED | {"head_dim": 8}))),
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "gpt neox, a part of each head": (
        language(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**PARTIAL)),
        {"attention": 2, "layer_norm": 5, "rotary_qk": 2, "mlp": 2, "linear": 2},
    ),
    "gpt j, neighbours": (
        gptj,
        {"attention_by_matmul": 2, "layer_norm": 3, "rotary_qk": 2, "mlp": 2, "linear": 2},
    ),
    "cohere, neighbours": (
        language(hf.CohereForCausalLM, hf.CohereConfig(**SMALL)),
        {"attention": 2, "layer_norm": 3, "rotary_qk": 2, "gated": 2, "linear": 2},
    ),
    "glm, neighbours of a part": (
        language(hf.GlmForCausalLM, hf.GlmConfig(**GROUPED, attention_dropout=0.0)),
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "llama 4, complex angles": (
        llama4,
        {"attention": 2, "rms_norm": 5, "rotary_qk": 2, "gated": 2},
    ),
    "bert": (bert, {"attention": 2, "layer_norm": 5, "mlp": 2}),
    "gpt 2": (gpt2, {"attention": 2, "layer_norm": 5, "mlp": 2}),
    "t5": (t5, {"attention": 3, "rms_norm": 7, "gated": 2}),
    "vision transformer": (
        vit,
        {"convolution": 1, "layer_norm": 5, "multi_head_attention": 2, "mlp": 2},
    ),
    "resnet": (resnet, {"convolution": 20, "max_pool": 1}),
    "mobilenet": (mobilenet, {"convolution": 52, "mlp": 1}),
    "convnext": (convnext, {"convolution": 4, "layer_norm": 5, "mlp": 2}),
    # Its batch norms are those of weights, which it standardizes.
    "bit": (bit, {"convolution": 9, "group_norm": 7, "batch_norm": 9, "max_pool": 1}),
    "janus, the encoder of images": (autoencoder, {"convolution": 19, "group_norm": 11}),
    "poolformer": (poolformer, {"convolution": 12, "group_norm": 8}),
}


def _in_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name):
    make, expected = MODELS[name]
    torch.manual_seed(0)
    model, arguments, result_of = make()
    model = model.double()
    arguments = {key: _in_double(value) for key, value in arguments.items()}
    parameters = list(model.parameters())
    rewritten = Rewritten(model)
    plain, ours = (result_of(run(**arguments)) for run in (model, rewritten))
    assert Counter(rewritten.swapped) == expected, rewritten.report
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    along = torch.randn_like(plain)
    grads, our_grads = (
        torch.autograd.grad(result, parameters, along, allow_unused=True)
        for result in (plain, ours)
    )
    # That of a bias of keys is zero but for rounding.
    rounding = 1e-12 * max(float(grad.abs().max()) for grad in grads if grad is not None)
    for grad, our_grad in zip(grads, our_grads, strict=True):
        assert (grad is None) == (our_grad is None)
        if grad is not None:
            # Models compute parts of this in float32.
            atol = 1e-5 * float(grad.abs().max()) + rounding
            torch.testing.assert_close(our_grad, grad, rtol=1e-5, atol=atol)
