"""The process's plan cache, and the store on disk from which later processes load plans.

The store is a folder with one file for each plan: ``CUDNN_OPS_CACHE_DIR``, or else ``cudnn_ops`` in
the user's cache folder. A stored plan is code that will run on the GPU, so a folder that other
users can write to is not used, with a warning. Any number of processes may share it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cudnn_ops import _C

DEFAULT_STORE_LIMIT = 256 * 2**20


class CacheInfo(NamedTuple):
    """Counters of the plan cache since the process started or the cache was cleared."""

    hits: int
    """Calls that found their plan."""
    builds: int
    """Plans built; each costs 20 to 500 ms of host time."""
    loads: int
    """Plans loaded from the store or a bundle instead; each costs about 2 ms."""
    evictions: int
    """Plans dropped, least recently used first, because the limit was reached."""
    size: int
    """Plans held now."""
    limit: int
    """The largest number of plans that are held."""
    background: int
    """Of the plans built or loaded, those that no call waited for: see :func:`set_plan_policy`."""
    pending: int
    """Plans that are still to be made in the background."""
    failed: int
    """Plans that cuDNN refused or failed to make in the background. Their calls run on what they
    have."""


class StoreInfo(NamedTuple):
    """State of the store on disk."""

    folder: str
    """Its folder; empty if there is no store."""
    refusal: str
    """Why the folder is not used; empty if it is used."""
    files: int
    """Number of stored plans."""
    bytes: int
    """Their size in bytes."""
    limit: int
    """The size limit in bytes; the least recently used plans are deleted first."""


def cache_info() -> CacheInfo:
    """Returns the counters of the plan cache, which all threads and operators share.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.cache_info().limit
        512
    """
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Drops every plan, resets the counters and forgets which shapes were seen.

    Calls in flight are not affected. Plans that are on their way in the background are not kept.
    The store on disk keeps its plans: :func:`store_clear`.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.cache_clear()
        >>> cudnn_ops.cache_info().size
        0
    """
    _C.cache_clear()


def wait_for_plans() -> None:
    """Waits until the plans that are made in the background are ready.

    For measurements, and before a CUDA graph is captured: calls whose shapes have been promoted
    until now run on their own plans afterwards.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.wait_for_plans()
        >>> cudnn_ops.cache_info().pending
        0
    """
    _C.wait_for_plans()


def set_cache_limit(limit: int) -> None:
    """Sets how many plans are held, and drops the least recently used ones beyond that.

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
    """Returns the state of the store on disk.

    Example:
        >>> import cudnn_ops
        >>> info = cudnn_ops.store_info()
        >>> info.limit
        268435456
    """
    return StoreInfo(*_C.store_info())


def store_clear() -> int:
    """Deletes every plan in the store, and returns how many there were.

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
        folder: created, private to this user, when the first plan is stored; None turns the store
            off.
        limit: the size limit in bytes.

    Raises:
        ValueError: ``limit`` is negative.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.set_store(None)  # keep no plans on disk
        >>> cudnn_ops.store_info().folder
        ''
    """
    if limit < 0:
        raise ValueError(f"limit must be a number of bytes, at least 0, got {limit}")
    _C.set_store("" if folder is None else str(Path(folder).expanduser().absolute()), limit)


def _read_environment() -> None:
    folder = os.environ.get("CUDNN_OPS_CACHE_DIR")
    if folder is None:
        caches = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
        folder = f"{caches}/cudnn_ops"
    set_store(folder or None)  # empty: no store


_read_environment()
