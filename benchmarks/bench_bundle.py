"""The first attention of a process whose plans come from a bundle, beside one that builds them.

The bundle is built in a process that sees no GPU, for the description of this one. Forward +
backward, after torch's own first CUDA call; each sample is a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.bench_cold_start import CASE, child
from benchmarks.harness import OURS, ROOT, Rows, main

SHAPES = ((4, 32, 2048, 128), (4, 8, 2048, 128), (4, 8, 2048, 128))


def run(rows: Rows, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = build(Path(folder))
        samples: dict[tuple[str, str], list[list[float]]] = {}
        for _ in range(max(rounds // 15, 2)):
            for impl, name, bundles in (
                (OURS, "a bundle", (bundle,)),
                (OURS, "no bundle", ()),
                ("torch_default", "no bundle", ()),
            ):
                samples.setdefault((impl, name), []).append(child(impl, "", *bundles))
    for (impl, name), found in samples.items():
        _, first, _, loading, *built = (median(column) for column in zip(*found, strict=True))
        # Torch's default attention is what a model in eager mode calls.
        impl = impl if impl == OURS else "eager"
        rows.add(f"{CASE}, {name}", impl, "first_call_ms", first)
        if built:
            rows.add(f"{CASE}, {name}", impl, "plans_built", built[0])
        if name == "a bundle":
            rows.add(f"{CASE}, {name}, loading it", impl, "first_call_ms", loading)


def build(folder: Path) -> str:
    """The path of a bundle with the plans of the case, built by a process that sees no GPU."""
    import cudnn_ops

    # [B, S, H, D] memory, as the processes draw them.
    q, k, v = (
        torch.empty(b, s, h, d, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for b, h, s, d in SHAPES
    )
    shapes, gpu, bundle = (folder / name for name in ("shapes.json", "gpu.json", "plans.bundle"))
    requests = cudnn_ops.plan_requests("sdpa", q, k, v, is_causal=True, plans="exact")
    cudnn_ops.save_requests(requests, shapes)
    gpu.write_text(cudnn_ops.support.describe_device())
    command = ["-m", "cudnn_ops", "bundle", "--from", shapes, "--device", gpu, "--out", bundle]
    subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "CUDNN_OPS_CACHE_DIR": ""},
        check=True,
    )
    return str(bundle)


if __name__ == "__main__":
    main("bundle", run)
