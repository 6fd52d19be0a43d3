"""What inductor's caches on disk have to know of this package."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from torch import fx

from cudnn_ops import _C

_PACKAGE = Path(__file__).parents[1]
#: Where the functions are that graphs call, and what says of which shapes and strides results are.
_FOLDERS = ("compiler", "ops")


def marked(module: fx.GraphModule) -> dict[str, str]:
    """For inductor's ``unsafe_marked_cacheable_functions``: this package's functions in a graph.

    A graph that calls other functions than torch's is not cached unless these are named. Each name
    has a word that becomes part of the graph's key, and so do the operators: here it stands for
    their sources.
    """
    graphs = [one.graph for one in module.modules() if isinstance(one, fx.GraphModule)]
    targets = {node.target for one in graphs for node in one.nodes if node.op == "call_function"}
    named = [
        f"{function.__module__}.{function.__name__}"
        for function in targets
        if callable(function) and getattr(function, "__module__", "").startswith("cudnn_ops.")
    ]
    return dict.fromkeys(["cudnn_ops", *sorted(named)], sources())


@functools.cache
def sources() -> str:
    """A word for all that decides what a graph with this package's functions computes."""
    found = hashlib.sha256(repr(sorted(_C.versions().items())).encode())
    for folder in _FOLDERS:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
