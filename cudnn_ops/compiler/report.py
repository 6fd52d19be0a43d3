"""What the backend found in the graphs that it compiled, and what it did about each."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx


@dataclass
class Candidate:
    """A part of a graph that a pattern recognized.

    Attributes:
        pattern: the pattern's name.
        node: the name of its last node in Dynamo's graph.
        shape: of the result.
        dtype: of the result.
        where: the line of the model that computes it, as ``file:line``; empty where unknown.
        note: what was recognized in it, such as what became of a mask.
        swapped: whether our operator is in its place.
        reason: why not; or, for one that is swapped, what speaks for it.
        ours_ms: how long ours takes, in milliseconds, forward and backward where there is one.
        stock_ms: how long what inductor makes of the stock subgraph takes.
    """

    pattern: str
    node: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    where: str = ""
    note: str = ""
    swapped: bool = False
    reason: str = ""
    ours_ms: float | None = None
    stock_ms: float | None = None

    @classmethod
    def of(cls, pattern: str, node: fx.Node, reason: str = "") -> Candidate:
        value = node.meta.get("example_value")
        candidate = cls(pattern, node.name, where=line_of_model(node), reason=reason)
        if isinstance(value, Tensor):
            candidate.shape = tuple(value.shape)
            candidate.dtype = str(value.dtype).removeprefix("torch.")
        return candidate


@dataclass
class CompileReport:
    """What :func:`cudnn_ops.compile_report` gives: every candidate since the last ``clear()``.

    Printed, it is a table.

    Attributes:
        candidates: in the order in which they were found.
        graphs: how many graphs were compiled.
        notes: what concerns whole graphs, such as that they are for a CPU.
    """

    candidates: list[Candidate] = field(default_factory=list)
    graphs: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def begin(self) -> int:
        """A graph is compiled; the result is for :meth:`forget`."""
        self.graphs += 1
        return len(self.candidates)

    def forget(self, begun: int) -> None:
        """The graph that was begun is not compiled after all."""
        self.graphs -= 1
        del self.candidates[begun:]

    def clear(self) -> None:
        """Forgets everything."""
        self.candidates.clear()
        self.notes.clear()
        self.graphs = 0

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def swapped(self) -> list[Candidate]:
        """Those that our operators compute."""
        return [candidate for candidate in self.candidates if candidate.swapped]

    def __str__(self) -> str:
        lines = [
            ("pattern", "result", "count", "swapped", "ours ms", "inductor ms", "where, what, why")
        ]
        for found, count in Counter(map(_row, self.candidates)).items():
            pattern, result, swapped, ours, stock, why = found
            lines.append((pattern, result, str(count), swapped, ours, stock, why))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        table = []
        for *cells, last in lines:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            table.append("  ".join([*padded, last]).rstrip())
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        head = f"{graphs}, {len(self.swapped)} of {len(self)} candidates swapped"
        return "\n".join([head, *self.notes, *(table if self.candidates else [])])


def _row(candidate: Candidate) -> tuple[str, str, str, str, str, str]:
    """Without what differs from layer to layer."""
    sizes = ", ".join(map(str, candidate.shape))
    parts = (candidate.where, candidate.note, candidate.reason)
    why = "; ".join(part for part in parts if part)
    ours, stock = (
        "" if ms is None else f"{ms:.4f}" for ms in (candidate.ours_ms, candidate.stock_ms)
    )
    swapped = "yes" if candidate.swapped else "no"
    return candidate.pattern, f"{candidate.dtype}[{sizes}]", swapped, ours, stock, why


def first_line(error: Exception) -> str:
    """What an error says first: torch's go on with stacks."""
    return next(iter(str(error).splitlines()), "")


def warn(what: str, error: Exception) -> None:
    """Of something that the backend does without, because of the error."""
    warnings.warn(
        f'torch.compile with backend="cudnn_ops": {what}: {type(error).__name__}: '
        f"{first_line(error)}",
        stacklevel=2,
    )


def line_of_model(node: fx.Node) -> str:
    """From the stack that Dynamo keeps: its last line that names a file."""
    places = [
        line.strip()
        for line in (node.meta.get("stack_trace") or "").splitlines()
        if line.strip().startswith("File ")
    ]
    if not places:
        return ""
    file, line, *_ = places[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34)).rpartition('/')[2]}:{line.removeprefix('line ')}"


_report = CompileReport()


def compile_report() -> CompileReport:
    """What ``torch.compile(..., backend="cudnn_ops")`` swapped in this process, and why not.

    Returns:
        one report, which grows with every compiled graph; ``clear()`` empties it, ``print()`` shows
        a table.

    Example:
        >>> import torch, cudnn_ops
        >>> options = {"swap": ["rms_norm"]}  # without measuring
        >>> norm = torch.compile(torch.nn.RMSNorm(64), backend="cudnn_ops", options=options)
        >>> cudnn_ops.compile_report().clear()
        >>> _ = norm(torch.randn(2, 64))
        >>> len(cudnn_ops.compile_report().swapped)
        1
    """
    return _report
