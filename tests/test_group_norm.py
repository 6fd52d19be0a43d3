"""Group norm: results and gradients, memory orders, mistakes, strange groups, compile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import cudnn_ops
from tests.cases import group_norm as cases
from tests.cases import sdpa
from tests.cases.drawn import check_all
from tests.cases.group_norm import GroupNormCase, channels_last
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
IMAGE = GroupNormCase((2, 12, 5, 7), 3)
GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    check_all(cases, 60, device, random.Random(7000 + block))


#: Groups that fit into shared memory and that do not, in both orders: U-Nets and their decoders,
#: one group, one channel a group, pieces that two groups share, odd sizes.
SHAPES = [
    ((1, 512, 96, 96), 32),
    ((8, 320, 64, 64), 32),
    ((2, 1280, 16, 16), 32),
    ((3, 1920, 8, 8), 32),
    ((2, 64, 128, 128), 1),
    ((3, 40, 100, 100), 40),
    ((1, 2, 700, 700), 1),
    ((1, 3, 301, 333), 3),
    ((5, 36, 61, 67), 12),
    ((5, 36, 61, 67), 9),
    ((256, 64, 7, 7), 8),
    ((64, 60, 14, 14), 6),
    ((1, 20, 602, 602), 2),
    ((200, 4096), 1),
    ((33, 4096), 64),
    ((2, 96, 100_003), 8),
    ((1, 48, 20, 60, 70), 6),
    ((2000, 24, 4), 24),
    # In parts of blocks that all run at once.
    ((2, 960, 64, 64), 32),
    ((1, 256, 512, 512), 32),
    ((4, 64, 256, 256), 64),
    ((2, 36, 251, 333), 9),
    ((12, 40, 90, 94), 4),
]


@GPU
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_sizes(shape, groups, layout, device, poisoned):
    if len(shape) == 2 and layout == "last":
        return  # there is one order
    for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
        for activation in ("none", "silu"):
            case = GroupNormCase(
                shape, groups, activation=activation, layout=layout, residual=seed == 0
            )
            cases.check(case, cases.make(case, dtype, device, seed))


def launch_of(shape: tuple[int, ...], layout: str) -> Callable[[], Tensor]:
    case = GroupNormCase(shape, 32, "silu", layout=layout)
    t = cases.make(case, torch.bfloat16, "cuda", seed=1)
    x, _, weight, bias = (None if leaf is None else leaf.detach() for leaf in t.leaves)
    return lambda: _ops._group_norm(x, None, 32, weight, bias, 1e-5, 2, False)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["first", "last"])
def test_launches_beside_each_other(layout):
    """Blocks wait for those of their own launch alone: on two streams, and in two graphs."""
    calls = [launch_of(shape, layout) for shape in ((2, 320, 128, 128), (1, 512, 128, 128))]
    expected = [call() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, call()))
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for stream, call, outs in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                outs += [call() for _ in range(3)]
    torch.cuda.synchronize()
    for outs, right in zip(found, expected, strict=True):
        assert all(torch.equal(out, right) for out in outs)
    for _, out in graphs:
        out.fill_(77)
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out), right in zip(graphs, expected, strict=True):
        assert torch.equal(out, right)


@GPU
@pytest.mark.parametrize("kilobytes", [163, 99, 8])
def test_with_less_shared_memory(kilobytes, device, poisoned):
    """What an A100 and an L40S have, on any GPU; and next to nothing."""
    _ops._norm_limit_shared_memory(kilobytes << 10)
    try:
        for shape, groups in SHAPES[:6]:
            for layout in ("first", "last"):
                case = GroupNormCase(shape, groups, activation="silu", layout=layout)
                cases.check(case, cases.make(case, torch.float16, device, seed=1))
    finally:
        _ops._norm_limit_shared_memory(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_gradients_in_float64(activation, device):
    if device == "cuda":
        return  # float64 is for CPUs
    torch.manual_seed(0)
    shapes = ((2, 6, 3), (2, 6, 3), (6,), (6,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def both(x, residual, weight, bias):
        return cudnn_ops.add_group_norm(x, residual, 3, weight, bias, activation=activation)

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("adds", [False, True])
def test_opcheck(adds, layout, device):
    case = GroupNormCase((2, 12, 5, 7), 3, activation="silu", layout=layout, residual=adds)
    t = cases.make(case, torch.float32, device, seed=1)
    arguments = (t.input, t.residual, 3, t.weight, t.bias, 1e-5, 2)
    for with_stats in (False, True):
        torch.library.opcheck(_ops._group_norm.default, (*arguments, with_stats))
    _, _, mean, rstd = _ops._group_norm(*arguments, True)
    assert t.weight is not None
    assert t.bias is not None
    saved = (t.input, t.weight, t.bias, mean, rstd)
    x, weight, bias, mean, rstd = (tensor.detach() for tensor in saved)
    grad_sum = t.grad_sum if adds else None
    for mask in ((True, True, True), (True, False, False), (False, True, False)):
        backward = (t.grad_out, grad_sum, x, 3, weight, bias, mean, rstd, 2, mask)
        torch.library.opcheck(_ops._group_norm_backward.default, backward)
    for name, given in (
        ("group_norm", (t.input,)),
        ("add_group_norm", (t.input, t.grad_out)),
    ):
        op = getattr(_ops, name).default
        torch.library.opcheck(op, (*given, 3, t.weight, t.bias), {"activation": "silu"})


@pytest.mark.parametrize("device", DEVICES)
def test_results_lie_as_the_input(device):
    """Also where that is in neither order: in the nearer one; and a residual follows."""
    image = torch.randn(2, 8, 6, 5, device=device)
    rows, volume = torch.randn(2, 8, 6, device=device), torch.randn(2, 8, 3, 4, 5, device=device)
    for x, is_last in (
        (image, False),
        (channels_last(image), True),
        (image.transpose(2, 3), False),
        (channels_last(image)[:, :4], True),
        (channels_last(image).transpose(2, 3), True),
        (image[:, :, ::2], False),
        (image[:, :1], False),
        (channels_last(rows), True),
        (volume.contiguous(memory_format=torch.channels_last_3d), True),
        (image[0, 0].expand(2, 8, 6, 5), True),
    ):
        leaf = x.detach().requires_grad_()
        out, total = cudnn_ops.add_group_norm(leaf, channels_last(x.sin()), 1)
        (grad,) = torch.autograd.grad(out, leaf, x.cos())
        for result in (out, total, grad):
            wanted = channels_last(result) if is_last else result.contiguous()
            assert result.stride() == wanted.stride()
        with FakeTensorMode() as mode:
            fake = _ops._group_norm(mode.from_tensor(x), None, 1, None, None, 1e-5, 0, False)[0]
        assert fake.stride() == out.stride()
        expected = F.group_norm(x + x.sin(), 1)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    other = channels_last(torch.randn(3, 32, device=device)[:, :, None, None])
    assert cudnn_ops.group_norm(other, 4).is_contiguous(memory_format=torch.channels_last)


MISTAKES = [
    ({"num_groups": 5}, ValueError, "num_groups must divide input's channels, 12; got 5"),
    ({"num_groups": 0}, ValueError, "num_groups must be 1 or more, got 0"),
    ({"num_groups": -3}, ValueError, "num_groups must be 1 or more, got -3"),
    ({"num_groups": "3"}, TypeError, "num_groups must be a whole number, got '3'"),
    ({"input": torch.ones(12)}, ValueError, r"input must be \[N, C, ...\].*got \[12\]"),
    ({"input": torch.ones(2, 12, 3).int()}, TypeError, "input must be float16, bfloat16 or"),
    ({"input": None}, TypeError, "input must be a tensor, got None"),
    ({"weight": torch.ones(11)}, ValueError, r"weight must be \[12\].*got \[11\]"),
    ({"weight": torch.ones(12, 1)}, ValueError, r"weight must be \[12\].*got \[12, 1\]"),
    ({"bias": torch.ones(12).double()}, TypeError, "bias must be of the input's dtype, .*Double"),
    ({"bias": torch.ones(12, device="meta")}, ValueError, "bias must be .*on cpu; got .* on meta"),
    ({"activation": "relu"}, ValueError, 'activation must be "none" or "silu", got "relu"'),
    ({"activation": None}, TypeError, "activation must be a string, got None"),
    ({"eps": "small"}, TypeError, "eps must be a number, got 'small'"),
    ({"input": torch.ones(1, 12), "num_groups": 12}, ValueError, "Expected more than 1 value"),
]
MISTAKES_OF_SUM = [
    ({"residual": torch.ones(2, 12, 4)}, ValueError, "residual must be of input's shape"),
    ({"residual": torch.ones(2, 12, 3).half()}, TypeError, "residual must be of input's dtype"),
    ({"residual": None}, TypeError, "residual must be a tensor, got None"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message):
    image, channels = torch.ones(2, 12, 3), torch.ones(12)
    given = {"input": image, "num_groups": 3, "weight": channels, "bias": channels} | change
    with pytest.raises(error, match=f"(?s)cudnn_ops.group_norm: .*{message}"):
        cudnn_ops.group_norm(**given)


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES_OF_SUM)
def test_mistakes_of_the_sum(change, error, message):
    image = torch.ones(2, 12, 3)
    with pytest.raises(error, match=f"cudnn_ops.add_group_norm: {message}"):
        cudnn_ops.add_group_norm(**({"input": image, "residual": image, "num_groups": 3} | change))


def test_one_value_is_refused_as_in_torch():
    for shape, groups in (((1, 4), 4), ((1, 2, 1, 1), 2), ((2, 4), 4), ((1, 4, 2), 4)):
        x = torch.randn(shape)
        try:
            expected = F.group_norm(x, groups)
        except ValueError:
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                cudnn_ops.group_norm(x, groups)
        else:
            torch.testing.assert_close(cudnn_ops.group_norm(x, groups), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equal_numbers_are_their_own_mean(dtype, device):
    """A little beside it, and a small eps makes much of that."""
    for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
        for shape, groups in (
            *(((2, 6, 7, 7), 2), ((2, 64, 16, 16), 8), ((1, 16, 300, 300), 2)),
            ((1, 40, 280, 280), 4),
        ):
            for order in (torch.contiguous_format, torch.channels_last):
                x = torch.full(shape, value, dtype=dtype, device=device)
                x = x.contiguous(memory_format=order).requires_grad_()
                out = cudnn_ops.group_norm(x, groups)
                assert not out.any(), f"{shape}: {out.abs().max().item()}"
                (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
                assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_a_large_mean_costs_no_digits(layout, device):
    """A thousand deviations from zero, in float32; also where only the first number is at zero."""
    for shape, groups in (((2, 32, 24, 24), 4), ((1, 16, 200, 201), 2), ((1, 40, 280, 280), 4)):
        case = GroupNormCase(shape, groups, activation="silu", layout=layout, shift=1000.0)
        cases.check(case, cases.make(case, torch.float32, device, seed=1))
        t = cases.make(case, torch.float32, device, seed=2)
        with torch.no_grad():
            t.input[:, :, 0, 0] = 0
        cases.check(case, t)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_numbers_near_the_largest(layout, device):
    """float16 as exactly as any others."""
    for shape, groups in (((2, 6, 7, 7), 2), ((1, 16, 300, 300), 2), ((1, 40, 280, 280), 4)):
        x = torch.full(shape, 65504.0, dtype=torch.float16, device=device)
        x[:, :, ::2] = -65504.0
        x = cases.lay_out(x, layout)
        exact = F.group_norm(x.double(), groups)
        sdpa.check(cudnn_ops.group_norm(x, groups), exact, exact.half(), str(shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (0, 6), (3, 0, 4)])
def test_nothing_to_norm(shape, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    out, total = cudnn_ops.add_group_norm(x, x.detach(), 2, weight, weight, activation="silu")
    assert out.shape == total.shape == shape
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]
    assert not grads[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_parameters_cost_nothing(device):
    """Each gradient alone is the one of all together."""
    for layout in ("first", "last"):
        for size in (9, 100):
            case = GroupNormCase((2, 8, size, size), 2, activation="silu", layout=layout)
            t = cases.make(case, torch.float32, device, seed=1)
            (out,) = cases.run(case, t)
            together = torch.autograd.grad(out, t.differentiable, t.grad_out, retain_graph=True)
            for leaf, right in zip(t.differentiable, together, strict=True):
                (alone,) = torch.autograd.grad(out, leaf, t.grad_out, retain_graph=True)
                torch.testing.assert_close(alone, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_alone_has_a_gradient(device):
    x, weight = torch.randn(2, 6, 5, device=device), torch.randn(6, device=device)
    leaves = [tensor.requires_grad_() for tensor in (x, weight)]
    _, total = cudnn_ops.add_group_norm(x, torch.ones_like(x), 3, weight)
    grad, of_weight = torch.autograd.grad(total, leaves, x.detach().cos())
    assert torch.equal(grad, x.detach().cos())
    assert not of_weight.any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_again(device):
    for layout in ("first", "last"):
        case = GroupNormCase((2, 32, 90, 90), 4, activation="silu", layout=layout)
        t = cases.make(case, torch.float32, device, seed=1)
        runs = []
        for _ in range(2):
            (out,) = cases.run(case, t)
            runs.append([out, *torch.autograd.grad(out, t.differentiable, t.grad_out)])
        assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_compiled_without_a_break_for_any_size(layout, device):
    torch._dynamo.reset()

    def step(x, weight, bias):
        return cudnn_ops.group_norm(x * 2, 3, weight, bias, activation="silu").sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch, height, width in ((2, 5, 7), (3, 9, 8)):
        case = GroupNormCase((batch, 12, height, width), 3, layout=layout)
        t = cases.make(case, torch.float32, device, seed=1)
        runs = []
        for function in (compiled, step):
            out = function(t.input, t.weight, t.bias)
            runs.append([out, *torch.autograd.grad(out, t.differentiable, t.grad_out)])
        torch.testing.assert_close(*runs)
        assert runs[0][0].stride() == runs[1][0].stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_that_of_torch(dtype, device):
    x, weight = torch.randn(2, 6, 5, device=device), torch.randn(6, device=device)
    low = x.to(dtype)
    with torch.autocast(device, torch.bfloat16):
        mine = cudnn_ops.group_norm(low, 2, weight)
        if device == "cuda":
            other = F.group_norm(low, 2, weight)
            assert mine.dtype == other.dtype == torch.float32
            torch.testing.assert_close(mine, other)
        out, total = cudnn_ops.add_group_norm(low, x, 2, weight)
    assert mine.dtype == (torch.float32 if device == "cuda" else dtype)
    assert out.dtype == total.dtype == torch.float32
    assert torch.equal(total, low + x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_after_the_forward_is_told(device):
    for name in ("input", "weight", "bias"):
        case = GroupNormCase((2, 6, 5), 2, activation="silu")
        t = cases.make(case, torch.float32, device, seed=1)
        (out,) = cases.run(case, t)
        with torch.no_grad():
            getattr(t, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@GPU
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("size", [16, 200])
def test_in_a_graph(size, layout, device):
    case = GroupNormCase((2, 64, size, size), 8, activation="silu", layout=layout)
    t = cases.make(case, torch.bfloat16, device, seed=1)

    def step():
        (out,) = cases.run(case, t)
        return [out, *torch.autograd.grad(out, t.differentiable, t.grad_out)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        t.input.copy_(t.input.flip(0) + 1)
    graph.replay()
    for mine, right in zip(found, step(), strict=True):
        assert torch.equal(mine, right)


def test_other_derivatives_are_refused():
    x = torch.randn(2, 6, 5)
    with pytest.raises(NotImplementedError, match="group_norm: forward-mode"):
        torch.func.jvp(lambda x: cudnn_ops.group_norm(x, 2), (x,), (x,))
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(
        cudnn_ops.group_norm(leaf, 2).sin().sum(), leaf, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward of a norm"):
        grad.sum().backward()
