"""Speculative decoding: draft tokens that the model verifies, several in one step.

A step computes what would follow each draft token, as if all before it were right, and chooses the
next token at each of these places as it would without speculation: by the same options, and by the
request's random number for this place of its output. Draft tokens are accepted as long as they are
what is chosen; the first that is not is replaced by what is. So the output is the same, token by
token, whatever was proposed. Given a draft token x it is accepted with the model's probability p(x)
of it, and what replaces it is distributed as p without x: that is the rejection sampling of
Leviathan et al., "Fast inference from transformers via speculative decoding", and of Chen et al.,
"Accelerating large language model decoding with speculative sampling", for drafts that are certain
(q(x) = 1), and it keeps to the request's seed besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cudnn_ops.serving.memory import whole
from cudnn_ops.serving.request import Request


@dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last tokens where they occurred before, in prompt or output.

    It costs no computation on the GPU, and pays off where the output repeats what is there: in
    summaries, answers from documents, edits of code (Saxena, "Prompt lookup decoding";
    ``prompt_lookup_num_tokens`` of transformers, ``ngram`` of vLLM).

    Raises:
        ValueError: a number less than 1; ``min_ngram`` more than ``max_ngram``.

    Example:
        >>> from cudnn_ops.generation import PromptLookup
        >>> PromptLookup(num_draft_tokens=6).max_ngram
        3
        >>> PromptLookup(num_draft_tokens=0)
        Traceback (most recent call last):
        ValueError: num_draft_tokens must be a whole number, at least 1, got 0
    """

    num_draft_tokens: int = 4
    """The largest number of draft tokens of a request in a step."""
    max_ngram: int = 3
    """How many of the last tokens must have occurred before: at first this many, then fewer."""
    min_ngram: int = 2
    """But at least so many."""

    def __post_init__(self) -> None:
        whole("num_draft_tokens", self.num_draft_tokens, 1)
        whole("min_ngram", self.min_ngram, 1)
        if whole("max_ngram", self.max_ngram, 1) < self.min_ngram:
            raise ValueError(
                f"max_ngram must be at least min_ngram, {self.min_ngram}, got {self.max_ngram}"
            )


class NgramIndex:
    """Where the n-grams of one request's tokens last occurred; grows with the tokens."""

    def __init__(self, options: PromptLookup) -> None:
        # The longest first: what follows them is the likeliest to follow again.
        self._sizes = range(options.max_ngram, options.min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end here or before are known

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most ``count`` tokens that may follow; none if the last ones have not occurred before.

        Args:
            tokens: all of the request so far, which begin with those of the call before.
            count: at least 1.
        """
        length = len(tokens)
        # Without the n-grams at the very end, which would be found in place of earlier ones.
        for end in range(self._indexed + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, length - 1)
        for size in self._sizes:
            found = self._ends.get(tuple(tokens[length - size :])) if size < length else None
            if found is not None:
                period = tokens[found:]
                # What repeats itself goes on repeating: the proposal may reach into itself.
                return [period[index % len(period)] for index in range(count)]
        return []


class Drafter(Protocol):
    """Proposes draft tokens for the requests of one engine."""

    @property
    def num_draft_tokens(self) -> int:
        """The largest number of draft tokens of a request in a step."""
        ...

    def warm_up(self) -> None:
        """Builds the plans of all steps, and captures their graphs."""
        ...

    def prepare(self, wanted: Mapping[Request, int], running: Sequence[Request]) -> None:
        """Called once a step, before ``propose`` is.

        Args:
            wanted: requests that decode, with the largest number of draft tokens of each.
            running: all that run, in the order in which they are served.
        """
        ...

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """At most ``count`` draft tokens, which is at least 1, and at most what was wanted."""
        ...

    def release(self, request: Request) -> None:
        """Frees the memory of a request that has no pages any more."""
        ...

    def forget(self, request: Request) -> None:
        """Drops what is known of a request that has ended."""
        ...


class LookupDrafter:
    """Proposes what followed before.

    It follows from a request's tokens alone, so that all ranks propose the same.
    """

    def __init__(self, options: PromptLookup) -> None:
        self._options = options
        self._indices: dict[Request, NgramIndex] = {}

    @property
    def num_draft_tokens(self) -> int:
        """As the options say."""
        return self._options.num_draft_tokens

    def warm_up(self) -> None:
        """There is nothing to build."""

    def prepare(self, wanted: Mapping[Request, int], running: Sequence[Request]) -> None:
        """There is nothing to prepare."""

    def propose(self, request: Request, count: int) -> list[int]:
        """At most ``count`` draft tokens; none if the last tokens have not occurred before."""
        if request not in self._indices:
            self._indices[request] = NgramIndex(self._options)
        return self._indices[request].propose(request.tokens, count)

    def release(self, request: Request) -> None:
        """It comes back with the same tokens, so that the index stays right."""

    def forget(self, request: Request) -> None:
        """Drops the index of a request that has ended."""
        self._indices.pop(request, None)
