"""The suite of GPU tests and benchmarks, and the tables made from its results."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_suite,
    tables,
)
from benchmarks.harness import Rows
from tests.cases.benchmarks import ENV


def test_results_folder_is_named_after_the_gpu() -> None:
    slugs = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx_4090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
    }
    assert {name: gpu_suite.gpu_slug(name) for name in slugs} == slugs


TESTS_OF_EVERY_KIND = """
import pytest
@pytest.fixture
def broken(): raise OSError
@pytest.mark.parametrize("n", range(3))
def test_good(n): pass
def test_bad(): assert False
def test_skipped(): pytest.skip("no reason")
@pytest.mark.xfail
def test_known(): assert False
def test_broken(broken): pass
"""


def test_junit_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS_OF_EVERY_KIND)
    command = [sys.executable, "-m", "pytest", "-q", "--junit-xml=junit.xml", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    failures = ["test_some::test_bad", "test_some::test_broken"]
    expected = gpu_suite.Outcome(passed=3, failed=1, skipped=2, errors=1, failures=failures)
    assert gpu_suite.parse_junit(tmp_path / "junit.xml") == expected


def test_a_crash_of_pytest_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "run", lambda *_: (-11, 1.0))
    outcome, _ = gpu_suite.run_tests([])
    assert outcome == gpu_suite.Outcome(errors=1, failures=["pytest: exit status -11"])


ENDS_EARLY = """
import os
def test_bad(): assert "this" == "that"
def test_end(): os._exit(3)
"""


def test_a_run_that_is_cut_off_has_said_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "test_early.py"
    file.write_text(ENDS_EARLY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=gpu_suite.ROOT)
    assert result.returncode == 3
    assert re.search(r"failed: \S*test_early.py::test_bad .*test_early.py:3", result.stdout)


def test_tests_are_spread_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def run(arguments: list[str], _: float, given: dict[str, str]) -> tuple[int, float]:
        asked.append((arguments, given))
        return 0, 1.0

    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _, seconds = gpu_suite.run_tests(["-k", "one"], jobs=3)
    assert seconds == 2.0
    (beside, variables), (alone, no_variables) = asked
    assert beside[beside.index("-n") + 1] == "3"
    assert "gpu and not alone" in beside
    # The cores are shared too, and the GPUs.
    assert variables == {"TORCHINDUCTOR_COMPILE_THREADS": "2", "CUDNN_OPS_TEST_GPUS": "0,1"}
    assert "gpu and alone" in alone
    assert "-n" not in alone
    assert not no_variables
    assert beside[-3:] == alone[-3:] == ["tests", "-k", "one"]
    asked.clear()
    gpu_suite.run_tests([])
    ((arguments, variables),) = asked
    assert "-n" not in arguments
    assert arguments[arguments.index("gpu") - 1] == "-m"
    assert not variables


@pytest.mark.parametrize("passed", [[3, 0], [0, 2], [0, 0]])
def test_what_several_runs_counted_is_added_up(passed, monkeypatch):
    """A part may have no test for one of them; of none there is nothing to say that is good."""
    counts = iter(passed)

    def run(arguments: list[str], *_: Any) -> tuple[int, float]:
        count = next(counts)
        (report,) = (word for word in arguments if word.startswith("--junit-xml="))
        cases = "".join(f'<testcase classname="tests.x" name="{i}"/>' for i in range(count))
        Path(report.removeprefix("--junit-xml=")).write_text(f"<suite>{cases}</suite>")
        return 0 if count else gpu_suite.NOTHING_SELECTED, 1.0

    monkeypatch.setattr(gpu_suite, "run", run)
    outcome, _ = gpu_suite.run_tests([], jobs=2)
    assert outcome.passed == sum(passed)
    assert outcome.good == (sum(passed) > 0)


def test_a_process_is_stopped_at_its_limit() -> None:
    assert gpu_suite.run(["-c", "raise SystemExit(3)"], limit_s=60)[0] == 3
    sleep = ["-c", "import time; time.sleep(60)"]
    assert gpu_suite.run(sleep, limit_s=0.2)[0] == gpu_suite.TIMED_OUT


ALL = ["gpu_tests", "one", "two"]
GOOD = gpu_suite.Outcome(passed=2, skipped=1)
EMPTY = gpu_suite.Outcome(skipped=3)
BAD = gpu_suite.Outcome(passed=2, errors=1, failures=["a::b"])


@pytest.mark.parametrize(
    ("options", "outcome", "status", "expected"),
    [
        ([], GOOD, 0, (0, ALL)),
        ([], EMPTY, 0, (1, ALL)),
        ([], BAD, 0, (1, ALL)),
        ([], GOOD, 9, (1, ALL)),
        (["--only=tests"], GOOD, 9, (0, ["gpu_tests"])),
        (["--only=benchmarks"], BAD, 0, (0, ["one", "two"])),
    ],
)
def test_suite_runs_what_is_asked_and_fails_with_any_of_it(
    options: list[str],
    outcome: gpu_suite.Outcome,
    status: int,
    expected: tuple[int, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(arguments: list[str], _: float) -> tuple[int, float]:
        assert arguments[:2] == ["-m", f"benchmarks.bench_{Path(arguments[3]).stem}"]
        Path(arguments[3]).touch()
        return status, 1.0

    for name in ("bench_one.py", "bench_two.py", "harness.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_suite, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(gpu_suite, "run_tests", lambda *_: (outcome, 1.23))
    monkeypatch.setattr(gpu_suite, "environment", lambda: ENV)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *options])
    exit_status = gpu_suite.main()
    written = sorted((tmp_path / "results" / "h200").iterdir())
    assert (exit_status, [path.stem for path in written]) == expected
    if "gpu_tests" in expected[1]:
        where = {key: ENV[key] for key in ("commit", "gpu", "torch", "cudnn")}
        counts = vars(outcome) | {"seconds": 1.2}
        found = json.loads(written[0].read_text())
        assert found == counts | where | {"parts": {"1/1": counts}}


def test_parts_of_one_commit_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu_tests.json"
    for commit, part, outcome, passed, failures in (
        ("a", (1, 2), BAD, 2, ["a::b"]),
        ("a", (2, 2), GOOD, 4, ["a::b"]),
        ("a", (1, 2), GOOD, 4, []),  # again, in place of what it gave before
        ("a", (3, 3), GOOD, 2, []),  # parts of another size are others
        ("b", (1, 3), GOOD, 2, []),
    ):
        monkeypatch.setattr(
            gpu_suite, "environment", lambda commit=commit: ENV | {"commit": commit}
        )
        gpu_suite.write_outcome(path, outcome, 1.5, part)
        found = json.loads(path.read_text())
        assert (found["commit"], found["passed"], found["failures"]) == (commit, passed, failures)
        assert found["seconds"] == 1.5 * len(found["parts"])


def test_parts_are_all_files_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(arguments: list[str], *_: Any) -> tuple[int, float]:
        asked.extend(word for word in arguments if word.endswith(".py"))
        return 0, 1.0

    monkeypatch.setattr(gpu_suite, "run", run)
    for part in range(1, 4):
        gpu_suite.run_tests([], part=(part, 3))
    assert sorted(asked) == sorted(
        f"tests/{path.name}" for path in Path(__file__).parent.glob("test_*.py")
    )


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--part", part])
    with pytest.raises(SystemExit):
        gpu_suite.main()
    assert "--part" in capsys.readouterr().err


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README with one stale table, and the results for it."""
    rows = Rows(ENV)
    for impl, us in (("cudnn_ops", 10.2), ("torch_cudnn", 12.1)):
        rows.add("BSHD forward, no grad", impl, "host_us", us)
    rows.write(tmp_path / "h200" / "host_overhead.json")
    path = tmp_path / "README.md"
    table = "<!-- table:host_overhead -->\nold\n<!-- /table:host_overhead -->"
    path.write_text(f"above\n{table}\nbelow\n")
    monkeypatch.setattr(tables, "README", path)
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return path


def test_readme_tables_are_checked_and_rewritten(
    readme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables", *arguments])
        return tables.main()

    stale = readme.read_text()
    assert main("--check") == 1
    assert readme.read_text() == stale
    assert main() == 0
    assert readme.read_text().splitlines() == [
        "above",
        "<!-- table:host_overhead -->",
        "|  | cudnn_ops | torch_cudnn |",
        "| --- | ---: | ---: |",
        "| BSHD forward, no grad | 10.2 | 12.1 |",
        "",
        "Host time of one call in µs, [1, 8, 64, 64] bf16, causal. Median of 50 samples. "
        "NVIDIA H200, commit 0123456789ab-dirty, 2026-11-21, torch 2.11.0, cuDNN 9.19.0.",
        "<!-- /table:host_overhead -->",
        "below",
    ]
    assert main("--check") == 0


def test_a_table_names_every_commit_that_its_rows_are_of(readme: Path, tmp_path: Path) -> None:
    (file,) = tables.RESULTS.glob("*/host_overhead.json")
    found = json.loads(file.read_text())
    for row, commit in zip(found["rows"], ("1" * 40, "2" * 40), strict=False):
        row["commit"] = commit
    file.write_text(json.dumps(found))
    where = "NVIDIA H200, commits 111111111111 and 222222222222, 2026-11-21,"
    assert where in tables.render(readme.read_text(), tables.RESULTS)


def test_an_unmeasured_table_says_so(tmp_path: Path) -> None:
    text = "<!-- table:sdpa -->\n{}<!-- /table:sdpa -->"
    assert tables.render(text.format(""), tmp_path) == text.format("Not measured yet.\n")


def test_wrong_markers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no table is named 'spda'"):
        tables.render("<!-- table:spda -->\n<!-- /table:spda -->", tmp_path)
    with pytest.raises(SystemExit, match="no closing marker"):
        tables.render("<!-- table:sdpa -->\n", tmp_path)
