"""Which token follows: the options of a request, and the choice for a batch of logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> from cudnn_ops.generation import SamplingParams
        >>> SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=1).temperature
        0.7
    """

    max_tokens: int = 64
    """The most tokens to generate."""
    temperature: float = 0.0
    """What the logits are divided by; 0: the most likely token is taken."""
    top_k: int = 0
    """How many of the most likely tokens are drawn from; 0: all."""
    top_p: float = 1.0
    """Drawn from are the fewest most likely tokens whose probabilities add up to this."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is served; None: another one each time."""
    stop_tokens: Collection[int] = ()
    """Tokens that end a request. The one that did is the last of its output."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens is a whole number, at least 1, got {self.max_tokens!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is at least 0 and finite, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is a whole number, 0 (all) or more, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is more than 0 and at most 1, got {self.top_p!r}")


def sample(logits: Tensor, options: Tensor) -> Tensor:
    """Chooses a token a row, each row with options of its own and by itself alone.

    The random numbers are the caller's, so that a row's choice depends on no other row.

    Args:
        logits: [batch, vocabulary].
        options: float64 [batch, 4]: temperature, top_k, top_p, and a number from 0 to 1, drawn
            uniformly.

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
    # By rounding the number may reach the whole sum, behind which nothing is kept.
    chosen = torch.minimum(chosen, kept.sum(-1, keepdim=True) - 1)
    return tokens.gather(1, chosen).squeeze(1)
