"""The benchmark of the server, with a tiny model on a CPU: its rows, and what they are made of."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.continuous_batching import cache

from benchmarks import bench_serving
from benchmarks.harness import OURS, Rows
from tests.cases.server import make_tiny, tiny_server

WAITS = [f"{name}_p{part}_ms" for name in ("first_token", "between_tokens") for part in (50, 99)]


def test_all_rows(monkeypatch):
    """Eight requests; both serve them all."""
    # Of a CPU, transformers asks psutil, which need not be there.
    memory = (torch.device("cpu"), 256 << 20, 0, 0)
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory)
    rows = Rows({})
    bench_serving.measure(bench_serving.TINY, 8, rows)
    found = [(row["case"], row["impl"], row["metric"]) for row in rows.rows]
    assert found == [
        (case, impl, metric)
        for case, impl in (
            ("all at once", bench_serving.PEER),
            ("all at once", OURS),
            ("20 a second", OURS),
        )
        for metric in ("tokens_per_s", *WAITS)
    ]
    values = {key: row["value"] for key, row in zip(found, rows.rows, strict=True)}
    assert min(values.values()) > 0
    for case, impl, metric in found:
        if "p99" in metric:
            assert values[case, impl, metric] >= values[case, impl, metric.replace("99", "50")]


def test_waits_are_a_tokens_share():
    rows = Rows({})
    times = [[(0.5, 1), (0.7, 2), (0.8, 1)]] * 3
    bench_serving.add_times(rows, "case", OURS, 2.0, 12, times)
    values = {row["metric"]: row["value"] for row in rows.rows}
    assert values["tokens_per_s"] == 6
    assert values["first_token_p50_ms"] == pytest.approx(500)
    for part in (50, 99):
        assert values[f"between_tokens_p{part}_ms"] == pytest.approx(100)


def test_a_client_that_is_refused_says_why():
    tiny = make_tiny()
    with tiny_server(tiny) as client, pytest.raises(RuntimeError, match="context has room for 128"):
        bench_serving.ask(str(client.base_url), [(0.0, {"prompt": "a" * 200})])
