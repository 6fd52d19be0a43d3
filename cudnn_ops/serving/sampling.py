"""Choosing the next token: the options of a request, and sampling from a batch of logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_ops.serving.memory import whole


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are sampled, and when it ends.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> from cudnn_ops.generation import SamplingParams
        >>> SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=1).temperature
        0.7
    """

    max_tokens: int = 64
    """The largest number of tokens to generate."""
    temperature: float = 0.0
    """Divisor of the logits; 0 selects the most likely token (greedy)."""
    top_k: int = 0
    """Samples from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Samples from the smallest set of most likely tokens whose probabilities sum to this."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is served; None: a random seed."""
    stop_tokens: Collection[int] = ()
    """Tokens that end a request; the one that did is the last of its output."""

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 1)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 (all) or more, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, got {self.top_p!r}")


def sample(logits: Tensor, options: Tensor) -> Tensor:
    """Samples one token for each row, with options for each row.

    The caller provides the random numbers, so that a row's result depends on no other row.

    Args:
        logits: [batch, vocabulary].
        options: float64 [batch, 4]: temperature, top_k, top_p, and a uniform random number in
            [0, 1).

    Returns:
        int64 [batch].
    """
    temperature, top_k, top_p, number = options[:, :, None].unbind(1)  # each [batch, 1]
    is_greedy = temperature == 0
    # float64: over a large vocabulary the sum of float32 probabilities is off by more than the
    # smallest of them, and the last tokens could never be drawn.
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = (ordered / temperature.masked_fill(is_greedy, 1.0)).softmax(-1)
    rank = torch.arange(weights.shape[1], device=weights.device)
    before = weights.cumsum(-1) - weights
    is_likely = ((top_k == 0) | (rank < top_k)) & (before < top_p)
    kept = (rank == 0) | (is_likely & ~is_greedy)
    reached = weights.masked_fill(~kept, 0.0).cumsum(-1)
    chosen = (reached <= number * reached[:, -1:]).sum(-1, keepdim=True)
    # Rounding may make the number reach the whole sum, after which no token is kept.
    chosen = torch.minimum(chosen, kept.sum(-1, keepdim=True) - 1)
    return tokens.gather(1, chosen).squeeze(1)
