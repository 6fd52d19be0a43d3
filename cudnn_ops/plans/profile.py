"""Names of plans in profiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_ops import _C

_ENGINE, _PLAN = 1, 2
_lock = threading.Lock()
_in_force: list[int] = []


@contextmanager
def profile_names(*, shapes: bool = False) -> Iterator[None]:
    """A context in which profiles name the plan that an operator runs, in all threads.

    PyTorch's profiler and ``torch.autograd.profiler.emit_nvtx`` name operators themselves, with the
    shapes of their arguments under ``record_shapes=True``. Inside this context each plan that runs
    on a GPU is a range of its own within its operator's, ``cuDNN eng9_k24=7 of ... (0 bytes of
    workspace)``: which engine cuDNN runs and with which knobs. What runs without a plan, as on a
    CPU, has none.

    Args:
        shapes: whether the name goes on with all parameters of the plan: the sizes and strides that
            it was built for, which tell an exact plan from a polymorphic one.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(1, 2, 16, 8)
        >>> with cudnn_ops.profile_names(), torch.profiler.profile(record_shapes=True) as profile:
        ...     out = cudnn_ops.scaled_dot_product_attention(x, x, x)
        >>> any("cudnn_ops::" in event.name for event in profile.events())
        True
    """
    level = _PLAN if shapes else _ENGINE
    with _lock:
        _in_force.append(level)
        _C.set_profile_names(max(_in_force))
    try:
        yield
    finally:
        with _lock:
            _in_force.remove(level)
            _C.set_profile_names(max(_in_force, default=0))
