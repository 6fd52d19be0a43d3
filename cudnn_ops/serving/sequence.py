"""One sequence of a paged cache: the pages that it holds."""

from __future__ import annotations

from array import array

from cudnn_ops.serving.page_pool import PagePool


class KVSequence:
    """A sequence in a :class:`PagedKVCache`, which alone makes them; equal only to itself."""

    __slots__ = ("_committed", "_length", "_pages", "_pool")

    def __init__(self, pool: PagePool, pages: array[int], length: int, committed: int) -> None:
        """For :class:`PagedKVCache` alone."""
        # Says whose it is. The cache itself would be a cycle: its memory, most of a GPU's, would
        # stay until the garbage collector runs.
        self._pool: PagePool | None = pool
        self._pages = pages  # exactly those that the length needs
        self._length = length
        self._committed = committed  # how many of the first pages are in the tree, one path of it

    @property
    def length(self) -> int:
        """Tokens that have a slot; 0 once it is freed."""
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages that hold them, in order."""
        return tuple(self._pages)

    def __repr__(self) -> str:
        """Its length and pages."""
        freed = "" if self._pool else ", freed"
        return f"KVSequence(length={self._length}, pages={self._pages.tolist()}{freed})"

    def _void(self) -> None:
        self._pool, self._pages, self._length, self._committed = None, array("i"), 0, 0
