"""The backend of torch.compile: patterns, and what decides about them.

``backend.py`` is what Dynamo calls; ``rewrite.py`` finds and replaces, by the patterns listed in
``patterns/__init__.py``, and ``strides.py`` settles what depends on strides; ``nodes.py`` and
``match.py`` read graphs; ``masks.py`` recognizes attention masks by computing them; ``choice.py``
decides and ``report.py`` says what was decided. Graphs that an earlier process has compiled are
known by ``fingerprint.py``, kept by ``known_graphs.py``, and called by ``one_call.py``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType

_NAME = "cudnn_ops"


def register(registry: ModuleType) -> None:
    """Makes Dynamo know the backend by its name, as an installed package's entry point does."""
    entry = EntryPoint(_NAME, "cudnn_ops.compiler.backend:cudnn_ops", "torch_dynamo_backends")
    registry._BACKENDS.setdefault(_NAME, entry)
