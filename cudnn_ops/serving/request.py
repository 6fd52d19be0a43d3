"""One request: its tokens, its text, its figures, and what ends it."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from cudnn_ops.serving.kept import Kept
from cudnn_ops.serving.sampling import SamplingParams
from cudnn_ops.serving.sequence import KVSequence
from cudnn_ops.serving.stats import RequestStats
from cudnn_ops.serving.text import Decode, TextStream, overlap

FinishReason: TypeAlias = Literal["stop", "length", "error", "abort", "timeout", "moved"]

#: What ranks that follow are told beside a token: how the request goes on.
_ENDS: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's probabilities at one token of the output.

    They are those of the model's logits, before temperature, penalties and all other options.
    """

    token: int
    """The chosen token."""
    logprob: float
    """Its log probability."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with theirs, the likeliest first."""


class Request:
    """One prompt and the tokens generated for it; compares by identity."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        serial: int,
        decode: Decode | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> None:
        """Called by :meth:`cudnn_ops.generation.Engine.submit` only."""
        self.params = params
        self.serial = serial  # tells ranks which one is meant
        self.priority = priority
        """Requests of a higher one are served first."""
        self.origin: int | None = None
        """The ``serial`` of the sender's request, if it was handed over by another engine."""
        self.stats = RequestStats(prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        """Why it ended; None while it waits or runs."""
        self.stopped_by: int | tuple[int, ...] | str | None = None
        """The stop token, stop sequence or stop string that ended it."""
        self.error: Exception | None = None
        """Why it failed, if its ``finish_reason`` is ``"error"``."""
        self.logprobs: list[TokenLogprobs] = []
        """One for each token of the output, if ``params.logprobs`` asks for them."""
        # Prompt and output in one list: after a preemption they are recomputed alike.
        self.tokens = list(prompt)
        self.sequence: KVSequence | None = None  # while it runs
        self.kept: Kept | None = None  # while it waits: what need not be computed
        self._submitted = time.perf_counter()
        self._timeout, self._queue_timeout = timeout, queue_timeout
        self._text = None if decode is None else TextStream(decode, tuple(params.stop_strings))
        # One generator per request: sampling depends on its seed and its output so far alone.
        self._generator = random.Random(params.seed)
        self._numbers: deque[float] = deque()  # drawn for tokens that are still to come

    def age(self, now: float) -> float:
        """Seconds since its submission."""
        return now - self._submitted

    def state(self) -> dict[str, Any]:
        """What another process must know to go on with it, beside its age."""
        assert self.sequence is not None
        return {
            "tokens": self.tokens,
            "length": self.sequence.length,
            "params": self.params,
            "serial": self.serial,
            "priority": self.priority,
            "timeout": self._timeout,
            "stats": self.stats,
            "logprobs": self.logprobs,
            "text": self._text and self._text.state,
            "generator": self._generator,
            "numbers": self._numbers,
        }

    @classmethod
    def resume(cls, state: dict[str, Any], serial: int, decode: Decode | None) -> Request:
        """The request of which another process has told the state, and its age in ``seconds``."""
        stats: RequestStats = state["stats"]
        options = {name: state[name] for name in ("priority", "timeout")}
        prompt = state["tokens"][: stats.prompt_tokens]
        request = cls(prompt, state["params"], serial, decode, **options)
        request.tokens, request.stats, request.logprobs = (
            *(state["tokens"], stats, state["logprobs"]),
        )
        request.origin = state["serial"]
        if request._text is not None:
            request._text.state = state["text"]
        request._generator, request._numbers = state["generator"], state["numbers"]
        request._submitted -= state["seconds"]
        return request

    @property
    def prompt(self) -> list[int]:
        """The submitted tokens."""
        return self.tokens[: self.stats.prompt_tokens]

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, including those that ended the request."""
        return self.tokens[self.stats.prompt_tokens :]

    @property
    def text(self) -> str | None:
        """The output's text, without what ended the request; None if the engine has no ``decode``.

        While the request runs, it only ever grows: what may turn out to be part of a stop, or of a
        character whose other bytes are still to come, is held back. Raises what ``decode`` raises.
        """
        if self._text is None:
            return None
        self._read()
        return self._text.shown(self.is_finished)

    @property
    def rank(self) -> tuple[int, int]:
        """Requests are served in this order, the least first."""
        return -self.priority, self.serial

    @property
    def is_limited(self) -> bool:
        """Whether it has a timeout."""
        return self._timeout is not None or self._queue_timeout is not None

    def is_late(self, now: float) -> bool:
        """Whether it has taken longer than it may, or has waited longer for its first step."""
        passed = self.age(now)
        if self._timeout is not None and passed > self._timeout:
            return True
        never_ran = self.sequence is None and not self.stats.peak_pages
        return never_ran and self._queue_timeout is not None and passed > self._queue_timeout

    @property
    def left(self) -> int:
        """How many tokens it may still generate."""
        return self.params.max_tokens - self.stats.output_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its output is complete."""
        return self.finish_reason is not None

    def number(self, ahead: int = 0) -> float:
        """Uniform in [0, 1): selects the next token, or the one that is so many tokens ahead."""
        while len(self._numbers) <= ahead:
            self._numbers.append(self._generator.random())
        return self._numbers[ahead]

    @property
    def told(self) -> int:
        """What ranks that follow must know of its last token, in one number for :meth:`repeat`."""
        return self.tokens[-1] * len(_ENDS) + _ENDS.index(self.finish_reason)

    def accept(self, token: int, now: float, logprobs: TokenLogprobs | None = None) -> None:
        """Appends a token that was generated at time ``now``; it may end the request."""
        self._append(token, now)
        params, count = self.params, self.stats.output_tokens
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if count >= params.min_tokens:
            if token in params.stop_tokens:
                self._stop(token)
            elif params.stop_sequences:
                self._stop_by_sequence()
        if not self.finish_reason and count == params.max_tokens:
            self.finish_reason = "length"
        if params.stop_strings and self._text is not None:
            try:
                self._read()
            except Exception as error:
                self.fail(error, now)
            if self._text.stop is not None:
                self._stop(self._text.stop)
        if self.finish_reason:
            self.stats.seconds = now - self._submitted

    def repeat(self, told: int, now: float) -> int | None:
        """Does what :meth:`accept` or :meth:`fail` did on the rank that tells it.

        Returns:
            The token; None if the request failed before it had one, of which -1 tells.
        """
        if told < 0:
            self.finish_reason = "error"
            return None
        token, end = divmod(told, len(_ENDS))
        self._append(token, now)
        self.finish_reason = _ENDS[end]
        return token

    def fail(self, error: Exception, now: float) -> None:
        """Ends the request at time ``now`` by an error of its own, with the output that it has."""
        self.finish_reason, self.error = "error", error
        self.stats.seconds = now - self._submitted

    def end(self, reason: FinishReason, now: float) -> None:
        """Ends the request at time ``now``, with the output that it has."""
        self.finish_reason = reason
        self.stats.seconds = now - self._submitted

    def _append(self, token: int, now: float) -> None:
        stats = self.stats
        self.tokens.append(token)
        if self._numbers:
            self._numbers.popleft()
        else:
            self._generator.random()
        stats.output_tokens += 1
        if stats.time_to_first_token is None:
            stats.time_to_first_token = now - self._submitted

    def _stop(self, by: int | tuple[int, ...] | str) -> None:
        self.finish_reason, self.stopped_by = "stop", by

    def _stop_by_sequence(self) -> None:
        """Ends the request if its output ends with a stop sequence."""
        for sequence in self.params.stop_sequences:
            size = len(sequence)
            if size <= self.stats.output_tokens and tuple(self.tokens[-size:]) == sequence:
                self._stop(tuple(sequence))
                return

    def _hidden(self) -> int:
        """How many of the last tokens are no text: a stop, or what may become one."""
        if isinstance(self.stopped_by, int):
            return 1
        if isinstance(self.stopped_by, tuple):
            return len(self.stopped_by)
        stops = self.params.stop_sequences
        if self.finish_reason or not stops:
            return 0
        longest = max(map(len, stops))
        return overlap(tuple(self.output[-longest:]), tuple(stops))

    def _read(self) -> None:
        """Makes text of the tokens that are not yet part of it."""
        text = self._text
        assert text is not None
        if text.stop is None:
            begin = self.stats.prompt_tokens + text.fed
            tokens = self.tokens[begin : len(self.tokens) - self._hidden()]
            searches = self.stats.output_tokens >= self.params.min_tokens
            text.feed(tokens, self.is_finished, searches)

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.sequence else "waiting")
        return f"Request(prompt={len(self.prompt)} tokens, output={self.output}, {state})"


class Branch(NamedTuple):
    """A request as it will be if some draft tokens are accepted."""

    request: Request
    drafts: tuple[int, ...] = ()
    """They are assumed to follow its tokens."""

    @property
    def output(self) -> list[int]:
        """The output with the drafts, in a new list."""
        return [*self.request.output, *self.drafts]

    @property
    def output_tokens(self) -> int:
        """How many tokens the output has."""
        return self.request.stats.output_tokens + len(self.drafts)

    @property
    def number(self) -> float:
        """Uniform in [0, 1): selects the token that follows."""
        return self.request.number(len(self.drafts))

    def last(self, count: int) -> list[int]:
        """The last tokens of the prompt and the output with the drafts; at least one."""
        return [*self.request.tokens[-count:], *self.drafts][-count:]
