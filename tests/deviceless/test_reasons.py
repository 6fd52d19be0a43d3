"""What cuDNN says in thousands of characters becomes one sentence; on request it is all there."""

from __future__ import annotations

import pytest
import torch

from cudnn_ops.support import explain

bf16 = torch.bfloat16
#: Operator, device, shapes, options, and what the sentence has to tell.
REFUSALS = [
    (
        "sdpa_backward",
        "a100",
        [((1, 2, 64, 256), bf16)],
        {"is_causal": True},
        "hidden_dim should be less than or equal to 128",
    ),
    ("sdpa_backward", "a100", [((1, 2, 128, 64), bf16)], {"softcap": 5.0}, "only Hopper is"),
    (
        "sdpa_backward",
        "b200",
        [((1, 2, 128, 512), bf16)],
        {"sinks": True, "dropout_p": 0.1},
        "With dropout, this engine only supports fprop inference",
    ),
    (
        "rms_norm",
        "b200",
        [((64, 513), torch.float64)],
        {"weight": True},
        "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE",
    ),
    (
        "conv2d_backward",
        "a100",
        [((2, 32, 8, 8), torch.float64), ((64, 8, 3, 3), torch.float64)],
        {"padding": 1, "groups": 4},
        "engines for such graphs supports this",
    ),
]


def reason(op: str, device: str, shapes: list, options: dict) -> str:
    return explain(op, *shapes, device=device, **options).reason


@pytest.mark.parametrize(("op", "device", "shapes", "options", "tells"), REFUSALS)
def test_a_sentence(op, device, shapes, options, tells):
    found = reason(op, device, shapes, options)
    assert tells in found
    assert len(found) < 300, found
    for noise in ("\n", "{", "Warning", "Reason:", " at: ", "cudnn_frontend", "DESCRIPTOR"):
        assert noise not in found


def test_the_whole_on_request(monkeypatch):
    op, device, shapes, options, tells = REFUSALS[2]
    monkeypatch.setenv("CUDNN_OPS_FULL_REASONS", "1")
    found = reason(op, device, shapes, options)
    assert tells in found
    assert found.count("Warning: CUDNN_STATUS_NOT_SUPPORTED") > 10
