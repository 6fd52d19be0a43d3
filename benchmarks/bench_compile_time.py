"""Seconds from torch.compile to the end of a first step: backend="cudnn_ops" beside inductor.

Each sample is a process of its own, which has made the model and run it in eager mode. What earlier
ones left on disk differs: nothing, and then ours measures what it swaps; what was measured, as for
a model whose layers were compiled before in another one; or all that the first one left, compiled
graphs among it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.bench_zoo import COMPILERS, entry_of
from benchmarks.harness import OURS, Rows, in_process, main
from benchmarks.turns import stopwatch
from benchmarks.whole_models import step_of

#: How many of each run, in turns. The least counts: the same work takes up to twice as long in one
#: process as in the next, and what disturbs one only ever makes it slower.
SECOND_PROCESSES = 5
EMPTY, MEASURED, WARM = "nothing known", "measured before", "compiled before"
#: Parts of benchmark `zoo`: few kernels and many, inference and training, with and without images.
PARTS = ("ViT-B/16, inference", "GPT-2 medium, 12 layers, training", "ResNet-50, training")
CHILD = """
import sys
from benchmarks.bench_compile_time import first_step

print(first_step(*sys.argv[1:]))
"""


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root, name) for name in ("plans", OURS, "again", "compile")}
        plans = folders["plans"]
        found = {
            (EMPTY, OURS): child(part, OURS, plans, folders[OURS]),
            (MEASURED, OURS): child(part, OURS, plans, folders["again"]),
            (EMPTY, "compile"): child(part, "compile", plans, folders["compile"]),
        }
        later: dict[str, list[float]] = {OURS: [], "compile": []}
        for _ in range(SECOND_PROCESSES):
            for name, seconds in later.items():
                seconds.append(child(part, name, plans, folders[name]))
    found[MEASURED, "compile"] = found[EMPTY, "compile"]  # which measures nothing of that kind
    found |= {(WARM, name): min(seconds) for name, seconds in later.items()}
    for state in (EMPTY, MEASURED, WARM):
        for name in (OURS, "compile"):
            rows.add(f"{part}, {state}", name, "compile_s", found[state, name])


def child(part: str, name: str, plans: Path, compiled: Path) -> float:
    """Seconds of one process, with the folder of our plans and that of what inductor compiled."""
    stored = {"CUDNN_OPS_CACHE_DIR": str(plans), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    # An installed package has its bytecode, as torch has here: this one's is kept by the first.
    stored["PYTHONDONTWRITEBYTECODE"] = ""
    seconds = float(in_process(CHILD, part, name, **stored).split()[-1])
    print(f"{part}, {name}: {seconds:.2f} s", flush=True)  # each sample, too
    return seconds


def first_step(part: str, name: str) -> float:
    """Seconds of torch.compile, which imports inductor, and a first step by one of COMPILERS."""
    entry, trains = entry_of(part)
    device = torch.device("cuda")
    model = entry.make(device).train(trains).to(torch.bfloat16)
    inputs = entry.inputs(device)
    step_of(entry, model, inputs, trains)()  # torch's own first calls
    torch.cuda.synchronize()
    seconds_since = stopwatch()
    compiled = torch.compile(model, dynamic=False, **COMPILERS[name])
    step_of(entry, compiled, inputs, trains)()
    torch.cuda.synchronize()
    return seconds_since()


if __name__ == "__main__":
    main("compile_time", run, run_part, PARTS)
