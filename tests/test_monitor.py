"""``cudnn_ops.profile``: calls, times and FLOPs of operators."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from cudnn_ops.plans import figure, monitor
from tests.conftest import DEVICES

SIZES = {"device": "cpu", "dtype": torch.float32, "requires_grad": True}


def leaf(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*shape, **{**SIZES, **options})  # type: ignore[call-overload]


def everything(**options: object) -> None:
    """A call of each operator that has a FLOP formula, and of some that have none."""
    query, key = leaf(1, 4, 16, 8, **options), leaf(1, 2, 16, 8, **options)
    x, image, kernel = (leaf(*s, **options) for s in ((6, 64), (2, 8, 6, 6), (4, 8, 3, 3)))
    w1, w2 = leaf(128, 64, **options), leaf(64, 128, **options)
    packed = leaf(16, 2, 8, **options)
    outs = [
        cudnn_ops.scaled_dot_product_attention(query, key, key, enable_gqa=True, is_causal=True),
        cudnn_ops.scaled_dot_product_attention(query, query, query, window_size=(4, 0)),
        cudnn_ops.conv2d(image, kernel, padding=1, activation="relu"),
        cudnn_ops.linear(x, w1, activation="relu"),
        cudnn_ops.mlp(x, w1, None, w2, None, "gelu"),
        cudnn_ops.rms_norm(x, (64,)),
        cudnn_ops.swiglu(x, x),
    ]
    lengths = torch.tensor([0, 16], dtype=torch.int32, device=packed.device)
    outs.append(cudnn_ops.varlen_attention(packed, packed, packed, lengths, lengths, 16, 16))
    torch.stack([out.float().sum() for out in outs]).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_torch_s_counter(device):
    options = {"device": device, "dtype": torch.bfloat16}
    everything(**options)
    with FlopCounterMode(display=False) as counter:
        everything(**options)
    with cudnn_ops.profile() as found:
        everything(**options)
    counted = sum(row.flops * row.calls for row in found.rows if row.flops is not None)
    assert counted == counter.get_total_flops()
    without = {row.op for row in found.rows if row.flops is None}
    assert without == {"rms_norm", "norm_backward", "swiglu", "gated_backward"}
    assert all(row.ms > 0 and row.calls == 1 for row in found.rows)
    assert [row.ms for row in found.rows] == sorted((row.ms for row in found.rows), reverse=True)
    assert {row.dtype for row in found.rows if not row.op.endswith("backward")} == {"bfloat16"}


def test_calls_of_one_shape_are_a_row():
    x = torch.randn(2, 64)
    with cudnn_ops.profile() as found:
        for _ in range(3):
            cudnn_ops.rms_norm(x, (64,))
        cudnn_ops.rms_norm(x[:1], (64,))
    assert sorted((row.op, row.shapes, row.calls) for row in found.rows) == [
        ("rms_norm", "[1, 64]", 1),
        ("rms_norm", "[2, 64]", 3),
    ]
    assert found.plans_built == found.plans_loaded == 0


def test_a_table_json_and_a_plot(tmp_path):
    with cudnn_ops.profile() as found:
        everything()
    first, *_, last = str(found).splitlines()
    assert first.split()[:5] == ["operator", "shapes", "calls", "ms", "TFLOP/s"]
    assert "plans built: 0, loaded: 0" in last
    found.save(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())
    assert [row["op"] for row in saved["rows"]] == [row.op for row in found.rows]
    assert saved["rows"][0]["tflops"] == found.rows[0].tflops
    found.plot(tmp_path / "found.svg", most=3)
    assert (tmp_path / "found.svg").read_text().count("<svg") == 1


def test_the_share_of_the_peak():
    row = monitor.OperatorProfile("sdpa", "", "bfloat16", calls=10, ms=2.0, flops=10**11)
    assert row.tflops == pytest.approx(500)
    shares = {
        "NVIDIA H200": 500 / 989,
        "NVIDIA L40S": 500 / 362,
        "NVIDIA L4": 500 / 121,
        "NVIDIA Unheard Of": None,
    }
    for device, share in shares.items():
        assert monitor.Profile(device).share_of_peak(row) == share
    row.dtype = "float32"
    assert monitor.Profile("NVIDIA H200").share_of_peak(row) is None
    row.flops = None
    assert row.tflops is None


def test_engines_and_workspace_are_read_from_names():
    """As csrc/graph/profile_names.cpp writes them, with and without the parameters behind."""
    name = "cuDNN eng9_k24=7 of cudnn_ops::sdpa (4096 bytes of workspace)"
    for text in (name, name + ": sdpa query=bf16[1, 4, 64, 64]"):
        match = monitor._PLAN.match(text)
        assert match is not None
        assert match.groups() == ("eng9_k24=7", "4096")


def test_nothing_to_draw(tmp_path, monkeypatch):
    with cudnn_ops.profile() as found:
        pass
    assert str(found).splitlines()[-1] == f"{found.device}: 0 ms; plans built: 0, loaded: 0"
    with pytest.raises(ValueError, match=r"no operator of cudnn_ops was called"):
        found.plot(tmp_path / "found.svg")

    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(figure, "import_module", missing)
    found.rows.append(monitor.OperatorProfile("sdpa", "", ""))
    with pytest.raises(RuntimeError, match=r"Profile.plot needs matplotlib: `pip install"):
        found.plot(tmp_path / "found.svg")


@pytest.mark.gpu
def test_on_a_gpu(fresh_cache):
    def step() -> None:
        x = leaf(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
        cudnn_ops.scaled_dot_product_attention(x, x, x).sum().backward()

    with cudnn_ops.profile() as first:
        step()
    assert first.plans_built == 2
    with cudnn_ops.profile() as found:
        step()
    assert found.plans_built == 0
    assert {row.op for row in found.rows} == {"sdpa", "sdpa_backward"}
    for row in found.rows:
        assert row.engines
        assert row.workspace_bytes >= 0
        assert 0.001 < row.ms < 1  # kernels alone, without the host
        assert row.tflops is not None
