"""The documentation's plots, drawn from benchmarks/results/<gpu>/<name>.json: bars beside peers.

`svg` draws one; the build of the documentation draws all of them, and `python -m benchmarks.tables`
keeps the one that the README shows.
"""

import io
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import OURS, Row, pivot

Bars = Mapping[str, Mapping[str, float]]
"""The length of each bar by group and implementation."""

#: One hue for ours and what is built on it; the peers are distinguished from it at a glance.
COLORS = {
    OURS: "#4c9a2a",
    f"{OURS}_compile": "#2f6b14",
    f"{OURS}_function": "#8cc56f",
    "polymorphic": "#c3e3b2",
    "kernel": "#2f6b14",
    "float8": "#8cc56f",
    "cudnn": "#3b75af",
    "torch_cudnn": "#3b75af",
    "torch_flash": "#8a63b0",
    "torch_efficient": "#c85c8e",
    "flash_attn_4": "#c85c8e",
    "torch_varlen": "#8a63b0",
    "flex_attention": "#e1812c",
    "eager": "#3b75af",
    "compile": "#e1812c",
    "compile max-autotune": "#b5651d",
    "copy": "#a0a0a0",
}
GAIN = "time over cudnn_ops's; above 1 cudnn_ops is faster"


class Plot(NamedTuple):
    """What the bars of one benchmark's plot are."""

    bars: Callable[[Sequence[Row]], Bars]
    axis: str
    benchmark: str
    is_log: bool = False


def metric(rows: Sequence[Row], name: str, only: str = "") -> Bars:
    """A metric as it was measured, of the cases that `only` matches."""
    return {case: found for case, found in pivot(rows, name).items() if re.search(only, case)}


def gains(rows: Sequence[Row], name: str = "gpu_ms", only: str = "") -> Bars:
    """The peers' time over ours, where there are peers."""
    found = metric(rows, name, only)
    bars = {
        case: {impl: ms / by[OURS] for impl, ms in by.items() if impl != OURS and impl in COLORS}
        for case, by in found.items()
    }
    return {case: by for case, by in bars.items() if by}


def mean_gains(rows: Sequence[Row]) -> Bars:
    """Geometric means of eager's and torch.compile's over the sizes of one group of norms."""
    found = gains(rows)
    means: dict[str, dict[str, float]] = {}
    for case in found:
        group, which = case.rsplit(" ", 2)[0], case.rpartition(" ")[2]
        alike = [f for c, f in found.items() if c.startswith(f"{group} ") and c.endswith(which)]
        for impl in ("eager", "compile"):
            values = [f[impl] for f in alike if impl in f]
            if values:
                means.setdefault(f"{group} {which}", {})[impl] = statistics.geometric_mean(values)
    return means


PLOTS = {
    "attention": Plot(partial(metric, name="tflops"), "TFLOP/s, more is better", "sdpa"),
    "attention_features": Plot(gains, GAIN, "attention_features"),
    "paged_decode": Plot(partial(metric, name="tb_per_s"), "TB/s, more is better", "paged_decode"),
    "host_overhead": Plot(
        partial(metric, name="host_us", only=r"forward, "),
        "host time in µs, less is better",
        "host_overhead",
    ),
    "new_lengths": Plot(
        partial(metric, name="new_shape_ms"),
        "host ms that a new length adds, less is better",
        "shape_churn",
        is_log=True,
    ),
    "norms": Plot(mean_gains, GAIN, "norms"),
    "train_step": Plot(partial(metric, name="step_ms"), "ms a step, less is better", "train_step"),
    "conv": Plot(
        # The names of other geometries end in a colon and a step.
        partial(gains, only=r"^[^:]* fwd$"),
        GAIN,
        "conv",
    ),
    "resnet": Plot(
        partial(gains, name="step_ms"),
        GAIN,
        "resnet",
    ),
    "zoo": Plot(lambda rows: dict(sorted(gains(rows, "step_ms").items())), GAIN, "zoo"),
}


def svg(name: str, results: Path) -> str:
    """The plot of each GPU that the benchmark was run on, one below the other."""
    plot = PLOTS[name]
    runs = [
        json.loads(file.read_text()) for file in sorted(results.glob(f"*/{plot.benchmark}.json"))
    ]
    bars = [plot.bars(run["rows"]) for run in runs]
    heights = [1.0 + 0.17 * sum(len(group) + 0.8 for group in found.values()) for found in bars]
    # The same bytes from the same numbers, and text that stays text.
    with mpl.rc_context({"svg.hashsalt": OURS, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure((8, sum(heights)), layout="constrained", facecolor="white")
        rows = figure.subplots(len(runs), squeeze=False, height_ratios=heights)[:, 0]
        for axes, run, found in zip(rows, runs, bars, strict=True):
            _draw(axes, found, plot)
            axes.set_title(f"{run['env']['gpu']}, {run['env']['date']}", loc="left", fontsize=9)
        figure.legend(*_legend(rows), loc="outside lower center", ncols=4, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE)


def _draw(axes: Axes, bars: Bars, plot: Plot) -> None:
    """Horizontal bars, grouped, the first group on top."""
    ticks = []
    place = 0.0
    for found in bars.values():
        ticks.append(place + (len(found) - 1) / 2)
        for impl in sorted(found, key=list(COLORS).index):
            axes.barh(place, found[impl], 0.9, color=COLORS[impl], label=impl)
            axes.text(found[impl], place, f" {found[impl]:.3g}", va="center", fontsize=7)
            place += 1
        place += 0.8
    axes.set_yticks(ticks, [case.replace(",", ", ").replace(",  ", ", ") for case in bars])
    axes.set_ylim(place - 1, -0.8)
    axes.set_xlabel(plot.axis)
    if plot.is_log:
        axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.axis == GAIN:
        axes.axvline(1, color="black", linewidth=0.8)


def _legend(rows: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """Each implementation once, in the colours' order."""
    found: dict[str, Artist] = {}
    for axes in rows:
        for bar, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, bar)
    labels = sorted(found, key=list(COLORS).index)
    return [found[label] for label in labels], labels
