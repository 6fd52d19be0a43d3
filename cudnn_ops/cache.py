"""The process-wide cache of built cuDNN plans: counters, limit, emptying."""

from __future__ import annotations

from typing import NamedTuple

from cudnn_ops import _C


class CacheInfo(NamedTuple):
    """What the plan cache has done since the process began or it was last cleared."""

    hits: int
    """Calls that found their plan."""
    builds: int
    """Plans built; each takes 20 to 500 ms of host time."""
    evictions: int
    """Plans dropped, least recently used first, because the limit was reached."""
    size: int
    """Plans held now."""
    limit: int
    """The most plans that are held."""


def cache_info() -> CacheInfo:
    """Returns the counters of the plan cache, which all threads and operators share."""
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Drops every plan and sets the counters to zero. Calls in flight are not disturbed."""
    _C.cache_clear()


def set_cache_limit(limit: int) -> None:
    """Sets the most plans that are held, at once dropping those that are too many.

    Args:
        limit: number of plans, at least 1. The default is 512.

    Raises:
        ValueError: ``limit`` is less than 1.
    """
    _C.set_cache_limit(limit)
