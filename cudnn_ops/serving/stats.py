"""Counters and times of requests and of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of speculative decoding; those of several requests can be added."""

    drafts: int = 0
    """How often draft tokens were verified: once for each request and step that had any."""
    draft_tokens: int = 0
    """Tokens that were proposed."""
    accepted_tokens: int = 0
    """Those of them that became output."""

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over draft tokens; 0 before the first."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification gives on average: the accepted ones and the one behind them.

        As in vLLM. 0 before the first.
        """
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass
class RequestStats:
    """Counters and times of one request. Times are in seconds, on the host's clock."""

    prompt_tokens: int
    output_tokens: int = 0
    prefix_hits: int = 0
    """Tokens that prefix caching found, including those found again after a preemption."""
    preemptions: int = 0
    """How often it lost its pages to requests that are served before it."""
    restored_tokens: int = 0
    """Tokens whose keys and values came back from the host, or from another engine."""
    peak_pages: int = 0
    """The largest number of pages that it held, including shared ones."""
    time_to_first_token: float | None = None
    """Since its submission; None before the first token."""
    seconds: float | None = None
    """From its submission to its end; None before that."""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over ``seconds``; 0 before the end."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine, over all requests so far."""

    finished: int = 0
    """Requests that are complete."""
    failed: int = 0
    """Requests that ended by an error of their own."""
    aborted: int = 0
    """Requests that were aborted."""
    timed_out: int = 0
    """Requests that ended by their timeout."""
    steps: int = 0
    overlapped: int = 0
    """Steps that were queued while the one before was computed."""
    replays: int = 0
    """Steps that were replayed from a CUDA graph."""
    computed_tokens: int = 0
    """Tokens that went through the model, including those computed again after a preemption."""
    extra_tokens: int = 0
    """Those of them whose request had ended by then, as is found one step later with overlap."""
    output_tokens: int = 0
    prefix_hits: int = 0
    """Tokens of admitted requests that prefix caching found in the cache."""
    preemptions: int = 0
    swaps: int = 0
    """How many of the preemptions copied pages to the host."""
    restored_tokens: int = 0
    """Tokens whose keys and values came back from the host, or from another engine."""
    peak_pages: int = 0
    """The largest number of pages in use in any step."""
    seconds: float = 0.0
    """Time in which a step was planned or computed, in seconds."""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def overlap_share(self) -> float:
        """The share of ``overlapped`` in ``steps``; 0 before the first step."""
        return self.overlapped / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over ``seconds``; 0 before the first step."""
        return self.output_tokens / self.seconds if self.seconds else 0.0
