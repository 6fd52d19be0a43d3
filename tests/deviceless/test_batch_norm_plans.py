"""Real cuDNN plans of batch norms for GPUs that are not there, and what runs without one."""

from __future__ import annotations

import pytest
import torch

import cudnn_ops
from cudnn_ops.support import explain

GPUS = ("a100", "h200", "b200")
SHAPES = [
    (32, 64, 14, 14),
    (4, 8, 9, 7),
    (257, 256),
    (3, 48, 1, 1),
    (8, 96, 301),
    (2, 128, 4, 9, 9),
]
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training(shape, device):
    for dtype in HALVES:
        for residual in (None, True):
            # A sum without ReLU is no plan's.
            for activation in ("none", "relu") if residual is None else ("relu",):
                options = {"residual": residual, "activation": activation, "channels_last": True}
                answer = explain(
                    "batch_norm", (shape, dtype), training=True, device=device, **options
                )
                assert answer.supported, answer.reason
                assert answer.engine.startswith("eng"), answer
                answer = explain("batch_norm_backward", (shape, dtype), device=device, **options)
                assert answer.supported, answer.reason
                assert answer.engine.startswith("eng"), answer


@pytest.mark.parametrize("device", GPUS)
def test_without_running_statistics(device):
    answer = explain(
        "batch_norm",
        ((32, 64, 14, 14), torch.bfloat16),
        training=True,
        running_mean=None,
        running_var=None,
        channels_last=True,
        device=device,
    )
    assert answer.supported, answer.reason
    assert answer.engine.startswith("eng"), answer


def test_where_no_plan_runs():
    """One sentence says why, and who runs instead."""
    images = (32, 64, 14, 14)
    last = (64 * 196, 1, 64 * 14, 64)
    for spec, options, engine, reason in (
        ((images, torch.bfloat16, last), {}, "cudnn_ops", "has no engine for it"),
        ((images, torch.bfloat16), {}, "torch", "the channels last in memory"),
        ((images, torch.float32, last), {}, "torch", "for float16 and bfloat16"),
        (((4, 12, 9, 7), torch.float16), {"channels_last": True}, "torch", "multiple of 8"),
        (((2, 8, 1, 2, 3, 4), torch.float16), {"channels_last": True}, "torch", "three dimensions"),
        ((images, torch.float16, last), {"residual": True}, "torch", "only before a ReLU"),
        (((1 << 20, 64, 8, 8), torch.float16), {"channels_last": True}, "torch", "in 32 bits"),
    ):
        training = engine == "torch"
        answer = explain("batch_norm", spec, training=training, device="h200", **options)
        assert answer.supported
        assert answer.engine == engine
        assert reason in answer.reason
        if training and "residual" not in options:
            answer = explain("batch_norm_backward", spec, device="h200", **options)
            assert (answer.engine, reason in answer.reason) == ("torch", True)


def test_masks_are_for_whole_blocks_of_channels():
    """Of other channels the ReLU is a pass of its own, before the plan of a norm without one."""
    for channels, has_mask in ((64, 1), (192, 1), (8, 0), (96, 0)):
        (plan,) = cudnn_ops.plan_requests(
            "batch_norm_backward",
            ((32, channels, 14, 14), torch.bfloat16),
            residual=True,
            activation="relu",
            channels_last=True,
        )
        assert f"has_mask={has_mask}, has_masked={has_mask}" in str(plan)


def test_requests():
    """The forward and the backward of training; by running statistics there is no plan."""
    spec = ((32, 64, 14, 14), torch.bfloat16)
    training = cudnn_ops.plan_requests("batch_norm", spec, channels_last=True)
    assert [request.op for request in training] == ["batch_norm", "batch_norm_backward"]
    assert cudnn_ops.plan_requests("batch_norm", spec, channels_last=True, training=False) == []
    report = cudnn_ops.warmup(training, device="h200", progress=False)
    assert not report.refused


def test_mistakes():
    spec = ((32, 64, 14, 14), torch.bfloat16)
    with pytest.raises(ValueError, match="activation must be one of none, relu, got 'silu'"):
        explain("batch_norm", spec, activation="silu", device="h200")
    with pytest.raises(ValueError, match="residual must be of input's shape"):
        explain("batch_norm", spec, residual=((3,), torch.bfloat16), device="h200")
    with pytest.raises(TypeError, match="batch_norm has no argument channel_last; did you mean"):
        explain("batch_norm", spec, channel_last=True, device="h200")
