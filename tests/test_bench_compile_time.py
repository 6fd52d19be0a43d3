"""The benchmark of compile times: what its processes find on disk, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_compile_time as bench
from benchmarks import bench_zoo, tables
from benchmarks.harness import Rows


def test_what_processes_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing; times, by which all is compiled once more; or what the first one of each left."""
    calls: list[tuple[str, bool, bool]] = []

    def child(part: str, name: str, plans: Path, compiled: Path) -> float:
        calls.append((name, plans.exists(), compiled.exists()))
        for folder in (plans, compiled):
            folder.mkdir(exist_ok=True)
        return 10.0 * len(calls)

    monkeypatch.setattr(bench, "child", child)
    rows = Rows({"commit": "abc"})
    bench.run(rows, rounds=1)
    again = [("cudnn_ops", True, True), ("compile", True, True)]
    of_a_part = 3 + 2 * bench.SECOND_PROCESSES
    assert calls[:of_a_part] == [
        ("cudnn_ops", False, False),
        ("cudnn_ops", True, False),
        ("compile", True, False),
        *(bench.SECOND_PROCESSES * again),
    ]
    assert len(calls) == of_a_part * len(bench.PARTS)
    assert tables.compile_time(rows.rows)[:4] == [
        ["", "cudnn_ops", "compile", "ratio"],
        ["ViT-B/16, inference, nothing known", "10.0", "30.0", "0.33"],
        ["ViT-B/16, inference, measured before", "20.0", "30.0", "0.67"],
        ["ViT-B/16, inference, compiled before", "40.0", "50.0", "0.80"],
    ]


def test_parts_are_of_the_zoo() -> None:
    assert set(bench.PARTS) <= set(bench_zoo.PARTS)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        bench.child("no model, training", "compile", tmp_path, tmp_path)
