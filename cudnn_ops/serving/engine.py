"""Serving many requests at once from a paged cache: continuous batching around any model.

    cache = PagedKVCache(layers, pages, 16, heads_kv, head_size, dtype=dtype, device="cuda")
    engine = Engine(model, cache, max_batch=64, chunk=1024)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=100, temperature=0.7, seed=1))
    for request in engine.run():
        print(request.output, request.stats)

Each step computes the next token of every running request, and a chunk of the prompts that have
arrived; requests join and leave between steps. :class:`Model` describes what a model must provide.
The queue is in :mod:`cudnn_ops.serving.scheduler`, the GPU's work in
:mod:`cudnn_ops.serving.model_runner`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.memory import whole
from cudnn_ops.serving.model_runner import Model, ModelRunner
from cudnn_ops.serving.sampling import SamplingParams
from cudnn_ops.serving.scheduler import Request, Scheduler


class GeneratedToken(NamedTuple):
    """One generated token and its request."""

    request: Request
    token: int


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine, over all requests so far."""

    finished: int = 0
    """Requests that are complete."""
    steps: int = 0
    replays: int = 0
    """Steps that were replayed from a CUDA graph."""
    computed_tokens: int = 0
    """Tokens that went through the model, including those computed again after a preemption."""
    output_tokens: int = 0
    prefix_hits: int = 0
    """Tokens of admitted requests that prefix caching found in the cache."""
    preemptions: int = 0
    peak_pages: int = 0
    """The largest number of pages in use in any step."""
    seconds: float = 0.0
    """Time spent in steps, in seconds."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over ``seconds``; 0 before the first step."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Generates tokens for requests that may arrive at any time: continuous batching.

    Requests are served in the order of their arrival, as many at once as ``max_batch`` and the free
    pages allow. Prefix caching reuses the keys and values of known prompts; a request whose prefix
    is being computed for another request waits for it. When pages run out, the youngest running
    request is preempted: it gives its pages back, waits, and is later computed again as far as
    prefix caching does not find it.

    Greedy output equals that of the model alone, up to rounding in other batch shapes. Sampled
    output depends on the request's seed alone, up to the same rounding.

    Not thread-safe. All steps must run on one stream (:class:`~cudnn_ops.PagedKVCache`).

    Args:
        model: computes the logits. On a GPU its parameters must keep their addresses.
        cache: holds its keys and values. It may be shared; pages that others hold are not available
            to this engine.
        max_batch: the largest number of requests that run at once.
        chunk: the largest number of prompt tokens in a step. Small chunks keep the latency of
            running requests low, large ones process prompts faster.
        max_length: the longest request, prompt and output in tokens, that the model supports; None
            stands for what fits into the cache.

    Raises:
        ValueError: a number less than 1.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        *,
        max_batch: int = 32,
        chunk: int = 512,
        max_length: int | None = None,
    ) -> None:
        """Allocates the inputs of a step; captures nothing yet."""
        room = cache.pages * cache.page_size
        max_length = room if max_length is None else max_length
        self.cache = cache
        self.max_batch, self.chunk = whole("max_batch", max_batch, 1), whole("chunk", chunk, 1)
        self.max_length = min(whole("max_length", max_length, 1), room)
        self._scheduler = Scheduler(cache, max_batch, chunk)
        self._runner = ModelRunner(model, cache, max_batch, chunk, self.max_length)
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """The counters so far."""
        return self._stats

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in the batch or for pages, including preempted ones."""
        return len(self._scheduler.waiting)

    def warm_up(self) -> None:
        """Builds the plans and captures the CUDA graphs of all batch sizes.

        Otherwise the first step of each size does, and takes as long as many steps. Touches no
        page.
        """
        self._runner.warm_up()

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queues a request; :meth:`step` serves it.

        Args:
            prompt: token ids, at least one.
            params: how to choose the next tokens; None stands for the defaults.

        Returns:
            The request; serving updates its ``output``, ``finish_reason`` and ``stats``.

        Raises:
            ValueError: the prompt is empty or holds no token ids; prompt and ``max_tokens``
                together exceed ``max_length``.
        """
        params = SamplingParams() if params is None else params
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"prompt must be a sequence of token ids: {error}") from None
        if not tokens:
            raise ValueError("prompt must have at least one token, got none")
        if not 0 <= min(tokens) <= max(tokens) < 2**63:
            raise ValueError("prompt must be a sequence of token ids, from 0 to 2**63 - 1")
        length = len(tokens) + params.max_tokens
        if length > self.max_length:
            raise ValueError(
                f"prompt and max_tokens are {len(tokens)} + {params.max_tokens} tokens, and a "
                f"request has room for {self.max_length}: shorten one of them, or create an engine "
                f"with a larger max_length and a cache of more pages (now {self.cache.pages} of "
                f"{self.cache.page_size} tokens)"
            )
        request = Request(tokens, params)
        self._scheduler.waiting.append(request)
        return request

    def step(self) -> list[GeneratedToken]:
        """Computes one step: the next tokens of running requests, and a chunk of prompts.

        Returns:
            The generated tokens; empty if there was nothing to do, or if no prompt is complete yet.
            ``request.is_finished`` says whether a token is its request's last.

        Raises:
            OutOfPages: other users of the cache hold so many pages that the oldest request cannot
                proceed. Nothing is lost: call it again once pages are free.
        """
        began = time.perf_counter()
        scheduler = self._scheduler
        batch = scheduler.schedule()
        if not batch.shares:
            return []
        pages = self.cache.pages - self.cache.available
        try:
            result = self._runner.launch(batch)
            # While the device computes: what it will have written is known already.
            scheduler.commit(batch)
            tokens = result.tolist()
        except BaseException:
            scheduler.undo(batch)
            raise
        generated = []
        now = time.perf_counter()
        for share, token in zip(batch.shares, tokens, strict=True):
            if share.is_last:
                share.request.accept(token, now)
                generated.append(GeneratedToken(share.request, token))
        finished = [request for request, _ in generated if request.is_finished]
        for request in finished:
            scheduler.finish(request)
        stats = self._stats
        self._stats = replace(
            stats,
            finished=stats.finished + len(finished),
            steps=stats.steps + 1,
            replays=self._runner.replays,
            computed_tokens=stats.computed_tokens + len(batch.slots),
            output_tokens=stats.output_tokens + len(generated),
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            peak_pages=max(stats.peak_pages, pages),
            seconds=stats.seconds + time.perf_counter() - began,
        )
        return generated

    def run(self) -> Iterator[Request]:
        """Steps until no request is left, and yields each request when it is finished.

        Requests that are submitted in between are served too.
        """
        while self.running or self.waiting:
            for request, _ in self.step():
                if request.is_finished:
                    yield request
