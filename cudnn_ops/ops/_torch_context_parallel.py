"""Notices ``torch.distributed.tensor.experimental.context_parallel``, which attention refuses.

torch marks that context only by what it replaces in a module of its own. That is not imported here,
for it takes a second and most programs never need it: it is looked at when somebody imports it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from cudnn_ops import _C

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


class _Finder(MetaPathFinder):
    """Sees one module being imported, once, and leaves finding it to the others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_watch(module: ModuleType) -> None:
            run(module)
            _watch(module)

        spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


if _MODULE in sys.modules:
    _watch(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _Finder())
