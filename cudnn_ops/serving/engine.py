"""Serving many requests at once from a paged cache: continuous batching around any model.

    cache = PagedKVCache(layers, pages, 16, heads_kv, head_size, dtype=dtype, device="cuda")
    engine = Engine(model, cache, max_batch=64, chunk=1024)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=100, temperature=0.7, seed=1))
    for request in engine.run():
        print(request.output, request.stats)

Each step computes the next token of every running request, and a chunk of the prompts that have
arrived; requests join and leave between steps. :class:`Model` describes what a model must provide.
What a step does is in :mod:`cudnn_ops.serving.core`, the queue in
:mod:`cudnn_ops.serving.scheduler`, the GPU's work in :mod:`cudnn_ops.serving.model_runner`, what
several ranks tell each other in :mod:`cudnn_ops.serving.ranks`.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.serving.core import Core
from cudnn_ops.serving.draft_model import DraftModel
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.memory import whole
from cudnn_ops.serving.model_runner import Model
from cudnn_ops.serving.ranks import Order, Submitted
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.sampling import SamplingParams, check_vocabulary
from cudnn_ops.serving.speculation import PromptLookup
from cudnn_ops.serving.stats import EngineStats
from cudnn_ops.serving.step import GeneratedToken, Piece
from cudnn_ops.serving.swap import Preemption
from cudnn_ops.serving.text import Decode


class Engine(Core):
    """Generates tokens for requests that may arrive at any time: continuous batching.

    Requests are served in the order of their priority and arrival, as many at once as ``max_batch``
    and the free pages allow. Prefix caching reuses the keys and values of known prompts; a request
    whose prefix is being computed for another request waits for it. When pages run out, or for a
    request of a higher priority, the last running request in this order is preempted: it gives its
    pages back, waits, and is later computed again as far as prefix caching does not find it, or
    copied back (``preemption``).

    Greedy output equals that of the model alone, up to rounding in other batch shapes. Sampled
    output depends on the request's seed alone, up to the same rounding.

    Not thread-safe. All steps must run on one stream (:class:`~cudnn_ops.PagedKVCache`).

    With a mesh, each rank creates the engine with its part of the model and a cache of its own
    heads. Requests are submitted on the first rank, whose steps the others repeat in
    :meth:`follow`; the tokens are those that the first rank chooses from its logits::

        with Engine(model, cache, mesh=mesh) as engine:
            if engine.is_leader:
                ...  # submit, step, run, abort
            else:
                engine.follow()

    Args:
        model: computes the logits. On a GPU its parameters must keep their addresses.
        cache: holds its keys and values. It may be shared; pages that others hold are not available
            to this engine.
        max_batch: the largest number of requests that run at once.
        chunk: the largest number of prompt tokens in a step. Small chunks keep the latency of
            running requests low, large ones process prompts faster.
        max_length: the longest request, prompt and output in tokens, that the model supports; None
            stands for what fits into the cache.
        mesh: the ranks that share the model's heads: a mesh of one dimension (``mesh["tp"]`` of
            several), or a process group. One rank alone is as no mesh.
        decode: the text of a list of tokens, such as ``tokenizer.decode``, for ``stop_strings`` and
            the requests' ``text``. With a mesh, the first rank alone calls it.
        speculation: how to propose draft tokens, which a step verifies together; None proposes
            none. The output is the same, up to rounding in other batch shapes.
        preemption: what happens to the keys and values of a preempted request. ``"recompute"``:
            they are computed again, as far as prefix caching does not find them. ``"swap"``: they
            are copied to the host and back, if there is room. ``"auto"``: they are copied if that
            is estimated to be faster, by measured rates of computing prompts and of copying.
        swap_bytes: how much of the host's memory may hold them. It is allocated at once, and on a
            GPU pinned; not with ``"recompute"``.
        vocabulary: how many tokens the model knows: prompts with others are refused. Without it
            they are not, and may fail in the model, with every request of the step; on a GPU none
            can be served after that.
        overlap: whether the host queues the next step while the GPU computes this one, and hands
            out this one's tokens meanwhile. Then an end is found one step late, and a request that
            is submitted between two steps takes part in the step after the next. The output is the
            same, up to rounding in other batch shapes. None: on a GPU. Not queued ahead are steps
            that need the tokens of the one before: those that preempt, and any with
            ``speculation``.

    Raises:
        RuntimeError: another rank does not create its engine within the group's timeout.
        TypeError: ``mesh`` is something else.
        ValueError: a number less than 1; a ``decode`` or ``speculation`` of another kind; a mesh of
            several dimensions, or without this rank; engines or caches that differ between the
            ranks; an unknown ``preemption``.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        *,
        max_batch: int = 32,
        chunk: int = 512,
        max_length: int | None = None,
        mesh: DeviceMesh | ProcessGroup | None = None,
        decode: Decode | None = None,
        speculation: PromptLookup | DraftModel | None = None,
        preemption: Preemption = "recompute",
        swap_bytes: int = 4 << 30,
        vocabulary: int | None = None,
        overlap: bool | None = None,
    ) -> None:
        """Allocates the inputs of a step; captures nothing yet."""
        super().__init__(
            *(model, cache, max_batch, chunk, max_length, mesh, decode, speculation),
            *(preemption, swap_bytes, overlap),
        )
        self._serials = itertools.count()
        self.vocabulary = None if vocabulary is None else whole("vocabulary", vocabulary, 1)

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
        page. Ranks that follow warm up with this one.
        """
        self._tell("warm_up", Order.WARM_UP)
        self._warm_up()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> Request:
        """Queues a request; :meth:`step` serves it.

        Args:
            prompt: token ids, at least one.
            params: how to choose the next tokens; None stands for the defaults.
            priority: requests of a higher one are served first, and preempt those of a lower one
                where there is no room for both.
            timeout: in seconds from now. The first step after that ends the request with the
                ``finish_reason`` ``"timeout"``; it keeps its output.
            queue_timeout: the same for a request that has waited so long and never ran.

        Returns:
            The request; serving updates its ``output``, ``finish_reason`` and ``stats``.

        Raises:
            RuntimeError: this rank is not the mesh's first one.
            ValueError: the prompt is empty, holds no token ids, or some beyond ``vocabulary``;
                prompt and ``max_tokens`` together exceed ``max_length``; there are ``stop_strings``
                and no ``decode``; ``priority`` is no whole number; a timeout is not more than 0.
        """
        self._check_leads("submit")
        params = SamplingParams() if params is None else params
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"prompt must be a sequence of token ids: {error}") from None
        if not tokens:
            raise ValueError("prompt must have at least one token, got none")
        if not 0 <= min(tokens) <= max(tokens) < 2**63:
            raise ValueError("prompt must be a sequence of token ids, from 0 to 2**63 - 1")
        if self.vocabulary is not None:
            check_vocabulary("prompt", tokens, self.vocabulary)
        if params.stop_strings and self._decode is None:
            raise ValueError(
                f"stop_strings are {params.stop_strings!r}, and this engine makes no text: create "
                "it with decode=, or use stop_sequences"
            )
        length = len(tokens) + params.max_tokens
        if length > self.max_length:
            raise ValueError(
                f"prompt and max_tokens are {len(tokens)} + {params.max_tokens} tokens, and a "
                f"request has room for {self.max_length}: shorten one of them, or create an engine "
                f"with a larger max_length and a cache of more pages (now {self.cache.pages} of "
                f"{self.cache.page_size} tokens)"
            )
        if not isinstance(priority, int):
            raise ValueError(f"priority must be a whole number, got {priority!r}")
        for name, seconds in (("timeout", timeout), ("queue_timeout", queue_timeout)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be None or more than 0 seconds, got {seconds!r}")
        serial, limits = next(self._serials), {"timeout": timeout, "queue_timeout": queue_timeout}
        request = Request(tokens, params, serial, self._decode, priority=priority, **limits)
        self._enqueue(request)
        if self._ranks:
            self._ranks.events.append(Submitted(serial, tokens, params.max_tokens, priority))
        return request

    def abort(self, request: Request) -> None:
        """Ends a request, and frees its pages. It keeps its output; ``run`` does not yield it.

        Nothing happens if it is finished already.

        Raises:
            RuntimeError: this rank is not the mesh's first one.
            ValueError: the request was not submitted to this engine.
        """
        self._check_leads("abort")
        if request.is_finished:
            return
        if self._scheduler.find(request.serial) is not request:
            raise ValueError(f"request must be one of this engine, got {request!r}")
        self._end(request, "abort")

    def step(self) -> list[GeneratedToken]:
        """Computes one step: the next tokens of running requests, and a chunk of prompts.

        Returns:
            The generated tokens; empty if there was nothing to do, or if no prompt is complete yet.
            With speculation a request may have several, one behind the other.
            ``request.is_finished`` says whether the last of them is its request's last. A request
            that has failed is among them too (``finish_reason`` ``"error"``), as is one that was
            late (``"timeout"``); the others go on.

        Raises:
            OutOfPages: other users of the cache hold so many pages that the oldest request cannot
                proceed. Nothing is lost: call it again once pages are free.
            RuntimeError: this rank is not the mesh's first one; another one does not answer within
                the group's timeout.
        """
        began = time.perf_counter()
        self._check_leads("step")
        self._end_late()
        self._tell("step", Order.STEP)
        generated = self._accept(self._compute(began))
        late, self._late = self._late, []
        return late + generated

    def stream(self, request: Request) -> Iterator[Piece]:
        """Steps until a request ends, and yields what it has generated, as soon as it is there.

        All other requests are served too, and several streams may be read in turn: a stream steps
        only if its request has nothing new. Use :meth:`abort` to end the request before its time.

        Args:
            request: of this engine.

        Raises:
            Exception: what the request failed by, behind the pieces before that.
            OutOfPages: as :meth:`step`.
            RuntimeError: as :meth:`step`.
            ValueError: the request was not submitted to this engine.
        """
        self._check_leads("stream")
        if not request.is_finished and self._scheduler.find(request.serial) is not request:
            raise ValueError(f"request must be one of this engine, got {request!r}")
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Piece]:
        told, shown = 0, 0
        while True:
            is_finished, tokens, text = request.is_finished, request.output[told:], request.text
            new = None if text is None else text[shown:]
            if tokens or new:
                told += len(tokens)
                shown += len(new or "")
                yield Piece(tokens, new)
            elif is_finished:
                break
            else:
                self.step()
        if request.error is not None:
            raise request.error

    def run(self) -> Iterator[Request]:
        """Steps until no request is left, and yields each when it ends, unless it was aborted.

        Requests that are submitted in between are served too.
        """
        while self.running or self.waiting:
            # Each once, even if several tokens of it were accepted.
            yield from dict.fromkeys(request for request, _ in self.step() if request.is_finished)

    def follow(self) -> None:
        """Repeats the first rank's steps until it closes the engine. For the mesh's other ranks.

        Raises:
            RuntimeError: this rank is the first one, or there is no mesh; the first rank makes no
                step within the group's timeout (one that has nothing to do counts); the cache was
                used beside the engine on one of them.
        """
        if self.is_leader:
            raise RuntimeError(
                "Engine.follow: this rank is the first one, which the others follow; it calls step "
                "or run (is_leader tells them apart)"
            )
        self._follow()

    def close(self) -> None:
        """Ends :meth:`follow` on the other ranks; where there are none, it does nothing.

        All ranks then release their CUDA graphs, without which NCCL cannot destroy its
        communicator. The engine may be used again once they follow it again.
        """
        if self._ranks and self.is_leader:
            try:
                self._tell("close", Order.CLOSE)
            finally:
                self._runner.release_graphs()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # If ranks are gone, the error says so already.
        with nullcontext() if error is None else suppress(RuntimeError):
            self.close()
