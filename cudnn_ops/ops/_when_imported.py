"""Running something once a module of torch is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Sees one module being imported, once, and leaves finding it to the others."""

    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self._name, self._callback = name, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run, callback = spec.loader.exec_module, self._callback

        def run_and_call_back(module: ModuleType) -> None:
            run(module)
            callback(module)

        spec.loader.exec_module = run_and_call_back  # type: ignore[method-assign]
        return spec


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Calls ``callback`` with the module: at once if it is imported, or as soon as it is."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
