"""The command behind `make gpu`: the GPU tests, then every benchmark, for a package already built.

Each runs in a process of its own under a time limit, so one that crashes or hangs costs only
itself. `gpu_tests.json` and each benchmark's `<name>.json` land in benchmarks/results/<gpu>/.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.harness import ROOT, aligned, environment

BENCHMARKS = ROOT / "benchmarks"
TESTS_LIMIT_S = 1800
BENCHMARK_LIMIT_S = 600
TIMED_OUT = 124
NOTHING_SELECTED = 5  # pytest's exit status
#: Tests that take minutes each begin first: of several processes none would be left with one.
LONGEST = ["tests/test_sdpa_features_random.py"]


@dataclass
class Outcome:
    """What pytest counted, and the names of the tests that failed or broke."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    errors: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Something was tested, and nothing went wrong."""
        return self.passed > 0 and not self.failures

    def __add__(self, other: "Outcome") -> "Outcome":
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return Outcome(**{key: mine + its for (key, mine), its in pairs})

    def __str__(self) -> str:
        counts = ("passed", "failed", "skipped", "errors")
        return ", ".join(f"{getattr(self, count)} {count}" for count in counts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: results/<gpu>, as h200")
    parser.add_argument("--only", choices=("tests", "benchmarks"), help="leave the others out")
    parser.add_argument(
        "--pytest-args", default="", metavar="ARGS", help="one word: --pytest-args='-k sdpa -x'"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="tests at once (default: 1)"
    )
    parser.add_argument(
        "--part",
        type=part_of,
        default=(1, 1),
        metavar="K/N",
        help="every N-th file of tests from the K-th on, counted with the commit's other parts",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU, and torch finds none")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    out: Path = args.out or BENCHMARKS / "results" / gpu_slug(torch.cuda.get_device_name())
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")

    good = True
    summary = [["", "seconds", "outcome"]]
    if args.only != "benchmarks":
        outcome, seconds = run_tests(shlex.split(args.pytest_args), args.jobs, args.part)
        write_outcome(out / "gpu_tests.json", outcome, seconds, args.part)
        good &= outcome.good
        summary.append(["tests", f"{seconds:.0f}", str(outcome)])
    if args.only != "tests":
        for path in sorted(BENCHMARKS.glob("bench_*.py")):
            name = path.stem.removeprefix("bench_")
            command = ["-m", f"benchmarks.{path.stem}", "--out", str(out / f"{name}.json")]
            status, seconds = run(command, BENCHMARK_LIMIT_S)
            good &= status == 0
            summary.append([name, f"{seconds:.0f}", describe(status)])
    print(f"\n{aligned(summary)}\n{'all good' if good else 'NOT GOOD'}; results are in {out}")
    return 0 if good else 1


def part_of(text: str) -> tuple[int, int]:
    """(2, 3) for "2/3", the second of three parts."""
    part, of = map(int, text.split("/"))
    if not 1 <= part <= of:
        raise ValueError
    return part, of


def run(
    arguments: Sequence[str], limit_s: float, variables: Mapping[str, str] = {}
) -> tuple[int, float]:
    """Run this Python with its output shown; its exit status and how many seconds it took."""
    print(f"\n== python {shlex.join(arguments)}", flush=True)
    # Unbuffered, so that what it printed before it was killed is seen.
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=env, timeout=limit_s, check=False
        )
        status = done.returncode
    except subprocess.TimeoutExpired:
        status = TIMED_OUT
    return status, time.monotonic() - start


def describe(status: int) -> str:
    """An exit status in words."""
    if status == TIMED_OUT:
        return "ran past its time limit"
    return "done" if status == 0 else f"exit status {status}"


def run_tests(
    pytest_args: Sequence[str], jobs: int = 1, part: tuple[int, int] = (1, 1)
) -> tuple[Outcome, float]:
    """All tests or a part of them, by one process or several at once.

    Several share out the GPUs (tests/conftest.py); the tests that need all of them, or one for
    themselves, come last, one after the other.
    """
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    chosen = files[part[0] - 1 :: part[1]] if part[1] > 1 else ["tests"]
    if jobs > 1:
        chosen = [file for file in LONGEST if chosen == ["tests"] or file in chosen] + chosen
    phases = [("gpu and not alone", jobs), ("gpu and alone", 1)] if jobs > 1 else [("gpu", 1)]
    total, seconds, is_empty = Outcome(), 0.0, False
    for selected, processes in phases:
        arguments = ["-m", selected, *chosen, *pytest_args]
        outcome, status, duration = _run_pytest(arguments, processes)
        is_empty |= status == NOTHING_SELECTED
        if status not in (0, NOTHING_SELECTED) and not outcome.failures:
            # A crash leaves no report, and a bad option a clean one.
            outcome.errors += 1
            outcome.failures.append(f"pytest: {describe(status)}")
        total, seconds = total + outcome, seconds + duration
    if is_empty and total == Outcome():
        return Outcome(errors=1, failures=["pytest: no test was selected"]), seconds
    return total, seconds


def _run_pytest(arguments: Sequence[str], jobs: int) -> tuple[Outcome, int, float]:
    """What it counted, its exit status, and its seconds."""
    # One test after another to whoever is free: some take a minute, and most no time.
    spread = ["-n", str(jobs), "--maxschedchunk", "1"] if jobs > 1 else []
    variables = {}
    if jobs > 1:
        # Else each process would start as many others as there are cores, to compile with.
        threads = max((os.cpu_count() or 1) // jobs, 1)
        gpus = ",".join(map(str, range(torch.cuda.device_count())))
        variables = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "CUDNN_OPS_TEST_GPUS": os.environ.get("CUDA_VISIBLE_DEVICES", gpus),
        }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = ["-m", "pytest", "-q", f"--junit-xml={report}", *spread, *arguments]
        status, seconds = run(command, TESTS_LIMIT_S, variables)
        return parse_junit(report) if report.exists() else Outcome(), status, seconds


def parse_junit(report: Path) -> Outcome:
    """The counts in pytest's JUnit report."""
    outcome = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):
        failed, broke = case.find("failure") is not None, case.find("error") is not None
        if failed or broke:
            outcome.failed += failed
            outcome.errors += broke
            outcome.failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    return outcome


def write_outcome(path: Path, outcome: Outcome, seconds: float, part: tuple[int, int]) -> None:
    """What the parts of this commit's tests gave, each by itself and all together."""
    env = environment()
    where = {key: env[key] for key in ("commit", "gpu", "torch", "cudnn")}
    parts: dict[str, Any] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if {key: before[key] for key in where} == where:
            parts = {
                name: one for name, one in before["parts"].items() if part_of(name)[1] == part[1]
            }
    parts[f"{part[0]}/{part[1]}"] = asdict(outcome) | {"seconds": round(seconds, 1)}
    first, *others = parts.values()
    counts = {key: sum((one[key] for one in others), first[key]) for key in first}
    counts["seconds"] = round(counts["seconds"], 1)
    path.write_text(json.dumps(counts | where | {"parts": parts}, indent=1) + "\n")


def gpu_slug(name: str) -> str:
    """The folder of a GPU's results: "NVIDIA H100 80GB HBM3" is h100, "... RTX 4090" rtx_4090.

    The model ends with the first word that has a digit; makers and brands are no part of it.
    """
    words = re.split(r"[\s-]+", name.lower())
    model: list[str] = []
    for word in words:
        if word not in ("nvidia", "tesla", "quadro", "geforce"):
            model.append(word)
        if re.search(r"\d", word):
            break
    return "_".join(model)


if __name__ == "__main__":
    sys.exit(main())
