"""Real cuDNN plans of convolutions for GPUs that are not there, forward and backward."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cudnn_ops import plan_requests
from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.support import explain

_ops = torch.ops.cudnn_ops
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
        is_whole = activation not in ("hardswish", "relu6")
        assert not answer.reason if is_whole else "graphs have no such activation" in answer.reason


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


#: Whether the convolution runs bare: operator, input, weight, dtype, activation, options.
BARE = {
    "depthwise": ("conv2d", (8, 96, 28, 28), (96, 1, 7, 7), BF16, "silu", {"groups": 96}),
    "its multiplier": ("conv2d", (8, 96, 28, 28), (192, 1, 3, 3), BF16, "relu", {"groups": 96}),
    "in half": ("conv2d", (8, 96, 28, 28), (96, 1, 7, 7), torch.half, "silu", {"groups": 96}),
    "of relu": ("conv2d", (8, 96, 28, 28), (96, 1, 3, 3), torch.half, "relu", {"groups": 96}),
    "in one dimension": ("conv1d", (8, 96, 1500), (192, 1, 31), BF16, "none", {"groups": 96}),
    "in three": ("conv3d", (2, 32, 8, 9, 9), (32, 1, 3, 3, 3), BF16, "silu", {"groups": 32}),
    "few channels a group": ("conv2d", (8, 64, 9, 9), (64, 8, 3, 3), BF16, "silu", {"groups": 8}),
    "odd channels": ("conv2d", (8, 33, 9, 9), (65, 33, 3, 3), BF16, "silu", {}),
    "odd channels of relu": ("conv2d", (8, 33, 9, 9), (65, 33, 3, 3), BF16, "relu", {}),
    "three outputs of relu": ("conv2d", (8, 64, 9, 9), (3, 64, 3, 3), BF16, "relu", {}),
    "one pixel of relu": ("conv2d", (8, 64, 7, 7), (128, 64, 7, 7), torch.float32, "relu", {}),
    "twelve of relu": ("conv2d", (8, 96, 9, 9), (192, 12, 3, 3), BF16, "relu", {"groups": 8}),
    "48 a group, of relu": ("conv2d", (8, 96, 9, 9), (96, 48, 3, 3), BF16, "relu", {"groups": 2}),
    "96 a group, of relu": ("conv2d", (8, 192, 9, 9), (192, 96, 3, 3), BF16, "relu", {"groups": 2}),
    "16 to 32 of relu": ("conv2d", (8, 96, 9, 9), (192, 16, 3, 3), BF16, "relu", {"groups": 6}),
    "more outputs of relu": ("conv2d", (8, 64, 9, 9), (128, 32, 3, 3), BF16, "relu", {"groups": 2}),
    "49 taps of relu": ("conv2d", (8, 64, 9, 9), (64, 32, 7, 7), BF16, "relu", {"groups": 2}),
    "25 taps of relu": ("conv2d", (8, 128, 9, 9), (128, 64, 5, 5), BF16, "relu", {"groups": 2}),
    "many of 56": ("conv2d", (64, 112, 28, 28), (112, 56, 3, 3), BF16, "silu", {"groups": 2}),
    "many of 64": ("conv2d", (64, 128, 28, 28), (128, 64, 3, 3), BF16, "silu", {"groups": 2}),
    "odd groups of relu": ("conv2d", (8, 66, 9, 9), (66, 33, 3, 3), BF16, "relu", {"groups": 2}),
}
FUSED = {
    "depthwise, few taps": (
        "conv2d",
        (8, 96, 9, 9),
        (96, 1, 3, 3),
        torch.half,
        "silu",
        {"groups": 96},
    ),
    "in three, many taps": (
        "conv3d",
        (1, 32, 9, 9, 9),
        (32, 1, 5, 5, 5),
        BF16,
        "silu",
        {"groups": 32},
    ),
    "many channels a group": ("conv2d", (8, 64, 9, 9), (64, 32, 3, 3), BF16, "silu", {"groups": 2}),
    "few of 56": ("conv2d", (8, 112, 9, 9), (112, 56, 3, 3), BF16, "silu", {"groups": 2}),
    "many of 48": ("conv2d", (64, 96, 28, 28), (96, 48, 3, 3), BF16, "silu", {"groups": 2}),
    "64 a group, of relu": ("conv2d", (8, 128, 9, 9), (128, 64, 3, 3), BF16, "relu", {"groups": 2}),
    "one pixel": ("conv2d", (8, 64, 7, 7), (128, 64, 7, 7), torch.float32, "silu", {}),
    "three channels": ("conv2d", (8, 3, 9, 9), (32, 3, 3, 3), BF16, "silu", {}),
}


@pytest.fixture
def without_our_kernels() -> Iterator[None]:
    """As where cuDNN's depthwise convolutions and those in groups are the faster ones."""
    _ops._conv_use_depthwise(0, 1)
    _ops._conv_use_grouped(1)
    yield
    _ops._conv_use_grouped(0)
    _ops._conv_use_depthwise(0, 0)


@pytest.mark.usefixtures("without_our_kernels")
@pytest.mark.parametrize("name", [*BARE, *FUSED])
def test_where_cudnn_is_faster_without_the_epilogue(name):
    """Then its plan is that of the bare convolution, and it is said why."""
    op, x, weight, dtype, activation, options = {**BARE, **FUSED}[name]
    arguments = op, (x, dtype), (weight, dtype)
    plans = [
        plan_requests(*arguments, training=False, **options, **epilogue)
        for epilogue in ({}, {"bias": True, "activation": activation})
    ]
    assert (plans[0] == plans[1]) == (name in BARE)
    answer = explain(*arguments, bias=True, activation=activation, device="h200", **options)
    assert answer.supported
    if name in BARE:
        why = "only the convolution in one graph, the rest in one more pass: .* that torch runs"
        assert re.search(why, answer.reason)
        assert answer.engine == explain(*arguments, device="h200", **options).engine
    else:
        assert not answer.reason


#: Whether a kernel of ours runs: dtype, input, kernel, options; of the forward, then of the
#: gradients of the input and of the weight.
BY_OUR_KERNEL: dict[str, tuple[torch.dtype, tuple[int, int, int], int, dict[str, Any], str]] = {
    "an even kernel": (BF16, (8, 2048, 2048), 4, {"padding": 3}, "111"),
    "a long one": (torch.half, (8, 512, 1500), 31, {"padding": "same"}, "111"),
    "a short one": (torch.float32, (8, 2048, 1024), 3, {"padding": 1}, "111"),
    "dilated": (BF16, (8, 2048, 2048), 4, {"dilation": 2}, "111"),
    "strided": (BF16, (8, 2048, 2048), 4, {"stride": 2}, "111"),
    "one channel": (BF16, (8, 1, 2048), 4, {}, "000"),
    "a reach beyond 32 bits": (BF16, (1, 2, 64), 2, {"padding": 1 << 30}, "000"),
}


@pytest.mark.parametrize("name", BY_OUR_KERNEL)
def test_where_a_kernel_of_ours_runs(name):
    """Then no plan is built, and it is said why."""
    dtype, x, taps, options, ours = BY_OUR_KERNEL[name]
    shapes = (x, dtype), ((x[1], 1, taps), dtype)
    options = {"groups": x[1], **options}
    epilogue = {"bias": True, "residual": True, "activation": "silu"}
    assert len(plan_requests("conv1d", *shapes, **options, **epilogue)) == ours.count("0")
    if name == "a reach beyond 32 bits":
        return
    forward = explain("conv1d", *shapes, **options, **epilogue, device="h200")
    backward = explain("conv1d_backward", *shapes, **options, device="h200")
    assert forward.supported
    assert backward.supported
    engines = forward.engine, *backward.engine.split(", ")
    assert [engine == "cudnn_ops" for engine in engines] == [digit == "1" for digit in ours]
    for answer in (forward, backward):
        says_why = re.search("a kernel of cudnn_ops runs: .* faster than cuDNN's", answer.reason)
        assert bool(says_why) == ("cudnn_ops" in answer.engine.split(", "))


def test_a_kernel_of_ours_runs_for_depthwise_rows_alone():
    for op, x, weight, groups in (
        ("conv1d", (8, 64, 500), (128, 1, 4), 64),
        ("conv1d", (8, 64, 500), (64, 2, 4), 32),
        ("conv2d", (8, 64, 30, 30), (64, 1, 4, 4), 64),
    ):
        assert len(plan_requests(op, (x, BF16), (weight, BF16), groups=groups)) == 3


#: Whether a product of matrices runs: dtype, input, kernel, options; of the forward, then of the
#: gradients of the input and of the weight.
BY_PRODUCT: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...], dict[str, Any], str]] = {
    "a whole image": (BF16, (8, 64, 7, 7), (7, 7), {}, "111"),
    "a whole row, strided": (torch.half, (9, 64, 30), (30,), {"stride": 2}, "111"),
    "a whole volume": (BF16, (8, 16, 3, 4, 5), (3, 4, 5), {}, "111"),
    "a column": (BF16, (8, 64, 7, 1), (7, 1), {"dilation": (1, 3)}, "111"),
    "few samples": (BF16, (7, 64, 7, 7), (7, 7), {}, "110"),
    "single precision": (torch.float32, (8, 64, 7, 7), (7, 7), {}, "000"),
    "one pixel": (BF16, (8, 64, 1, 1), (1, 1), {}, "000"),
    "padded": (BF16, (8, 64, 7, 7), (7, 7), {"padding": 1}, "000"),
    "less than all": (BF16, (8, 64, 7, 8), (7, 7), {}, "000"),
    "grouped": (BF16, (8, 64, 7, 7), (7, 7), {"groups": 2}, "000"),
}


@pytest.mark.parametrize("name", BY_PRODUCT)
def test_where_a_product_of_matrices_runs(name):
    dtype, x, kernel, options, by_product = BY_PRODUCT[name]
    op = f"conv{len(kernel)}d"
    shapes = (x, dtype), ((32, x[1] // options.get("groups", 1), *kernel), dtype)
    epilogue = {"bias": True, "activation": "silu"}
    forward = explain(op, *shapes, **options, **epilogue, device="h200")
    backward = explain(f"{op}_backward", *shapes, **options, device="h200")
    engines = forward.engine, *backward.engine.split(", ")
    assert [engine == "torch" for engine in engines] == [digit == "1" for digit in by_product]
    for answer in (forward, backward):
        assert answer.supported
        says_why = "a matrix product of torch runs: the kernel is as large" in answer.reason
        assert says_why == ("torch" in answer.engine.split(", "))


@pytest.mark.usefixtures("without_our_kernels")
def test_a_convolution_without_an_epilogue_is_not_explained():
    op, x, weight, dtype, _, options = BARE["depthwise"]
    assert not explain(op, (x, dtype), (weight, dtype), device="h200", **options).reason


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
