"""Real cuDNN plans of batch norms for GPUs that are not there, and what runs without one."""

from __future__ import annotations

import pytest
import torch

import cudnn_ops
from cudnn_ops.support import explain

GPUS = ("a100", "h200", "b200")
SHAPES = [(32, 64, 14, 14), (2, 448, 9, 7), (8, 64, 301), (2, 128, 4, 9, 9)]
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training(shape, device):
    for dtype in HALVES:
        for op in ("batch_norm", "batch_norm_backward"):
            training = {} if op.endswith("backward") else {"training": True}
            answer = explain(op, (shape, dtype), device=device, channels_last=True, **training)
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
    relu = {"activation": "relu"}
    for spec, options, engine, reason in (
        ((images, torch.bfloat16), {}, "torch", "the channels last in memory"),
        (((4, 12, 9, 7), torch.float16), {"channels_last": True}, "torch", "multiple of 8"),
        (((4, 6, 9, 7), torch.float32), {"channels_last": True}, "torch", "of 4 in float32"),
        ((images, torch.float16, last), {"residual": True}, "cudnn_ops", "faster than cuDNN's"),
        ((images, torch.bfloat16, last), relu, "cudnn_ops", "a sum or a ReLU they are faster"),
        ((images, torch.float32, last), {}, "cudnn_ops", "for float16 and bfloat16"),
        (((2, 64, 1, 2, 3, 4), torch.half), {"channels_last": True}, "cudnn_ops", "three dim"),
        (((9, 24, 9, 9), torch.half), {"channels_last": True}, "cudnn_ops", "64 channels alone"),
        (((512, 64), torch.half), {}, "cudnn_ops", "64 channels alone"),
        (((1 << 20, 64, 8, 8), torch.half), {"channels_last": True}, "cudnn_ops", "in 32 bits"),
    ):
        for op in ("batch_norm", "batch_norm_backward"):
            training = {} if op.endswith("backward") else {"training": True}
            answer = explain(op, spec, device="h200", **training, **options)
            assert answer.supported
            assert answer.engine == engine
            assert reason in answer.reason
    answer = explain("batch_norm", (images, torch.bfloat16, last), training=False, device="h200")
    assert (answer.engine, "has no engine for it" in answer.reason) == ("cudnn_ops", True)


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
