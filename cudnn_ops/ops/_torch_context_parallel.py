"""Notices ``torch.distributed.tensor.experimental.context_parallel``, which attention refuses.

torch marks that context only by what it replaces in one of its modules. Importing that module takes
a second, and most programs never need it, so it is patched when something else imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from cudnn_ops import _C
from cudnn_ops.ops._when_imported import when_imported

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def _telling(function: Callable[..., Any], active: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def tell(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _C.set_context_parallel(active)
        return result

    return tell


def _watch(module: ModuleType) -> None:
    """Makes what enters and leaves the context tell the operators."""
    for name, active in (
        ("_enable_context_parallel_dispatcher_impl", True),
        ("_disable_context_parallel_dispatcher_impl", False),
    ):
        setattr(module, name, _telling(getattr(module, name), active))
    # It may have been entered before.
    _C.set_context_parallel(module.F.scaled_dot_product_attention in module._replaced_functions)


when_imported(_MODULE, _watch)
