"""Preemption by swapping: the pages of a preempted request go to the host, and come back.

Pages are gathered on the device, all layers at once, and copied on a stream of their own while the
engine computes. They return the same way. What is on the host is bounded, and allocated once. All
copies are queued on one stream in the order of the calls, so that a page of the host may be given
to another request while the copy from it is still to come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cudnn_ops.serving.edits import upload
from cudnn_ops.serving.kept import Kept
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.sequence import KVSequence

Preemption: TypeAlias = Literal["recompute", "swap", "auto"]

#: Bytes that are gathered at once: two such pieces of the device's memory take turns.
_PIECE = 64 << 20

#: Before anything was measured: tokens of prompts and bytes of a link to the host, in a second.
_TOKENS_PER_SECOND, _BYTES_PER_SECOND = 20_000, 20_000_000_000


class Rates(NamedTuple):
    """What recomputing and copying are estimated by."""

    tokens: int
    """Tokens of prompts in a second."""
    bytes: int
    """Bytes to or from the host in a second."""


class SwappedPages(NamedTuple):
    """Pages of a request on the host."""

    space: SwapSpace
    held: list[int]
    first: int
    length: int

    def restore(self, pages: Sequence[int], skipped: int) -> None:
        """As :class:`Kept` says."""
        self.space.load(self.held[skipped - self.first :], pages)

    def drop(self) -> None:
        """As :class:`Kept` says."""
        self.space.free.extend(self.held)


class SwapSpace:
    """Pages in the host's memory, pinned if the cache is on a GPU, and the copies to and from it.

    Args:
        cache: whose pages are copied.
        size: bytes, which are rounded down to whole pages.
    """

    def __init__(self, cache: PagedKVCache, size: int) -> None:
        self._device = cache.key_cache(0).device
        self._pages = cache.by_page()
        self.page_bytes = sum(each[0].numel() * each.element_size() for each in self._pages)
        self.pages = size // self.page_bytes
        """Pages in all."""
        self.free = list(range(self.pages))
        """Those that hold nothing."""
        self._piece = max(1, min(_PIECE // self.page_bytes, self.pages))
        on_gpu = self._device.type == "cuda"
        self._host = [self._empty(self.pages, each, on_gpu) for each in self._pages]
        self._stages = [
            [self._empty(self._piece, each, device=self._device) for each in self._pages]
            for _ in range(2)
        ]
        self._used: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._side = torch.cuda.Stream(self._device) if on_gpu else None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self.rates: deque[float] = deque(maxlen=9)
        """Measured bytes in a second."""

    @staticmethod
    def _empty(
        count: int, like: Tensor, pinned: bool = False, device: torch.device | str = "cpu"
    ) -> Tensor:
        shape = (count, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def save(self, pages: Sequence[int]) -> list[int]:
        """Queues copying pages to the host; there must be as many free ones.

        Returns:
            The host's pages.
        """
        # Neighbours are copied at once.
        self.free.sort()
        held, self.free = self.free[: len(pages)], self.free[len(pages) :]
        with self._timing(len(pages)):
            for start, index, stage in self._pieces(pages):
                for source, target in zip(self._pages, stage, strict=True):
                    torch.index_select(source, 0, index, out=target[: len(index)])
                with self._aside():
                    for each, run in _runs(held[start : start + len(index)]):
                        for source, target in zip(stage, self._host, strict=True):
                            part = source[each : each + len(run)]
                            target[run.start : run.stop].copy_(part, non_blocking=True)
                    self._release()
        return held

    def load(self, held: Sequence[int], pages: Sequence[int]) -> None:
        """Queues copying pages of the host into as many of the cache."""
        with self._timing(len(pages)):
            for start, index, stage in self._pieces(pages):
                with self._aside():
                    for each, run in _runs(held[start : start + len(index)]):
                        for source, target in zip(self._host, stage, strict=True):
                            part = target[each : each + len(run)]
                            part.copy_(source[run.start : run.stop], non_blocking=True)
                if self._side is not None:
                    torch.cuda.current_stream(self._device).wait_stream(self._side)
                for source, target in zip(stage, self._pages, strict=True):
                    target.index_copy_(0, index, source[: len(index)])
                self._release()

    def measure(self) -> None:
        """Looks at the copies that are done by now."""
        while self._timed and self._timed[0][1].query():
            began, ended, copied = self._timed.popleft()
            self.rates.append(copied / max(began.elapsed_time(ended) / 1e3, 1e-9))

    def _pieces(self, pages: Sequence[int]) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """Where each piece begins, its pages on the device, and where it is staged."""
        for start in range(0, len(pages), self._piece):
            index = torch.tensor(pages[start : start + self._piece])
            index = upload({"index": index}, self._device)["index"]
            self._turn = 1 - self._turn
            used = self._used[self._turn]
            if used is not None:
                torch.cuda.current_stream(self._device).wait_event(used)
            yield start, index, self._stages[self._turn]

    def _release(self) -> None:
        """Marks the stage as used by what is queued on the current stream."""
        if self._side is not None:
            used = self._used[self._turn] = self._used[self._turn] or torch.cuda.Event()
            used.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of the copies, behind what is queued on the current one."""
        side: AbstractContextManager[object] = nullcontext()
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            side = torch.cuda.stream(self._side)
        with side:
            yield

    @contextmanager
    def _timing(self, pages: int) -> Iterator[None]:
        """Measures a copy of so many pages, with its share in the gathering."""
        copied = pages * self.page_bytes
        if self._side is None:
            began = time.perf_counter()
            yield
            self.rates.append(copied / max(time.perf_counter() - began, 1e-9))
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._aside():
            start.record()
        yield
        end.record(self._side)
        self._timed.append((start, end, copied))


class Swapper:
    """Decides whether a preempted request is swapped or recomputed.

    Args:
        cache: of the engine.
        policy: ``"swap"``: if the host has room; ``"auto"``: if it seems faster besides.
        size: bytes on the host.
    """

    def __init__(self, cache: PagedKVCache, policy: Literal["swap", "auto"], size: int) -> None:
        self._cache, self._policy = cache, policy
        self.space = SwapSpace(cache, size)
        self.rates = Rates(_TOKENS_PER_SECOND, _BYTES_PER_SECOND)
        """What is decided by; with several ranks, the first one's."""
        self._computing: deque[float] = deque(maxlen=9)

    @property
    def used(self) -> int:
        """Pages of the host that are in use."""
        return self.space.pages - len(self.space.free)

    def computed(self, tokens: int, seconds: float) -> None:
        """Notes a step that computed so many tokens, most of them of prompts."""
        self._computing.append(tokens / max(seconds, 1e-9))

    def measure(self) -> Rates:
        """Updates the rates by what was measured, and returns them."""
        self.space.measure()
        # With the first guesses among them, the first step does not count, which builds plans.
        tokens = median([_TOKENS_PER_SECOND, _TOKENS_PER_SECOND, *self._computing])
        copied = median([_BYTES_PER_SECOND, _BYTES_PER_SECOND, *self.space.rates])
        self.rates = Rates(max(1, int(tokens)), max(1, int(copied)))
        return self.rates

    def save(self, sequence: KVSequence) -> Kept | None:
        """Queues copying a sequence that is to be freed; None if it is to be computed again.

        The first pages that others hold as well stay where they are. If they are gone when the
        request comes back, it is computed again.
        """
        pages, holders = sequence.pages, self._cache._pool.holders
        first = 0
        while first < len(pages) and holders[pages[first]] > 1:
            first += 1
        tokens, count = sequence.length - first * self._cache.page_size, len(pages) - first
        if tokens <= 0 or count > len(self.space.free):
            return None
        if self._policy == "auto":
            copied = 2 * count * self.space.page_bytes  # there and back
            if tokens / self.rates.tokens <= copied / self.rates.bytes:
                return None
        return SwappedPages(self.space, self.space.save(pages[first:]), first, sequence.length)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Neighbours among increasing numbers: where they begin in the list, and what they are."""
    ends = [at + 1 for at, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    for start, stop in pairwise([0, *ends, len(numbers)]):
        yield start, range(numbers[start], numbers[stop - 1] + 1)
