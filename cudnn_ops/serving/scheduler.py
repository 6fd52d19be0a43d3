"""Which requests a step computes, and how many tokens of each: admission, chunks, preemption.

Host logic alone: the model is run by :mod:`cudnn_ops.serving.model_runner`.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import insort
from collections.abc import Collection, Mapping
from itertools import islice
from typing import NamedTuple

from cudnn_ops.serving.batch import Batch, Share
from cudnn_ops.serving.kept import Kept
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.sequence import KVSequence
from cudnn_ops.serving.speculation import Drafter
from cudnn_ops.serving.swap import Swapper


class State(NamedTuple):
    """What schedulers that make the same decisions have in common, between steps."""

    free: int
    """Empty pages of the cache."""
    evictable: int
    """Its pages that no sequence holds."""
    running: int
    """Requests."""
    waiting: int
    """Requests."""
    slots: int
    """A checksum of the slots of the step before."""
    swapped: int
    """Pages on the host."""


class Scheduler:
    """Serves as many requests at once as fit into the batch and the pages.

    Those of a higher priority come first, and of these the oldest. Only the last of the running
    ones is ever preempted: for pages, or for a waiting request of a higher priority. So the first
    request always makes progress, and among equals none starves.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_batch: int,
        chunk: int,
        drafter: Drafter | None = None,
        swapper: Swapper | None = None,
    ) -> None:
        self.cache, self.max_batch, self.chunk = cache, max_batch, chunk
        self._drafter, self._swapper = drafter, swapper
        self.waiting: list[Request] = []  # the first to be served first
        self.running: list[Request] = []  # likewise
        self.prefix_hits = self.preemptions = self.swaps = self.restored_tokens = 0
        self._slots: list[int] = []  # of the step before
        # While a step is planned whose last one is still being computed: what that will bring.
        self._pending: Mapping[Request, int] = {}

    @property
    def state(self) -> State:
        """To compare with other ranks' schedulers."""
        pool = self.cache._pool
        slots = zlib.crc32(array("q", self._slots))
        queues = len(self.running), len(self.waiting)
        swapped = self._swapper.used if self._swapper else 0
        return State(len(pool.free), len(pool.evictable), *queues, slots, swapped)

    def schedule(self) -> Batch:
        """Plans a step and allocates slots for its tokens; empty if there is nothing to do.

        Raises:
            OutOfPages: there are too few for the oldest request alone, for somebody else holds
                pages of the cache. It may be called again once they are free.
        """
        # There are too many if a step has failed whose ends were counted on.
        while len(self.running) > self.max_batch or self._must_make_way():
            self._preempt(self.running[-1])
        while True:
            try:
                batch = self._continue_running()
                break
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
        self._admit(batch)
        if self._drafter:
            try:
                batch = self._with_drafts(batch, self._drafter)
            except BaseException:  # a draft model's
                self.undo(batch)
                raise
        self._slots = batch.slots
        return batch

    def schedule_ahead(self, before: Batch) -> Batch | None:
        """Plans the step behind one that is being computed, whose tokens are not known yet.

        Each request that has a token by that step goes on, unless it surely ends with it; one that
        has ended otherwise by then is computed in vain. Nobody is preempted, for what is preempted
        must be known. It cannot be done with drafts, which follow from the tokens.

        Returns:
            None if a step needs the tokens, or if there is nothing to do.
        """
        pending = self._pending = before.chosen()
        try:
            if self._must_make_way():
                return None
            batch = self._continue_running()
            self._admit(batch)
        except OutOfPages:  # before anything was changed
            return None
        finally:
            self._pending = {}
        if not batch.shares:
            return None
        self._slots = batch.slots
        return Batch(batch.shares, batch.slots, pending=pending, is_ahead=True)

    def undo(self, batch: Batch) -> None:
        """Releases the slots of a step that was not computed."""
        for share in batch.shares:
            if share.is_held:
                self.cache.truncate(share.sequence, share.start)

    def clear(self, batch: Batch, requests: Collection[Request]) -> None:
        """Zeroes what a step that is queued writes for requests, whose slots are released already.

        What is computed in vain may not be finite. Whoever gets the page next would read it, times
        zero, until it is written over.
        """
        slots = iter(batch.slots)
        written = [
            slot
            for share in batch.shares
            for slot in islice(slots, share.stop - share.start)
            if share.request in requests
        ]
        if written:
            self.cache._zero_slots(written)

    def commit(self, batch: Batch) -> None:
        """Commits the pages that a step has filled to the cache, and counts them."""
        size = self.cache.page_size
        for share in batch.shares:
            if not share.is_held:
                continue
            stats = share.request.stats
            stats.peak_pages = max(stats.peak_pages, self._pages(share.length))
            if share.start // size < share.stop // size:
                self.cache.commit(share.sequence, share.request.tokens[: share.stop])

    def settle(self, batch: Batch) -> None:
        """Gives back the slots of draft tokens that were rejected, and commits the others' pages.

        A request's last token has not been computed, so that it has no slot either.
        """
        size = self.cache.page_size
        for share in batch.shares:
            if share.drafts:
                tokens = share.request.tokens
                kept = max(share.stop, len(tokens) - 1)
                self.cache.truncate(share.sequence, kept)
                if share.stop // size < kept // size:
                    self.cache.commit(share.sequence, tokens[:kept])

    def finish(self, request: Request) -> None:
        """Removes a running request and frees its pages."""
        self.running.remove(request)
        self._release(request)
        self._forget(request)

    def find(self, serial: int) -> Request | None:
        """The request of this number, if it runs or waits."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.serial == serial:
                    return request
        return None

    def enqueue(self, request: Request) -> None:
        """Adds a request behind those that are served before it."""
        insort(self.waiting, request, key=lambda each: each.rank)

    def remove(self, request: Request) -> None:
        """Removes a running or waiting request, and frees its pages."""
        if request.sequence is None:
            self.waiting.remove(request)
            if request.kept is not None:
                request.kept.drop()
                request.kept = None
            self._forget(request)
        else:
            self.finish(request)

    def _must_make_way(self) -> bool:
        """Whether the last request is in the way of a waiting one of a higher priority."""
        if not self.waiting or not self.running:
            return False
        candidate = self.waiting[0]
        if candidate.priority <= self.running[-1].priority:
            return False
        if len(self.running) >= self.max_batch:
            return True
        sequence = self.cache.allocate(candidate.tokens)
        has_room = self._has_room(candidate, sequence)
        self.cache.free(sequence)
        return not has_room

    def _continue_running(self) -> Batch:
        """Schedules the next tokens of running requests.

        Raises:
            OutOfPages: there are too few for all of them; nothing has been changed.
        """
        budget = self.chunk
        wanted: list[tuple[Request, KVSequence, int]] = []
        for request in self.running:
            assert request.sequence is not None
            left = self._length(request) - request.sequence.length
            # A decoding request never waits for another one's prompt.
            count = left if left == 1 else min(left, budget)
            if left > 1:
                budget -= count
            if count and not self._surely_ends(request):
                wanted.append((request, request.sequence, count))
        # Longest first: the thread blocks of attention then end together.
        wanted.sort(key=lambda share: share[1].length, reverse=True)
        slots = self.cache.extend_all([(sequence, count) for _, sequence, count in wanted])
        shares = [
            Share(request, sequence, sequence.length - count, sequence.length)
            for request, sequence, count in wanted
        ]
        return Batch(shares, slots)

    def _admit(self, batch: Batch) -> None:
        """Admits waiting requests as far as the batch, the pages and the step's budget allow."""
        cache = self.cache
        budget = self._left(batch)
        # Those that end with the step before leave their places, but not yet their pages.
        places = self.max_batch + sum(map(self._surely_ends, self.running))
        while self.waiting and len(self.running) < places and budget > 0:
            request = self.waiting[0]
            sequence = cache.allocate(request.tokens)
            hits = sequence.length
            # If none is running, waiting would not help.
            if self.running and not (
                self._has_room(request, sequence) and not self._is_being_computed(request, hits)
            ):
                cache.free(sequence)
                return
            kept = request.kept
            start = hits
            if kept is not None and kept.first * cache.page_size <= hits:
                start = max(hits, kept.length)
            count = min(len(request.tokens) - start, budget)
            try:
                slots = cache.extend(sequence, start - hits + count)
            except OutOfPages:
                cache.free(sequence)
                raise
            batch.slots.extend(slots[start - hits :])
            if kept is not None:
                self._restore(request, kept, sequence, hits, start)
            del self.waiting[0]
            insort(self.running, request, key=lambda each: each.rank)
            request.sequence = sequence
            request.stats.prefix_hits += hits
            self.prefix_hits += hits
            batch.shares.append(Share(request, sequence, start, sequence.length))
            budget -= count

    def _restore(
        self, request: Request, kept: Kept, sequence: KVSequence, hits: int, start: int
    ) -> None:
        """Brings back what was kept of a request, from token ``hits`` to ``start - 1``."""
        if start > hits:
            size = self.cache.page_size
            pages = sequence.pages[hits // size : self._pages(start)]
            kept.restore(pages, hits // size)
            self.cache.commit(sequence, request.tokens[:start])
            self.restored_tokens += start - hits
            request.stats.restored_tokens += start - hits
        kept.drop()
        request.kept = None

    def _left(self, batch: Batch) -> int:
        """What the prompts in a batch leave of a step's budget."""
        counts = (share.stop - share.start for share in batch.shares)
        return self.chunk - sum(count for count in counts if count > 1)

    def _with_drafts(self, batch: Batch, drafter: Drafter) -> Batch:
        """The batch with draft tokens, as far as the step's budget and the pages allow.

        They come last: they take nothing from what is certain to be needed, and preempt nobody.
        """
        cache, size = self.cache, self.cache.page_size
        budget = self._left(batch)
        shares: list[Share] = []
        slots: list[int] = []
        known = iter(batch.slots)
        wanted: dict[Request, int] = {}
        for share in batch.shares:
            if share.is_last and share.stop - share.start == 1:
                # The step generates one token beside those that are accepted.
                count = min(share.request.left - 1, drafter.num_draft_tokens, budget)
                if count > 0:
                    wanted[share.request] = count
        drafter.prepare(wanted, self.running)
        available = cache.available
        for share in batch.shares:
            in_page = -share.stop % size
            count = min(wanted.get(share.request, 0), budget, in_page + available * size)
            drafts = drafter.propose(share.request, count) if count > 0 else []
            available -= max(0, -(-(len(drafts) - in_page) // size))
            budget -= len(drafts)
            shares.append(share._replace(drafts=tuple(drafts)))
        # One call for all: most of a call's time does not depend on how many tokens it is for.
        behind = iter(cache.extend_all([(share.sequence, len(share.drafts)) for share in shares]))
        for share in shares:
            slots += islice(known, share.stop - share.start)
            slots += islice(behind, len(share.drafts))
        return Batch(shares, slots, len(slots) > len(batch.slots))

    def _has_room(self, candidate: Request, sequence: KVSequence) -> bool:
        """Whether all known tokens find a page, with one to spare for each that runs.

        Without the spare ones a request would be admitted only to be preempted when the others
        have grown by a few tokens. For want of them, what was just preempted does not come back in
        the same step either.
        """
        needed = self._pages(len(candidate.tokens)) - self._pages(sequence.length)
        for request in self.running:
            assert request.sequence is not None
            needed += self._pages(self._length(request)) - self._pages(request.sequence.length) + 1
        return needed <= self.cache.available

    def _is_being_computed(self, candidate: Request, hits: int) -> bool:
        """Whether the page after those that were found is on its way in a running request.

        It is worth waiting for: computing it twice costs more than a step's delay.
        """
        stop = hits + self.cache.page_size
        is_known = candidate.kept is not None and stop <= candidate.kept.length
        if not self.cache.prefix_sharing or is_known or stop >= len(candidate.tokens):
            return False
        known = candidate.tokens[:stop]
        # Were it computed, it would have been found.
        return any(request.tokens[:stop] == known for request in self.running)

    def _preempt(self, request: Request) -> None:
        """Preempts a running request. Prefix caching may find what it has computed."""
        self.running.remove(request)
        assert request.sequence is not None
        if self._swapper:
            request.kept = self._swapper.save(request.sequence)
            self.swaps += request.kept is not None
        self._release(request)
        request.stats.preemptions += 1
        self.preemptions += 1
        self.enqueue(request)

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        if request.finish_reason == "error":  # its keys and values may not be finite
            self.cache.discard(request.sequence)
        else:
            self.cache.free(request.sequence)
        request.sequence = None
        if self._drafter:
            self._drafter.release(request)

    def _forget(self, request: Request) -> None:
        if self._drafter:
            self._drafter.forget(request)

    def _surely_ends(self, request: Request) -> bool:
        """Whether the token that the host does not know yet is its last one in any case."""
        return request in self._pending and request.left == 1

    def _length(self, request: Request) -> int:
        """Tokens of a request, with the one that the host does not know yet."""
        return len(request.tokens) + (request in self._pending)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)
