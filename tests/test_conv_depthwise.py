"""Depthwise convolutions of images and volumes, by kernels of ours: results, layouts, choice."""

from __future__ import annotations

import math
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = range(3)
MEASURED, NEVER, ALWAYS = range(3)


@contextmanager
def using(use: int) -> Iterator[None]:
    """Our kernels for every step that they can compute, or for none."""
    for step in STEPS:
        _ops._conv_use_depthwise(step, use)
    try:
        yield
    finally:
        for step in STEPS:
            _ops._conv_use_depthwise(step, MEASURED)


@pytest.fixture
def ours() -> Iterator[None]:
    with using(ALWAYS):
        yield


def image(
    batch: int,
    channels: int,
    size: tuple[int, ...],
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str | None = None,
    dilation: int | tuple[int, ...] = 1,
) -> ConvCase:
    """With as many zeros on each side as keep the size, unless it says how many."""

    def each(number: int | tuple[int, ...]) -> tuple[int, ...]:
        return (number,) * len(size) if isinstance(number, int) else number

    taps, steps = each(kernel), each(dilation)
    if padding is None:
        padding = tuple(d * (k - 1) // 2 for k, d in zip(taps, steps, strict=True))
    pads = padding if isinstance(padding, str) else each(padding)
    strides = each(stride)
    return ConvCase(batch, channels, channels, size, taps, strides, pads, steps, channels)


#: Of three, five and seven taps, which have kernels of their own, with strides of 1 and 2: whole
#: tiles and those that end early, images smaller than a kernel, far and no padding, channels that
#: fill blocks and that do not, more images than a block has turns. Then images that blocks have
#: whole, and parts of larger ones, and all else.
IMAGES = {
    **{
        f"{kernel} taps, stride {stride}": image(2, 64, (14, 21), kernel, stride)
        for kernel in (3, 5, 7)
        for stride in (1, 2)
    },
    **{
        f"{kernel} taps, stride {stride}, odd": image(3, 72, (11, 17), kernel, stride, padding)
        for kernel, padding in ((3, 0), (5, 1), (7, 2))
        for stride in (1, 2)
    },
    **{
        f"{kernel} taps, stride {stride}, far padding": image(
            1, 6, (4, 3), kernel, stride, 2 * kernel
        )
        for kernel in (3, 5, 7)
        for stride in (1, 2)
    },
    "unlike padding": image(2, 16, (9, 10), 7, 1, (3, 0)),
    "unlike padding, stride 2": image(2, 16, (9, 10), 5, 2, (1, 2)),
    "small images": image(40, 130, (7, 7), 7),
    "one pixel": image(5, 12, (1, 1), 3),
    "one row": image(2, 34, (1, 40), 5),
    "one column": image(2, 34, (40, 1), 5),
    "two channels": image(2, 2, (13, 9), 3),
    "many channels": image(1, 2050, (5, 5), 3),
    "many images": image(700, 2, (8, 8), 3, 2),
    **{
        f"whole, {kernel} taps, stride {stride}, {columns} outputs": image(
            5, 136, (stride * columns, stride * columns), kernel, stride
        )
        for kernel in (3, 5, 7)
        for stride in (1, 2)
        for columns in (7, 14)
    },
    "whole, flat, far padding above": image(9, 8, (2, 14), 7, 1, (9, 3)),
    "whole, high": image(2, 24, (60, 7), 5),
    **{f"parts, {kernel} taps": image(2, 72, (31, 28), kernel) for kernel in (5, 7)},
    "parts, not full": image(1, 8, (9, 25), 7),
    "parts, more padding than the kernel reaches": image(1, 136, (3, 16), 7, 1, (9, 9)),
    "one image": image(1, 96, (56, 56), 7),
    "large": image(4, 96, (112, 112), 3, 2),
    "odd channels": image(2, 33, (12, 19), 3),
    "odd channels, stride 2": image(2, 7, (12, 19), 5, 2),
    "even kernel": image(2, 24, (12, 19), 4, 1, "same"),
    "even kernel, stride 2": image(2, 24, (12, 19), 2, 2, 0),
    "kernel of two sizes": image(2, 24, (12, 19), (3, 5)),
    "strides of two sizes": image(2, 24, (12, 19), 3, (2, 1)),
    "one tap": image(2, 24, (9, 8), 1),
    "stride 3": image(2, 16, (20, 23), 5, 3),
    "stride beyond the kernel": image(2, 16, (20, 23), 2, 5, 0),
    "dilated": image(2, 16, (20, 23), 3, dilation=2),
    "dilated one way": image(2, 16, (20, 23), 3, dilation=(1, 3)),
    "dilated and strided": image(2, 18, (20, 23), 3, 2, dilation=2),
    "nine taps": image(2, 16, (20, 23), 9),
    "thirty-one taps": image(1, 20, (35, 40), 31),
    "volume": image(2, 24, (5, 9, 10), 3),
    "volume, strided": image(2, 24, (5, 9, 10), 3, (1, 2, 2)),
    "volume, dilated": image(1, 5, (7, 8, 9), (2, 3, 3), 1, 1, (2, 1, 2)),
    "volume, one deep": image(2, 16, (1, 9, 10), (1, 3, 3)),
    "volume, of time alone": image(2, 16, (9, 5, 4), (3, 1, 1)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_depthwise_images(name, is_whole, device, ours, poisoned):
    activation = "silu" if is_whole else "none"
    case = replace(IMAGES[name], residual=is_whole, activation=activation)
    for dtype in DTYPES:
        cases.check(case, cases.make(case, dtype, device, seed=31))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_depthwise_images_with_every_activation(activation, device, ours, poisoned):
    for shape in (image(2, 64, (14, 14), 7), image(2, 32, (5, 6), 3, dilation=2)):
        case = replace(shape, activation=activation)
        for dtype in (torch.bfloat16, torch.float32):
            cases.check(case, cases.make(case, dtype, device, seed=32))


def part(tensor: torch.Tensor) -> torch.Tensor:
    """Some of the channels, or numbers, of a larger tensor."""
    dim = min(tensor.dim() - 1, 1)
    wider = torch.cat([tensor.detach()] * 3, dim)
    return wider.narrow(dim, tensor.shape[dim], tensor.shape[dim]).requires_grad_(
        tensor.requires_grad
    )


def first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lay_out", [cases.behind, part, first])
def test_any_layout(lay_out, device, ours, poisoned):
    for shape in (image(2, 40, (11, 12), 5), image(2, 26, (9, 8), 3, 2), image(2, 7, (4, 6, 5), 3)):
        case = replace(shape, activation="gelu", residual=True)
        t = cases.make(case, torch.bfloat16, device, seed=33)
        laid_out = cases.Tensors(*map(lay_out, vars(t).values()))
        cases.check(case, laid_out)
        out = cases.run(case, laid_out)
        format = torch.channels_last if case.dims == 2 else torch.channels_last_3d
        grads = torch.autograd.grad(out, [laid_out.input, laid_out.residual], t.grad_out)
        assert all(one.is_contiguous(memory_format=format) for one in (out, *grads))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_expanded(device, ours):
    case = image(2, 40, (11, 12), 5)
    t = cases.make(case, torch.float32, device, seed=34)
    one = torch.full((), 0.25, device=device).expand_as(t.grad_out)
    cases.check(case, replace(t, grad_out=one))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_frozen_parameters(name, activation, device, ours):
    """Only what is asked for is computed; the others' gradients are the same without it."""
    case = replace(IMAGES["7 taps, stride 1"], activation=activation)
    t = cases.make(case, torch.float32, device, seed=35)
    wanted = [one for key, one in t.differentiable.items() if key != name]
    whole = torch.autograd.grad(cases.run(case, t), wanted, t.grad_out)
    getattr(t, name).requires_grad_(False)
    alone = torch.autograd.grad(cases.run(case, t), wanted, t.grad_out)
    # The bias's may be added up in another order where the weight's is not asked for.
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_the_same_each_time(device, ours):
    case = image(16, 96, (28, 28), 7)
    t = cases.make(case, torch.bfloat16, device, seed=36)
    leaves = list(t.differentiable.values())
    runs = [torch.autograd.grad(cases.run(case, t), leaves, t.grad_out) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.gpu
def test_our_kernels_run_where_they_are_asked_for():
    case = image(2, 64, (14, 14), 7)
    t = cases.make(case, torch.bfloat16, "cuda", seed=37)
    for use in (ALWAYS, NEVER):
        with using(use), profile(activities=[ProfilerActivity.CUDA]) as profiled:
            cases.run(case, t).backward(t.grad_out)
            torch.cuda.synchronize()
        ran = " ".join(event.key for event in profiled.key_averages())
        kernels = ("whole_7_1_14", "whole_weight_7_1_14")
        assert all((f"depthwise_conv_{name}" in ran) == (use == ALWAYS) for name in kernels)


@pytest.mark.gpu
def test_a_cuda_graph_is_replayed(ours):
    case = replace(image(2, 64, (14, 14), 7), activation="gelu")
    t = cases.make(case, torch.bfloat16, "cuda", seed=38)
    cases.check_a_replayed_graph(case, t)


def test_what_is_chosen():
    images = [*IMAGES.values()]
    with using(ALWAYS):
        assert {engine for case in images for engine in other_engines(case)} == {"cudnn_ops"}
        grouped = replace(images[0], groups=2)
        doubled = replace(images[0], out_channels=2 * images[0].channels)
        assert [other_engines(case) for case in (grouped, doubled)] == [[""] * 3] * 2
    with using(NEVER):
        assert {engine for case in images for engine in other_engines(case)} == {""}
    large = IMAGES["large"]
    assert other_engines(large) == ["cudnn_ops"] * 3
    for case in images:
        if case.batch * case.channels * math.prod(case.size) < 1 << 16:
            assert other_engines(case) == [""] * 3
    dense = replace(large, stride=(1, 1), bias=False)
    assert other_engines(dense) == ["cudnn_ops"] * 3
    # Of few numbers, where something follows, which cuDNN's takes a pass for.
    small = replace(dense, batch=1, size=(56, 56))
    assert other_engines(small) == [""] * 3
    for following in ({"bias": True}, {"residual": True}, {"activation": "relu"}):
        assert other_engines(replace(small, **following)) == ["cudnn_ops", "", ""]
    tiny = replace(small, size=(7, 7), bias=True)
    assert other_engines(tiny)[0] == ""
    assert other_engines(replace(large, kernel=(13, 13), stride=(1, 1))) == ["cudnn_ops"] * 3


def test_explain_names_the_kernel():
    x, weight = ((8, 96, 56, 56), torch.bfloat16), ((96, 1, 7, 7), torch.bfloat16)
    options = {"padding": 3, "groups": 96, "activation": "silu"}
    answer = explain("conv2d", x, weight, device="H200", **options)
    assert (answer.supported, answer.engine) == (True, "cudnn_ops")
    assert "for depthwise convolutions of this size it is faster" in answer.reason
    # Of few numbers cuDNN's is as fast, but for the pass of an epilogue.
    few, x = ((96, 1, 3, 3), torch.bfloat16), ((1, 96, 56, 56), torch.bfloat16)
    bare = {"padding": 1, "groups": 96}
    for epilogue in ({"bias": True}, {"residual": True}, {"activation": "silu"}):
        answer = explain("conv2d", x, few, device="H200", **bare, **epilogue)
        assert (answer.supported, answer.engine) == (True, "cudnn_ops")
        assert "a pass for the epilogue" in answer.reason
    answer = explain("conv2d", x, few, device="H200", **bare)
    assert "cudnn_ops" not in answer.engine
    # Where none is: torch runs the same.
    small = ((1, 96, 14, 14), torch.bfloat16)
    for op in ("conv2d", "conv2d_backward"):
        answer = explain(op, small, weight, device="H200", **options)
        assert answer.supported
        assert "cudnn_ops" not in answer.engine
        assert "none was measured to be faster than cuDNN's" in answer.reason


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, ours):
    t = cases.make(IMAGES["5 taps, stride 2"], torch.float32, device, seed=39)
    geometry = _ops._conv_geometry(2, t.weight, [2, 2], [2, 2], [1, 1], 64)
    for index in (0, 2):
        call = (t.input, t.weight, t.bias, None, geometry, index, index == 2)
        torch.library.opcheck(_ops._conv.default, call)
        saved = t.grad_out if index else None
        backward = (t.grad_out, t.input.detach(), t.weight.detach(), saved, geometry, index)
        torch.library.opcheck(_ops._conv_backward.default, (*backward, [True] * 4))
