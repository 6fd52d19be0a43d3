"""The options of a request: how its tokens are chosen, and what ends it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from cudnn_ops.serving.memory import whole

Allowed: TypeAlias = Tensor | Iterable[int] | None
"""Token ids, or a bool mask [vocabulary]; None stands for all tokens."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    The options change the model's logits, one behind the other in the order of transformers and
    vLLM: ``logit_bias``; ``repetition_penalty``, ``frequency_penalty`` and ``presence_penalty``;
    then ``bad_words``, ``min_tokens`` and ``allowed_tokens`` exclude tokens. The greatest logit is
    chosen, or one is drawn after ``temperature``, ``top_k``, ``top_p`` and ``min_p``, each applied
    to the probabilities that the one before it leaves.

    Raises:
        ValueError: a number out of its range, or something that is not a collection of tokens or
            strings.

    Example:
        >>> from cudnn_ops.generation import SamplingParams
        >>> SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=1).temperature
        0.7
        >>> SamplingParams(min_p=2.0)
        Traceback (most recent call last):
        ValueError: min_p must be a number from 0 to 1, got 2.0
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
    min_p: float = 0.0
    """Samples from the tokens that are at least this probable relative to the most likely one
    (Nguyen et al., "Turning up the heat"; as in vLLM and transformers)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens of the prompt and the output so far, and multiplies the
    negative ones (Keskar et al., "CTRL"; as in vLLM and transformers). More than 0; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output so far; -2 to 2 (as in OpenAI's API and
    vLLM)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the output so far has it; -2 to 2 (as in
    OpenAI's API and vLLM)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; -100 to 100 (as in OpenAI's API)."""
    bad_words: Collection[Sequence[int]] = ()
    """Sequences of tokens that are not generated: where prompt and output so far end with all but a
    sequence's last token, that one is excluded (as ``bad_words_ids`` of transformers)."""
    min_tokens: int = 0
    """Before so many tokens, stop tokens are excluded, and no stop sequence or string ends the
    request (as in vLLM)."""
    allowed_tokens: Callable[[list[int]], Allowed] | None = None
    """For structured output: called with the output so far, it returns what may follow. That is
    token ids, a bool mask [vocabulary] on the CPU or the device, or None for any token. It runs on
    the host while the device computes the logits, and may be called again for the same output.
    If it raises or allows nothing, its request alone fails. With speculation it is also called for
    outputs that end with draft tokens, allowed or not; what it says there counts only if they are
    accepted."""
    stop_sequences: Collection[Sequence[int]] = ()
    """Sequences of tokens that end a request; the one that did is the end of its output, and not
    part of its text."""
    stop_strings: Collection[str] = ()
    """Strings that end a request, wherever in a token they begin or end. Its text ends before the
    string; its output has all tokens. Needs an engine with ``decode``."""
    logprobs: int | None = None
    """How many of the most likely tokens to tell the log probability of, beside that of the chosen
    token. They are those of the model, before all other options (as in vLLM). None: no log
    probabilities at all."""

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 1)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 (all) or more, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, got {self.top_p!r}")
        _check_number("min_p", self.min_p, 0, 1)
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 0 < penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be a number, more than 0 and finite, got {penalty!r}"
            )
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 <= whole("min_tokens", self.min_tokens, 0) <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}"
            )
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0)
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise ValueError(
                "allowed_tokens must be None or a function of the output so far, got "
                f"{self.allowed_tokens!r}"
            )
        # Copies: what was given may change while the request is served.
        for name, value in (
            ("logit_bias", _biases(self.logit_bias)),
            ("bad_words", _token_sequences("bad_words", self.bad_words)),
            ("stop_sequences", _token_sequences("stop_sequences", self.stop_sequences)),
            ("stop_strings", _strings(self.stop_strings)),
        ):
            object.__setattr__(self, name, value)

    @cached_property
    def _has_penalties(self) -> bool:
        """Whether the tokens so far must be counted."""
        return not (
            self.repetition_penalty == 1 and self.presence_penalty == self.frequency_penalty == 0
        )

    @cached_property
    def _edits_logits(self) -> bool:
        """Whether the model's logits may be changed."""
        excludes = self.bad_words or self.min_tokens or self.allowed_tokens
        return bool(self._has_penalties or self.logit_bias or excludes)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the greatest logit is all that is asked for."""
        return self.temperature == 0 and not self._edits_logits and self.logprobs is None


def check_vocabulary(name: str, tokens: Collection[int], vocabulary: int) -> None:
    """Raises ValueError if some of the tokens are not of the model's vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(
            f"{name} must be of tokens from 0 to {vocabulary - 1}, the model's vocabulary, got "
            f"{wrong}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if not _is_number(value) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}, got {value!r}")


def _is_token(value: object) -> bool:
    try:
        return 0 <= operator.index(value) < 2**63  # type: ignore[arg-type]
    except TypeError:
        return False


def _biases(biases: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(biases, Mapping) or not all(
        _is_token(token) and _is_number(bias) and -100 <= bias <= 100
        for token, bias in biases.items()
    ):
        raise ValueError(
            f"logit_bias must be a mapping of token ids to numbers from -100 to 100, got {biases!r}"
        )
    return {operator.index(token): float(bias) for token, bias in biases.items()}


def _token_sequences(
    name: str, sequences: Collection[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    try:
        copied = tuple(tuple(sequence) for sequence in sequences)
    except TypeError:
        copied = ((),)
    if not all(sequence and all(map(_is_token, sequence)) for sequence in copied):
        raise ValueError(
            f"{name} must be a collection of sequences, each of at least one token id, "
            f"got {sequences!r}"
        )
    return tuple(tuple(map(operator.index, sequence)) for sequence in copied)


def _strings(strings: Collection[str]) -> tuple[str, ...]:
    # A string is itself a collection of strings.
    if not isinstance(strings, str) and isinstance(strings, Iterable):
        copied = tuple(strings)
        if all(isinstance(string, str) and string for string in copied):
            return copied
    raise ValueError(
        f"stop_strings must be a collection of strings that are not empty, got {strings!r}"
    )
