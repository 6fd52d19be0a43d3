"""What a waiting request brings back in place of computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Kept(Protocol):
    """Keys and values of a waiting request, outside of the cache."""

    @property
    def first(self) -> int:
        """How many of the first pages are not among them."""
        ...

    @property
    def length(self) -> int:
        """How many tokens of the request have keys and values, with those of the first pages."""
        ...

    def restore(self, pages: Sequence[int], skipped: int) -> None:
        """Queues writing them to pages of the cache.

        Args:
            pages: of the tokens behind the first ``skipped`` pages.
            skipped: at least ``first``.
        """
        ...

    def drop(self) -> None:
        """Frees their memory. Restoring that is queued before is not disturbed."""
        ...
