"""What an engine does at each step, alone or as one of several ranks.

:class:`cudnn_ops.generation.Engine` is its face: what users call, and what they are told.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Literal, get_args

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.serving.batch import Batch
from cudnn_ops.serving.choosing import Chosen
from cudnn_ops.serving.draft_model import DraftModel, ModelDrafter, RankedDrafter
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.memory import whole
from cudnn_ops.serving.model_runner import Model, ModelRunner
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.ranks import Ended, Message, Order, Ranks, Submitted
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.sampling import SamplingParams
from cudnn_ops.serving.scheduler import Scheduler
from cudnn_ops.serving.speculation import Drafter, LookupDrafter, PromptLookup
from cudnn_ops.serving.stats import EngineStats
from cudnn_ops.serving.step import GeneratedToken, Outcome, Step
from cudnn_ops.serving.swap import Preemption, Swapper
from cudnn_ops.serving.text import Decode


class Core:
    """Schedules, computes and accepts steps; the first of several ranks tells the others.

    The arguments are those of :class:`~cudnn_ops.generation.Engine`.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        max_batch: int,
        chunk: int,
        max_length: int | None,
        mesh: DeviceMesh | ProcessGroup | None,
        decode: Decode | None,
        speculation: PromptLookup | DraftModel | None,
        preemption: Preemption,
        swap_bytes: int,
        overlap: bool | None,
    ) -> None:
        room = cache.pages * cache.page_size
        max_length = room if max_length is None else max_length
        if decode is not None and not callable(decode):
            raise ValueError(f"decode must be None or a function of token ids, got {decode!r}")
        if not isinstance(speculation, PromptLookup | DraftModel | None):
            raise ValueError(
                f"speculation must be None, a PromptLookup or a DraftModel, got {speculation!r}"
            )
        self.cache, self._decode, self.speculation = cache, decode, speculation
        if preemption not in get_args(Preemption):
            raise ValueError(
                f'preemption must be "recompute", "swap" or "auto", got {preemption!r}'
            )
        self.preemption, self.swap_bytes = preemption, whole("swap_bytes", swap_bytes, 0)
        if not isinstance(overlap, bool | None):
            raise ValueError(f"overlap must be None, True or False, got {overlap!r}")
        if overlap is None:  # on a CPU, planning ahead would be computing ahead
            overlap = cache.key_cache(0).device.type == "cuda"
        self.overlap = overlap and speculation is None  # for drafts follow from the tokens
        """Whether a step is queued before the tokens of the one before are known."""
        self.max_batch, self.chunk = whole("max_batch", max_batch, 1), whole("chunk", chunk, 1)
        self.max_length = min(whole("max_length", max_length, 1), room)
        self._ranks = None if mesh is None else self._join(mesh)
        self._runner = ModelRunner(
            *(model, cache, max_batch, chunk, self.max_length, self._ranks, self._num_draft_tokens)
        )
        self._drafter = self._make_drafter()
        self._swapper = None
        if preemption != "recompute":
            self._swapper = Swapper(cache, preemption, swap_bytes)
        self._scheduler = Scheduler(cache, max_batch, chunk, self._drafter, self._swapper)
        self._stats = EngineStats()
        # A step that is queued and was not accepted: at most one, behind those that were.
        self._queued: Step | None = None
        self._read_at = 0.0  # when the last step's tokens were there
        self._limited: list[Request] = []  # that may be late one day
        self._late: list[GeneratedToken] = []  # that ended between steps, to be told

    @property
    def is_leader(self) -> bool:
        """Whether requests are submitted here: on a mesh's first rank, and without a mesh."""
        return self._ranks is None or self._ranks.is_leader

    @property
    def _num_draft_tokens(self) -> int:
        return self.speculation.num_draft_tokens if self.speculation else 0

    def _join(self, mesh: DeviceMesh | ProcessGroup) -> Ranks | None:
        """The ranks, which create equal engines; None if there is one alone."""
        cache = self.cache
        keys = cache.key_cache(0)
        most = self.max_batch * (1 + self._num_draft_tokens)
        ranks = Ranks.of(mesh, keys.device, most)
        if ranks is not None:
            sizes = ("layers", "pages", "page_size", "heads_kv", "head_size", "value_size")
            facts = {f"cache.{name}": getattr(cache, name) for name in (*sizes, "prefix_sharing")}
            names = ("max_batch", "chunk", "max_length", "speculation", "preemption", "swap_bytes")
            facts |= {name: getattr(self, name) for name in (*names, "overlap")}
            if isinstance(self.speculation, DraftModel):  # which the first rank alone runs
                facts["speculation"] = f"DraftModel(num_draft_tokens={self._num_draft_tokens})"
            ranks.check_agreement(facts | {"the cache's dtype": str(keys.dtype)})
        return ranks

    def _make_drafter(self) -> Drafter | None:
        options, cache = self.speculation, self.cache
        if options is None:
            return None
        if isinstance(options, PromptLookup):
            return LookupDrafter(options)
        own = None
        if self.is_leader:
            if options.cache is None:
                raise ValueError("speculation must have a model and a cache on the first rank")
            devices = [each.key_cache(0).device for each in (cache, options.cache)]
            if options.cache is cache or devices[0] != devices[1]:
                raise ValueError(
                    "speculation must have a cache of its own, on the device of the engine's, "
                    f"{devices[0]}, got one on {devices[1]}"
                )
            own = ModelDrafter(options, self._runner, self.max_batch, self.chunk)
        if self._ranks is None:
            return own
        return RankedDrafter(own, options.num_draft_tokens, self._ranks)

    def _check_leads(self, method: str) -> None:
        if self._ranks and not self._ranks.is_leader:
            raise RuntimeError(
                f"Engine.{method}: rank {self._ranks.rank} of {self._ranks.size} follows rank 0, "
                f"which alone calls {method}; call follow() here"
            )

    def _tell(self, method: str, order: Order) -> None:
        """Tells the other ranks what to do; raises on them, for they are told."""
        self._check_leads(method)
        rates = self._swapper.measure() if self._swapper else None
        if self._ranks:
            self._ranks.tell(order, self._scheduler.state, rates)

    def _follow(self) -> None:
        """Repeats the first rank's steps until it closes the engine."""
        try:
            self._repeat_steps()
        finally:
            self._runner.release_graphs()

    def _repeat_steps(self) -> None:
        ranks = self._ranks
        assert ranks is not None
        step: Step | None = None
        while True:
            message = ranks.hear()
            self._settle(step, message)
            step = None
            if message.order == Order.CLOSE:
                return
            if message.order == Order.WARM_UP:
                self._warm_up()
                continue
            with suppress(OutOfPages):  # raised on the first rank too, which tells what comes next
                step = self._compute(time.perf_counter())

    def _settle(self, step: Step | None, message: Message) -> None:
        """Does what the first rank did since its last message.

        Args:
            step: what it was told then, if that was a step.
            message: what it is told now.
        """
        ranks, scheduler = self._ranks, self._scheduler
        assert ranks is not None
        rows = sum(share.places for share in step.batch.shares) if step else 0
        if rows != len(message.chosen):
            raise RuntimeError(
                f"Engine.follow: rank {ranks.rank} of {ranks.size} computed a step of {rows} "
                f"tokens, and rank 0 one of {len(message.chosen)}: it failed there, or here before"
            )
        if step:
            self._accept(step, message.chosen)
        for event in message.events:
            if isinstance(event, Submitted):
                params = SamplingParams(max_tokens=event.max_tokens)
                request = Request(event.prompt, params, event.serial, priority=event.priority)
                scheduler.enqueue(request)
                continue
            ended = scheduler.find(event.serial)
            assert ended is not None
            self._end(ended, event.reason)
        ranks.check_state(scheduler.state, message.state)
        if self._swapper:
            self._swapper.rates = message.rates

    def _enqueue(self, request: Request) -> None:
        """Queues a request that this rank leads."""
        self._scheduler.enqueue(request)
        if request.is_limited:
            self._limited.append(request)

    def _end(self, request: Request, reason: Literal["abort", "timeout"]) -> None:
        """Ends a request between two steps; the other ranks are told before the next."""
        self._scheduler.remove(request)
        request.end(reason, time.perf_counter())
        stats = self._stats
        if reason == "abort":
            self._stats = replace(stats, aborted=stats.aborted + 1)
        else:
            self._stats = replace(stats, timed_out=stats.timed_out + 1)
        if self._ranks and self.is_leader:
            self._ranks.events.append(Ended(request.serial, reason))
        self._withdraw([request])

    def _end_late(self) -> None:
        """Ends the requests that are late; on the first rank."""
        if not self._limited:
            return
        now = time.perf_counter()
        self._limited = [request for request in self._limited if not request.is_finished]
        for request in self._limited:
            if request.is_late(now):
                self._end(request, "timeout")
                self._late.append(GeneratedToken(request, None))

    def _take_back(self) -> None:
        """Takes back the step that is queued, which is computed again by a later one."""
        if self._queued and self._queued.chosen is None:
            batch = self._queued.batch
            self._scheduler.undo(batch)
            self._scheduler.clear(batch, [share.request for share in batch.shares if share.is_held])
            self._queued = None

    def _stop_overlapping(self) -> None:
        """From now on no step is queued ahead."""
        self._take_back()
        self.overlap = False

    def _withdraw(self, ended: Collection[Request]) -> None:
        """Forgets what is queued of requests that have just ended, and are released."""
        if not self._queued or not ended:
            return
        if self._queued.chosen is None:
            self._scheduler.clear(self._queued.batch, ended)
        if not self._queued.is_wanted:
            extra, stats = len(self._queued.batch.slots), self._stats
            self._stats = replace(
                stats,
                computed_tokens=stats.computed_tokens + extra,
                extra_tokens=stats.extra_tokens + extra,
            )
            self._queued = None

    def _warm_up(self) -> None:
        self._take_back()  # its logits would be overwritten
        with self._ranks.computing("warming up") if self._ranks else nullcontext():
            self._runner.warm_up()
            if self._drafter:
                self._drafter.warm_up()

    def _compute(self, began: float) -> Step | None:
        """Computes a step: the one that is queued, or one that is planned now, at that time.

        Before it waits for that step's tokens, it queues the next one, if that does not need them.

        Returns:
            The step with its tokens; None if there was nothing to do.
        """
        step = self._queued or self._launch(self._scheduler.schedule(), began)
        self._queued = ahead = None
        if step is None:
            return None
        if step.chosen is None:
            self._choose(step)
            self._queued = step  # also if the next one fails: then it is read by the next call
            ahead = self._launch_ahead(step)
            self._queued = None
        with self._undoing(step, ahead):
            assert step.chosen is not None
            # While the device computes: what it will have written is known already. But not before
            # the next step is planned: it must not take what may turn out not to be finite.
            self._scheduler.commit(step.batch)
            step.tokens = step.chosen.read()
        self._queued = ahead
        return step

    def _launch(self, batch: Batch, began: float, before: Chosen | None = None) -> Step | None:
        """Queues a step up to its logits; None if there is nothing in it.

        Args:
            batch: what to compute.
            began: when it was planned.
            before: what the step before chooses, if that is not known yet.
        """
        if not batch.shares:
            return None
        pages = self.cache.pages - self.cache.available
        try:
            with self._computing():
                logits, greedy = self._runner.launch(batch, before.tokens if before else None)
        except BaseException:
            self._scheduler.undo(batch)
            raise
        return Step(batch, logits, greedy, pages, began)

    def _launch_ahead(self, step: Step) -> Step | None:
        """Queues the step behind one whose tokens are not known yet, if it can be."""
        if not self.overlap:
            return None
        began = time.perf_counter()
        batch = self._scheduler.schedule_ahead(step.batch)
        return None if batch is None else self._launch(batch, began, step.chosen)

    def _choose(self, step: Step) -> None:
        """Queues the choice of a step's tokens, once those of the step before are accepted."""
        with self._undoing(step):
            step.chosen = self._runner.choose(step.batch, step.logits, step.greedy)

    def _computing(self) -> AbstractContextManager[None]:
        """A context whose errors name a rank that does not answer."""
        return self._ranks.computing("computing a step") if self._ranks else nullcontext()

    @contextmanager
    def _undoing(self, *steps: Step | None) -> Iterator[None]:
        """The same, and if anything fails, the slots of these steps are released."""
        try:
            with self._computing():
                yield
        except BaseException:
            for step in reversed(steps):
                if step:
                    self._scheduler.undo(step.batch)
            raise

    def _accept(self, step: Step | None, told: list[int] | None = None) -> list[GeneratedToken]:
        """Gives the requests of a step their tokens, and counts it.

        Args:
            step: a step that was computed, if there was anything to do.
            told: what the first rank says of each row; None there.
        """
        if step is None:
            return []
        outcome = step.accept(told, time.perf_counter(), self._ranks is not None)
        scheduler = self._scheduler
        if step.batch.has_drafts:
            scheduler.settle(step.batch)
        for request in outcome.ended:
            scheduler.finish(request)
        if self._ranks and told is None:
            self._ranks.chosen = outcome.tells
        self._count(step, outcome)
        self._withdraw(outcome.ended)
        return outcome.generated

    def _count(self, step: Step, outcome: Outcome) -> None:
        """Counts a step, its tokens, and the requests that it ended."""
        stats, scheduler, ended = self._stats, self._scheduler, outcome.ended
        failed = [request for request in ended if request.finish_reason == "error"]
        # A step that was planned ahead is computed from the end of the one before.
        computed, now = len(step.batch.slots), time.perf_counter()
        seconds, self._read_at = now - max(step.began, self._read_at), now
        if self._swapper and computed >= self.chunk // 2 and not step.batch.is_decoding:
            self._swapper.computed(computed, seconds)
        # One that failed before it had a token is among those generated, too.
        missing = sum(token is None for _, token in outcome.generated) if failed else 0
        self._stats = replace(
            stats,
            finished=stats.finished + len(ended) - len(failed),
            failed=stats.failed + len(failed),
            steps=stats.steps + 1,
            overlapped=stats.overlapped + step.is_ahead,
            replays=self._runner.replays,
            computed_tokens=stats.computed_tokens + computed,
            extra_tokens=stats.extra_tokens + outcome.extra_tokens,
            output_tokens=stats.output_tokens + len(outcome.generated) - missing,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            swaps=scheduler.swaps,
            restored_tokens=scheduler.restored_tokens,
            peak_pages=max(stats.peak_pages, step.pages),
            seconds=stats.seconds + seconds,
            speculation=stats.speculation + outcome.speculation,
        )
