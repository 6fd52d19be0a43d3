"""The keys and values of a transformer's past tokens, in pages that sequences share.

A page has room for ``page_size`` tokens of every layer. A sequence is a list of pages, so that it
grows without being moved, and sequences that begin alike hold the same pages. A slot is where one
token lies: ``page * page_size + offset``.

Pages whose tokens are known (:meth:`PagedKVCache.commit`) are found again by content, in a radix
tree over whole pages: :meth:`PagedKVCache.allocate` begins a prompt with what was computed before.
They outlive their sequences, and are given away least recently used first once nothing is free.

Nothing here is thread-safe: one thread, or the caller's lock. Nothing waits for the GPU. What is
computed with the pages must be queued on one stream, in the order of the calls made here, for a
page that was let go of may be another sequence's a call later.
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
    """What the pages of a cache are used for. ``pages`` is ``free + evictable + in_use``."""

    pages: int
    """Pages in all."""
    free: int
    """Pages that nothing is in."""
    evictable: int
    """Pages that no sequence holds, kept because their content is known."""
    in_use: int
    """Pages that sequences hold, each counted once."""
    shared: int
    """Pages that more than one sequence holds."""
    sequences: int
    """Sequences that have not been freed."""
    tokens: int
    """Slots that hold a token of a sequence, each counted once however many share it."""
    fill: float
    """``tokens`` over the slots of the pages in use; 0 where none is in use."""
    prefix_hits: int
    """Tokens that :meth:`PagedKVCache.allocate` found computed."""
    prefix_lookups: int
    """Tokens that :meth:`PagedKVCache.allocate` was given."""


class PagedKVCache(PagedMemory):
    """Keys and values of all layers in one allocation, and the book of who holds which page.

    The memory begins as zeros and is not cleared when a page changes hands. Attention reads whole
    pages and multiplies the values of slots past a sequence's end by a weight of zero; zeros once
    make sure that nothing is there that zero does not cancel, as NaN in fresh memory would not.

    What is shared by content was computed by one model with one set of weights: another adapter
    needs another cache, new weights need :meth:`reset`.

    Args:
        layers: layers of the transformer that have keys and values.
        pages: pages in all. The memory is ``layers * pages * page_size * heads_kv * (head_size +
            value_size)`` elements.
        page_size: tokens of a page, a power of 2.
        heads_kv: key and value heads of a layer.
        head_size: elements of a key.
        value_size: elements of a value; None stands for ``head_size``.
        dtype: of keys and values.
        device: where they are.
        kv_layout: ``"NHD"``, pages are [page_size, heads_kv, size], or ``"HND"``, [heads_kv,
            page_size, size].
        prefix_sharing: whether sequences are found by content. Without it nothing is evictable, and
            :meth:`commit` does nothing.

    Raises:
        ValueError: a number less than 1, or an unknown layout.

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
    ) -> None:
        """Allocates the memory."""
        super().__init__(
            *(layers, pages, page_size, heads_kv, head_size),
            value_size=value_size,
            dtype=dtype,
            device=device,
            kv_layout=kv_layout,
        )
        self.prefix_sharing = prefix_sharing
        self._sequences: set[KVSequence] = set()
        self.reset()

    def reset(self) -> None:
        """Frees every sequence, forgets all content, sets the counters to zero."""
        for sequence in self._sequences:
            sequence._void()
        self._sequences.clear()
        self._pool = PagePool(self.pages)
        self._prefix_hits = self._prefix_lookups = 0

    @property
    def available(self) -> int:
        """Pages that sequences can still get: those that are free or evictable."""
        return self._pool.available

    def allocate(self, token_ids: Sequence[int] = ()) -> KVSequence:
        """A new sequence, which begins with the pages that are known to hold ``token_ids``.

        Args:
            token_ids: the prompt; whole numbers of 64 bits. Anything else that keys and values
                follow from must be in them: for an image, say, numbers hashed from it.

        Returns:
            The sequence. Its ``length``, whole pages and at most ``len(token_ids) - 1``, is how
            many tokens need not be computed; :meth:`extend` makes room for the others.

        Raises:
            ValueError: ``token_ids`` are not whole numbers of 64 bits.
        """
        pages = array("i")
        if self.prefix_sharing and len(token_ids):
            # The last token is always left to compute: the next one's logits come from it.
            pages = self._pool.find(
                token_blocks(token_ids, self.page_size, 0, (len(token_ids) - 1) // self.page_size)
            )
            self._prefix_lookups += len(token_ids)
            self._prefix_hits += len(pages) * self.page_size
        return self._sequence(pages, len(pages) * self.page_size, len(pages))

    def fork(self, sequence: KVSequence, length: int | None = None) -> KVSequence:
        """A sequence that shares the pages of another's first tokens.

        Takes no page: of a last page that is not full, the first of the two to be extended gets a
        copy. What writes the shared tokens must be queued before that.

        Args:
            sequence: stays as it is.
            length: tokens to share; None stands for all.

        Raises:
            ValueError: ``length`` is more than the sequence has; it is not one of this cache.
        """
        self._check(sequence)
        length = sequence._length if length is None else whole("length", length, 0)
        if length > sequence._length:
            raise ValueError(f"length is at most the sequence's {sequence._length}, got {length}")
        pages = sequence._pages[: -(-length // self.page_size)]
        self._pool.hold(pages)
        return self._sequence(pages, length, min(sequence._committed, length // self.page_size))

    def extend(self, sequence: KVSequence, count: int) -> list[int]:
        """Makes room for ``count`` more tokens of one sequence: :meth:`extend_all` of it alone.

        Raises:
            OutOfPages: there are too few; nothing has been changed.
            ValueError: ``count`` is negative; the sequence is not one of this cache.
        """
        return self.extend_all([(sequence, count)])

    def extend_all(self, requests: Iterable[tuple[KVSequence, int]]) -> list[int]:
        """Makes room for more tokens of several sequences: of all of them, or of none.

        A last page that has room, but that another sequence holds too or that is known by content,
        is copied on the device first, in all layers. One that nobody else holds is written to
        nevertheless where there is no page for the copy; its content is then no longer known.

        Args:
            requests: sequences, each once, and the number of tokens that each gets.

        Returns:
            The slots of the new tokens, one request's behind the other's: a ``slot_mapping``.

        Raises:
            OutOfPages: there are too few; nothing has been changed.
            ValueError: a count is negative; a sequence is there twice, or not one of this cache.
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
            raise ValueError("requests name a sequence twice: add up its counts")
        # Where all holders of a page write to it, the last one to be served has it for itself.
        needed += sum(count - (count == holders[page]) for page, count in writers.items())
        if needed > pool.available:
            raise OutOfPages(needed, len(pool.free), len(pool.evictable), pool.total)
        return writers, pool.available > needed

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Cuts a sequence to its first ``length`` tokens, and lets go of the pages beyond.

        Raises:
            ValueError: ``length`` is negative or more than the sequence has; it is not one of this
                cache.
        """
        self._check(sequence)
        if whole("length", length, 0) > sequence._length:
            raise ValueError(f"length is at most the sequence's {sequence._length}, got {length}")
        kept = -(-length // self.page_size)
        self._pool.let_go(sequence._pages[kept:])
        del sequence._pages[kept:]
        sequence._length = length
        sequence._committed = min(sequence._committed, length // self.page_size)

    def free(self, sequence: KVSequence) -> None:
        """Ends a sequence. Its pages that nobody else holds are free, or evictable if known.

        Raises:
            ValueError: it has been freed; it is not one of this cache.
        """
        self._check(sequence)
        self._pool.let_go(sequence._pages)
        self._sequences.remove(sequence)
        sequence._void()

    def commit(self, sequence: KVSequence, token_ids: Sequence[int]) -> int:
        """Says what a sequence's first tokens are, so that :meth:`allocate` finds their full pages.

        To be called once what computes their keys and values is queued. Tokens that were said
        before are not looked at again, so saying all of them each time costs no more.

        Two sequences that computed the same keep one page: where the content of a page is known in
        another, the sequence takes that one and frees its own. Nothing is copied, a page is won,
        and whoever holds a page then holds its ancestors in the tree, on which eviction relies. A
        page that a fork holds too cannot be exchanged, for the fork would keep the old one; there
        it ends, and what follows is said by a later call, once the fork is gone or has committed.

        Args:
            sequence: of this cache.
            token_ids: the tokens from the sequence's first one, not necessarily all.

        Returns:
            How many pages were exchanged for ones of the same content. Unless it is 0, page tables
            made before and slots of these tokens are out of date.

        Raises:
            ValueError: more tokens than the sequence has, or other ones than were said of the same
                page; not whole numbers of 64 bits; it is not one of this cache.
        """
        self._check(sequence)
        if len(token_ids) > sequence._length:
            raise ValueError(
                f"token_ids are at most the sequence's {sequence._length}, got {len(token_ids)}"
            )
        if not self.prefix_sharing:
            return 0
        done, size = sequence._committed, self.page_size
        blocks = token_blocks(token_ids, size, done, len(token_ids) // size)
        sequence._committed, exchanged = self._pool.enter(sequence._pages, done, blocks)
        return exchanged

    def slots(self, sequence: KVSequence, start: int, stop: int) -> list[int]:
        """The slots of tokens ``start`` to ``stop`` of a sequence, the latter not among them.

        Raises:
            ValueError: not ``0 <= start <= stop <= length``; it is not one of this cache.
        """
        self._check(sequence)
        if not 0 <= whole("start", start, 0) <= whole("stop", stop, 0) <= sequence._length:
            raise ValueError(
                f"start and stop are 0 to the sequence's {sequence._length}, in this order, got "
                f"{start} and {stop}"
            )
        size, pages = self.page_size, sequence._pages
        return [pages[token // size] * size + token % size for token in range(start, stop)]

    def page_table(self, sequences: Sequence[KVSequence], width: int | None = None) -> Tensor:
        """The pages of a batch, as attention takes them; out of date once one of it changes.

        Written anew by each call, from an array that each sequence keeps: for 256 sequences that
        took as long as gathering the rows of a table kept for all, which would need a bound.

        Args:
            sequences: the batch; in it a sequence may be there more than once.
            width: columns; None stands for the most pages that one holds, or 1.

        Returns:
            int32 [batch, width] on the CPU. Behind a sequence's pages is 0: a page that is there.

        Raises:
            ValueError: ``width`` is too small; a sequence is not one of this cache.
        """
        rows = self._rows(sequences)
        widest = max(map(len, rows), default=0)
        if width is None:
            width = max(widest, 1)
        elif whole("width", width, 0) < widest:
            raise ValueError(f"width is at least {widest}, the pages of a sequence, got {width}")
        if not rows or not width:
            return torch.zeros((len(rows), width), dtype=torch.int32)
        table = bytearray(4 * len(rows) * width)
        self.write_page_table(sequences, memoryview(table).cast("i"), width)
        return torch.frombuffer(table, dtype=torch.int32).view(len(rows), width)

    def write_page_table(
        self, sequences: Sequence[KVSequence], table: memoryview, width: int
    ) -> None:
        """Writes the same into memory that is there, such as a pinned tensor's.

        Args:
            sequences: the batch, none of them with more than ``width`` pages.
            table: 32 bit numbers, at least batch times ``width``. What lies behind a sequence's
                pages is left alone.
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
        # Unlike torch.tensor, takes the numbers as they lie; but not none of them.
        return torch.frombuffer(lengths or array("i", [0]), dtype=torch.int32)[: len(lengths)]

    def usage(self) -> CacheUsage:
        """What the pages are used for now. Takes a look at every sequence, not at every page."""
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

    def _check(self, sequence: KVSequence) -> None:
        pool = self._pool
        if not isinstance(sequence, KVSequence):
            raise ValueError(f"sequence is one that this cache allocated, got {sequence!r}")
        if sequence._pool is None:
            raise ValueError("sequence has been freed")
        if sequence._pool is not pool:
            raise ValueError(f"sequence is one of another cache: {sequence!r}")
