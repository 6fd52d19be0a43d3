"""What all benchmarks share: three clocks, the rows, the environment they name, the command line.

Knowledge of one operator belongs in bench_<name>.py, knowledge of a competitor in peers.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from benchmarks.turns import clock_in_turns, is_alone, tune_one_by_one

if TYPE_CHECKING:
    from typing_extensions import NotRequired

ROOT = Path(__file__).resolve().parents[1]
OURS = "cudnn_ops"

FULL_ROUNDS, QUICK_ROUNDS = 50, 5
# The driver blocks a caller with 1024 launches pending: 50 calls of up to 10 kernels stay clear.
HOST_CALLS = 50  # a sample

Functions = Mapping[str, Callable[[], object]]
Around = Callable[[str], AbstractContextManager[object]]


class Row(TypedDict):
    case: str
    impl: str
    metric: str
    value: float
    commit: NotRequired[str]
    """Where the rows of a file are of several."""


def gpu_ms(functions: Functions, *, rounds: int, around: Around | None = None) -> dict[str, float]:
    """Median GPU time of one call of each function, in milliseconds, as the package's own clock."""
    # Inside: results are written even where the operators' library does not load.
    from cudnn_ops.plans import timing

    return timing.gpu_ms(functions, rounds=rounds, around=around)


def host_us(functions: Functions, *, rounds: int, around: Around | None = None) -> dict[str, float]:
    """Median host time of one call of each function, in microseconds, without synchronization.

    A sample is HOST_CALLS calls that start on an idle GPU. `around` is as for `gpu_ms`.
    """
    from cudnn_ops.plans import timing

    gc.collect()
    gc.disable()
    try:
        found = timing.host_ms(functions, rounds=rounds, calls=HOST_CALLS, around=around)
        return {name: 1e3 * ms for name, ms in found.items()}
    finally:
        gc.enable()


def step_ms(functions: Functions, *, rounds: int) -> dict[str, float]:
    """Median time of one call of each function that starts on an idle GPU, in milliseconds.

    From the call to the end of its last kernel: the host's time counts where the GPU waits for it.
    """
    from cudnn_ops.plans import timing

    return timing.medians(functions, _step_sample, rounds)


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes that one call allocates on the GPU at its peak, beyond those allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _step_sample(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


class Rows:
    """What a benchmark found: one value for each case, implementation and metric."""

    def __init__(self, env: Mapping[str, str | int]) -> None:
        self.env = env
        self.rows: list[Row] = []

    def add(self, case: str, impl: str, metric: str, value: float) -> None:
        self.rows.append(Row(case=case, impl=impl, metric=metric, value=value))

    def table(self) -> str:
        """Plain text: for each metric, cases down, implementations across, each peer over ours."""
        return "\n\n".join(self._metric_table(m) for m in unique(r["metric"] for r in self.rows))

    def merge_into(self, others: Sequence[Row], commit: str) -> None:
        """Puts the rows of an earlier run before these, but for the cases that these have.

        Each row says of which commit it is; those that do not yet are of ``commit``.
        """
        mine = {row["case"] for row in self.rows}
        for row in self.rows:
            row["commit"] = str(self.env["commit"])
        kept = [row for row in others if row["case"] not in mine]
        for row in kept:
            row.setdefault("commit", commit)
        self.rows[:0] = kept

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"env": self.env, "rows": self.rows}
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")

    def _metric_table(self, metric: str) -> str:
        cases = pivot(self.rows, metric)
        impls = unique(impl for values in cases.values() for impl in values)
        peers = [impl for impl in impls if impl != OURS] if OURS in impls else []
        lines = [[metric, *impls, *(f"{peer}/ours" for peer in peers)]]
        for case, values in cases.items():
            cells = [short(values[impl]) if impl in values else "-" for impl in impls]
            for peer in peers:
                both = peer in values and OURS in values
                cells.append(f"{values[peer] / values[OURS]:.2f}" if both else "-")
            lines.append([case, *cells])
        return aligned(lines)


def pivot(rows: Iterable[Row], metric: str) -> dict[str, dict[str, float]]:
    """The metric's values by case, then by implementation, both in the rows' order."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["metric"] == metric:
            cases.setdefault(row["case"], {})[row["impl"]] = row["value"]
    return cases


def unique(names: Iterable[str]) -> list[str]:
    """The names without repeats, in order of first appearance."""
    return list(dict.fromkeys(names))


def short(value: float) -> str:
    """Three significant digits, or a whole number from 1000 up."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as columns: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def environment() -> dict[str, str | int]:
    """What the numbers were measured on and with."""
    smi = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        from cudnn_ops import __version__ as version
    except (ImportError, OSError):  # not built, or its library does not load
        version = "unavailable"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or 0,
        "driver": smi.partition("\n")[0] or "unknown",
        "cudnn_ops": version,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def cudnn_name(version: int) -> str:
    """91900 is 9.19.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def commit() -> str:
    """The commit that is measured: $CUDNN_OPS_COMMIT where the tree came without git, else HEAD.

    HEAD gets "-dirty" when the tree differs from it. Results are written while benchmarks run, so
    they do not count.
    """
    if named := os.environ.get("CUDNN_OPS_COMMIT"):
        return named
    git = ("git", "-C", str(ROOT))
    head = _output(*git, "rev-parse", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (f"{head}-dirty" if changes else head) if head else "unknown"


def in_process(program: str, *arguments: str, **variables: str) -> str:
    """What a Python program prints in a process of its own, with more environment variables.

    Raises:
        RuntimeError: it fails; the message is what it said.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _output(*command: str) -> str:
    """What the command prints, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main(
    name: str,
    run: Callable[[Rows, int], None],
    run_part: Callable[[str, Rows, int], None] | None = None,
    parts: Sequence[str] = (),
) -> None:
    """The command line of bench_<name>.py: `run(rows, rounds)` fills the rows.

    A long one has parts too: `--only` runs some of them by `run_part`, and its rows take the place
    of those of the same cases in the file.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.bench_{name}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows there as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="few samples: shows that it runs, not how fast"
    )
    if run_part is not None:
        parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of {parts}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU, and torch finds none")
    if args.out and not args.out.parent.is_dir():  # said before minutes of measuring, not after
        parser.error(f"--out: {args.out.parent} is not a folder")
    rounds = QUICK_ROUNDS if args.quick else FULL_ROUNDS
    rows = Rows({**environment(), "rounds": rounds})
    if not is_alone():
        clock_in_turns()
        tune_one_by_one()
    only = getattr(args, "only", None)
    try:
        if only and run_part is not None:
            for part in only:
                run_part(part, rows, rounds)
        else:
            run(rows, rounds)
    finally:  # who interrupts it keeps what there is
        print(rows.table())
        if args.out:
            if only and args.out.exists():
                found = json.loads(args.out.read_text())
                rows.merge_into(found["rows"], found["env"]["commit"])
            rows.write(args.out)
