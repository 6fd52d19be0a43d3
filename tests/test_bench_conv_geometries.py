"""Convolutions of every kind beside torch's: the benchmark, and the rule that none is slower."""

from __future__ import annotations

import json

import torch

from benchmarks import bench_conv, tables
from benchmarks.conv_geometries import GEOMETRIES, depthwise, grouped, is_slower
from benchmarks.harness import ROOT, Rows

RESULTS = ROOT / "benchmarks/results/h200"

SMALL = (
    depthwise(2, 4, (9,), 3, dtype=torch.float32),
    depthwise(2, 4, 9, 3, 2, multiplier=2, dtype=torch.float32),
    grouped(2, 4, (5, 6, 7), 8, (3, 2, 1), 2, dilation=2, dtype=torch.float32),
)


def test_sixty_geometries_and_more():
    assert len({str(geometry) for geometry in GEOMETRIES}) == len(GEOMETRIES) >= 60
    assert [str(geometry) for geometry in SMALL] == [
        "float32 2x4->4 9 k3 g4",
        "float32 2x4->8 9x9 k3x3 s2 g4",
        "float32 2x4->8 5x6x7 k3x2x1 d2 g2",
    ]


def test_what_is_slower_than_noise_is_told(monkeypatch, capsys):
    monkeypatch.setattr(bench_conv, "ROWS", SMALL[:1])
    monkeypatch.setattr(bench_conv, "IMAGES", SMALL[1:])
    monkeypatch.setattr(bench_conv, "SHAPES", ())
    monkeypatch.setattr(bench_conv, "measure", lambda *_: None)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: randn(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for ours, is_told in ((1.02, False), (1.04, True)):
        rows = Rows({})
        ms = {"cudnn_ops": ours, "eager": 1.0}
        monkeypatch.setattr(bench_conv, "gpu_ms", lambda _, rounds, ms=ms: ms)
        bench_conv.run(rows, rounds=1)
        count = 5 * len(SMALL)
        assert len(rows.rows) == 2 * count
        told = capsys.readouterr().out.count("slower than torch's: float32")
        assert told == count * is_told
        assert len(tables.conv(rows.rows)) == 2  # a heading and the means of nothing
    assert not is_slower({"cudnn_ops": 0.008, "eager": 0.0065})


def test_nothing_was_recorded_as_slower_than_torch_s():
    """Neither forward, with an epilogue or without, nor either gradient."""
    ms: dict[str, dict[str, float]] = {}
    for row in json.loads((RESULTS / "conv.json").read_text())["rows"]:
        ms.setdefault(row["case"], {})[row["impl"]] = row["value"]
    cases = [case for case in ms if any(case.startswith(f"{g}: ") for g in GEOMETRIES)]
    assert len(cases) == 5 * len(GEOMETRIES)
    assert not {case for case in cases if is_slower(ms[case])}
