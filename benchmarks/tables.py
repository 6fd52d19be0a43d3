"""The README's tables of measurements, rendered from benchmarks/results/<gpu>/<name>.json.

`python -m benchmarks.tables` rewrites what stands between <!-- table:NAME --> and
<!-- /table:NAME -->; with --check it only says, by its exit status, whether that is needed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import OURS, ROOT, Row, pivot, short, unique

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)

Lines = list[list[str]]


class Table(NamedTuple):
    """How one benchmark's rows become a table, header first, and what its numbers are."""

    lines: Callable[[Sequence[Row]], Lines]
    numbers: str


def sdpa(rows: Sequence[Row]) -> Lines:
    """Forward and backward side by side: a line a shape, then each peer's time over ours."""
    times = pivot(rows, "gpu_ms")
    impls = unique(row["impl"] for row in rows if row["metric"] == "gpu_ms")
    peers = [impl for impl in impls if impl != OURS]
    lines = [["B, Hq, Hkv, S, D", *impls, *(f"vs {peer}" for peer in peers)]]
    for shape in unique(case.rpartition(" ")[0] for case in times):
        fwd, bwd = times[f"{shape} fwd"], times[f"{shape} bwd"]
        lines.append([shape.replace(",", ", ")])
        lines[-1] += [f"{short(fwd[impl])} / {short(bwd[impl])}" for impl in impls]
        for peer in peers:
            gains = (times[peer] / times[OURS] for times in (fwd, bwd))
            lines[-1].append(" / ".join(f"{gain:.2f}x" for gain in gains))
    return lines


def host_overhead(rows: Sequence[Row]) -> Lines:
    """A line a case, a column an implementation."""
    times = pivot(rows, "host_us")
    impls = unique(row["impl"] for row in rows)
    return [["", *impls], *([case, *(short(us[i]) for i in impls)] for case, us in times.items())]


TABLES = {
    "sdpa": Table(
        sdpa, "GPU time in ms, forward / backward, bf16; x is the peer's time over ours."
    ),
    "host_overhead": Table(
        host_overhead, "Host time of one call in µs, [1, 8, 64, 64] bf16, causal."
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check: bool = parser.parse_args().check
    text = README.read_text()
    fresh = render(text, RESULTS)
    if text == fresh:
        return 0
    if check:
        print(f"{README.name} is stale: run python -m benchmarks.tables", file=sys.stderr)
        return 1
    README.write_text(fresh)
    return 0


def render(text: str, results: Path) -> str:
    """The text with every marked table made anew from `results`."""
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise SystemExit("a table marker is misspelt or has no closing marker")
    return MARKED.sub(lambda marked: marked[1] + _every_gpu(marked[2], results) + marked[3], text)


def _every_gpu(name: str, results: Path) -> str:
    """The named table of each GPU that it was measured on."""
    if name not in TABLES:
        raise SystemExit(f"no table is named {name!r}; there are: {', '.join(TABLES)}")
    files = sorted(results.glob(f"*/{name}.json"))
    tables = (_markdown(TABLES[name], json.loads(file.read_text())) for file in files)
    return "\n".join(tables) or "Not measured yet.\n"


def _markdown(table: Table, found: Mapping[str, Any]) -> str:
    """The table and, below it, what its numbers are and where they come from."""
    header, *body = table.lines(found["rows"])
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *body))
    env = found["env"]
    # 40 hex digits say no more to a reader than 12 do; what follows them, as in "-dirty", does.
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", env["commit"])
    cudnn = f"{env['cudnn'] // 10000}.{env['cudnn'] // 100 % 100}.{env['cudnn'] % 100}"
    return (
        f"{lines}\n{table.numbers} Median of {env['rounds']} samples. "
        f"{env['gpu']}, commit {commit}, {env['date']}, torch {env['torch']}, cuDNN {cudnn}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
