"""Tables of measured engines, which the operators load at import.

``tuned/sm<architecture>.json`` names, for some plans, an engine that is faster than the first
choice of cuDNN's heuristics; ``tuned/norms_sm<architecture>.json`` says which norms run faster on
our kernels than on cuDNN, ``tuned/linear_sm<architecture>.json`` which linear layers run faster by
cuBLASLt's epilogues, and which by cuDNN. Each table notes the GPU and the versions that it was
measured with; what is about cuDNN's engines is used with that version of cuDNN only, and that of
norms with newer ones too. ``python -m cudnn_ops tune`` writes them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cudnn_ops import _C
from cudnn_ops.ops.activation import ACTIVATIONS, SLOPE, Activation
from cudnn_ops.ops.linear import LINEAR_ENGINES, LINEAR_STEPS

if TYPE_CHECKING:
    from cudnn_ops.plans.tune import TunedPlan

TABLES = Path(__file__).parent / "tuned"
#: An engine must be this much faster than the heuristics' first choice to enter a table.
WORTHWHILE = 0.02
#: A norm's forward alone, one that a gradient follows, and the gradient.
NORM_PLANS = ("inference", "training", "backward")


@dataclass
class EngineTable:
    """A file of tuned engines for one GPU architecture."""

    sm: int
    """90 for compute capability 9.0."""
    gpu: str
    driver: str
    cudnn: int
    """91900 for 9.19.0."""
    torch: str
    date: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    """Each has ``plan`` (in words, for readers), ``words`` (its key), ``engine`` and ``ms``."""

    @classmethod
    def of_this_machine(cls) -> EngineTable:
        major, minor = torch.cuda.get_device_capability()
        return cls(
            sm=major * 10 + minor,
            gpu=torch.cuda.get_device_name(),
            driver=_driver(),
            cudnn=_C.cudnn_version(),
            torch=torch.__version__,
            date=datetime.now(timezone.utc).date().isoformat(),
        )

    @classmethod
    def read(cls, path: Path) -> EngineTable:
        return cls(**json.loads(path.read_text()))

    def add(self, tuned: TunedPlan) -> None:
        """Adds a measurement, or removes the plan if the heuristics' choice is as fast."""
        words = list(tuned.request.words)
        self.entries = [entry for entry in self.entries if entry["words"] != words]
        if tuned.gain > WORTHWHILE:
            ms = {engine: round(ms, 5) for engine, ms in tuned.engine_ms.items()}
            self.entries.append(
                {"plan": str(tuned.request), "words": words, "engine": tuned.fastest, "ms": ms}
            )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
    return found[0] if found else "unknown"


@dataclass(frozen=True)
class NormTiming:
    """GPU time of one norm of one size, in milliseconds."""

    plan: str
    """One of :data:`NORM_PLANS`: a forward alone, one that a gradient follows, or the gradient."""
    is_layer: bool
    columns: int
    rows: int
    engine: str
    """The fastest of cuDNN's."""
    cudnn_ms: float
    ours_ms: float

    @property
    def is_cudnn_faster(self) -> bool:
        return self.cudnn_ms < self.ours_ms * (1 - WORTHWHILE)

    def as_choice(self) -> tuple[int, bool, int, int, bool, str]:
        """The arguments of C++, which measures a row in bytes."""
        row_bytes = self.columns * torch.bfloat16.itemsize
        plan = NORM_PLANS.index(self.plan)
        return plan, self.is_layer, row_bytes, self.rows, self.is_cudnn_faster, self.engine

    def __str__(self) -> str:
        name = "layer_norm" if self.is_layer else "rms_norm"
        return (
            f"{name:<10} {self.plan:<9} {self.rows:>8} x {self.columns:<6} "
            f"ours {self.ours_ms:.4f} ms, cuDNN {self.cudnn_ms:.4f} ms  {self.engine}"
        )


@dataclass(frozen=True)
class LinearTiming:
    """GPU time of one step of a linear layer by each of its engines, in milliseconds."""

    step: str
    """``"inference"`` or ``"training"``, a layer without or with a gradient to follow,
    ``"hidden_gradient"``, of a hidden layer with its bias's, ``"weight_gradient"``, with its
    bias's, or ``"training_slope"``: two layers, forward and backward."""
    activation: Activation | Literal["slope"]
    """``"slope"`` of a gradient through a slope that was kept."""
    rows: int
    columns: int
    depth: int
    """Of the product, of [rows, depth] and [depth, columns]."""
    engine_ms: dict[str, float]
    """By ``"ours"``, a kernel of ours behind the product, ``"epilogue"``, cuBLASLt's,
    ``"epilogue_sum"``, one that sums for the bias too, and ``"graph"``, cuDNN's. Of
    ``"training_slope"``: with what the activation is of kept, and with its slope kept by graphs."""
    plan_engine: str = ""
    """The fastest of cuDNN's engines for the graph, where that was measured."""

    @property
    def fastest(self) -> str:
        """A graph, which serves one number of rows, only where it is worthwhile."""
        without_plan = self._fastest_without_plan
        graph_ms = self.engine_ms.get("graph", math.inf)
        is_worthwhile = graph_ms < self.engine_ms[without_plan] * (1 - WORTHWHILE)
        return "graph" if is_worthwhile else without_plan

    @property
    def _fastest_without_plan(self) -> str:
        without_plan = [engine for engine in self.engine_ms if engine != "graph"]
        return min(without_plan, key=self.engine_ms.__getitem__)

    def as_choice(self, engine: str | None = None) -> tuple[list[int], str]:
        """The columns of C++, with the fastest engine or another, and the graph's engine."""
        chosen = engine or self.fastest
        without_plan = self._fastest_without_plan if chosen == "graph" else chosen
        numbers = [
            LINEAR_STEPS.index(self.step),
            SLOPE if self.activation == "slope" else ACTIVATIONS.index(self.activation),
            *(self.rows, self.columns, self.depth),
            LINEAR_ENGINES.index(without_plan),
            chosen == "graph",
        ]
        return numbers, self.plan_engine

    def __str__(self) -> str:
        size = f"{self.rows} x {self.columns} x {self.depth}"
        times = ", ".join(f"{engine} {ms:.4f} ms" for engine, ms in self.engine_ms.items())
        line = f"{self.step:<15} {self.activation:<9} {size:>22}  {times}  {self.plan_engine}"
        return line.rstrip()


def load_tables() -> None:
    """Loads the package's tables into the operators."""
    for path in sorted(TABLES.glob("sm*.json")):
        table = EngineTable.read(path)
        engines = [(entry["words"], entry["engine"]) for entry in table.entries]
        _C.set_engine_table(table.sm, table.cudnn, engines)
    for path in sorted(TABLES.glob("norms_sm*.json")):
        table = EngineTable.read(path)
        choices = [NormTiming(**entry).as_choice() for entry in table.entries]
        _C.set_norm_table(table.sm, table.cudnn, choices)
    for path in sorted(TABLES.glob("linear_sm*.json")):
        table = EngineTable.read(path)
        timings = [LinearTiming(**entry).as_choice() for entry in table.entries]
        _C.set_linear_table(table.sm, table.cudnn, timings)


load_tables()
