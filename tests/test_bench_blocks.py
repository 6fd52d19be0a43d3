"""The benchmark of blocks: every kind of case on a CPU, at small sizes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bench_blocks as bench
from benchmarks.harness import OURS, Rows
from cudnn_ops.nn import VisionTransformer

_VIT: dict[str, Any] = {"patch_size": 8, "dim": 32, "depth": 1, "heads": 2, "hidden": 64}


def _torchvision() -> nn.Module:
    model: Any = torchvision.models.VisionTransformer(32, 8, 1, 2, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


def _timm() -> nn.Module:
    sizes: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    return timm.models.VisionTransformer(**sizes, mlp_ratio=2, num_classes=5)


SIZES = (32, 4, 2, 8, 48)
CASES = (
    bench.decoder_case("llama", bench._LLAMA, bench.LLAMA, SIZES, (2, 9)),
    bench.decoder_case("qwen3", bench._QWEN3, bench.QWEN3, SIZES, (2, 9), qk_norm="rms"),
    bench.encoder_case("bert", 32, 4, (2, 9)),
    bench.vision_case("torchvision", _torchvision, 2, 32, **_VIT, classes=5),
    bench.vision_case("timm", _timm, 2, 32, **_VIT, classes=5),
)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_is_held_to_theirs(case, trains):
    steps = bench.checked_steps(case.name, case, trains, "cpu")
    assert list(steps) == [OURS, "eager", "compile", f"compile, {OURS}"]
    assert len(steps[OURS]()) == 1 + trains


@pytest.mark.parametrize(("trains", "count"), [(False, 7), (True, 21)])
def test_products_are_those_of_both_directions(trains, count, monkeypatch):
    """q, k, v, o, gate, up and down; each has two gradients."""
    steps = bench.checked_steps("llama", CASES[0], trains, "cpu")
    again, called = bench.products(steps["eager"]), Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called[func.overloadpacket] += 1
            return func(*args, **(kwargs or {}))

    with Counted():
        again()
    assert called[torch.ops.aten.mm] == count


def test_other_weights_are_refused(monkeypatch):
    load = nn.Module.load_state_dict
    monkeypatch.setattr(VisionTransformer, "load_state_dict", lambda *_: None)
    assert load is not VisionTransformer.load_state_dict
    with pytest.raises(RuntimeError, match=r"x: cudnn_ops is off by .*; allowed: "):
        bench.checked_steps("x", CASES[-1], False, "cpu")


def test_both_modes_of_a_part_are_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "measure", lambda *args: measured.append(args[:2]))
    bench.run(Rows({}), 1)
    assert measured == [(case, trains) for case in bench.CASES for trains in (False, True)]


def test_sizes_of_all_cases():
    """Ours are made for the input that they get, without memory."""
    for case in bench.CASES:
        with torch.device("meta"):
            ours, theirs = case.ours(), partial(case.theirs)()
        count = sum(parameter.numel() for parameter in theirs.parameters())
        assert sum(parameter.numel() for parameter in ours.parameters()) == count
