"""Convolutions of images in groups, by a kernel of ours: results, layouts, choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cudnn_ops.support import explain
from tests.cases import conv as cases
from tests.cases.conv import ConvCase, other_engines
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
_ops = torch.ops.cudnn_ops
DTYPES = (torch.bfloat16, torch.float16)
MEASURED, NEVER, ALWAYS = range(3)


@contextmanager
def using(use: int) -> Iterator[None]:
    """Our kernel for all that it can compute, or for nothing."""
    _ops._conv_use_grouped(use)
    try:
        yield
    finally:
        _ops._conv_use_grouped(MEASURED)


@pytest.fixture
def ours() -> Iterator[None]:
    with using(ALWAYS):
        yield


def image(
    batch: int,
    size: tuple[int, int],
    groups: int,
    inputs: int,
    outputs: int | None = None,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | str = (1, 1),
    dilation: tuple[int, int] = (1, 1),
) -> ConvCase:
    """By channels of a group, in and out."""
    channels = groups * inputs, groups * (outputs or inputs)
    return ConvCase(batch, *channels, size, kernel, stride, padding, dilation, groups)


#: Widths of a part of a stage, of whole ones and of several; tiles of pixels and of outputs that
#: end early; images that are smaller than a kernel, and more pixels than one block has.
IMAGES = {
    **{f"{width} a group": image(2, (9, 7), 3, width) for width in range(8, 137, 8)},
    "8 to 64": image(2, (14, 15), 2, 8, 64),
    "64 to 8": image(2, (14, 15), 2, 64, 8),
    "24 to 72": image(1, (12, 13), 3, 24, 72),
    "232 to 40": image(1, (5, 6), 2, 232, 40),
    "strided": image(2, (15, 14), 2, 56, stride=(2, 2)),
    "strided, no padding": image(2, (15, 14), 2, 56, stride=(2, 2), padding=(0, 0)),
    "strided, far padding": image(2, (7, 6), 2, 40, stride=(2, 2), padding=(4, 3)),
    "strided, 32 to 72": image(2, (15, 14), 2, 32, 72, stride=(2, 2)),
    "strided, even kernel": image(2, (15, 14), 2, 24, kernel=(4, 2), stride=(2, 2)),
    "strided, one row": image(2, (1, 40), 2, 24, stride=(2, 2)),
    "strided one way": image(2, (15, 14), 2, 24, stride=(1, 2)),
    "strides of two sizes": image(2, (15, 14), 2, 24, stride=(1, 3)),
    "stride beyond the kernel": image(2, (15, 14), 2, 24, kernel=(2, 2), stride=(4, 4)),
    "dilated": image(2, (15, 14), 2, 48, padding=(2, 2), dilation=(2, 2)),
    "dilated one way": image(2, (15, 14), 2, 40, padding=(1, 3), dilation=(1, 3)),
    "one tap": image(2, (9, 11), 4, 40, kernel=(1, 1), padding=(0, 0)),
    "one tap, strided": image(2, (9, 11), 4, 16, kernel=(1, 1), stride=(2, 2), padding=(0, 0)),
    "one tap, padded": image(2, (3, 4), 2, 24, kernel=(1, 1), padding=(2, 1)),
    "even kernel": image(2, (12, 19), 2, 24, kernel=(4, 2), padding="same"),
    "kernel of two sizes": image(2, (12, 19), 2, 24, kernel=(1, 5), padding=(0, 2)),
    "seven taps": image(1, (12, 13), 2, 56, kernel=(7, 7), padding=(3, 3)),
    "far padding": image(1, (4, 3), 2, 56, padding=(6, 5)),
    "no padding": image(2, (9, 8), 2, 56, padding=(0, 0)),
    "one pixel": image(3, (1, 1), 2, 112),
    "one row": image(2, (1, 200), 2, 56),
    "one column": image(2, (200, 1), 2, 24),
    "many groups": image(2, (6, 6), 100, 8),
    "many images": image(300, (7, 7), 2, 24),
    "many pixels": image(2, (120, 100), 2, 56),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_grouped_images(name, is_whole, device, ours, poisoned):
    activation = "silu" if is_whole else "none"
    case = replace(IMAGES[name], residual=is_whole, bias=is_whole, activation=activation)
    for dtype in DTYPES:
        cases.check(case, cases.make(case, dtype, device, seed=51))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_grouped_images_with_every_activation(activation, device, ours, poisoned):
    case = replace(image(2, (14, 14), 2, 56), activation=activation)
    for dtype in DTYPES:
        cases.check(case, cases.make(case, dtype, device, seed=52))


@pytest.mark.gpu
def test_layouts_and_addresses(ours):
    """Contiguous tensors, and ones that start at an address that is no multiple of 16."""
    case = replace(image(2, (9, 10), 2, 24), activation="gelu", residual=True)
    t = cases.make(case, torch.bfloat16, "cuda", seed=53)
    expected = cases.run(case, t)
    for lay_out in (torch.Tensor.contiguous, cases.behind):
        changed = {name: lay_out(tensor.detach()) for name, tensor in t.differentiable.items()}
        assert torch.equal(cases.run(case, replace(t, **changed)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_values_near_the_limits_and_what_is_not_a_number(device, ours):
    """A wrong number stays in its group and in the reach of the kernel."""
    case = replace(image(1, (12, 12), 2, 24), bias=False)
    t = cases.make(case, torch.float16, device, seed=54)
    with torch.no_grad():
        t.input[0, 3, 5, 5] = torch.nan
        out = cases.run(case, t)
        wrong = out.isnan().nonzero()
        assert set(wrong[:, 1].tolist()) == set(range(24))
        assert set(wrong[:, 2].tolist()) == set(wrong[:, 3].tolist()) == {4, 5, 6}
        t.input.fill_(torch.finfo(torch.float16).max)
        t.weight.fill_(1)
        assert cases.run(case, t).isinf().all()
        t.weight.fill_(2.0**-9)
        found = cases.run(case, t)[0, :, 1:-1, 1:-1]
        torch.testing.assert_close(found, torch.full_like(found, 65504 * 9 * 24 / 512))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [("input",), ("weight",), ("bias",), ("input", "bias")])
def test_frozen_parts(wanted, device, ours):
    case = replace(image(2, (9, 10), 2, 40), activation="relu")
    t = cases.make(case, torch.bfloat16, device, seed=55)
    leaves = t.differentiable
    every = torch.autograd.grad(cases.run(case, t), list(leaves.values()), t.grad_out)
    expected = dict(zip(leaves, every, strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted)
    found = torch.autograd.grad(cases.run(case, t), [leaves[n] for n in wanted], t.grad_out)
    for name, grad in zip(wanted, found, strict=True):
        assert torch.equal(grad, expected[name])


@pytest.mark.gpu
def test_our_kernel_runs_where_it_is_asked_for():
    case = image(2, (14, 14), 2, 56)
    t = cases.make(case, torch.bfloat16, "cuda", seed=56)
    for use in (MEASURED, NEVER):
        with using(use), profile(activities=[ProfilerActivity.CUDA]) as profiled:
            cases.run(case, t).backward(t.grad_out)
            torch.cuda.synchronize()
        calls = {e.key: e.count for e in profiled.key_averages() if "grouped_conv" in e.key}
        assert sum(calls.values()) == (0 if use == NEVER else 2)


@pytest.mark.gpu
def test_a_cuda_graph_is_replayed(ours):
    case = replace(image(2, (14, 14), 2, 56), activation="gelu")
    t = cases.make(case, torch.bfloat16, "cuda", seed=57)
    cases.check_a_replayed_graph(case, t)


FORWARD, GRADIENT = ["cudnn_ops", "", ""], ["", "cudnn_ops", ""]
BOTH, NEITHER = ["cudnn_ops", "cudnn_ops", ""], [""] * 3


def test_what_is_chosen():
    square = image(8, (14, 14), 4, 24)
    with using(ALWAYS):
        for case in IMAGES.values():
            has_gradient = case.stride == (1, 1) or (
                max(case.stride) == 2 and case.dilation == (1, 1)
            )
            assert other_engines(case) == (BOTH if has_gradient else FORWARD)
        assert other_engines(image(2, (9, 7), 3, 12)) == NEITHER
        assert other_engines(image(2, (9, 7), 1, 24)) == NEITHER
        assert other_engines(square, torch.float32) == NEITHER
    with using(NEVER):
        assert other_engines(square) == NEITHER
    assert other_engines(square) == BOTH
    assert other_engines(replace(square, stride=(2, 2))) == BOTH
    assert other_engines(replace(square, stride=(2, 3))) == FORWARD
    assert other_engines(replace(square, stride=(2, 2), dilation=(2, 2))) == FORWARD
    for width in (64, 128):
        assert other_engines(image(8, (14, 14), 4, width, stride=(2, 2))) == GRADIENT
    assert other_engines(image(8, (14, 14), 4, 32, stride=(2, 2))) == NEITHER
    strided_pointwise = image(8, (14, 14), 4, 24, kernel=(1, 1), padding=(0, 0), stride=(2, 2))
    assert other_engines(strided_pointwise) == FORWARD
    for width in (40, 48, 56, 72, 96, 112):
        assert other_engines(image(8, (14, 14), 4, width)) == BOTH
    for width in (8, 32, 64, 128, 136, 232):
        assert other_engines(image(8, (14, 14), 4, width)) == NEITHER
    assert other_engines(image(8, (14, 14), 4, 16)) == FORWARD
    assert other_engines(image(8, (14, 14), 8, 16)) == NEITHER
    assert other_engines(image(8, (14, 14), 4, 32, 64)) == BOTH
    pointwise = image(8, (14, 14), 4, 32, kernel=(1, 1), padding=(0, 0))
    assert other_engines(pointwise) == BOTH
    assert other_engines(image(8, (14, 14), 4, 56, kernel=(5, 5), padding=(2, 2))) == NEITHER
    assert other_engines(image(64, (56, 56), 2, 24)) == NEITHER
    assert other_engines(image(8, (56, 56), 2, 24)) == BOTH


def test_explain_names_the_kernel():
    x, weight = ((8, 224, 56, 56), torch.bfloat16), ((224, 56, 3, 3), torch.bfloat16)
    options = {"padding": 1, "groups": 4}
    answer = explain("conv2d", x, weight, device="H200", activation="relu", **options)
    assert (answer.supported, answer.engine) == (True, "cudnn_ops")
    assert "computes the whole epilogue, and for groups of this many channels" in answer.reason
    answer = explain("conv2d_backward", x, weight, device="H200", **options)
    assert answer.supported
    assert "for groups of this many channels it is faster than cuDNN's" in answer.reason
