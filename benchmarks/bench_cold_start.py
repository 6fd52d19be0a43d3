"""The first attention of a process, forward + backward, after torch's own first CUDA call.

Each sample is a process of its own. With a warm store the plans come from disk; with none they are
built, as torch's cuDNN backend has to do in every process, or come from the package, as in a wheel
(cudnn_ops/plans/common.py has the shape, for plans of any length).
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import Rows, in_process, main

CASE = "4,32,8,2048,128 causal"
FROM_PACKAGE = "no store, plans of the package"
NO_PLANS = "none"  # a folder that is not there
CHILD = """
import sys, time
import torch
from benchmarks import peers

name, packaged, *bundles = sys.argv[1:]
if name == "cudnn_ops":
    from pathlib import Path
    import cudnn_ops.plans.packaged
    cudnn_ops.plans.packaged.FOLDER = Path(packaged)
attention = peers.sdpa(name)[name]

def timed(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3

start = time.perf_counter()
torch.zeros(1, device="cuda").add_(1).item()
first_cuda = (time.perf_counter() - start) * 1e3

def draw(heads):
    return torch.randn(4, 2048, heads, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

start = time.perf_counter()
for bundle in bundles:
    import cudnn_ops
    cudnn_ops.load_bundle(bundle)
loading = (time.perf_counter() - start) * 1e3

inputs = [draw(heads).requires_grad_() for heads in (32, 8, 8)]
grad_out = draw(32)
# Autograd's threads, and the memory, are torch's own first costs too.
torch.autograd.grad(inputs[0].mul(2), inputs[0], grad_out)

def step():
    with peers.backend(name):
        out = attention(*inputs, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, inputs, grad_out)

print(first_cuda, timed(step), timed(step), loading)
if name == "cudnn_ops":
    import cudnn_ops
    print(cudnn_ops.cache_info().builds)
"""


def run(rows: Rows, rounds: int) -> None:
    samples: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as warm, tempfile.TemporaryDirectory() as packaged:
        child("cudnn_ops", warm)  # fills the store
        build_packaged(Path(packaged))
        try:
            for _ in range(max(rounds // 15, 2)):
                for name, state, store, plans in (
                    ("cudnn_ops", "warm store", warm, NO_PLANS),
                    ("cudnn_ops", "no store", "", NO_PLANS),
                    ("cudnn_ops", FROM_PACKAGE, "", packaged),
                    ("torch_cudnn", "no store", "", NO_PLANS),
                ):
                    sample = child(name, store, packaged=plans)
                    samples.setdefault((name, state), []).append(sample)
        finally:  # who interrupts minutes of starting processes keeps what there is
            add_medians(samples, rows)


def add_medians(samples: Mapping[tuple[str, str], Sequence[Sequence[float]]], rows: Rows) -> None:
    for (name, state), found in samples.items():
        first_cuda, first, second, _, *built = (
            median(column) for column in zip(*found, strict=True)
        )
        if state == FROM_PACKAGE:
            rows.add(f"{CASE}, {state}", name, "plans_built", built[0])
        rows.add(f"{CASE}, {state}", name, "first_call_ms", first)
        rows.add(f"{CASE}, {state}, second call", name, "first_call_ms", second)
        rows.add(f"{CASE}, {state}, torch's first CUDA call", name, "first_call_ms", first_cuda)


def build_packaged(folder: Path) -> None:
    """The plans that a wheel has of the case, for this GPU, as if the package had them."""
    import cudnn_ops
    from cudnn_ops.plans.common import DECODERS, Sizes, attention_plans
    from cudnn_ops.plans.packaged import file_name

    requests = attention_plans(DECODERS[0], Sizes(4, 2048), True, True, "current")
    path = folder / file_name(cudnn_ops.support.describe_device())
    cudnn_ops.build_bundle(requests, "current", path, progress=False)


def child(name: str, store: str, *bundles: str, packaged: str = NO_PLANS) -> list[float]:
    """Milliseconds: torch's first CUDA call, the first forward + backward, the second, loading.

    Loading is that of the bundles; ``packaged`` is a folder in place of the package's own. Of ours
    one more: how many plans it built.
    """
    found = in_process(CHILD, name, packaged, *bundles, CUDNN_OPS_CACHE_DIR=store)
    return [float(number) for number in found.split()]


if __name__ == "__main__":
    main("cold_start", run)
