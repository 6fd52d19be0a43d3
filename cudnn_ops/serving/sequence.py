"""One sequence of a paged cache: the pages that it holds."""

from __future__ import annotations

from array import array

from cudnn_ops.serving.page_pool import PagePool


class KVSequence:
    """A sequence in a :class:`~cudnn_ops.PagedKVCache`, which creates it; compares by identity."""

    __slots__ = ("_committed", "_length", "_pages", "_pool")

    def __init__(self, pool: PagePool, pages: array[int], length: int, committed: int) -> None:
        """Called by :class:`~cudnn_ops.PagedKVCache` only."""
        # Tells its owner. A reference to the cache itself would be a cycle: its memory, most of a
        # GPU's, would stay until the garbage collector runs.
        self._pool: PagePool | None = pool
        self._pages = pages  # exactly as many as the length needs
        self._length = length
        self._committed = committed  # how many of the first pages are in the tree

    @property
    def length(self) -> int:
        """Number of tokens with a slot; 0 after it was freed."""
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of its tokens, in order."""
        return tuple(self._pages)

    def __repr__(self) -> str:
        freed = "" if self._pool else ", freed"
        return f"KVSequence(length={self._length}, pages={self._pages.tolist()}{freed})"

    def _void(self) -> None:
        self._pool, self._pages, self._length, self._committed = None, array("i"), 0, 0
