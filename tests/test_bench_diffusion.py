"""The benchmark of diffusers: its models, its measurement on a small one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bench_diffusion, tables
from benchmarks.harness import OURS, Rows
from benchmarks.zoo_models import Entry
from tests.cases.diffusion import make, make_inputs


def _inputs(device: torch.device) -> dict[str, Any]:
    return {**make_inputs("dit", str(device), torch.bfloat16), "return_dict": False}


SMALL = Entry("small", "diffusers", lambda _: make("dit"), _inputs, lambda out: out[0])


def test_its_models():
    assert list(bench_diffusion.MODELS) == ["SD 1.5 U-Net", "VAE decoder", "DiT-XL/2"]


def test_a_small_model_is_held_to_float32(monkeypatch):
    compilers = {name: {"backend": "eager"} for name in bench_diffusion.COMPILERS}
    monkeypatch.setattr(bench_diffusion, "COMPILERS", compilers)
    names = []

    def variants(model: nn.Module) -> dict[str, Any]:
        made = variants_of(model)
        names.extend(made)
        return made

    variants_of = bench_diffusion.variants
    monkeypatch.setattr(bench_diffusion, "variants", variants)
    bench_diffusion.measure(SMALL, Rows({}), rounds=1, device="cpu")
    assert names == [OURS, "eager", *compilers]


def test_a_wrong_result_is_refused(monkeypatch):
    def wrong(model: nn.Module) -> dict[str, Any]:
        return {"wrong": lambda **inputs: (2 * model(**inputs)[0],)}

    monkeypatch.setattr(bench_diffusion, "variants", wrong)
    with pytest.raises(RuntimeError, match=r"small: wrong is off by .* in its result"):
        bench_diffusion.measure(SMALL, Rows({}), rounds=1, device="cpu")


def test_table():
    rows = Rows({})
    times = {OURS: 3.0, "eager": 4.0, "compile": 2.0, "compile, cudnn_ops": 1.6}
    for name, ms in {**times, bench_diffusion.BOTH: 1.0}.items():
        rows.add("one", name, "step_ms", ms)
    for name, ms in times.items():
        rows.add("not both", name, "step_ms", ms)
    head, one, not_both = tables.steps(rows.rows)
    assert head[-2:] == ["gain of compile, cudnn_ops", f"gain of {bench_diffusion.BOTH}"]
    gains = ["1.33x", "0.67x", "1.25x", "2.00x"]
    assert one == ["one", "3.00", "4.00", "2.00", "1.60", "1.00", *gains]
    assert not_both == ["not both", "3.00", "4.00", "2.00", "1.60", "", *gains[:3], ""]


def test_without_diffusers(monkeypatch, capsys):
    monkeypatch.setattr(bench_diffusion, "find_spec", lambda _: None)
    bench_diffusion.run(Rows({}), rounds=1)
    assert capsys.readouterr().out.count("diffusers is not installed") == 3
