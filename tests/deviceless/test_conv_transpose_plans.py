"""Plans of transposed convolutions, forward and backward, for GPUs that are not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from cudnn_ops import _C, plan_requests, warmup
from cudnn_ops.support import explain

BF16 = torch.bfloat16
#: U-Net, DCGAN, a super-resolution net, EnCodec, a volume; operator, input, weight, options.
CASES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("conv_transpose2d", (8, 128, 32, 32), (128, 64, 2, 2), {"stride": 2}),
    ("conv_transpose2d", (8, 256, 8, 8), (256, 128, 4, 4), {"stride": 2, "padding": 1}),
    (
        "conv_transpose2d",
        (8, 64, 28, 28),
        (64, 64, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    ("conv_transpose1d", (4, 512, 400), (512, 256, 16), {"stride": 8, "padding": 4}),
    ("conv_transpose3d", (2, 64, 8, 8, 8), (64, 32, 2, 2, 2), {"stride": 2}),
    ("conv_transpose2d", (8, 64, 14, 14), (64, 8, 4, 4), {"stride": 2, "groups": 4}),
)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_shapes(case, device):
    op, x, weight, options = case
    for dtype in (BF16, torch.float32):
        shapes = (x, dtype), (weight, dtype)
        answer = explain(op, *shapes, bias=True, activation="relu", device=device, **options)
        assert answer.supported, answer.reason
        answer = explain(f"{op}_backward", *shapes, device=device, **options)
        assert answer.supported, answer.reason


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("case", CASES[:4:3], ids=lambda case: case[0])
def test_whole_epilogues_in_one_graph(case, device):
    """In training too, where the activation's input is a result."""
    op, x, weight, options = case
    for activation in ("none", "relu", "silu", "gelu_tanh"):
        answer = explain(
            op,
            (x, BF16),
            (weight, BF16),
            bias=True,
            residual=True,
            activation=activation,
            with_before=activation not in ("none", "relu"),
            device=device,
            **options,
        )
        assert answer.supported, answer.reason
        assert not answer.reason


def test_the_epilogue_of_a_volume():
    """A pass of its own with cuDNN 9.19, which has no graph with it; in the graph with 9.28."""
    op, x, weight, options = CASES[4]
    answer = explain(op, (x, BF16), (weight, BF16), bias=True, device="h200", **options)
    assert answer.supported
    if _C.cudnn_version() >= 92800:
        assert not answer.reason
    else:
        assert re.search("before version 9.28 cuDNN has no transposed .* volumes", answer.reason)
    # The plan that runs, and no other, is what a warm-up builds.
    requests = plan_requests(op, (x, BF16), (weight, BF16), bias=True, **options)
    assert not warmup(requests, device="h200", progress=False).refused


#: Where the epilogue stays out of the graph: input, weight, dtype, options.
BARE: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "groups": ((8, 64, 14, 14), (64, 32, 4, 4), BF16, {"groups": 2}),
    "depthwise": ((8, 64, 14, 14), (64, 1, 4, 4), BF16, {"groups": 64}),
    "three outputs": ((8, 64, 14, 14), (64, 3, 4, 4), BF16, {}),
    "odd inputs": ((8, 33, 14, 14), (33, 64, 4, 4), BF16, {}),
}


@pytest.mark.parametrize("name", BARE)
def test_where_the_epilogue_is_another_pass(name):
    x, weight, dtype, options = BARE[name]
    arguments = "conv_transpose2d", (x, dtype), (weight, dtype)
    options = {"stride": 2, "padding": 1, **options}
    plans = [
        plan_requests(*arguments, training=False, **options, **epilogue)
        for epilogue in ({}, {"bias": True, "activation": "silu"})
    ]
    assert plans[0] == plans[1]
    answer = explain(*arguments, bias=True, activation="silu", device="h200", **options)
    assert answer.supported
    assert re.search("for groups and for channels .* the one that torch runs", answer.reason)


@pytest.mark.parametrize(
    ("inputs", "kernel", "stride", "is_bare"),
    [(512, 2, 2, True), (504, 2, 2, False), (128, 4, 2, True), (504, 1, 1, False)],
)
def test_images_with_many_products_a_number(inputs, kernel, stride, is_bare):
    shapes = ((2, inputs, 14, 14), BF16), ((inputs, 64, kernel, kernel), BF16)
    options = {"stride": stride, "bias": True, "activation": "relu", "device": "h200"}
    answer = explain("conv_transpose2d", *shapes, **options)
    assert answer.supported
    assert ("and a pass behind it" in answer.reason) == is_bare


def test_rows_with_many_products_a_number():
    shapes = ((2, 2048, 140), BF16), ((2048, 64, 4), BF16)
    answer = explain("conv_transpose1d", *shapes, stride=2, bias=True, device="h200")
    assert answer.supported
    assert not answer.reason


def test_float32_without_tf32():
    op, x, weight, options = CASES[0]
    shapes = (x, torch.float32), (weight, torch.float32)
    with torch.backends.cudnn.flags(allow_tf32=False):
        answer = explain(op, *shapes, bias=True, device="h200", **options)
        assert answer.supported
        assert "in float32 without TF32" in answer.reason
        assert explain(f"{op}_backward", *shapes, device="h200", **options).supported
    with torch.backends.cudnn.flags(allow_tf32=True):
        assert not explain(op, *shapes, bias=True, device="h200", **options).reason


def test_where_torch_s_kernel_runs():
    """No plan is built, and it is said why."""
    shapes = ((8, 64, 14, 14), BF16), ((64, 64, 3, 3), BF16)
    options = {"dilation": 2, "output_padding": 1, "bias": True, "activation": "silu"}
    assert not plan_requests("conv_transpose2d", *shapes, **options)
    for name in ("conv_transpose2d", "conv_transpose2d_backward"):
        answer = explain(name, *shapes, **options, device="h200")
        assert answer.supported
        assert set(answer.engine.split(", ")) == {"torch"}
        assert "output_padding that is not less than the stride" in answer.reason


def test_inputs_of_one_pixel_are_products():
    shapes = ((8, 128, 1, 1), BF16), ((128, 64, 4, 4), BF16)
    assert not plan_requests("conv_transpose2d", *shapes, bias=True)
    answer = explain("conv_transpose2d", *shapes, bias=True, device="h200")
    assert answer.engine == "torch"


def test_depthwise_rows_run_by_kernels_of_ours():
    shapes = ((8, 512, 100), BF16), ((512, 1, 4), BF16)
    options = {"groups": 512, "stride": 2, "padding": 1}
    assert not plan_requests("conv_transpose1d", *shapes, **options)
    assert explain("conv_transpose1d", *shapes, **options, device="h200").engine == "cudnn_ops"


def test_requests_name_the_plans():
    """The input's gradient is the plan of a convolution, which that may have built."""
    x, w = ((8, 64, 14, 14), BF16), ((64, 32, 4, 4), BF16)
    options = {"stride": 2, "padding": 1}
    forward, of_input, of_weight = plan_requests("conv_transpose2d", x, w, **options)
    assert (forward.op, of_input.op, of_weight.op) == ("conv", "conv", "conv_backward")
    mirror = plan_requests("conv2d", ((8, 32, 28, 28), BF16), w, training=False, **options)
    assert mirror == [of_input]
    assert forward != of_input
