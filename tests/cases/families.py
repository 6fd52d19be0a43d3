"""A small model of any family of transformers, by its configuration's defaults made small."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers import AutoModelForSeq2SeqLM as AutoModelForSeq2Seq

from tests.cases.models import SIZES

#: What sizes are called where they are not called as in ``SIZES``; those that a family has apply.
OTHER_SIZES: dict[str, Any] = {
    # GPT-2 and its like
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": 256,
    # encoders with decoders
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "initializer_factor": 2.0,
    # experts, all of them, so that rounding does not choose
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # windows and chunks that the tests' sequences pass
    "sliding_window": 7,
    "attention_chunk_size": 8,
    "local_attention": 6,
    # no dropout where models train
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
}
AUTO = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2Seq,
}


def tiny_config(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes = {**SIZES, **OTHER_SIZES}
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    changes = {
        name: value
        for name, value in sizes.items()
        if name in ids or getattr(default, name, None) is not None
    }
    if hasattr(default, "kv_lora_rank"):  # each query head has a key of its own
        changes |= {"num_key_value_heads": 4, "head_dim": changes["qk_rope_head_dim"]}
    layer_types = getattr(default, "layer_types", None)
    if layer_types:  # one of each
        kinds = list(dict.fromkeys(layer_types))
        changes["layer_types"] = [kinds[i % len(kinds)] for i in range(2)]
    for name in list(changes):
        described = getattr(kind, name, None)
        if isinstance(described, property) and described.fset is None:
            del changes[name]
    return kind(**changes)


def tiny_model(
    family: str, task: str = "causal", attention: str = "eager", turned: float | None = None
) -> Any:
    """The same parameters at every call; ``turned``: the part of each head with positions."""
    torch.manual_seed(5)
    config = tiny_config(family)
    if turned is not None:
        config.rope_parameters["partial_rotary_factor"] = turned
    model = AUTO[task].from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    for parameter in model.parameters():  # biases and norms too
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.float().eval()
