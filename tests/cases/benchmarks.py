"""What the benchmarks' tests share: a shape, an environment, and benchmarks on a CPU."""

import fcntl
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import (
    bench_host_overhead,
    bench_sdpa,
    bench_shape_churn,
    harness,
    peers,
)

SHAPE = bench_sdpa.Shape(2, 4, 2, 48, 16, causal=True)
ENV: dict[str, str | int] = {
    "gpu": "NVIDIA H200",
    "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
    "date": "2026-11-21",
    "torch": "2.11.0",
    "cudnn": 91900,
    "rounds": 50,
}


def must_wait(folder: Path) -> bool:
    """Whether who wants a turn of this folder's GPU must wait for it."""
    with open(folder / "turn", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a benchmark run here: each function is called once and is said to take 2."""

    def clock(functions: harness.Functions, **_: object) -> dict[str, float]:
        for function in functions.values():
            function()
        return dict.fromkeys(functions, 2.0)

    tensors, randn = bench_sdpa.tensors, torch.randn
    monkeypatch.setattr(bench_sdpa, "tensors", lambda shape, _: tensors(shape, "cpu"))
    monkeypatch.setattr(bench_sdpa, "SHAPES", (SHAPE,))
    monkeypatch.setattr(bench_sdpa, "gpu_ms", clock)
    monkeypatch.setattr(bench_sdpa, "peak_bytes", lambda function: len(function()) * 2**20)
    monkeypatch.setattr(bench_host_overhead, "host_us", clock)
    for name in ("SHAPES", "tensors", "gpu_ms"):
        monkeypatch.setattr(bench_shape_churn, name, getattr(bench_sdpa, name))
    monkeypatch.setattr(torch, "randn", lambda *a, **k: randn(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(peers, "backend", lambda _: nullcontext())
    monkeypatch.setattr(peers, "sdpa", lambda *n: dict.fromkeys(n, scaled_dot_product_attention))
