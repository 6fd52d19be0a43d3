"""What became of graphs that were rewritten before, kept on disk: they are not matched again.

One file for each graph, beside the times that decided about it. It counts as long as these are what
they were.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import fx

from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.report import Candidate, line_of_model
from cudnn_ops.plans.cache import store_info
from cudnn_ops.plans.files import replacing


class KnownGraph(NamedTuple):
    """A graph that was rewritten.

    Attributes:
        word: by which :mod:`cudnn_ops.compiler.one_call` finds what came out; empty where nothing
            was swapped.
        times: what was asked for, with the answers.
        candidates: what was found in it.
    """

    word: str
    times: Mapping[str, Times]
    candidates: Sequence[Candidate]

    def candidates_in(self, graph: fx.Graph) -> list[Candidate]:
        """Those, with the lines that the model has now."""
        lines = {node.name: line_of_model(node) for node in graph.nodes}
        return [
            dataclasses.replace(one, where=lines.get(one.node, one.where))
            for one in self.candidates
        ]


def find(fingerprint: str, times: Mapping[str, Times]) -> KnownGraph | None:
    """What is known of a graph, if it was decided by these times."""
    path = _path(fingerprint)
    try:
        word, asked, candidates = [] if path is None else json.loads(path.read_text())
        known = KnownGraph(
            word,
            {key: Times(*each) for key, each in asked.items()},
            [Candidate(**{**one, "shape": tuple(one["shape"])}) for one in candidates],
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None  # missing, damaged, or of another version
    return known if all(times.get(key) == each for key, each in known.times.items()) else None


def keep(fingerprint: str, known: KnownGraph) -> None:
    """Writes it down, where there is a store."""
    path = _path(fingerprint)
    if path is None:
        return
    candidates = [dataclasses.asdict(one) for one in known.candidates]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps([known.word, known.times, candidates]).encode())
    except OSError:
        return  # as the store of plans: what cannot be kept is found again


def _path(fingerprint: str) -> Path | None:
    info = store_info()
    has_store = info.folder and not info.refusal
    return Path(info.folder, f"compiled_{fingerprint}.json") if has_store else None
