"""Tests of the example programs belong here: the demo must really learn, under torch.compile."""

import json
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from examples.train_llama import TrainConfig, train


def byte_frequency_loss() -> float:
    """Held-out nats per byte of the training bytes' frequencies, independent of the demo's code."""
    text = np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    fitted, heldout = np.split(text, [len(text) * 9 // 10])
    frequencies = np.bincount(fitted, minlength=256) / len(fitted)
    used = np.bincount(heldout, minlength=256) / len(heldout)
    seen = (frequencies > 0) & (used > 0)
    return float(-(used[seen] * np.log(frequencies[seen])).sum())


def test_training_beats_byte_frequencies(tmp_path: Path) -> None:
    summary = train(TrainConfig(device="cpu", steps=30, out=tmp_path))

    assert summary.unigram_loss == pytest.approx(byte_frequency_loss(), abs=0.01)
    assert summary.heldout_loss < byte_frequency_loss() - 0.2
    assert summary.history.heldout_losses[30] == summary.heldout_loss
    assert len(summary.history.train_losses) == 30
    assert summary.tokens_per_second > 0

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == summary.sample != ""
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(asdict(summary)))
