"""The documentation's tables of measurements, rendered from benchmarks/results/<gpu>/<name>.json.

`python -m benchmarks.tables` rewrites what stands between <!-- table:NAME --> and
<!-- /table:NAME --> in the README and in docs/, and the plots that the README shows (plots.py
draws them). With --check it writes nothing; the exit status says whether anything is stale.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import OURS, ROOT, Row, cudnn_name, pivot, short, unique

README = ROOT / "README.md"
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)

Lines = list[list[str]]


class Table(NamedTuple):
    """How one benchmark's rows become a table, header first, and what its numbers are."""

    lines: Callable[[Sequence[Row]], Lines]
    numbers: str
    benchmark: str
    samples: float = 1.0
    """Of the rounds in the environment, how many samples a median is of; 0: of no samples."""


def sdpa(rows: Sequence[Row]) -> Lines:
    """Forward and backward side by side: a line a shape, then each peer's time over ours."""
    times = pivot(rows, "gpu_ms")
    impls = unique(row["impl"] for row in rows if row["metric"] == "gpu_ms")
    peers = [impl for impl in impls if impl != OURS]
    lines = [["B, Hq, Hkv, S, D", *impls, *(f"vs {peer}" for peer in peers)]]
    for shape in unique(case.rpartition(" ")[0] for case in times):
        fwd, bwd = times[f"{shape} fwd"], times[f"{shape} bwd"]
        lines.append([_spaced(shape)])
        lines[-1] += [f"{short(fwd[impl])} / {short(bwd[impl])}" for impl in impls]
        for peer in peers:
            gains = (times[peer] / times[OURS] for times in (fwd, bwd))
            lines[-1].append(" / ".join(f"{gain:.2f}x" for gain in gains))
    return lines


def attention_features(rows: Sequence[Row]) -> Lines:
    """A line a feature: ours, ours over plain causal attention, and each peer's time over ours."""
    times = pivot(rows, "gpu_ms")
    peers = [impl for impl in unique(row["impl"] for row in rows) if impl != OURS]
    lines = [["B, Hq, Hkv, S, D", OURS, "over causal", *(f"vs {peer}" for peer in peers)]]

    def ratio(above: Mapping[str, float], below: Mapping[str, float], impl: str) -> str:
        return f"{above[impl] / below[OURS]:.2f}x" if impl in above else ""

    for case in unique(case.rpartition(" ")[0] for case in times):
        shape = case.partition(" ")[0]
        both = [times[f"{case} {which}"] for which in ("fwd", "bwd")]
        causal = [times[f"{shape} causal {which}"] for which in ("fwd", "bwd")]
        line = [_spaced(case), " / ".join(short(ms[OURS]) for ms in both)]
        pairs = zip(both, causal, strict=True)
        line.append(" / ".join(ratio(ms, plain, OURS) for ms, plain in pairs))
        for peer in peers:
            line.append(" / ".join(ratio(ms, ms, peer) for ms in both) if peer in both[0] else "")
        lines.append(line)
    return lines


def paged_decode(rows: Sequence[Row]) -> Lines:
    """A line a shape: time, and bytes a second beside those of a copy and of the peers."""
    times, rates = pivot(rows, "gpu_ms"), pivot(rows, "tb_per_s")
    hosts = pivot(rows, "host_us")
    impls = unique(row["impl"] for row in rows if row["metric"] == "tb_per_s")
    lines = [
        ["B, Hq, Hkv, D, tokens", "ms", *(f"{impl} TB/s" for impl in impls), "of a copy", "host us"]
    ]
    for case, found in rates.items():
        line = [_spaced(case), short(times[case][OURS]), *_cells(found, impls, short)]
        share = f"{found[OURS] / found['copy']:.2f}"
        lines.append([*line, share, short(hosts[case][OURS])])
    return lines


def generation(rows: Sequence[Row]) -> Lines:
    """A line a case: a step's time, the GPU's part of it, and tokens."""
    metrics = unique(row["metric"] for row in rows)
    found = {metric: pivot(rows, metric) for metric in metrics}
    lines = [["", "step ms", "of it in the graph, ms", "GPU's share", "tokens a second", "gain"]]
    for case in found["step_ms"]:
        step, graph, share, rate = (found[metric][case][OURS] for metric in metrics)
        # Over steps that overlap, with as many requests.
        gain = rate / found["tokens_per_s"][", ".join(case.split(", ")[:2])][OURS]
        line = [case, short(step), short(graph), f"{share:.1%}", f"{rate:.0f}", f"{gain:.2f}"]
        lines.append(line)
    return lines


def host_overhead(rows: Sequence[Row]) -> Lines:
    """A line a case, a column an implementation."""
    times = pivot(rows, "host_us")
    impls = unique(row["impl"] for row in rows if row["metric"] == "host_us")
    return [["", *impls], *([case, *(short(us[i]) for i in impls)] for case, us in times.items())]


def norms(rows: Sequence[Row]) -> Lines:
    """A line a group of shapes: how many, and means of what others take over what we do."""
    times = pivot(rows, "gpu_ms")
    others = {
        "bound": ("copy", "three_pass"),
        **{peer: (peer,) for peer in ("eager", "compile", "liger")},
    }
    lines = [["", "shapes", *(f"vs {other}" for other in others)]]

    def gains(group: str, which: str, impls: Sequence[str]) -> list[float]:
        return [
            ms[impl] / ms[OURS]
            for case, ms in times.items()
            for impl in impls
            if case.startswith(f"{group} ") and case.endswith(which) and impl in ms
        ]

    # The rest of a case's name is its sizes and the direction.
    for group in unique(case.rsplit(" ", 2)[0] for case in times):
        line = [group, str(len(gains(group, " fwd", [OURS])))]
        for impls in others.values():
            found = (gains(group, which, impls) for which in (" fwd", " bwd"))
            line.append(" / ".join(f"{statistics.geometric_mean(g):.2f}x" for g in found if g))
        lines.append(line)
    return lines


def train_step(rows: Sequence[Row]) -> Lines:
    """A line a batch: a step of each variant, and the stock ones' over ours."""
    times = pivot(rows, "step_ms")
    impls = unique(row["impl"] for row in rows if row["metric"] == "step_ms")
    lines = [["sequences x tokens", *impls, "vs eager", "compiled vs compile"]]
    for case, ms in times.items():
        gains = (ms["eager"] / ms[OURS], ms["compile"] / ms[f"{OURS}_compile"])
        lines.append([case, *_cells(ms, impls, short), *(f"{gain:.2f}x" for gain in gains)])
    return lines


def train_step_profile(rows: Sequence[Row]) -> Lines:
    """A line a group of kernels, a column a batch."""
    found = pivot(rows, "share of GPU time, %")
    batches = unique(case.partition(" ")[0] for case in found)
    lines = [["", *batches]]
    for group in unique(case.partition(" ")[2] for case in found):
        shares = (found[f"{batch} {group}"][OURS] for batch in batches)
        lines.append([group, *(f"{share:.1f}%" for share in shares)])
    return lines


def conv(rows: Sequence[Row]) -> Lines:
    """A line a shape and epilogue: ours, over the bare convolution, and each peer's over ours.

    The last line has the geometric means of those over ours, patches left out. Other geometries are
    not in it: their names end in a colon and a step.
    """
    times = {case: ms for case, ms in pivot(rows, "gpu_ms").items() if ": " not in case}
    peers = ("eager", "compile")
    gains: list[list[float]] = []
    lines = [
        [
            "N, C, HW, K, R, stride, pad",
            "fwd",
            "/ conv alone",
            *(f"vs {p}" for p in peers),
            "bwd vs eager",
        ]
    ]
    for case in unique(case.rpartition(" ")[0] for case in times):
        fwd, bwd = times[f"{case} fwd"], times[f"{case} bwd"]
        ours = fwd[OURS]
        gain = [*(fwd[peer] / ours for peer in peers), bwd["eager"] / bwd[OURS]]
        lines.append([_spaced(case), short(ours), f"{ours / fwd['conv alone']:.2f}"])
        lines[-1] += [f"{gained:.2f}x" for gained in gain]
        if not case.endswith("patches"):
            gains.append(gain)
    means = [f"{statistics.geometric_mean(column):.2f}x" for column in zip(*gains, strict=True)]
    lines.append(["geometric mean without patches", "", "", *means])
    return lines


def beside_peers(rows: Sequence[Row]) -> Lines:
    """A line a case: ours, and each other's time over ours; forward and backward side by side.

    The last line has the geometric means of those. Cases that compare kernels without ours, to
    choose between them, are left out.
    """
    times = {case: ms for case, ms in pivot(rows, "gpu_ms").items() if OURS in ms}
    others = unique(other for ms in times.values() for other in ms if other != OURS)
    gains: dict[tuple[str, str], list[float]] = {}

    def cell(other: str, steps: Mapping[str, Mapping[str, float]]) -> str:
        cells = []
        for step, ms in steps.items():
            if other in ms:
                gain = ms[other] / ms[OURS]
                gains.setdefault((other, step), []).append(gain)
            cells.append(f"{gain:.2f}x" if other in ms else "-")
        return "" if set(cells) == {"-"} else " / ".join(cells)

    lines = [["", "ms", *(f"vs {other}" for other in others)]]
    for case in unique(re.sub(" (fwd|bwd)$", "", case) for case in times):
        found = ((step, times.get(case + step)) for step in (" fwd", " bwd", ""))
        steps = {step: ms for step, ms in found if ms is not None}
        ours = " / ".join(short(ms[OURS]) for ms in steps.values())
        lines.append([_spaced(case), ours, *(cell(other, steps) for other in others)])
    means = {key: f"{statistics.geometric_mean(found):.2f}x" for key, found in gains.items()}
    if any(step for _, step in means):
        steps_of = (" fwd", " bwd")
        ends = (" / ".join(means.get((other, step), "-") for step in steps_of) for other in others)
        lines.append(["geometric mean", "", *ends])
    return lines


def linear(rows: Sequence[Row]) -> Lines:
    """A line a layer and direction: ours, over the bare product, and each peer's over ours."""
    times = {c: ms for c, ms in pivot(rows, "gpu_ms").items() if not c.startswith("MLP ")}
    peers = ("eager", "compile", "compile max-autotune", "addmm_activation")
    lines = [["rows, outputs, inputs", "ms", "/ bare product", *(f"vs {peer}" for peer in peers)]]
    for case, ms in times.items():
        line = [_spaced(case), short(ms[OURS]), f"{ms[OURS] / ms['bare product']:.2f}"]
        lines.append([*line, *_gains(ms, peers)])
    return lines


def mlp(rows: Sequence[Row]) -> Lines:
    """A line a model: ours, over its bare products, and each peer's over ours; then the means."""
    times = {c: ms for c, ms in pivot(rows, "gpu_ms").items() if c.startswith("MLP ")}
    bare = "bare product"
    impls = unique(impl for ms in times.values() for impl in ms)
    peers = [impl for impl in impls if impl not in (OURS, bare)]
    lines = [["tokens, width, hidden", "ms", "/ products", *(f"vs {peer}" for peer in peers)]]
    for case, ms in times.items():
        name = _spaced(case.removeprefix("MLP ").removesuffix(" fwd + bwd"))
        line = [name, short(ms[OURS]), f"{ms[OURS] / ms[bare]:.2f}"]
        lines.append([*line, *_gains(ms, peers)])
    mean = statistics.geometric_mean
    over = mean(ms[OURS] / ms[bare] for ms in times.values())
    gains = (mean(ms[peer] / ms[OURS] for ms in times.values()) for peer in peers)
    return [*lines, ["geometric mean", "", f"{over:.2f}", *(f"{gain:.2f}x" for gain in gains)]]


def steps(rows: Sequence[Row]) -> Lines:
    """A line a task: milliseconds of each variant, and the peers' over ours.

    Behind them, torch.compile's over those of what the compile backend makes.
    """
    impls = unique(row["impl"] for row in rows)
    compiled = [impl for impl in impls if impl.endswith(f"compile, {OURS}")]
    peers = [impl for impl in impls if impl not in (OURS, *compiled)]
    vs, gains = [f"vs {peer}" for peer in peers], [f"gain of {impl}" for impl in compiled]
    lines = [["", *impls, *vs, *gains]]
    for case, ms in pivot(rows, "step_ms").items():
        gains = [_gains(ms, ["compile"], impl)[0] if impl in ms else "" for impl in compiled]
        lines.append([case, *_cells(ms, impls, short), *_gains(ms, peers), *gains])
    return lines


def serving(rows: Sequence[Row]) -> Lines:
    """A line an implementation of each trace: its speed, and how long its clients wait."""
    waits = [f"{name}_{cut}_ms" for name in ("first_token", "between_tokens") for cut in _CUTS]
    found = {metric: pivot(rows, metric) for metric in ("tokens_per_s", *waits)}
    names = (metric.removesuffix("_ms").replace("_", " ") for metric in waits)
    lines = [["", "by", "tokens/s", *(f"{name}, ms" for name in names)]]
    for case, rates in found["tokens_per_s"].items():
        for impl, rate in rates.items():
            times = (found[wait].get(case, {}).get(impl) for wait in waits)
            cells = ("" if ms is None else short(ms) for ms in times)
            lines.append([case, impl, f"{rate:.0f}", *cells])
    return lines


_CUTS = ("p50", "p99")


def new_lengths(rows: Sequence[Row]) -> Lines:
    """Plans built and the cost of a length never seen: a line a number, a column a peer."""
    plans, ms = pivot(rows, "plans_built"), pivot(rows, "new_shape_ms")
    impls = unique(row["impl"] for row in rows if row["metric"] == "new_shape_ms")
    lines = [["", *impls]]
    for case, found in plans.items():
        lines.append([f"plans built, {case}", *_cells(found, impls, lambda n: f"{n:.0f}")])
    for case, found in ms.items():
        lines.append([f"host ms added, {case}", *_cells(found, impls, short)])
    return lines


def polymorphic(rows: Sequence[Row]) -> Lines:
    """GPU time by kind of plan, and over that of the exact one."""
    times = pivot(rows, "gpu_ms")
    impls = unique(row["impl"] for row in rows if row["metric"] == "gpu_ms")
    others = [impl for impl in impls if impl != "exact"]
    lines = [["B, Hq, Hkv, S, D", *impls, *(f"{other} / exact" for other in others)]]
    for case, ms in times.items():
        ratios = (f"{ms[other] / ms['exact']:.3f}" for other in others)
        lines.append([_spaced(case), *(short(ms[impl]) for impl in impls), *ratios])
    return lines


def cold_start(rows: Sequence[Row]) -> Lines:
    """A line a state of the process, a column an implementation."""
    times = pivot(rows, "first_call_ms")
    impls = unique(row["impl"] for row in rows)
    return [["", *impls], *([case, *_cells(ms, impls, short)] for case, ms in times.items())]


def by_version(rows: Sequence[Row]) -> Lines:
    """A line a benchmark: the newer cuDNN's time over the older one's, in the mean and the ends."""
    old, new = unique(row["impl"] for row in rows)
    over: dict[str, dict[str, float]] = {}
    for case, ms in pivot(rows, "gpu_ms").items():
        benchmark, _, name = case.partition(": ")
        over.setdefault(benchmark, {})[name] = ms[new] / ms[old]
    lines = [["", "cases", f"{new} over {old}", "least", "most"]]
    for benchmark, ratios in over.items():
        line = [benchmark, str(len(ratios)), f"{statistics.geometric_mean(ratios.values()):.2f}"]
        ends = (min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__))
        lines.append([*line, *(f"{ratios[case]:.2f}, {case}" for case in ends)])
    return lines


def compile_time(rows: Sequence[Row]) -> Lines:
    """A line a model and what was known before: seconds, and ours over torch.compile's."""
    lines = [["", OURS, "compile", "ratio"]]
    for case, seconds in pivot(rows, "compile_s").items():
        ours, stock = seconds[OURS], seconds["compile"]
        lines.append([case, f"{ours:.1f}", f"{stock:.1f}", f"{ours / stock:.2f}"])
    return lines


def soak(rows: Sequence[Row]) -> Lines:
    """Memory as the shapes go by: a line a report."""
    device, host = pivot(rows, "device_mib"), pivot(rows, "host_mib")
    return [
        ["", "device MiB", "host MiB"],
        *([case, *(f"{m[case][OURS]:.0f}" for m in (device, host))] for case in device),
    ]


def distributed(rows: Sequence[Row]) -> Lines:
    """A line a case: tokens a second and memory, each over one GPU's; ours over each peer's."""
    rates, peaks = pivot(rows, "tokens_per_s"), pivot(rows, "peak_mib")
    one = "one gpu"
    peers = [impl for impl in unique(row["impl"] for row in rows) if impl not in (OURS, one)]
    lines = [["", "tokens/s", f"over {one}", "MiB", f"of {one}", *(f"vs {p}" for p in peers)]]
    for case, rate in rates.items():
        peak = peaks[case]
        over = f"{rate[OURS] / rate[one]:.2f}x" if one in rate else ""
        lines.append([_spaced(case), short(rate[OURS]), over])
        lines[-1] += [short(peak[OURS]), f"{peak[OURS] / peak[one]:.2f}" if one in peak else ""]
        lines[-1] += [f"{rate[OURS] / rate[p]:.2f}x" if p in rate else "" for p in peers]
    return lines


def zoo(rows: Sequence[Row]) -> Lines:
    """A line a model: milliseconds a step, each peer's over ours, compile seconds, memory.

    Some models have no seconds; what no model has gets no column.
    """
    steps, peaks = pivot(rows, "step_ms"), pivot(rows, "peak_mib")
    seconds = pivot(rows, "compile_s")
    peers = ("eager", "compile", "compile max-autotune")
    lines = [["", "ours", *(f"vs {peer}" for peer in peers), "first step, s", "MiB, of compile"]]
    for case, ms in sorted(steps.items()):
        lines.append([_spaced(case), short(ms[OURS]), *_gains(ms, peers)])
        found = seconds.get(case, {})
        both = (short(found[impl]) for impl in (OURS, "compile") if impl in found)
        lines[-1] += [" / ".join(both), f"{peaks[case][OURS] / peaks[case]['compile']:.2f}"]
    lines.append(["geometric mean", "", *_mean_gains(steps.values(), peers), "", ""])
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*columns, strict=True)]


def zoo_models(rows: Sequence[Row]) -> Lines:
    """A line a model, inference and training beside each other: milliseconds, and over ours."""
    steps, modes, peers = pivot(rows, "step_ms"), ("inference", "training"), ("eager", "compile")
    heading = [part for mode in modes for part in (mode, *(f"vs {peer}" for peer in peers))]
    lines = [["", *heading]]
    for model in sorted({case.rsplit(", ", 1)[0] for case in steps}):
        lines.append([_spaced(model)])
        for mode in modes:
            ms = steps.get(f"{model}, {mode}", {})
            lines[-1] += [*_cells(ms, (OURS,), short), *_gains(ms, peers)]
    lines.append(["geometric mean"])
    for mode in modes:
        found = [ms for case, ms in steps.items() if case.endswith(f", {mode}")]
        lines[-1] += ["", *_mean_gains(found, peers)]
    return lines


def _spaced(case: str) -> str:
    """Each comma with a space behind it, so that a table may break the line there."""
    return re.sub(r",(?! )", ", ", case)


def _cells(
    found: Mapping[str, float], impls: Sequence[str], form: Callable[[float], str]
) -> list[str]:
    return [form(found[impl]) if impl in found else "" for impl in impls]


def _gains(ms: Mapping[str, float], peers: Sequence[str], ours: str = OURS) -> list[str]:
    """Each peer's time over ours; empty for a peer that has none."""
    return [f"{ms[peer] / ms[ours]:.2f}x" if peer in ms else "" for peer in peers]


def _mean_gains(times: Collection[Mapping[str, float]], peers: Sequence[str]) -> list[str]:
    """The geometric means of these, over the cases that a peer has."""
    gains = ([ms[peer] / ms[OURS] for ms in times if peer in ms] for peer in peers)
    return [f"{statistics.geometric_mean(one):.2f}x" if one else "" for one in gains]


#: Of tables whose models are also compiled by this package.
GAIN = "A gain is compile's time over that variant's."

TABLES = {
    "sdpa": Table(
        sdpa, "GPU time in ms, forward / backward, bf16; x is the peer's time over ours.", "sdpa"
    ),
    "sdpa_newer": Table(
        sdpa,
        "GPU time in ms, forward / backward, bf16; x is the peer's time over ours.",
        "sdpa_newer",
    ),
    "attention_features": Table(
        attention_features,
        "GPU time in ms, forward / backward, bf16; x is the other's time over ours.",
        "attention_features",
    ),
    "paged_decode": Table(
        paged_decode,
        "Bytes of keys and values read, for a copy those read and written; bf16, pages of 16.",
        "paged_decode",
    ),
    "generation": Table(
        generation,
        "Llama 3 8B's sizes, random bf16 weights, prompts of 256 to 1024 tokens. With 4 drafts of "
        "0.7 a request has 4 draft tokens a step, each of which is right with that probability. "
        "The gain is in tokens a second, over steps that overlap.",
        "generation",
        samples=8,
    ),
    "host_overhead": Table(
        host_overhead, "Host time of one call in µs, [1, 8, 64, 64] bf16, causal.", "host_overhead"
    ),
    "norms": Table(
        norms,
        "Geometric means of the other's GPU time over ours, forward / backward, bf16; "
        "torch.compile at some of the shapes. The bound is a copy of the same bytes, or torch.add.",
        "norms",
        samples=1 / 5,
    ),
    "norms_host": Table(
        host_overhead, "Host time of one call in µs, bf16.", "norms", samples=1 / 5
    ),
    "train_step": Table(
        train_step,
        "Milliseconds of forward and backward with the host's time; 8 layers of width 2048, 16 "
        "query and 8 key heads, ffn 8192, vocabulary 32000, random bf16 weights.",
        "train_step",
        samples=0.25,
    ),
    "train_step_profile": Table(
        train_step_profile,
        "Share of the GPU's time in a step on cudnn_ops, by the names of kernels.",
        "train_step",
        samples=0,
    ),
    "conv": Table(
        conv, "GPU time in ms, bf16, channels last, engines measured.", "conv", samples=1 / 3
    ),
    "conv_transpose": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16, channels last, engines measured; N, C, size, "
        "K, kernel, stride, padding. x is the other's time over ours.",
        "conv_transpose",
        samples=1 / 3,
    ),
    "depthwise": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16, channels last, with a bias; N, C, size, "
        "kernel. x is the other's time over ours.",
        "depthwise",
        samples=1 / 3,
    ),
    "image_norms": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16. x is the other's time over ours.",
        "image_norms",
        samples=1 / 5,
    ),
    "max_pool": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16 but where a line says float32. x is the "
        "other's time over ours.",
        "max_pool",
        samples=1 / 5,
    ),
    "adaptive_norms": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16; samples, tokens, columns. x is the other's "
        "time over ours.",
        "adaptive_norms",
        samples=1 / 5,
    ),
    "fp8": Table(
        beside_peers,
        "GPU time in ms, from bf16 to bf16; B, Hq, Hkv, S, D. x is the other's time over ours.",
        "fp8",
    ),
    "fp8_prefill": Table(
        steps,
        "Milliseconds of a prefill with the host's time.",
        "fp8_prefill",
        samples=0.25,
    ),
    "linear": Table(linear, "GPU time in ms, bf16.", "linear", samples=1 / 3),
    "mlp": Table(mlp, "GPU time of forward and backward in ms, bf16.", "linear", samples=1 / 3),
    "resnet": Table(
        steps,
        f"Milliseconds with the host's time, bf16, channels last, 224 x 224. {GAIN}",
        "resnet",
        samples=2,
    ),
    "blocks": Table(
        steps,
        f"Milliseconds of a step with the host's time, bf16. {GAIN}",
        "blocks",
        samples=1,
    ),
    "diffusion": Table(
        steps,
        f"Milliseconds of a call with the host's time, bf16. {GAIN}",
        "diffusion",
        samples=1,
    ),
    "moe": Table(
        beside_peers,
        "GPU time of forward / backward in ms, bf16. x is the other's time over ours.",
        "moe",
        samples=1 / 5,
    ),
    "serving": Table(
        serving,
        "Tokens of output in all a second; from a request to its first token, and from one to the "
        "next.",
        "serving",
        samples=0,
    ),
    "new_lengths": Table(
        new_lengths,
        "4, 32, 8, S, 128 causal bf16, forward + backward; S drawn from 1 to 4096. Added is host "
        "time beyond that of the same call made again, calls that build a plan of ours left out.",
        "shape_churn",
        samples=0,
    ),
    "polymorphic": Table(polymorphic, "GPU time in ms, bf16.", "shape_churn", samples=0.5),
    "cold_start": Table(
        cold_start,
        "Milliseconds, forward + backward with the GPU's work; medians of processes.",
        "cold_start",
        samples=0,
    ),
    "by_version": Table(by_version, "GPU time, bf16.", "by_version", samples=0),
    "bundle": Table(
        cold_start,
        "Milliseconds, forward + backward with the GPU's work; medians of processes. `eager` is "
        "PyTorch's default attention.",
        "bundle",
        samples=0,
    ),
    "distributed": Table(
        distributed,
        "Forward + backward over B, Hq, Hkv, S, D, bf16, the sequence in zigzag order; serving: "
        "decoding at the sizes of Llama 3 8B; training: 2 sequences of 8192 tokens, eight layers "
        "of width 4096, `products` those steps, never compiled, without norms, rotary embedding "
        "and activations. MiB at the peak of a GPU, beyond its tensors, or for serving all that "
        "the engine holds there; x is ours over the other's tokens/s.",
        "distributed",
    ),
    "zoo": Table(
        zoo,
        "Milliseconds of a step with the host's time, bf16; x is the other's time over ours. MiB: "
        "ours over torch.compile's at the peak.",
        "zoo",
    ),
    "zoo_models": Table(
        zoo_models,
        "Milliseconds of a step with the host's time, bf16; x is the other's time over ours.",
        "zoo",
    ),
    "compile_time": Table(
        compile_time,
        "Seconds from the call of torch.compile to the end of the first step, of one process each; "
        "compiled before: the least of several processes.",
        "compile_time",
        samples=0,
    ),
    "soak": Table(
        soak, "Forward + backward at distinct shapes, at most 48 plans held.", "soak", samples=0
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check: bool = parser.parse_args().check
    stale = [(file, text) for file, text in _generated() if _read(file) != text]
    for file, text in stale:
        if check:
            print(f"{file.name} is stale: run python -m benchmarks.tables", file=sys.stderr)
        else:
            file.write_text(text)
    return 1 if check and stale else 0


def _generated() -> Iterator[tuple[Path, str]]:
    """Every file with generated content, and what it should hold."""
    for page in (README, *sorted(DOCS.rglob("*.md"))):
        yield page, render(page.read_text(), RESULTS)
    # Not before: a machine that only runs the benchmarks may lack matplotlib.
    from benchmarks import plots

    # The build of the documentation draws the others.
    for name in re.findall(r"\(docs/plots/(\w+)\.svg\)", README.read_text()):
        yield DOCS / "plots" / f"{name}.svg", plots.svg(name, RESULTS)


def _read(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def render(text: str, results: Path) -> str:
    """The text with every marked table made anew from `results`."""
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise SystemExit("a table marker is misspelt or has no closing marker")
    return MARKED.sub(lambda marked: marked[1] + _every_gpu(marked[2], results) + marked[3], text)


def _every_gpu(name: str, results: Path) -> str:
    """The named table of each GPU that it was measured on."""
    if name not in TABLES:
        raise SystemExit(f"no table is named {name!r}; there are: {', '.join(TABLES)}")
    files = sorted(results.glob(f"*/{TABLES[name].benchmark}.json"))
    tables = (_markdown(TABLES[name], json.loads(file.read_text())) for file in files)
    return "\n".join(tables) or "Not measured yet.\n"


def _markdown(table: Table, found: Mapping[str, Any]) -> str:
    """The table and, below it, what its numbers are and where they come from."""
    header, *body = table.lines(found["rows"])
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *body))
    env = found["env"]
    count = int(env["rounds"] * table.samples)
    samples = f"Median of {count} samples. " if count else ""
    # 40 hex digits say no more to a reader than 12 do; what follows them, as in "-dirty", does.
    commits = unique(row.get("commit", env["commit"]) for row in found["rows"])
    commits = [re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", commit) for commit in commits]
    *others, last = commits
    commit = f"commits {', '.join(others)} and {last}" if others else f"commit {last}"
    cudnn = cudnn_name(env["cudnn"])
    return (
        f"{lines}\n{table.numbers} {samples}"
        f"{env['gpu']}, {commit}, {env['date']}, torch {env['torch']}, cuDNN {cudnn}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
