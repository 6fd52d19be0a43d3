"""A paged cache of keys and values, with prefix caching.

A page has room for ``page_size`` tokens of every layer. A sequence is a list of pages, so it grows
without being copied, and sequences with a common prefix share its pages. A slot is the place of one
token: ``page * page_size + offset``.

Prefix caching: pages whose tokens are known (:meth:`PagedKVCache.commit`) are found again by their
content, in a radix tree over whole pages, so that :meth:`PagedKVCache.allocate` reuses what was
computed before. Such pages outlive their sequences; the least recently used ones are evicted when
no page is free.

Nothing here is thread-safe: use one thread, or a lock. Nothing waits for the GPU. Kernels that use
the pages must be queued on one stream, in the order of the calls made here, for a page that was
freed may belong to another sequence a call later.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cudnn_ops.serving.memory import PagedMemory, whole
from cudnn_ops.serving.page_pool import OutOfPages, PagePool, token_blocks
from cudnn_ops.serving.sequence import KVSequence


@dataclass(frozen=True)
class CacheUsage:
    """How the pages of a cache are used. ``pages`` is ``free + evictable + in_use``."""

    pages: int
    """Pages in all."""
    free: int
    """Empty pages."""
    evictable: int
    """Pages that no sequence holds, kept for prefix caching."""
    in_use: int
    """Pages that sequences hold, each counted once."""
    shared: int
    """Pages that more than one sequence holds."""
    sequences: int
    """Sequences that have not been freed."""
    tokens: int
    """Slots that hold a token of a sequence; shared slots count once."""
    fill: float
    """``tokens`` divided by the slots of the pages in use; 0 if none is in use."""
    prefix_hits: int
    """Tokens that :meth:`PagedKVCache.allocate` found in the cache."""
    prefix_lookups: int
    """Tokens that :meth:`PagedKVCache.allocate` looked up."""


class PagedKVCache(PagedMemory):
    """Keys and values of all layers in one allocation, with prefix caching.

    The memory is zeroed once, and not when a page is reused. Attention reads whole pages and
    multiplies the values of slots past a sequence's end by a weight of zero, so these slots must
    hold finite numbers: uninitialized memory might hold NaN.

    All prefixes must come from one model with one set of weights: use one cache for each adapter,
    and call :meth:`reset` when the weights change.

    Args:
        layers: number of layers with attention.
        pages: number of pages. The memory is ``layers * pages * page_size * heads_kv * (head_size +
            value_size)`` elements.
        page_size: tokens in a page, a power of 2.
        heads_kv: key and value heads in a layer.
        head_size: elements of a key.
        value_size: elements of a value; None stands for ``head_size``.
        dtype: dtype of keys and values. With ``torch.float8_e4m3fn`` they take half the memory of
            bfloat16, and decoding reads half as much; models compute in float16 or bfloat16 beside
            it, with heads of 64 or 128.
        device: their device.
        kv_layout: ``"NHD"``, pages are [page_size, heads_kv, size], or ``"HND"``, [heads_kv,
            page_size, size].
        prefix_sharing: whether prefixes are cached. Without it no page is evictable, and
            :meth:`commit` does nothing.
        descale_k: of a cache of ``float8_e4m3fn``, float32 [layers] or [layers, heads_kv]: keys are
            divided by it before they are rounded to numbers of at most 448, and attention
            multiplies them with it. None stands for 1.
        descale_v: likewise for values.

    Raises:
        ValueError: a number less than 1, an unknown layout, or descales that do not fit.

    Example:
        >>> import torch
        >>> from cudnn_ops import PagedKVCache
        >>> cache = PagedKVCache(2, 8, 4, 1, 16, dtype=torch.float32, device="cpu")
        >>> prompt = [5, 6, 7, 8, 9]
        >>> sequence = cache.allocate(prompt)
        >>> slots = cache.extend(sequence, len(prompt))
        >>> len(sequence.pages), cache.available
        (2, 6)
        >>> cache.commit(sequence, prompt)  # its full page can be found by content now
        0
        >>> cache.allocate([5, 6, 7, 8, 10]).length
        4
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_size: int,
        *,
        value_size: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_layout: Literal["NHD", "HND"] = "NHD",
        prefix_sharing: bool = True,
        descale_k: Tensor | None = None,
        descale_v: Tensor | None = None,
    ) -> None:
        super().__init__(
            *(layers, pages, page_size, heads_kv, head_size),
            value_size=value_size,
            dtype=dtype,
            device=device,
            kv_layout=kv_layout,
            descale_k=descale_k,
            descale_v=descale_v,
        )
        self.prefix_sharing = prefix_sharing
        self._sequences: set[KVSequence] = set()
        self.reset()

    def reset(self) -> None:
        """Frees every sequence, empties the prefix cache, and resets the counters."""
        for sequence in self._sequences:
            sequence._void()
        self._sequences.clear()
        self._pool = PagePool(self.pages)
        self._prefix_hits = self._prefix_lookups = 0

    @property
    def available(self) -> int:
        """Pages that are free or evictable, in all."""
        return self._pool.available

    def allocate(self, token_ids: Sequence[int] = ()) -> KVSequence:
        """Creates a sequence, which starts with the cached pages of a prompt's longest prefix.

        Args:
            token_ids: the prompt, 64-bit integers. Whatever else keys and values depend on must be
                part of them: for an image, for example, a hash of it.

        Returns:
            The sequence. Its ``length``, in whole pages and at most ``len(token_ids) - 1``, is the
            number of tokens that need not be computed; :meth:`extend` allocates the others.

        Raises:
            ValueError: ``token_ids`` are not 64-bit integers.
        """
        pages = array("i")
        if self.prefix_sharing and len(token_ids):
            # The last token is always computed: its logits give the next one.
            pages = self._pool.find(
                token_blocks(token_ids, self.page_size, 0, (len(token_ids) - 1) // self.page_size)
            )
            self._prefix_lookups += len(token_ids)
            self._prefix_hits += len(pages) * self.page_size
        return self._sequence(pages, len(pages) * self.page_size, len(pages))

    def fork(self, sequence: KVSequence, length: int | None = None) -> KVSequence:
        """Creates a sequence that shares the pages of another's first tokens.

        Allocates no page: when the last shared page is not full, the first of the two sequences to
        be extended gets a copy of it. What writes the shared tokens must be queued before that.

        Args:
            sequence: the other sequence; it is not changed.
            length: tokens to share; None stands for all.

        Raises:
            ValueError: ``length`` is more than the sequence has; it is not one of this cache.
        """
        self._check(sequence)
        length = sequence._length if length is None else length
        self._check_at_most("length", whole("length", length, 0), sequence)
        pages = sequence._pages[: -(-length // self.page_size)]
        self._pool.hold(pages)
        return self._sequence(pages, length, min(sequence._committed, length // self.page_size))

    def extend(self, sequence: KVSequence, count: int) -> list[int]:
        """Allocates slots for ``count`` more tokens of one sequence, as :meth:`extend_all`.

        Raises:
            OutOfPages: too few pages are available; nothing has been changed.
            ValueError: ``count`` is negative; the sequence is not one of this cache.
        """
        return self.extend_all([(sequence, count)])

    def extend_all(self, requests: Iterable[tuple[KVSequence, int]]) -> list[int]:
        """Allocates slots for more tokens of several sequences: for all of them, or for none.

        A last page with free slots that is shared with another sequence, or cached by its content,
        is first copied on the device, in all layers (copy on write). Without a page for the copy, a
        cached page that no other sequence holds is written in place, and leaves the prefix cache.

        Args:
            requests: pairs of a sequence, each at most once, and its number of new tokens.

        Returns:
            The slots of the new tokens in the order of the requests: a ``slot_mapping``.

        Raises:
            OutOfPages: too few pages are available; nothing has been changed.
            ValueError: a count is negative; a sequence is named twice, or not one of this cache.
        """
        requests = list(requests)
        writers, spare = self._plan(requests)
        size, pool = self.page_size, self._pool
        slots: list[int] = []
        copies: list[tuple[int, int]] = []
        overwritten: list[int] = []
        for sequence, count in requests:
            length, pages = sequence._length, sequence._pages
            sequence._length = length + count
            offset = length % size
            if offset and count:
                page = pages[-1]
                if page in writers:
                    alone, known = pool.holders[page] == 1, pool.nodes[page] is not None
                    if not alone or (known and spare):
                        copies.append((page, pool.take()))
                        pool.let_go((page,))
                        page = pages[-1] = copies[-1][1]
                    elif known:
                        overwritten.append(page)
                slot = page * size + offset
                if count == 1:
                    slots.append(slot)
                    continue
                filled = min(size - offset, count)
                slots.extend(range(slot, slot + filled))
                count -= filled
            while count > 0:
                page = pool.take()
                pages.append(page)
                slots.extend(range(page * size, page * size + min(size, count)))
                count -= size
        # Not before: by now all that was evictable has been taken, so that no page follows these.
        for page in overwritten:
            pool.forget(page)
        # In this order: what one copy has read is evictable, and may be what another writes.
        for source, target in copies:
            self._copy_page(source, target)
        return slots

    def _plan(self, requests: list[tuple[KVSequence, int]]) -> tuple[dict[int, int], bool]:
        """Checks requests, and whether there are the pages for them.

        Returns:
            The last pages that are to be written to but are not one sequence's alone, with how many
            requests do so; and whether a page is left over. One is enough for all the copies that
            could be done without, for each makes what it has read evictable.
        """
        size, pool = self.page_size, self._pool
        holders, nodes = pool.holders, pool.nodes
        needed = 0
        writers: dict[int, int] = {}
        for sequence, count in requests:
            if type(sequence) is not KVSequence or sequence._pool is not pool:
                self._check(sequence)
            if type(count) is not int or count < 0:
                whole("count", count, 0)
            offset = sequence._length % size
            if offset and count:
                page = sequence._pages[-1]
                if holders[page] > 1 or nodes[page] is not None:
                    writers[page] = writers.get(page, 0) + 1
                count += offset - size
            if count > 0:
                needed += -(-count // size)
        if len({sequence for sequence, _ in requests}) < len(requests):
            raise ValueError("requests name a sequence twice: add its counts up")
        # Where all holders of a page write to it, the last one to be served has it for itself.
        needed += sum(count - (count == holders[page]) for page, count in writers.items())
        if needed > pool.available:
            raise OutOfPages(needed, len(pool.free), len(pool.evictable), pool.total)
        return writers, pool.available > needed

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Truncates a sequence to its first ``length`` tokens, and frees the pages after them.

        Raises:
            ValueError: ``length`` is negative or more than the sequence has; it is not one of this
                cache.
        """
        self._check(sequence)
        self._check_at_most("length", whole("length", length, 0), sequence)
        kept = -(-length // self.page_size)
        self._pool.let_go(sequence._pages[kept:])
        del sequence._pages[kept:]
        sequence._length = length
        sequence._committed = min(sequence._committed, length // self.page_size)

    def free(self, sequence: KVSequence) -> None:
        """Ends a sequence. Its pages that no other one holds are free, or evictable if cached.

        Raises:
            ValueError: it has been freed; it is not one of this cache.
        """
        self._check(sequence)
        self._pool.let_go(sequence._pages)
        self._sequences.remove(sequence)
        sequence._void()

    def discard(self, sequence: KVSequence) -> None:
        """Ends a sequence whose keys and values must not be used again: they may not be finite.

        Pages that no other sequence holds are zeroed and free; they leave the prefix cache, with
        all pages that follow them there.

        Raises:
            ValueError: it has been freed; it is not one of this cache.
        """
        self._check(sequence)
        pages = list(sequence._pages)
        self.free(sequence)
        self._zero_pages(self._pool.drop(pages))

    def commit(self, sequence: KVSequence, token_ids: Sequence[int]) -> int:
        """Enters a sequence's first full pages into the prefix cache, for :meth:`allocate` to find.

        Call it when the kernels that compute their keys and values are queued. Tokens that were
        committed before are not compared again, so passing all tokens each time costs no more.

        Duplicates are merged: if the tree has another page with the same content, the sequence
        switches to it and frees its own. Nothing is copied, and whoever holds a page still holds
        its ancestors in the tree, on which eviction relies. A page that a fork shares cannot be
        exchanged, for the fork would keep the old one; committing stops there, and a later call
        goes on once the fork is freed or has committed.

        Args:
            sequence: of this cache.
            token_ids: the first tokens of the sequence, not necessarily all.

        Returns:
            How many pages were exchanged for others of the same content. If it is not 0, earlier
            page tables and slots of these tokens are out of date.

        Raises:
            ValueError: more tokens than the sequence has, or other ones than were committed for the
                same page; not 64-bit integers; the sequence is not one of this cache.
        """
        self._check(sequence)
        self._check_at_most("token_ids", len(token_ids), sequence)
        if not self.prefix_sharing:
            return 0
        done, size = sequence._committed, self.page_size
        blocks = token_blocks(token_ids, size, done, len(token_ids) // size)
        sequence._committed, exchanged = self._pool.enter(sequence._pages, done, blocks)
        return exchanged

    def slots(self, sequence: KVSequence, start: int, stop: int) -> list[int]:
        """The slots of tokens ``start`` to ``stop - 1`` of a sequence.

        Raises:
            ValueError: not ``0 <= start <= stop <= length``; it is not one of this cache.
        """
        self._check(sequence)
        if not 0 <= whole("start", start, 0) <= whole("stop", stop, 0) <= sequence._length:
            raise ValueError(
                f"start and stop must be 0 to the sequence's {sequence._length}, in this order, "
                f"got {start} and {stop}"
            )
        size, pages = self.page_size, sequence._pages
        return [pages[token // size] * size + token % size for token in range(start, stop)]

    def page_table(self, sequences: Sequence[KVSequence], width: int | None = None) -> Tensor:
        """The ``page_table`` of a batch for attention; out of date when a sequence of it changes.

        Each call writes it anew from the array that each sequence keeps: for 256 sequences that was
        as fast as gathering rows of a table kept for all, which would need a bound.

        Args:
            sequences: the batch; a sequence may be there more than once.
            width: columns; None stands for the largest number of pages of a sequence, or 1.

        Returns:
            int32 [batch, width] on the CPU, padded with 0, which is a valid page.

        Raises:
            ValueError: ``width`` is too small; a sequence is not one of this cache.
        """
        rows = self._rows(sequences)
        widest = max(map(len, rows), default=0)
        if width is None:
            width = max(widest, 1)
        elif whole("width", width, 0) < widest:
            raise ValueError(
                f"width must be at least {widest}, the pages of a sequence, got {width}"
            )
        if not rows or not width:
            return torch.zeros((len(rows), width), dtype=torch.int32)
        table = bytearray(4 * len(rows) * width)
        self.write_page_table(sequences, memoryview(table).cast("i"), width)
        return torch.frombuffer(table, dtype=torch.int32).view(len(rows), width)

    def write_page_table(
        self, sequences: Sequence[KVSequence], table: memoryview, width: int
    ) -> None:
        """Writes the same into existing memory, such as that of a pinned tensor.

        Args:
            sequences: the batch, none of them with more than ``width`` pages.
            table: 32-bit integers, at least batch times ``width``. Entries after a sequence's
                pages are not written.
            width: columns.

        Raises:
            ValueError: a sequence is not one of this cache.
        """
        for number, row in enumerate(self._rows(sequences)):
            start = number * width
            table[start : start + len(row)] = row

    def seq_lens(self, sequences: Sequence[KVSequence]) -> Tensor:
        """The lengths of a batch, in tokens: ``seq_lens_kv``, int32 [batch] on the CPU.

        Raises:
            ValueError: a sequence is not one of this cache.
        """
        self._rows(sequences)
        lengths = array("i", [sequence._length for sequence in sequences])
        # Unlike torch.tensor, it copies nothing; but it does not accept an empty buffer.
        return torch.frombuffer(lengths or array("i", [0]), dtype=torch.int32)[: len(lengths)]

    def usage(self) -> CacheUsage:
        """How the pages are used now. Looks at every sequence, not at every page."""
        size, pool = self.page_size, self._pool
        ends: dict[int, list[int]] = {}
        for sequence in self._sequences:
            if sequence._length % size:
                ends.setdefault(sequence._pages[-1], []).append(sequence._length % size)
        in_use = pool.total - pool.available
        tokens = in_use * size - sum(
            size - max(filled)
            for page, filled in ends.items()
            if len(filled) == pool.holders[page]  # else somebody holds all of it
        )
        return CacheUsage(
            pages=pool.total,
            free=len(pool.free),
            evictable=len(pool.evictable),
            in_use=in_use,
            shared=pool.shared,
            sequences=len(self._sequences),
            tokens=tokens,
            fill=tokens / (in_use * size) if in_use else 0.0,
            prefix_hits=self._prefix_hits,
            prefix_lookups=self._prefix_lookups,
        )

    def _sequence(self, pages: array[int], length: int, committed: int) -> KVSequence:
        sequence = KVSequence(self._pool, pages, length, committed)
        self._sequences.add(sequence)
        return sequence

    def _rows(self, sequences: Sequence[KVSequence]) -> list[array[int]]:
        pool = self._pool
        for sequence in sequences:
            if type(sequence) is not KVSequence or sequence._pool is not pool:
                self._check(sequence)
        return [sequence._pages for sequence in sequences]

    def _check_at_most(self, name: str, tokens: int, sequence: KVSequence) -> None:
        if tokens > sequence._length:
            raise ValueError(
                f"{name} must be at most the sequence's {sequence._length}, got {tokens}"
            )

    def _check(self, sequence: KVSequence) -> None:
        pool = self._pool
        if not isinstance(sequence, KVSequence):
            raise ValueError(f"sequence must be one that this cache allocated, got {sequence!r}")
        if sequence._pool is None:
            raise ValueError("sequence has been freed")
        if sequence._pool is not pool:
            raise ValueError(f"sequence belongs to another cache: {sequence!r}")
