"""The plans that the process holds, and the store on disk from which the next process takes them.

The store is a folder of files, one a plan: ``CUDNN_OPS_CACHE_DIR``, or else ``cudnn_ops`` in the
user's cache folder. A stored plan is code that will run on the GPU, so only this user may be able
to write there; a folder that others can write to is refused, with a warning. Any number of
processes may use it at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cudnn_ops import _C

DEFAULT_STORE_LIMIT = 256 * 2**20


class CacheInfo(NamedTuple):
    """What the plan cache has done since the process began or it was last cleared."""

    hits: int
    """Calls that found their plan."""
    builds: int
    """Plans built; each takes 20 to 500 ms of host time."""
    loads: int
    """Plans read from the store instead; each takes about 2 ms."""
    evictions: int
    """Plans dropped, least recently used first, because the limit was reached."""
    size: int
    """Plans held now."""
    limit: int
    """The most plans that are held."""


class StoreInfo(NamedTuple):
    """The store on disk as it is now."""

    folder: str
    """Where it is; empty when it is off."""
    refusal: str
    """Why the folder is not used; empty if it is."""
    files: int
    """Plans in it."""
    bytes: int
    """Their size."""
    limit: int
    """The most bytes that it keeps; the least recently used plans go first."""


def cache_info() -> CacheInfo:
    """Returns the counters of the plan cache, which all threads and operators share.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.cache_info().limit
        512
    """
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Drops every plan, sets the counters to zero and forgets which shapes were seen.

    Calls in flight are not disturbed. The store on disk keeps what it has: :func:`store_clear`.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.cache_clear()
        >>> cudnn_ops.cache_info().size
        0
    """
    _C.cache_clear()


def set_cache_limit(limit: int) -> None:
    """Sets the most plans that are held, at once dropping those that are too many.

    Args:
        limit: number of plans, at least 1. The default is 512.

    Raises:
        ValueError: ``limit`` is less than 1.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.set_cache_limit(512)
    """
    _C.set_cache_limit(limit)


def store_info() -> StoreInfo:
    """Returns where the store on disk is and what it holds.

    Example:
        >>> import cudnn_ops
        >>> info = cudnn_ops.store_info()
        >>> info.limit
        268435456
    """
    return StoreInfo(*_C.store_info())


def store_clear() -> int:
    """Deletes every plan in the store; returns how many there were.

    Example:
        >>> import cudnn_ops, tempfile
        >>> cudnn_ops.set_store(tempfile.mkdtemp())
        >>> cudnn_ops.store_clear()
        0
        >>> cudnn_ops.set_store(None)
    """
    return _C.store_clear()


def set_store(folder: str | os.PathLike[str] | None, *, limit: int = DEFAULT_STORE_LIMIT) -> None:
    """Sets the store's folder for this process.

    Args:
        folder: made, private to this user, when the first plan is stored. None: no store.
        limit: the most bytes that it keeps.

    Raises:
        ValueError: ``limit`` is negative.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.set_store(None)  # keep no plans on disk
        >>> cudnn_ops.store_info().folder
        ''
    """
    if limit < 0:
        raise ValueError(f"the store's limit is a number of bytes, got {limit}")
    _C.set_store("" if folder is None else str(Path(folder).expanduser().absolute()), limit)


def _read_environment() -> None:
    folder = os.environ.get("CUDNN_OPS_CACHE_DIR")
    if folder is None:
        caches = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
        folder = f"{caches}/cudnn_ops"
    set_store(folder or None)  # empty: no store


_read_environment()
