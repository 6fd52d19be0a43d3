"""The example of training on several processes, and its checkpoints on another mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*args: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-m", *torchrun, "-m", "examples.train_llama_distributed", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def losses_of(*args: str, out: Path) -> list[float]:
    result = run("--device", "cpu", "--out", str(out), *args)
    assert result.returncode == 0, result.stderr
    assert "tokens/s for each process" in result.stdout
    assert (out / "loss.png").stat().st_size > 0
    return json.loads((out / "summary.json").read_text())["progress"]["losses"]


def test_another_mesh_continues(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    losses = losses_of("--tp", "2", "--steps", "3", "--save-every", "2", out=first)
    assert len(losses) == 3
    resumed = losses_of(
        "--fsdp", "--recompute", "--steps", "1", "--resume", str(first / "checkpoint-2"), out=second
    )
    assert resumed == pytest.approx(losses[2:], rel=1e-4)


def test_processes_that_share_a_sequence_take_the_same_steps(tmp_path):
    losses = losses_of("--cp", "2", "--steps", "2", out=tmp_path / "context")
    whole = losses_of("--tp", "2", "--steps", "2", out=tmp_path / "tensor")
    assert losses == pytest.approx(whole, rel=1e-4)


def test_bad_arguments_end_with_a_line(tmp_path):
    result = run("--device", "cpu", "--tp", "2", "--out", str(tmp_path), processes=1)
    assert "error: --tp 2 does not divide the 1 processes" in result.stderr
    result = run("--device", "cpu", "--cp", "2", "--operators", "torch", "--out", str(tmp_path))
    assert "error: --cp needs --operators cudnn_ops, got torch" in result.stderr
    alone = subprocess.run(
        [sys.executable, "-m", "examples.train_llama_distributed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 2
    assert "start it by torchrun" in alone.stderr
