"""The benchmark of the engine's steps, with a tiny model on a CPU: its rows, checks and table."""

from __future__ import annotations

import pytest

from benchmarks import bench_generation, tables
from benchmarks.harness import OURS, Rows, pivot
from cudnn_ops.generation import Engine
from tests.cases.benchmarks import ENV

CASES = [
    f"decode, {batch}{kind}"
    for batch in ("3 requests", "1 request")
    for kind in ("", ", one by one", ", 4 drafts of 0.7")
]


def test_rows_make_the_table():
    rows = Rows(ENV)
    bench_generation.measure_all(bench_generation.TINY, 1, rows)
    metrics = ("step_ms", "graph_ms", "gpu_share", "tokens_per_s")
    assert [(row["case"], row["impl"], row["metric"]) for row in rows.rows] == [
        (case, OURS, metric) for case in CASES for metric in metrics
    ]
    found = {metric: pivot(rows.rows, metric) for metric in metrics}
    for case in CASES:
        step, graph, share, rate = (found[metric][case][OURS] for metric in metrics)
        assert 0 < graph < step
        assert 0 < share < 1
        tokens = rate * step / 1e3 / (3 if "3 requests" in case else 1)
        assert 1 <= tokens <= 5 if "drafts" in case else tokens == pytest.approx(1)
    header, *lines = tables.generation(rows.rows)
    assert header[-2:] == ["tokens a second", "gain"]
    assert [line[0] for line in lines] == CASES
    assert all(line[3].endswith("%") for line in lines)


def test_steps_that_do_not_overlap_are_not_called_so(monkeypatch):
    make_engine = bench_generation.make_engine

    def one_by_one(load, model, steps, kind) -> Engine:
        return make_engine(load, model, steps, "one by one")

    monkeypatch.setattr(bench_generation, "make_engine", one_by_one)
    with pytest.raises(RuntimeError, match="0% of the steps overlapped"):
        bench_generation.measure_all(bench_generation.TINY, 1, Rows(ENV))


def test_drafts_are_right_as_often_as_said():
    load = bench_generation.TINY
    model = bench_generation.make_model(load)
    with bench_generation.known_drafts(load.config.vocabulary):
        engine = bench_generation.make_engine(load, model, 60, "drafts")
        for _ in range(60):
            engine.step()
    # All before it have to be right as well.
    expected = sum(0.7**place for place in range(1, 5)) / 4
    assert engine.stats.speculation.acceptance_rate == pytest.approx(expected, abs=0.08)
