"""Convolutions: results and gradients, epilogues, layouts, compile, autocast, mistakes."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from cudnn_ops import _C, plan_requests, warmup
from tests.cases import conv as cases
from tests.cases.conv import ConvCase
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
_ops = torch.ops.cudnn_ops
PLAIN = ConvCase(2, 8, 16, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1))
ROW = ConvCase(2, 8, 16, (9,), (3,), (2,), (1,), (1,), 2, "leaky_relu", residual=True)
#: By a kernel of ours.
DEPTHWISE = ConvCase(2, 8, 8, (9,), (4,), (1,), (3,), (1,), 8, "silu", residual=True)
FULL = ConvCase(2, 8, 16, (9, 7), (3, 2), (2, 1), (1, 2), (1, 2), 2, "silu", residual=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_epilogues(activation, residual, device, poisoned):
    case = ConvCase(
        4, 32, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), 1, activation, residual=residual
    )
    for dtype in (torch.bfloat16, torch.float32):
        cases.check(case, cases.make(case, dtype, device, seed=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(32, 32), (37, 40)])
def test_patches(size, device, poisoned):
    """Kernels side by side on three channels; what is left over at the border is not used."""
    for dtype, activation in ((torch.bfloat16, "none"), (torch.float32, "gelu")):
        case = ConvCase(2, 3, 24, size, (8, 8), (8, 8), (0, 0), (1, 1), 1, activation)
        for channels_last in (False, True):
            case = replace(case, channels_last=channels_last)
            cases.check(case, cases.make(case, dtype, device, seed=2))


@pytest.mark.parametrize("device", DEVICES)
def test_channels_come_last(device):
    t = cases.make(PLAIN, torch.float32, device, seed=3)
    for x in (t.input, t.input.detach().contiguous().requires_grad_()):
        out = cases.run(PLAIN, cases.Tensors(x, t.weight, t.bias, None, t.grad_out))
        assert out.is_contiguous(memory_format=torch.channels_last)
        (grad,) = torch.autograd.grad(out, x, t.grad_out)
        assert grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_operators_are_the_functions(dims, device):
    size, kernel, ones = (9, 7, 5)[:dims], (3, 2, 1)[:dims], (1,) * dims
    case = ConvCase(2, 8, 16, size, kernel, (2,) * dims, ones, ones, 2, "relu", residual=True)
    t = cases.make(case, torch.float32, device, seed=9)
    assert torch.equal(cases.run(case, t), cases.run(case, t, _ops))
    function = getattr(cudnn_ops, f"conv{dims}d")
    for x in (t.input, t.input[0]):
        by_one_number = function(x, t.weight, t.bias, 2, 1, (1,), 2)
        assert torch.equal(by_one_number, function(x, t.weight, t.bias, [2] * dims, ones, ones, 2))
    packed = getattr(_ops, f"_conv{dims}d")
    for numbers in ([], [1], [1, 1, 1, 1, 1, 1], [-1, 1, 1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1, 1]):
        with pytest.raises(ValueError, match=r"a count is negative|not the numbers of a convol"):
            packed(t.input, t.weight, t.bias, numbers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_kernels_as_large_as_the_input(batch, dims, device, poisoned):
    """They are products of matrices on a GPU, whatever the strides, and most gradients too."""
    size, ones = (7, 5, 3)[:dims], (1,) * dims
    strides, nothing = (3,) * dims, (0,) * dims
    whole = ConvCase(batch, 6, 10, size, size, strides, nothing, ones, 1, "silu", residual=True)
    bare = replace(whole, activation="none", bias=False, residual=False)
    padded = replace(whole, padding=ones, activation="relu")
    grouped = replace(whole, groups=2)
    for case in (whole, bare, padded, grouped):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            cases.check(case, cases.make(case, dtype, device, seed=31))


@pytest.mark.parametrize("device", DEVICES)
def test_an_image_without_a_batch(device):
    t = cases.make(PLAIN, torch.float32, device, seed=4)
    out = cudnn_ops.conv2d(t.input[0], t.weight, t.bias, 1, 1, activation="relu")
    torch.testing.assert_close(out, F.relu(F.conv2d(t.input[0], t.weight, t.bias, 1, 1)))


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_batch(device):
    x = torch.empty(0, 8, 5, 5, device=device, requires_grad=True)
    weight = torch.ones(4, 8, 3, 3, device=device, requires_grad=True)
    out = cudnn_ops.conv2d(x, weight, activation="silu")
    assert out.shape == (0, 4, 3, 3)
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert grad_x.shape == x.shape
    assert not grad_weight.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [PLAIN, FULL, ROW, DEPTHWISE], ids=str)
def test_opcheck(case, device):
    t = cases.make(case, torch.float32, device, seed=5)
    activation = cases.ACTIVATIONS.index(case.activation)
    geometry = (*case.stride, *case.padding, *case.padding, *case.dilation, case.groups)
    arguments = (t.input, t.weight, t.bias, t.residual, geometry, activation)
    for with_before in (False, True):
        torch.library.opcheck(_ops._conv.default, (*arguments, with_before))
    _, before = _ops._conv(*arguments, True)
    saved = before.detach() if activation else None
    detached = (t.grad_out, t.input.detach(), t.weight.detach(), saved)
    mask = (True, True, True, activation > 0)
    torch.library.opcheck(_ops._conv_backward.default, (*detached, geometry, activation, mask))
    epilogue = {"activation": case.activation, "residual": t.residual}
    separate = (case.stride, case.padding, case.dilation, case.groups)
    public, private = (getattr(_ops, f"{prefix}conv{case.dims}d") for prefix in ("", "_"))
    torch.library.opcheck(public.default, (t.input, t.weight, t.bias, *separate), epilogue)
    packed = (*[case.dims] * 3, *case.stride, *case.padding, *case.dilation, case.groups)
    torch.library.opcheck(private.default, (t.input, t.weight, t.bias, packed), epilogue)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break_for_any_batch(device):
    torch._dynamo.reset()

    def step(x, weight, bias):
        return cudnn_ops.conv2d(x * 2, weight, bias, padding="same", activation="gelu")

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch in (2, 3):
        t = cases.make(replace(PLAIN, batch=batch), torch.float32, device, 6)
        for function in (compiled, step):
            out = function(t.input, t.weight, t.bias)
            grads = torch.autograd.grad(out, list(t.differentiable.values()), t.grad_out)
            if function is compiled:
                found = (out, *grads)
        torch.testing.assert_close(found, (out, *grads), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stride_may_come_into_the_compiled_function(device):
    torch._dynamo.reset()
    t = cases.make(PLAIN, torch.float32, device, seed=10)
    compiled = torch.compile(cudnn_ops.conv2d, fullgraph=True, dynamic=True)
    for stride in (1, 2, 3):
        found = compiled(t.input, t.weight, t.bias, stride)
        expected = cudnn_ops.conv2d(t.input, t.weight, t.bias, stride)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_is_that_of_torch(device):
    t = cases.make(PLAIN, torch.float32, device, seed=7)
    with torch.autocast(device, torch.bfloat16):
        other = F.conv2d(t.input, t.weight, t.bias, padding="same")
        for function in (cudnn_ops.conv2d, _ops.conv2d):
            for padding in ("same", 1):
                mine = function(t.input, t.weight, t.bias, padding=padding)
                assert mine.dtype == other.dtype == torch.bfloat16
                torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"activation": "tanh"}, ValueError, 'must be one of none, relu, .*; got "tanh"'),
        ({"padding": "full"}, ValueError, 'padding must be whole numbers, "same" or "valid"'),
        ({"padding": "same", "stride": 2}, ValueError, '"same" needs a stride of 1'),
        ({"padding": (1, 1, 1)}, ValueError, "padding must have 1 or 2 numbers"),
        ({"stride": []}, ValueError, "stride must have 1 or 2 numbers"),
        ({"stride": 1.5}, RuntimeError, r"(?s)stride_padding.*Value: \(1, 1, 1, 1\.5"),
        ({"padding": None}, RuntimeError, r"(?s)stride_padding.*Value: \(1, 1, 1, 1, None"),
        ({"dilation": "same"}, RuntimeError, r"(?s)stride_padding.*Value: .*'same'"),
        ({"groups": 3}, ValueError, "with 3 groups does not fit an input of 8 channels"),
        ({"bias": torch.ones(3)}, ValueError, r"bias must be \[16\]"),
        ({"residual": torch.ones(2, 16, 9, 9)}, ValueError, "residual must be like the output"),
        ({"input": torch.ones(2, 8, 2, 2)}, ValueError, "larger than the padded input"),
        # One short of fitting, which a division that rounds towards zero would not see.
        ({"input": torch.ones(2, 8, 2, 9), "stride": 2}, ValueError, "larger than the padded"),
        ({"input": torch.ones(8)}, ValueError, "input must have 4 dimensions"),
        ({"weight": torch.ones(16, 8, 3, 3).half()}, TypeError, "must be of one dtype"),
    ],
    ids=str,
)
def test_bad_input(change, error, match, device):
    arguments = {"input": torch.ones(2, 8, 9, 7), "weight": torch.ones(16, 8, 3, 3), **change}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    with pytest.raises(error, match=match):
        cudnn_ops.conv2d(**arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_messages_name_the_operator(dims, device):
    convolve = getattr(cudnn_ops, f"conv{dims}d")
    ones = (1,) * dims

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    x, weight = draw(2, 8, *ones), draw(4, 8, *ones)
    bad = {
        "residual must be like the output": {"residual": draw(2, 4, *ones, dtype=torch.half)},
        r"bias must be \[4\]": {"bias": draw(5)},
        "with 3 groups does not fit": {"groups": 3},
        "activation must be one of": {"activation": "tanh"},
    }
    for match, options in bad.items():
        with pytest.raises(ValueError, match=rf"^cudnn_ops\.conv{dims}d: .*{match}"):
            convolve(x, weight, **options)
    with pytest.raises(TypeError, match=rf"^cudnn_ops\.conv{dims}d: .*must be of one dtype"):
        convolve(x, weight.half())
    with pytest.raises(ValueError, match=rf"^cudnn_ops\.conv{dims}d: .*larger than the padded"):
        convolve(x, draw(4, 8, *(2 * n for n in ones)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_is_empty(dims, device):
    """As torch has it: no batch or no channels give an empty result, the rest is refused."""
    convolve, stock = (getattr(module, f"conv{dims}d") for module in (cudnn_ops, F))
    size, kernel = (5, 6, 7)[:dims], (3, 2, 1)[:dims]

    def draw(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, requires_grad=True)

    for batch, channels in ((0, 8), (2, 0), (0, 0)):
        leaves = draw(batch, channels, *size), draw(4, channels, *kernel), draw(4)
        for activation in ("none", "relu", "silu"):
            out = convolve(*leaves, activation=activation)
            assert out.shape == stock(*leaves).shape
            assert out.numel() == 0
            assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves))
    for x, weight, match in (
        (draw(2, 8, *size), draw(4, 8, 0, *kernel[1:]), "kernel of size 0"),
        (draw(2, 8, *size), draw(0, 8, *kernel), "must have an output channel"),
        (draw(0, 8, *size), draw(4, 8, 0, *kernel[1:]), "kernel of size 0"),
    ):
        with pytest.raises(ValueError, match=match):
            convolve(x, weight, padding=1)
    with pytest.raises(ValueError, match="the batch or the channels must be 0"):
        convolve(draw(2, 8, 0, *size[1:]), draw(4, 8, *kernel), padding=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_flops(dims, groups, device):
    """Each gradient has those of the forward; torch takes no account of groups in the weight's."""
    ones = (1,) * dims
    kernel, strides = (3, 2, 1)[:dims], (2,) * dims
    case = ConvCase(2, 8, 12, (9, 7, 5)[:dims], kernel, strides, ones, ones, groups)
    t = cases.make(case, torch.float32, device, seed=13)

    def flops(leaves: tuple[torch.Tensor, ...], by: object) -> tuple[int, int]:
        with FlopCounterMode(display=False) as forward:
            function = getattr(by, f"conv{dims}d")
            out = function(t.input, t.weight, t.bias, strides, ones, ones, groups)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out, leaves, t.grad_out)
        return forward.get_total_flops(), backward.get_total_flops()

    forward = 2 * t.grad_out.numel() * 8 // groups * math.prod(kernel)
    for leaves in ((t.input,), (t.weight,), (t.input, t.weight)):
        found = flops(leaves, cudnn_ops)
        assert found == (forward, forward * len(leaves))
        if groups == 1 or leaves[-1] is t.input:
            assert found == flops(leaves, F)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_any_address(dims, device, poisoned):
    """Parameters lie in flat buffers, and images are parts of others: not at multiples of 16."""
    ones = (1,) * dims
    case = ConvCase(
        2, 8, 16, (6, 5, 4)[:dims], (3,) * dims, ones, ones, ones, 1, "silu", residual=True
    )
    for dtype in (torch.bfloat16, torch.float32):
        t = cases.make(case, dtype, device, seed=14)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            """The same one number further in memory, where no piece of 16 bytes begins."""
            flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
            copy = flat[1:].as_strided(tensor.shape, tensor.stride())
            assert copy.copy_(tensor.detach()).data_ptr() % 16
            return copy.requires_grad_(tensor.requires_grad)

        cases.check(case, cases.Tensors(*(moved(tensor) for tensor in vars(t).values())))


def test_tf32_by_each_of_torch_s_switches():
    """What convolutions may do is asked for, whatever recurrent networks may."""
    shapes = ((1, 8, 5, 5), torch.float32), ((8, 8, 3, 3), torch.float32)
    settings = torch.backends.cudnn

    def plan() -> object:
        (request,) = plan_requests("conv2d", *shapes, training=False)
        return request

    by_flag = {}
    for allowed in (True, False):
        with settings.flags(allow_tf32=allowed):
            by_flag[allowed] = plan()
    assert by_flag[True] != by_flag[False]
    before = settings.conv.fp32_precision, settings.rnn.fp32_precision
    try:
        for of_conv, of_rnn in itertools.product(("tf32", "ieee"), repeat=2):
            settings.conv.fp32_precision, settings.rnn.fp32_precision = of_conv, of_rnn
            assert plan() == by_flag[of_conv == "tf32"]
    finally:
        settings.conv.fp32_precision, settings.rnn.fp32_precision = before


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative_is_refused(device):
    t = cases.make(PLAIN, torch.float32, device, seed=8)
    out = cases.run(PLAIN, t)
    (grad,) = torch.autograd.grad(out.square().sum(), t.input, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of a convolution"):
        grad.sum().backward()


def test_requests_name_the_plans():
    image, weight = ((2, 8, 9, 7), torch.half), ((16, 8, 3, 3), torch.half)
    requests = plan_requests("conv2d", image, weight, bias=True, activation="silu", padding="same")
    assert [request.op for request in requests] == ["conv", "conv_backward", "conv_backward"]
    (alone,) = plan_requests("conv2d", image, weight, training=False)
    assert alone.op == "conv"


@pytest.mark.gpu
def test_warmed_up_a_call_builds_nothing(fresh_cache):
    case = ConvCase(2, 8, 16, (9, 7), (3, 3), (1, 1), "same", (1, 1), activation="silu")
    t = cases.make(case, torch.bfloat16, "cuda", seed=9)
    options = {"bias": True, "activation": "silu", "padding": "same"}
    image, weight = ((tensor.shape, tensor.dtype) for tensor in (t.input, t.weight))
    assert not warmup(plan_requests("conv2d", image, weight, **options), progress=False).refused
    before = cudnn_ops.cache_info()
    cases.check(case, t)
    after = cudnn_ops.cache_info()
    assert (after.builds, after.loads) == (before.builds, before.loads)


@pytest.mark.gpu
def test_torch_s_benchmark_flag_measures_engines(fresh_cache, monkeypatch):
    t = cases.make(PLAIN, torch.bfloat16, "cuda", seed=10)
    _C.take_measurements()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    cases.check(PLAIN, t)
    # The forward and both gradients.
    assert len([words for words, engines in _C.take_measurements() if engines]) == 3


@pytest.mark.gpu
def test_bias_and_residual_are_measured_in_either_order(fresh_cache, monkeypatch):
    """There are other engines for each."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def families(case: ConvCase) -> set[str]:
        t = cases.make(case, torch.bfloat16, "cuda", seed=21)
        _C.take_measurements()
        with torch.no_grad():
            cases.run(case, t)
        ((_, engines),) = _C.take_measurements()
        return {name.split("_")[0] for name, _ in engines}

    case = ConvCase(2, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), residual=True)
    assert families(replace(case, bias=False)) < families(replace(case, activation="relu"))


@pytest.mark.gpu
def test_compiled_engines_are_measured_once_each(fresh_cache, monkeypatch):
    """Several threads compile them for a call; here two calls do so at once."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    drawn = []
    for channels in (64, 128):
        case = ConvCase(
            2, channels, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), 1, "silu", residual=True
        )
        drawn.append((case, cases.make(case, torch.bfloat16, "cuda", seed=channels)))
    _C.take_measurements()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: cases.check(*one), drawn))
    measured = _C.take_measurements()
    assert len(measured) == 3 * len(drawn)
    for _, engines in measured:
        names = [name for name, _ in engines]
        assert len(names) == len(set(names)) > 1
    case, t = drawn[0]
    with torch.no_grad():
        cases.run(case, t)
    ((_, engines),) = _C.take_measurements()
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(cases.MORE_ENGINES) <= {name for name, _ in engines}


@pytest.mark.gpu
def test_a_cuda_graph_is_replayed():
    t = cases.make(PLAIN, torch.bfloat16, "cuda", seed=11)
    with torch.no_grad():
        expected = cases.run(PLAIN, t).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cases.run(PLAIN, t)
        out.fill_(torch.nan)
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_copy_is_said():
    x = torch.ones(1, 8, 6, 6, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(8, 8, 3, 3, device="cuda", dtype=torch.bfloat16)
    torch._C._set_warnAlways(True)
    try:
        with pytest.warns(UserWarning, match="does not have its channels last and is copied"):
            cudnn_ops.conv2d(x, weight)
    finally:
        torch._C._set_warnAlways(False)


@pytest.mark.gpu
def test_a_copy_for_its_address_is_said():
    x = torch.ones(1 + 4 * 4 * 8, device="cuda")[1:].view(1, 4, 4, 8).permute(0, 3, 1, 2)
    weight = torch.ones(8, 8, 1, 1, device="cuda").to(memory_format=torch.channels_last)
    torch._C._set_warnAlways(True)
    try:
        with pytest.warns(UserWarning, match="no multiple of 16 and is copied"):
            out = cudnn_ops.conv2d(x, weight)
    finally:
        torch._C._set_warnAlways(False)
    assert (out == 8).all()


@pytest.mark.gpu
def test_tf32_where_torch_s_flag_says_so(monkeypatch):
    case = ConvCase(2, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), 1, "silu")
    t = cases.make(case, torch.float32, "cuda", seed=12)
    exact = cases.reference(case, t, torch.float64)[0]
    errors = []
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        errors.append(float((cases.run(case, t) - exact).norm() / exact.norm()))
    # TF32 has 10 bits behind the point.
    assert errors[0] < 1e-6 < errors[1] < 2**-10
