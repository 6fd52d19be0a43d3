"""Which requests a step computes, and how many tokens of each: admission, chunks, preemption.

Host logic alone: the model is run by :mod:`cudnn_ops.model_runner`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from cudnn_ops.kv_cache import KVSequence, OutOfPages, PagedKVCache
from cudnn_ops.sampling import SamplingParams


@dataclass
class RequestStats:
    """What one request took. Times are in seconds, on the host's clock."""

    prompt_tokens: int
    output_tokens: int = 0
    prefix_hits: int = 0
    """Tokens that were found computed, those found again after a preemption among them."""
    preemptions: int = 0
    """How often its pages were given to older requests."""
    peak_pages: int = 0
    """The most pages it held, shared ones among them."""
    time_to_first_token: float | None = None
    """From its submission; None before."""
    seconds: float | None = None
    """From its submission to its last token; None before."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over ``seconds``; 0 before the end."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


class Request:
    """One prompt and what has been generated for it; equal to itself only."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        """For :meth:`cudnn_ops.generation.Engine.submit` alone."""
        self.params = params
        self.stats = RequestStats(prompt_tokens=len(prompt))
        self.finish_reason: Literal["stop", "length"] | None = None
        """None while it waits or runs."""
        # Prompt and output in one: after a preemption there is no difference between the two.
        self.tokens = list(prompt)
        self.sequence: KVSequence | None = None  # while it runs
        self._submitted = time.perf_counter()
        # Its own, so that nothing but its seed and its output so far decides what is drawn next.
        self._generator = random.Random(params.seed)
        self.number = self._generator.random()
        """Uniform from 0 to 1: what the next token is drawn with."""

    @property
    def prompt(self) -> list[int]:
        """The tokens it was submitted with."""
        return self.tokens[: self.stats.prompt_tokens]

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.stats.prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether its output is complete."""
        return self.finish_reason is not None

    def accept(self, token: int) -> None:
        """Adds a generated token, which may be its last."""
        stats, params = self.stats, self.params
        self.tokens.append(token)
        self.number = self._generator.random()
        stats.output_tokens += 1
        elapsed = time.perf_counter() - self._submitted
        if stats.time_to_first_token is None:
            stats.time_to_first_token = elapsed
        if token in params.stop_tokens:
            self.finish_reason = "stop"
        elif stats.output_tokens == params.max_tokens:
            self.finish_reason = "length"
        if self.is_finished:
            stats.seconds = elapsed

    def __repr__(self) -> str:
        """Its size and state."""
        state = self.finish_reason or ("running" if self.sequence else "waiting")
        return f"Request(prompt={len(self.prompt)} tokens, output={self.output}, {state})"


@dataclass(frozen=True)
class Share:
    """What a step computes of one request: tokens ``start`` to ``stop``, the latter not included.

    They have their slots: the sequence's length is ``stop``.
    """

    request: Request
    sequence: KVSequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from it."""
        return self.stop == len(self.request.tokens)


@dataclass(frozen=True)
class Batch:
    """The shares of a step, and the slots of their tokens, one share's behind the other's."""

    shares: list[Share]
    slots: list[int]


class Scheduler:
    """First come, first served, as many at once as there are rows and pages for.

    Running requests are older than all waiting ones, and only the youngest running one is ever
    preempted. So the oldest always gets on, and everybody is the oldest one day.
    """

    def __init__(self, cache: PagedKVCache, max_batch: int, chunk: int) -> None:
        """Takes the arguments of :class:`cudnn_ops.generation.Engine`."""
        self.cache, self.max_batch, self.chunk = cache, max_batch, chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.prefix_hits = self.preemptions = 0

    def schedule(self) -> Batch:
        """Decides on a step and makes room for its tokens; empty if there is nothing to do.

        Raises:
            OutOfPages: there are too few for the oldest request alone, for somebody else holds
                pages of the cache. It may be called again once they are free.
        """
        batch = self._continue_running()
        self._admit(batch)
        for share in batch.shares:
            stats = share.request.stats
            stats.peak_pages = max(stats.peak_pages, self._pages(share.stop))
        return batch

    def undo(self, batch: Batch) -> None:
        """Takes back the room that was made for a step which was not computed."""
        for share in batch.shares:
            self.cache.truncate(share.sequence, share.start)

    def commit(self, batch: Batch) -> None:
        """Tells the cache what is in the pages that a step has filled."""
        size = self.cache.page_size
        for share in batch.shares:
            if share.start // size < share.stop // size:
                self.cache.commit(share.sequence, share.request.tokens[: share.stop])

    def finish(self, request: Request) -> None:
        """Lets go of a running request and its pages."""
        self.running.remove(request)
        self._release(request)

    def _continue_running(self) -> Batch:
        """The next tokens of running requests, of which some may have to be preempted."""
        while True:
            budget = self.chunk
            wanted: list[tuple[Request, KVSequence, int]] = []
            for request in self.running:
                assert request.sequence is not None
                left = len(request.tokens) - request.sequence.length
                # A request that decodes never waits for another one's prompt.
                count = left if left == 1 else min(left, budget)
                if left > 1:
                    budget -= count
                if count:
                    wanted.append((request, request.sequence, count))
            try:
                slots = self.cache.extend_all([(sequence, count) for _, sequence, count in wanted])
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
                continue
            shares = [
                Share(request, sequence, sequence.length - count, sequence.length)
                for request, sequence, count in wanted
            ]
            return Batch(shares, slots)

    def _admit(self, batch: Batch) -> None:
        """Adds to a step what waits, as far as rows, pages and the step's budget reach."""
        cache = self.cache
        budget = self.chunk - sum(
            share.stop - share.start for share in batch.shares if share.stop - share.start > 1
        )
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            request = self.waiting[0]
            sequence = cache.allocate(request.tokens)
            hits = sequence.length
            # Where nobody runs, waiting would not help.
            if self.running and not (
                self._has_room(request, sequence) and not self._is_being_computed(request, hits)
            ):
                cache.free(sequence)
                return
            count = min(len(request.tokens) - hits, budget)
            try:
                batch.slots.extend(cache.extend(sequence, count))
            except OutOfPages:
                cache.free(sequence)
                raise
            self.running.append(self.waiting.popleft())
            request.sequence = sequence
            request.stats.prefix_hits += hits
            self.prefix_hits += hits
            batch.shares.append(Share(request, sequence, hits, sequence.length))
            budget -= count

    def _has_room(self, candidate: Request, sequence: KVSequence) -> bool:
        """Whether all known tokens find a page, with one to spare for each that runs.

        Without the spare ones a request would be admitted only to be preempted when the others
        have grown by a few tokens. For want of them, what was just preempted does not come back in
        the same step either.
        """
        needed = self._pages(len(candidate.tokens)) - self._pages(sequence.length)
        for request in self.running:
            assert request.sequence is not None
            needed += self._pages(len(request.tokens)) - self._pages(request.sequence.length) + 1
        return needed <= self.cache.available

    def _is_being_computed(self, candidate: Request, hits: int) -> bool:
        """Whether the page after those that were found is on its way in a running request.

        It is worth waiting for: computing it twice costs more than a step's delay.
        """
        stop = hits + self.cache.page_size
        if not self.cache.prefix_sharing or stop >= len(candidate.tokens):
            return False
        known = candidate.tokens[:stop]
        # Were it computed, it would have been found.
        return any(request.tokens[:stop] == known for request in self.running)

    def _preempt(self, request: Request) -> None:
        """Gives the youngest one's pages back; what it computed is found again if it is in luck."""
        self.running.remove(request)
        self._release(request)
        request.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        self.cache.free(request.sequence)
        request.sequence = None

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)
