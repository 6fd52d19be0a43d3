"""The benchmark of the engine's steps, with a tiny model on a CPU: its rows, checks and table."""

from __future__ import annotations

import pytest

from benchmarks import bench_generation, tables
from benchmarks.harness import OURS, Rows, pivot
from cudnn_ops.generation import Engine
from tests.cases.benchmarks import ENV

CASES = ["decode, 3 requests", "decode, 3 requests, one by one"]


def test_rows_make_the_table():
    rows = Rows(ENV)
    bench_generation.measure_both(bench_generation.TINY, 8, rows)
    metrics = ("step_ms", "graph_ms", "gpu_share", "tokens_per_s")
    assert [(row["case"], row["impl"], row["metric"]) for row in rows.rows] == [
        (case, OURS, metric) for case in CASES for metric in metrics
    ]
    found = {metric: pivot(rows.rows, metric) for metric in metrics}
    for case in CASES:
        step, graph, share, rate = (found[metric][case][OURS] for metric in metrics)
        assert 0 < graph < step
        assert 0 < share < 1
        assert rate == pytest.approx(3e3 / step)
    header, *lines = tables.generation(rows.rows)
    assert header == ["", "step ms", "of it in the graph, ms", "GPU's share", "tokens a second"]
    assert [line[0] for line in lines] == CASES
    assert all(line[3].endswith("%") for line in lines)


def test_steps_that_do_not_overlap_are_not_called_so(monkeypatch):
    make_engine = bench_generation.make_engine

    def one_by_one(load, model, steps, overlap) -> Engine:
        return make_engine(load, model, steps, False)

    monkeypatch.setattr(bench_generation, "make_engine", one_by_one)
    with pytest.raises(RuntimeError, match="0% of the steps overlapped"):
        bench_generation.measure_both(bench_generation.TINY, 4, Rows(ENV))
