"""The documentation's plots: what their bars are, and that the README's is kept up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Row

pytest.importorskip("matplotlib", reason="a machine that only benchmarks may lack it")
from benchmarks import plots, tables


def rows(metric: str, cases: dict[str, dict[str, float]]) -> list[Row]:
    return [
        {"case": case, "impl": impl, "metric": metric, "value": value}
        for case, found in cases.items()
        for impl, value in found.items()
    ]


def test_gains_are_the_peers_time_over_ours() -> None:
    measured = rows(
        "gpu_ms",
        {
            "a fwd": {"cudnn_ops": 2.0, "eager": 3.0, "conv alone": 1.0},
            "a bwd": {"cudnn_ops": 1.0, "eager": 9.0},
            "b fwd": {"cudnn_ops": 1.0},
        },
    )
    assert plots.gains(measured, only=" fwd$") == {"a fwd": {"eager": 1.5}}


def test_means_are_geometric_and_of_one_group_and_direction() -> None:
    measured = rows(
        "gpu_ms",
        {
            "rms wide 8,8 fwd": {"cudnn_ops": 1.0, "eager": 2.0, "copy": 1.0},
            "rms wide 9,9 fwd": {"cudnn_ops": 1.0, "eager": 8.0, "compile": 3.0},
            "rms wide 9,9 bwd": {"cudnn_ops": 2.0, "eager": 2.0},
            "rms narrow 1,1 fwd": {"cudnn_ops": 1.0, "eager": 5.0},
        },
    )
    means = plots.mean_gains(measured)
    assert means["rms wide fwd"] == pytest.approx({"eager": 4.0, "compile": 3.0})
    assert means["rms wide bwd"] == {"eager": 1.0}
    assert means["rms narrow fwd"] == pytest.approx({"eager": 5.0})


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_has_bars_and_a_colour_for_each(name: str) -> None:
    drawn = plots.svg(name, tables.RESULTS)
    assert drawn.startswith("<?xml")
    assert plots.PLOTS[name].axis in re.sub(r"&gt;", ">", drawn)
    assert drawn == plots.svg(name, tables.RESULTS)  # or a check for changes would fail


def test_the_plot_of_the_readme_is_checked_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs" / "plots").mkdir(parents=True)
    plot = tmp_path / "docs" / "plots" / "attention.svg"
    (tmp_path / "README.md").write_text("![bars](docs/plots/attention.svg)\n")
    monkeypatch.setattr(tables, "README", tmp_path / "README.md")
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables", *arguments])
        return tables.main()

    assert main("--check") == 1
    assert not plot.exists()
    assert main() == 0
    assert main("--check") == 0
    plot.write_text(plot.read_text().replace("causal", "full"))
    assert main("--check") == 1
