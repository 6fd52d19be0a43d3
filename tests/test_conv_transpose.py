"""Transposed convolutions: results, gradients, epilogues, layouts, compile, autocast, mistakes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from cudnn_ops import _C, plan_requests, warmup
from tests.cases import conv
from tests.cases import conv_transpose as cases
from tests.cases.conv import Tensors
from tests.cases.conv_transpose import TransposeCase
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
_ops = torch.ops.cudnn_ops
PLAIN = TransposeCase(2, 16, 8, (6, 5), (4, 4), (2, 2), (1, 1), (0, 0), 1, (1, 1))
ROW = TransposeCase(2, 16, 8, (9,), (5,), (3,), (1,), (2,), 2, (1,), "leaky_relu", residual=True)
DEPTHWISE = TransposeCase(2, 8, 8, (9,), (4,), (2,), (1,), (0,), 8, (1,), "silu", residual=True)
FULL = TransposeCase(
    2, 16, 8, (6, 5), (3, 2), (2, 3), (1, 0), (1, 2), 2, (1, 2), "silu", residual=True
)
#: The output is longer than cuDNN's gradients make it: torch's kernel runs.
LONG = TransposeCase(
    2, 8, 8, (6, 5), (3, 2), (1, 2), (0, 1), (1, 0), 2, (2, 1), "gelu", residual=True
)
VOLUME = TransposeCase(
    1, 8, 8, (3, 4, 5), (2, 2, 2), (2,) * 3, (0,) * 3, (0,) * 3, 1, (1,) * 3, "relu"
)
ALL = [PLAIN, ROW, DEPTHWISE, FULL, LONG, VOLUME]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", conv.ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_epilogues(activation, residual, device, poisoned):
    case = replace(
        PLAIN, channels=32, out_channels=32, size=(9, 9), activation=activation, residual=residual
    )
    for dtype in (torch.bfloat16, torch.float32):
        cases.check(case, cases.make(case, dtype, device, seed=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_kinds(case, device, poisoned):
    for layout in (True, False):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            chosen = replace(case, channels_last=layout)
            cases.check(chosen, cases.make(chosen, dtype, device, seed=2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 9])
def test_inputs_of_one_pixel(batch, dims, device, poisoned):
    """They are products of matrices on a GPU, and so are their gradients."""
    ones, nothing, size = (1,) * dims, (0,) * dims, (4, 3, 2)[:dims]
    case = TransposeCase(batch, 16, 8, ones, size, ones, nothing, nothing, 1, ones, "silu")
    for chosen in (case, replace(case, activation="none", bias=False)):
        for dtype in (torch.bfloat16, torch.float32):
            cases.check(chosen, cases.make(chosen, dtype, device, seed=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", range(0, 60, 20))
def test_any_geometry(start, device, poisoned):
    for seed in range(start, start + 20):
        case = cases.draw(random.Random(seed))
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        cases.check(case, cases.make(case, dtype, device, seed))


def test_float64_on_a_cpu():
    cases.check(FULL, cases.make(FULL, torch.float64, "cpu", seed=4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [PLAIN, ROW, VOLUME], ids=str)
def test_channels_come_last(case, device):
    t = cases.make(case, torch.float32, device, seed=5)
    for x in (t.input, t.input.detach().contiguous().requires_grad_()):
        out = cases.run(case, Tensors(x, t.weight, t.bias, t.residual, t.grad_out))
        grad, of_weight = torch.autograd.grad(out, (x, t.weight), t.grad_out)
        for result in (out, grad):
            image = result.unsqueeze(2) if case.dims == 1 else result
            last = torch.channels_last_3d if case.dims == 3 else torch.channels_last
            assert image.is_contiguous(memory_format=last)
        assert of_weight.stride() == t.weight.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_operators_are_the_functions(dims, device):
    size, kernel, ones = (6, 5, 4)[:dims], (3, 2, 3)[:dims], (1,) * dims
    case = TransposeCase(
        2, 16, 8, size, kernel, (2,) * dims, ones, ones, 2, ones, "relu", residual=True
    )
    t = cases.make(case, torch.float32, device, seed=6)
    # cuDNN's gradients of grouped volumes add up in no order of their own.
    torch.testing.assert_close(cases.run(case, t), cases.run(case, t, _ops))
    function = getattr(cudnn_ops, f"conv_transpose{dims}d")
    for x in (t.input, t.input[0]):
        by_one_number = function(x, t.weight, t.bias, 2, 1, (1,), 2)
        by_all = function(x, t.weight, t.bias, [2] * dims, ones, ones, 2, ones)
        torch.testing.assert_close(by_one_number, by_all)
    packed = getattr(_ops, f"_conv_transpose{dims}d")
    for numbers in ([], [1], [1] * 8, [-1, 1, 1, 1, 1, 1, 1, 1, 1], [9, *[1] * 8], [1 << 62] * 9):
        with pytest.raises(ValueError, match="are not the numbers of a transposed convolution"):
            packed(t.input, t.weight, t.bias, numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_an_image_without_a_batch(device):
    t = cases.make(PLAIN, torch.float32, device, seed=7)
    out = cudnn_ops.conv_transpose2d(t.input[0], t.weight, t.bias, 2, 1, activation="relu")
    expected = F.relu(F.conv_transpose2d(t.input[0], t.weight, t.bias, 2, 1))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_an_empty_batch(case, device):
    t = cases.make(replace(case, batch=0), torch.float32, device, seed=8)
    out = cases.run(case, t)
    assert out.shape == t.grad_out.shape
    leaves = t.differentiable
    grads = torch.autograd.grad(out, list(leaves.values()), t.grad_out)
    for leaf, grad in zip(leaves.values(), grads, strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_frozen_parameters(case, device):
    """Only what is asked for is computed, whichever that is."""
    t = cases.make(case, torch.float32, device, seed=9)
    whole = cases.reference(case, t, torch.float32)[1:]
    for name, expected in zip(t.differentiable, whole, strict=True):
        leaves = {
            key: value.detach().requires_grad_(key == name)
            for key, value in t.differentiable.items()
        }
        out = cases.run(case, Tensors(**{**vars(t), **leaves}))
        (grad,) = torch.autograd.grad(out, leaves[name], t.grad_out)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_opcheck(case, device):
    t = cases.make(case, torch.float32, device, seed=10)
    activation = conv.ACTIVATIONS.index(case.activation)
    paddings = (*case.padding, *case.padding)
    geometry = (*case.output_padding, *case.stride, *paddings, *case.dilation, case.groups)
    arguments = (t.input, t.weight, t.bias, t.residual, geometry, activation)
    for with_before in (False, True):
        torch.library.opcheck(_ops._conv.default, (*arguments, with_before))
    out, before = _ops._conv(*arguments, True)
    saved = (out if case.activation == "relu" else before).detach() if activation else None
    detached = (t.grad_out, t.input.detach(), t.weight.detach(), saved)
    mask = (True, True, True, activation > 0)
    torch.library.opcheck(_ops._conv_backward.default, (*detached, geometry, activation, mask))
    epilogue = {"activation": case.activation, "residual": t.residual}
    public, private = (getattr(_ops, f"{p}conv_transpose{case.dims}d") for p in ("", "_"))
    torch.library.opcheck(public.default, (t.input, t.weight, t.bias, *case.geometry), epilogue)
    lists = (*case.stride, *case.padding, *case.output_padding, *case.dilation)
    packed = (*[case.dims] * 4, *lists, case.groups)
    torch.library.opcheck(private.default, (t.input, t.weight, t.bias, packed), epilogue)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break_for_any_size(device):
    torch._dynamo.reset()

    def step(x, weight, bias):
        return cudnn_ops.conv_transpose2d(x * 2, weight, bias, 2, 1, activation="gelu")

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch, size in ((2, (6, 5)), (3, (4, 9))):
        t = cases.make(replace(PLAIN, batch=batch, size=size), torch.float32, device, 11)
        results = []
        for function in (compiled, step):
            out = function(t.input, t.weight, t.bias)
            grads = torch.autograd.grad(out, list(t.differentiable.values()), t.grad_out)
            results.append((out, *grads))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_is_that_of_torch(device):
    t = cases.make(PLAIN, torch.float32, device, seed=12)
    with torch.autocast(device, torch.bfloat16):
        other = F.conv_transpose2d(t.input, t.weight, t.bias, 2, 1)
        for function in (cudnn_ops.conv_transpose2d, _ops.conv_transpose2d):
            mine = function(t.input, t.weight, t.bias, 2, 1)
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, other.bfloat16(), rtol=2e-2, atol=2e-2)
        half = t.input.half()
        assert cudnn_ops.conv_transpose2d(half, t.weight, t.bias).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_flops(dims, groups, device):
    """Each gradient has those of the forward: a product for each input, tap and output channel."""
    ones, strides, size = (1,) * dims, (2,) * dims, (6, 5, 4)[:dims]
    kernel = (3, 2, 3)[:dims]
    case = TransposeCase(2, 8, 12, size, kernel, strides, ones, ones, groups, ones)
    t = cases.make(case, torch.float32, device, seed=13)
    forward = 2 * t.input.numel() * 12 // groups * math.prod(kernel)
    for leaves in ((t.input,), (t.weight,), (t.input, t.weight)):
        with FlopCounterMode(display=False) as counted:
            out = cases.run(case, t)
        assert counted.get_total_flops() == forward
        with FlopCounterMode(display=False) as counted:
            torch.autograd.grad(out, leaves, t.grad_out)
        assert counted.get_total_flops() == forward * len(leaves)


_X, _W = torch.ones(2, 8, 9, 7), torch.ones(8, 4, 3, 3)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"activation": "tanh"}, ValueError, 'must be one of none, relu, .*; got "tanh"'),
    ({"padding": (1, 1, 1)}, ValueError, "padding must have 1 or 2 numbers"),
    ({"stride": []}, ValueError, "stride must have 1 or 2 numbers"),
    ({"output_padding": (0, 0, 0)}, ValueError, "output_padding must have 1 or 2 numbers"),
    ({"output_padding": 1}, ValueError, r"less than the stride or the dilation; got 1 with str"),
    ({"output_padding": 2, "stride": 2}, ValueError, "got 2 with stride 2 and dilation 1"),
    ({"output_padding": (0, -1)}, ValueError, "output_padding must be at least 0"),
    ({"stride": 0}, ValueError, "stride and dilation must be positive"),
    ({"dilation": 0}, ValueError, "stride and dilation must be positive"),
    ({"padding": -1}, ValueError, "padding must not be negative"),
    ({"stride": 1.5}, RuntimeError, r"(?s)stride_padding.*Value: \(1, 1, 1, 1, 1\.5"),
    ({"padding": "same"}, RuntimeError, r"(?s)stride_padding.*Value: .*'same'"),
    ({"groups": 3}, ValueError, r"weight \[8, 4, 3, 3\] with 3 groups .* input \[2, 8, 9, 7\]"),
    ({"groups": 0}, ValueError, r"weight \[8, 4, 3, 3\] with 0 groups"),
    (
        {"weight": torch.ones(4, 8, 3, 3)},
        ValueError,
        r"weight \[4, 8, 3, 3\] .* does not fit an input \[2, 8, 9, 7\]",
    ),
    ({"weight": torch.ones(8, 0, 3, 3)}, ValueError, "an input and an output channel"),
    ({"weight": torch.ones(8, 4, 0, 3)}, ValueError, "kernel of size 0"),
    ({"bias": torch.ones(8)}, ValueError, r"bias must be \[4\]"),
    ({"residual": torch.ones(2, 4, 9, 7)}, ValueError, r"like the output, \[2, 4, 11, 9\]"),
    ({"padding": 6}, ValueError, r"input \[2, 8, 9, 7\] and a weight \[8, 4, 3, 3\] .* no output"),
    ({"input": torch.ones(8)}, ValueError, "input must have 4 dimensions"),
    ({"input": torch.ones(2, 8, 0, 7)}, ValueError, "no output|the batch or the channels"),
    ({"weight": _W.half()}, TypeError, "must be of one dtype"),
    ({"input": _X.long(), "weight": _W.long()}, TypeError, "must be of one dtype, float16"),
    ({"bias": torch.ones(4).half()}, ValueError, r"bias must be \[4\], Float"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("change", "error", "match"), BAD, ids=str)
def test_bad_input(change, error, match, device):
    arguments = {"input": _X, "weight": _W, **change}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    with pytest.raises(error, match=match) as raised:
        cudnn_ops.conv_transpose2d(**arguments)
    if error is not RuntimeError:
        assert str(raised.value).startswith("cudnn_ops.conv_transpose2d: ")


def test_tensors_of_two_devices():
    with pytest.raises(ValueError, match="weight must be on cpu, got meta"):
        cudnn_ops.conv_transpose2d(_X, _W.to("meta"))


def test_a_double_backward_is_refused():
    t = cases.make(PLAIN, torch.float32, "cpu", seed=14)
    out = cases.run(PLAIN, t)
    (grad,) = torch.autograd.grad(out, t.input, t.grad_out.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of a convolution"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_saved_must_not_change(device):
    t = cases.make(replace(PLAIN, activation="relu"), torch.float32, device, seed=15)
    out = cases.run(replace(PLAIN, activation="relu"), t)
    with torch.no_grad():
        t.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, t.input, t.grad_out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PLAIN, FULL, VOLUME], ids=str)
def test_warmed_up_a_call_builds_nothing(case, fresh_cache):
    t = cases.make(case, torch.bfloat16, "cuda", seed=16)
    image, weight = ((tensor.shape, tensor.dtype) for tensor in (t.input, t.weight))
    names = "stride", "padding", "output_padding", "groups", "dilation"
    options = dict(zip(names, case.geometry, strict=True))
    options |= {"bias": case.bias, "residual": case.residual, "activation": case.activation}
    requests = plan_requests(f"conv_transpose{case.dims}d", image, weight, **options)
    assert not warmup(requests, progress=False).refused
    before = cudnn_ops.cache_info()
    cases.check(case, t)
    after = cudnn_ops.cache_info()
    assert (after.builds, after.loads) == (before.builds, before.loads)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_cuda_graph_is_replayed(case):
    t = cases.make(case, torch.bfloat16, "cuda", seed=17)
    with torch.no_grad():
        expected = cases.run(case, t).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cases.run(case, t)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_torch_s_benchmark_flag_measures_engines(fresh_cache, monkeypatch):
    case = replace(PLAIN, activation="silu", residual=True)
    t = cases.make(case, torch.bfloat16, "cuda", seed=18)
    _C.take_measurements()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    cases.check(case, t)
    # The forward and both gradients.
    assert len([words for words, engines in _C.take_measurements() if engines]) == 3
