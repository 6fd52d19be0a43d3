"""Real cuDNN plans of convolutions for GPUs that are not there, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cudnn_ops import plan_requests
from cudnn_ops.ops.conv import ACTIVATIONS
from cudnn_ops.support import explain

BF16 = torch.bfloat16
#: Operator, input, weight, options.
CASES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("conv2d", (32, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    ("conv2d", (32, 256, 14, 14), (1024, 256, 1, 1), {}),
    ("conv2d", (32, 128, 28, 28), (128, 128, 3, 3), {"padding": 1, "stride": 2}),
    ("conv2d", (8, 3, 224, 224), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
    ("conv2d", (8, 96, 28, 28), (96, 1, 7, 7), {"padding": "same", "groups": 96}),
    ("conv2d", (8, 64, 28, 28), (64, 16, 3, 3), {"padding": 2, "groups": 4, "dilation": 2}),
    ("conv1d", (8, 80, 3000), (384, 80, 3), {"padding": 1}),
    ("conv3d", (2, 16, 8, 28, 28), (32, 16, 3, 3, 3), {"padding": 1}),
)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_shapes(case, device):
    op, x, weight, options = case
    for dtype in (BF16, torch.float32):
        answer = explain(op, (x, dtype), (weight, dtype), bias=True, device=device, **options)
        assert answer.supported, answer.reason
        answer = explain(f"{op}_backward", (x, dtype), (weight, dtype), device=device, **options)
        assert answer.supported, answer.reason


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_whole_epilogues_in_one_graph(activation, device):
    op, x, weight, options = CASES[0]
    for residual, training in itertools.product((False, True), (False, True)):
        answer = explain(
            op,
            (x, BF16),
            (weight, BF16),
            bias=True,
            residual=residual,
            activation=activation,
            with_before=training and activation not in ("none", "relu"),
            device=device,
            **options,
        )
        assert answer.supported, answer.reason
        assert not answer.reason


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_what_is_large_takes_kernels_that_are_at_hand(device):
    """Bias and residual are added in the order that they are made for."""

    def engine(batch: int, activation: str) -> str:
        shapes = ((batch, 64, 56, 56), BF16), ((256, 64, 1, 1), BF16)
        options: dict[str, Any] = {"bias": True, "residual": True, "activation": activation}
        return explain("conv2d", *shapes, **options, device=device).engine.split("_")[0]

    for activation in ("none", "relu"):
        assert engine(32, activation) != engine(8, activation)
    assert engine(32, "silu") == engine(8, "silu")


def test_what_cannot_be_fused_is_said():
    """A depthwise convolution has no engine with an epilogue."""
    op, x, weight, options = CASES[4]
    arguments = ((x, BF16), (weight, BF16))
    answer = explain(op, *arguments, bias=True, activation="silu", device="h200", **options)
    assert answer.supported
    assert not answer.reason or "in one graph, the rest by torch's operators" in answer.reason


def test_deterministic_and_without_tf32():
    op, x, weight, options = CASES[0]
    arguments = ((x, torch.float32), (weight, torch.float32))
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    try:
        for step in ("", "_backward"):
            answer = explain(f"{op}{step}", *arguments, device="h200", **options)
            assert answer.supported, answer.reason
    finally:
        torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.allow_tf32 = allowed


def test_an_engine_by_name_brings_no_tf32_in(engine_table):
    """One that the heuristics do not name, and that cuDNN has."""
    op, x, weight, options = CASES[0]
    shapes = (x, torch.float32), (weight, torch.float32)
    options = {"bias": True, "activation": "silu", **options}

    def is_taken(engine: str) -> bool:
        engine_table(plan_requests(op, *shapes, training=False, **options), engine)
        return explain(op, *shapes, device="h200", **options).engine == engine

    with torch.backends.cudnn.flags(allow_tf32=True):
        assert is_taken("eng7_k24=3")
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert not is_taken("eng7_k24=3")
