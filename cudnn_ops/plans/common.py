"""The shapes whose plans come with the package.

Polymorphic plans of attention alone: each serves every batch and length up to its own, and memory
in any order, so that a few sizes serve most calls of a model. Plans of norms cannot be kept where
there is no GPU, and exact plans serve one shape each.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from cudnn_ops.plans.warmup import PlanRequest, plan_requests


class Heads(NamedTuple):
    """The attention of some models."""

    query: int
    kv: int
    size: int


class Sizes(NamedTuple):
    """The largest problem of a plan."""

    batch: int
    length: int


#: Of causal self-attention.
DECODERS = (
    Heads(32, 8, 128),  # Llama 3 8B, Mistral 7B, Qwen 3 8B
    Heads(64, 8, 128),  # Llama 3 70B, Qwen 3 32B
    Heads(40, 8, 128),  # Qwen 3 14B
    Heads(28, 4, 128),  # Qwen 2.5 7B
    Heads(16, 8, 128),  # Qwen 3 1.7B
    Heads(32, 8, 64),  # Llama 3.2 1B
    Heads(12, 12, 64),  # GPT-2
)
#: Of self-attention without a mask.
ENCODERS = (
    Heads(12, 12, 64),  # BERT base, ViT-B
    Heads(16, 16, 64),  # BERT large, ViT-L
    Heads(24, 24, 128),  # Flux
)
DECODER_PROMPTS = (
    *(Sizes(1, length) for length in (1024, 2048, 4096, 8192)),
    *(Sizes(batch, length) for batch in (4, 8) for length in (1024, 2048)),
)
DECODER_TRAINING = (
    *(Sizes(1, length) for length in (2048, 4096, 8192)),
    *(Sizes(2, length) for length in (2048, 4096)),
    *(Sizes(4, length) for length in (1024, 2048, 4096)),
    *(Sizes(8, length) for length in (1024, 2048)),
)
ENCODER_INFERENCE = (
    *(Sizes(batch, 1024) for batch in (1, 8, 32)),
    *(Sizes(batch, 4096) for batch in (1, 2)),
)
ENCODER_TRAINING = tuple(Sizes(batch, 1024) for batch in (8, 32, 64))


def common_requests(device: str | Path) -> list[PlanRequest]:
    """All of them, for a GPU as in :func:`cudnn_ops.support.explain`, each plan once."""
    requests: list[PlanRequest] = []
    for models, is_causal, inference, training in (
        (DECODERS, True, DECODER_PROMPTS, DECODER_TRAINING),
        (ENCODERS, False, ENCODER_INFERENCE, ENCODER_TRAINING),
    ):
        for heads in models:
            for trains, all_sizes in ((False, inference), (True, training)):
                for sizes in all_sizes:
                    requests += attention_plans(heads, sizes, is_causal, trains, device)
    return list(dict.fromkeys(requests))


def attention_plans(
    heads: Heads, sizes: Sizes, is_causal: bool, training: bool, device: str | Path
) -> list[PlanRequest]:
    """The forward's plan, or that of a forward in training and its backward's."""
    query, key = (
        ((sizes.batch, count, sizes.length, heads.size), torch.bfloat16)
        for count in (heads.query, heads.kv)
    )
    return plan_requests(
        "sdpa",
        query,
        key,
        is_causal=is_causal,
        enable_gqa=heads.query != heads.kv,
        training=training,
        plans="polymorphic",
        device=device,
    )
