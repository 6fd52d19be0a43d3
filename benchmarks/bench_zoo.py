"""Whole models, nothing rewritten: backend="cudnn_ops" beside eager mode and torch.compile.

bf16, random weights. A step is one call, in training with its backward, from an idle GPU to the end
of its last kernel. Compiling is timed from nothing to the end of the first step, and the peak of
memory is that of a step. Results, and in training gradients, are held to the same model in float32:
at most twice the error of eager mode, with nothing dropped, since each compiler draws numbers of
its own. Where that takes compiling once more, ours alone is held. What is timed drops what the
model drops. `--only` measures some models and adds their rows to the file;
`python -m benchmarks.side_by_side zoo` compiles several at a time, each with its share of compile
threads; their seconds leave out others' turns. A case that begins with inductor's caches, of an
earlier run or of the model's other mode, gets no seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

import cudnn_ops
from benchmarks.harness import OURS, Rows, main, peak_bytes, step_ms
from benchmarks.whole_models import checked_steps
from benchmarks.zoo_models import ZOO, Entry

COMPILERS: Mapping[str, dict[str, Any]] = {
    OURS: {"backend": "cudnn_ops"},
    "compile": {},
    "compile max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


#: A model in inference, or in training: a part by itself, since compiling takes minutes.
PARTS = [
    f"{entry.name}, {mode}"
    for entry in ZOO
    for mode in ("inference", "training")
    if entry.trains or mode == "inference"
]


def run(rows: Rows, rounds: int) -> None:
    failed: list[str] = []
    for part in PARTS:
        try:
            run_part(part, rows, rounds)
        except RuntimeError as error:  # hours of others' compiling would be lost
            failed.append(f"{part}: {error}")
            print(failed[-1], flush=True)
    if failed:
        raise RuntimeError("\n".join(failed))


def run_part(part: str, rows: Rows, rounds: int) -> None:
    entry, trains = entry_of(part)
    if find_spec(entry.library) is None:
        print(f"{entry.name}: {entry.library} is not installed")
        return
    # Inductor's workers compile with PyTorch's ptxas, this process with Triton's unless told so. It
    # would find no candidate that they compiled for max-autotune, and compile each once more.
    _set_triton_ptxas_path()
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    measure_case(entry, trains, rows, rounds)
    print(cudnn_ops.compile_report(), flush=True)


def entry_of(part: str) -> tuple[Entry, bool]:
    """The model of a part, and whether it trains."""
    entry = next(entry for entry in ZOO if entry.name == model_of(part))
    return entry, part.endswith(", training")


def model_of(part: str) -> str:
    """The name of a part's model."""
    return part.rpartition(", ")[0]


def measure_case(entry: Entry, trains: bool, rows: Rows, rounds: int, device: str = "cuda") -> None:
    """One model, in inference or training, by every compiler."""
    case = f"{entry.name}, {'training' if trains else 'inference'}"
    begins_empty = not any(Path(cache_dir()).iterdir())
    steps, seconds = checked_steps(case, entry, trains, device, variants)
    found = {"compile_s": {name: seconds[name] for name in COMPILERS}} if begins_empty else {}
    if device == "cuda":
        found["step_ms"] = step_ms(steps, rounds=rounds)
        found["peak_mib"] = {name: peak_bytes(call) / 2**20 for name, call in steps.items()}
    # All at once: in the file, what an interrupted part has would replace all rows of its case.
    for metric, values in found.items():
        for name, value in values.items():
            rows.add(case, name, metric, value)


def variants(model: nn.Module) -> dict[str, Any]:
    compiled: dict[str, Any] = {
        name: torch.compile(model, dynamic=False, **options) for name, options in COMPILERS.items()
    }
    return {"eager": model, **compiled}


if __name__ == "__main__":
    main("zoo", run, run_part, PARTS)
