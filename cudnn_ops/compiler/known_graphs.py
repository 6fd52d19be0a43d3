"""What became of graphs that were rewritten before, kept on disk: they are not matched again.

One file for each graph, beside the times that decided about it. It counts as long as these are what
they were.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.report import Candidate, line_of_model
from cudnn_ops.compiler.stored import path_of, write

_FILE = "compiled_{}.json"


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


def find(fingerprint: str, times_of: Callable[[str], Times | None]) -> KnownGraph | None:
    """What is known of a graph, if the times that decided are the ones that questions have now."""
    path = path_of(_FILE.format(fingerprint))
    try:
        word, asked, candidates = [] if path is None else json.loads(path.read_text())
        known = KnownGraph(
            word,
            {key: Times(*each) for key, each in asked.items()},
            [Candidate(**{**one, "shape": tuple(one["shape"])}) for one in candidates],
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None  # missing, damaged, or of another version
    return known if all(times_of(key) == each for key, each in known.times.items()) else None


def keep(fingerprint: str, known: KnownGraph) -> None:
    """Writes it down, where there is a store."""
    if (path := path_of(_FILE.format(fingerprint))) is not None:
        write(path, [known.word, known.times, list(map(dataclasses.asdict, known.candidates))])
