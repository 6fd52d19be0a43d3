"""Batch norm: results, gradients and statistics, memory orders, mistakes, compile, graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import cudnn_ops
from tests.cases import batch_norm as cases
from tests.cases import sdpa
from tests.cases.batch_norm import BatchNormCase
from tests.cases.drawn import check_all
from tests.cases.group_norm import channels_last
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
#: With and without a plan, which a size has that is called often, and under "exact" each.
POLICIES = pytest.mark.parametrize("policy", ["auto", "exact"])
RELU_OF_SUM = BatchNormCase((3, 64, 5, 7), activation="relu", residual=True, layout="last")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    check_all(cases, 60, device, random.Random(9000 + block))


@GPU
@pytest.mark.parametrize("block", range(4))
def test_any_combination_by_plans(block, device, poisoned):
    with cudnn_ops.using_plan_policy("exact"):
        check_all(cases, 60, device, random.Random(9100 + block))


#: Blocks of ResNets and RegNets, wide and narrow, odd sizes, rows, lines, volumes, much and little
#: for each channel; channels that plans take and that they do not.
SHAPES = [
    (32, 64, 56, 56),
    (8, 256, 56, 56),
    (64, 512, 7, 7),
    (4, 2048, 7, 7),
    (2, 64, 112, 112),
    (5, 192, 17, 13),
    (16, 24, 61, 59),
    (16, 8, 33, 31),
    (7, 440, 14, 14),
    (3, 48, 1, 1),
    (257, 1024),
    (9, 96, 301),
    (2, 128, 4, 14, 14),
    (3, 65, 20, 20),
    (1, 64, 200, 200),
    (2, 3, 224, 224),
]


@GPU
@POLICIES
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, layout, policy, device, poisoned):
    if layout == "last" and all(size == 1 for size in shape[2:]):
        return  # there is one order
    with cudnn_ops.using_plan_policy(policy):
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            for adds in (False, True):
                for activation in ("none", "relu"):
                    case = BatchNormCase(shape, activation=activation, residual=adds, layout=layout)
                    cases.check(case, cases.make(case, dtype, device, seed))
        case = BatchNormCase(shape, training=False, activation="relu", residual=True, layout=layout)
        cases.check(case, cases.make(case, torch.bfloat16, device, seed=3))


@GPU
@pytest.mark.parametrize("shape", [(4, 64, 9, 9), (4, 24, 9, 9)], ids=str)
def test_addresses_that_are_not_read_at_once(shape, device, poisoned):
    """Parameters, statistics and images that begin between multiples of 16 bytes."""
    plain = replace(RELU_OF_SUM, shape=shape, residual=False, activation="none")
    cases_of = (plain, replace(plain, activation="relu"), replace(RELU_OF_SUM, shape=shape))
    with cudnn_ops.using_plan_policy("exact"):
        for of, flat in itertools.product(
            cases_of, ("weight", "bias", "running", "layout", "other")
        ):
            case = replace(of, **{flat: "flat"})
            if flat == "layout":
                case = replace(case, layout="last")
                t = cases.make(case, torch.bfloat16, device, seed=1)
                buffer = torch.empty(t.input.numel() + 1, dtype=t.input.dtype, device=device)
                view = buffer[1:].as_strided(t.input.shape, t.input.stride(), 1)
                view.copy_(t.input.detach())
                t = replace(t, input=view.requires_grad_())
            else:
                t = cases.make(case, torch.bfloat16, device, seed=1)
            cases.check(case, t)


@GPU
def test_what_is_called_often_runs_by_plans(device):
    case = BatchNormCase((3, 64, 5, 7), layout="last")
    t = cases.make(case, torch.bfloat16, device, seed=1)
    before = cudnn_ops.cache_info().builds
    with cudnn_ops.using_plan_policy("exact"):
        for _ in range(2):
            torch.autograd.grad(cases.run(case, t), t.differentiable, t.grad_out)
    assert cudnn_ops.cache_info().builds <= before + 2
    x = t.input.detach()
    with cudnn_ops.record_shapes() as requests, cudnn_ops.using_plan_policy("exact"):
        cudnn_ops.batch_norm(x.float(), None, None, training=True)
        cudnn_ops.batch_norm(x[:, :7], None, None, training=True)
        cudnn_ops.batch_norm(x.contiguous(), None, None, training=True)
        cudnn_ops.batch_norm(x, None, None, training=True, activation="relu")
        cudnn_ops.batch_norm(x, None, None, training=True, residual=x)
    assert not requests


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_gradients_in_float64(activation, training, device):
    if device == "cuda":
        return  # float64 is for CPUs
    torch.manual_seed(0)
    shapes = ((4, 6, 3), (4, 6, 3), (6,), (6,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    var = torch.rand(6, dtype=torch.float64) + 0.5

    def norm(x, residual, weight, bias):
        # A copy: each of gradcheck's calls would change them.
        return cudnn_ops.batch_norm(
            *(x, torch.zeros_like(var), var.clone(), weight, bias, training),
            residual=residual,
            activation=activation,
        )

    assert torch.autograd.gradcheck(norm, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("training", [False, True])
def test_opcheck(training, layout, device):
    case = replace(RELU_OF_SUM, shape=(3, 8, 5, 7), training=training, layout=layout)
    t = cases.make(case, torch.float32, device, seed=1)
    public = (t.input, t.running_mean, t.running_var, t.weight, t.bias, training)
    options = {"residual": t.residual, "activation": "relu"}
    torch.library.opcheck(_ops.batch_norm.default, public, options)
    torch.library.opcheck(_ops.batch_norm.default, public)
    inner = (*public[:-1], t.residual, 0.1, 1e-5, 1)
    if training:
        torch.library.opcheck(_ops._batch_norm_training.default, inner)
        without = (t.input, None, None, None, None, None, 0.1, 1e-5, 0)
        torch.library.opcheck(_ops._batch_norm_training.default, without)
    else:
        torch.library.opcheck(_ops._batch_norm_inference.default, inner)
    out = cases.run(case, t).detach()
    x, weight = (tensor.detach() for tensor in (t.input, t.weight))
    mean, rstd = torch.zeros(8, device=device), torch.ones(8, device=device)
    for mask in ((True,) * 4, (True, False, False, False), (False, True, False, True)):
        saved = (t.grad_out, x, weight, None, out, mean, rstd, training, 1, mask, True)
        torch.library.opcheck(_ops._batch_norm_backward.default, saved)
        torch.library.opcheck(_ops._batch_norm_backward.default, (*saved, t.residual.detach()))
        saved = (t.grad_out, x, None, None, None, mean, rstd, training, 0, mask, False)
        torch.library.opcheck(_ops._batch_norm_backward.default, saved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_a_relu_is_told_by_its_input(layout, device):
    """The backward needs no output then, in whatever order images come back to it."""
    for channels in (12, 64):
        case = BatchNormCase((3, channels, 5, 7), activation="relu", layout=layout)
        t = cases.make(case, torch.float32, device, seed=1)
        x, weight, bias = (tensor.detach() for tensor in (t.input, t.weight, t.bias))
        out, *kept = _ops._batch_norm_training(x, None, None, weight, bias, None, 0.1, 1e-5, 1)
        for mask in ((True, True, True, False), (True, False, True, True)):
            of_out, of_input = (
                _ops._batch_norm_backward(
                    *(t.grad_out, x, weight, bias, given, *kept, True, 1, mask, False)
                )
                for given in (out, None)
            )
            torch.testing.assert_close(of_input, of_out, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="out must be given with a ReLU of what running"):
            _ops._batch_norm_backward(
                *(t.grad_out, x, weight, bias, None, *kept, False, 1, (True,) * 4, False)
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_two_gradients_are_that_of_their_sum(layout, dtype, device):
    """In whatever order of memory each of them is; the sum is not rounded here."""
    for shape, training in itertools.product(
        ((3, 64, 5, 7), (2, 12, 4, 4), (9, 24)), (True, False)
    ):
        case = BatchNormCase(shape, activation="relu", residual=True, layout=layout)
        t = cases.make(case, dtype, device, seed=1)
        x, weight, bias, added = (one.detach() for one in (t.input, t.weight, t.bias, t.residual))
        forward = (x, None, None, weight, bias, added, 0.1, 1e-5, 1)
        out, *kept = _ops._batch_norm_training(*forward)
        is_first = torch.rand_like(x, dtype=torch.float32) < 0.5
        first, more = t.grad_out.where(is_first, 0), t.grad_out.where(~is_first, 0)
        if x.dim() == 4:
            more = more.contiguous(memory_format=torch.contiguous_format)
        for of_relu, mask in itertools.product(
            (True, False), itertools.product((True, False), repeat=4)
        ):
            saved = (x, weight, None, out if of_relu else None, *kept, training, int(of_relu))
            wanted = _ops._batch_norm_backward(t.grad_out, *saved, mask, True)
            found = _ops._batch_norm_backward(first, *saved, mask, True, more)
            for mine, right in zip(found, wanted, strict=True):
                assert torch.equal(mine, right), (shape, training, of_relu, mask)


@GPU
def test_a_relu_told_by_its_input_keeps_no_output(device):
    """So that the next operator may change it in place; but weight and bias are kept."""
    case = BatchNormCase((3, 64, 5, 7), activation="relu", layout="last")
    t = cases.make(case, torch.float32, device, seed=1)
    out = cases.run(case, t)
    expected = torch.autograd.grad(out, t.differentiable, 3 * t.grad_out, retain_graph=True)
    found = torch.autograd.grad(out.mul_(3), t.differentiable, t.grad_out, retain_graph=True)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        t.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True])
def test_results_lie_as_the_input(training, device):
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
        statistics = [torch.ones(x.shape[1], device=device) for _ in range(2)]
        residual = channels_last(x.sin()).requires_grad_()
        out = cudnn_ops.batch_norm(
            leaf, *statistics, training=training, residual=residual, activation="relu"
        )
        grads = torch.autograd.grad(out, (leaf, residual), x.cos())
        for result in (out, *grads):
            wanted = channels_last(result) if is_last else result.contiguous()
            assert result.stride() == wanted.stride()
        statistics = [torch.ones(x.shape[1], device=device) for _ in range(2)]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in (x, *statistics)]
            fake = cudnn_ops.batch_norm(*fakes, training=training)
        assert fake.stride() == out.stride()
        expected = (F.batch_norm(x, *statistics, training=training) + x.sin()).relu()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


_CHANNELS = torch.ones(12)
MISTAKES = [
    ({"input": torch.ones(12)}, ValueError, r"input must be \[N, C, ...\].*got \[12\]"),
    ({"input": torch.ones(2, 12, 3).int()}, TypeError, "input must be float16, bfloat16 or"),
    ({"input": None}, TypeError, "input must be a tensor, got None"),
    ({"weight": torch.ones(11)}, ValueError, r"weight must be \[12\].*got \[11\]"),
    ({"weight": torch.ones(12, 1)}, ValueError, r"weight must be \[12\].*got \[12, 1\]"),
    ({"bias": _CHANNELS.double()}, TypeError, "bias must be of the input's dtype, .*Double"),
    ({"bias": torch.ones(12, device="meta")}, ValueError, "bias must be .*on cpu; got .* on meta"),
    ({"running_mean": torch.ones(3)}, ValueError, r"running_mean must be \[12\].*got \[3\]"),
    ({"running_var": _CHANNELS.long()}, TypeError, "running_var must be of the input's dtype"),
    ({"running_mean": None}, ValueError, "both, or neither; got running_var alone"),
    ({"running_var": None}, ValueError, "both, or neither; got running_mean alone"),
    (
        {"running_var": None, "running_mean": None, "training": False},
        ValueError,
        "running_mean and running_var are missing",
    ),
    (
        {"running_mean": torch.ones(12, requires_grad=True)},
        ValueError,
        "must not require a gradient; the order of arguments is",
    ),
    ({"activation": "silu"}, ValueError, 'activation must be "none" or "relu", got "silu"'),
    ({"activation": None}, TypeError, "activation must be a string, got None"),
    ({"eps": "small"}, TypeError, "eps must be a number, got 'small'"),
    ({"momentum": None}, TypeError, "momentum must be a number, got None"),
    ({"residual": torch.ones(2, 12, 4)}, ValueError, "residual must be of input's shape"),
    ({"residual": torch.ones(2, 12, 3).half()}, TypeError, "residual must be of input's dtype"),
    ({"input": torch.ones(1, 12)}, ValueError, "Expected more than 1 value per channel when tr"),
    ({"input": torch.ones(1, 12, 1, 1)}, ValueError, r"got input size \[1, 12, 1, 1\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message):
    given = {"input": torch.ones(2, 12, 3), "weight": _CHANNELS, "bias": _CHANNELS}
    given |= {"running_mean": _CHANNELS.clone(), "running_var": _CHANNELS.clone()}
    with pytest.raises(error, match=f"(?s)cudnn_ops.batch_norm: .*{message}"):
        cudnn_ops.batch_norm(**(given | {"training": True} | change))


def test_the_order_of_arguments_is_that_of_torch():
    t = cases.make(BatchNormCase((3, 8, 5), training=False), torch.float32, "cpu", seed=1)
    arguments = (t.input, t.running_mean, t.running_var, t.weight, t.bias, False, 0.1, 1e-3)
    torch.testing.assert_close(cudnn_ops.batch_norm(*arguments), F.batch_norm(*arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_one_value_is_normed_by_running_statistics(device):
    x = torch.randn(1, 6, device=device)
    mean, var = torch.randn(6, device=device), torch.rand(6, device=device)
    expected = F.batch_norm(x, mean, var)
    torch.testing.assert_close(cudnn_ops.batch_norm(x, mean, var), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equal_numbers_are_their_own_mean(dtype, device):
    for value in (0.0, 3.0, 10000.0):
        for shape in ((2, 6, 7, 7), (2, 64, 16, 16)):
            for order in (torch.contiguous_format, torch.channels_last):
                x = torch.full(shape, value, dtype=dtype, device=device)
                x = x.contiguous(memory_format=order).requires_grad_()
                statistics = [torch.ones(shape[1], device=device) for _ in range(2)]
                out = cudnn_ops.batch_norm(x, *statistics, training=True, momentum=1.0)
                assert out.abs().max() <= 1e-2
                (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
                assert grad.isfinite().all()
                of_mean = x.detach().float().mean((0, 2, 3))
                torch.testing.assert_close(statistics[0], of_mean)
                assert statistics[1].abs().max() <= 1e-6 * value * value


@pytest.mark.parametrize("device", DEVICES)
@POLICIES
def test_a_large_mean_costs_few_digits(policy, device):
    with cudnn_ops.using_plan_policy(policy):
        for dtype, shift in ((torch.float32, 300.0), (torch.float16, 30.0)):
            case = BatchNormCase((2, 64, 24, 24), layout="last", shift=shift)
            cases.check(case, cases.make(case, dtype, device, seed=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (0, 6), (3, 0, 4)])
def test_nothing_to_norm(shape, device):
    for training in (False, True):
        x = torch.ones(shape, device=device, requires_grad=True)
        weight = torch.ones(shape[1], device=device, requires_grad=True)
        statistics = [torch.full(shape[1:2], 5.0, device=device) for _ in range(2)]
        out = cudnn_ops.batch_norm(
            x, *statistics, weight, weight, training, residual=x, activation="relu"
        )
        assert out.shape == shape
        assert all((statistic == 5).all() for statistic in statistics)
        grads = torch.autograd.grad(out.sum(), (x, weight))
        assert [grad.shape for grad in grads] == [x.shape, weight.shape]
        assert not grads[1].any()


@pytest.mark.parametrize("device", DEVICES)
@POLICIES
def test_frozen_parameters_cost_nothing(policy, device):
    """Each gradient alone is the one of all together, and the others' inputs may be frozen."""
    with cudnn_ops.using_plan_policy(policy):
        for training in (False, True):
            for channels in (64, 24):
                case = replace(RELU_OF_SUM, shape=(3, channels, 5, 7), training=training)
                t = cases.make(case, torch.float32, device, seed=1)
                out = cases.run(case, t)
                together = torch.autograd.grad(out, t.differentiable, t.grad_out, retain_graph=True)
                for leaf, right in zip(t.differentiable, together, strict=True):
                    (alone,) = torch.autograd.grad(out, leaf, t.grad_out, retain_graph=True)
                    torch.testing.assert_close(alone, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_any_strides(device):
    case = replace(RELU_OF_SUM, activation="none")
    t = cases.make(case, torch.float32, device, seed=1)
    one = torch.ones((), device=device)
    dense = torch.ones_like(t.input)
    out = cases.run(case, t)
    expected = torch.autograd.grad(out, t.differentiable, dense, retain_graph=True)
    found = torch.autograd.grad(out, t.differentiable, one.expand_as(out))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(("training", "adds"), [(False, True), (True, True), (True, False)])
def test_compiled_without_a_break_for_any_size(training, adds, layout, device):
    torch._dynamo.reset()

    def step(x, mean, var, weight, bias, residual):
        return cudnn_ops.batch_norm(
            x * 2, mean, var, weight, bias, training, residual=residual, activation="relu"
        ).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch, height, width in ((2, 5, 7), (3, 9, 8)):
        case = replace(RELU_OF_SUM, shape=(batch, 12, height, width), layout=layout, residual=adds)
        t = cases.make(case, torch.float32, device, seed=1)
        runs = []
        for function in (compiled, step):
            running = [statistic.clone() for statistic in t.running]
            out = function(t.input, *running, t.weight, t.bias, t.residual)
            runs.append([out, *running, *torch.autograd.grad(out, t.differentiable, t.grad_out)])
        torch.testing.assert_close(*runs)
        assert runs[0][0].stride() == runs[1][0].stride()
        changed = not torch.equal(runs[0][1], t.running[0])
        assert changed == training


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_autocast_is_that_of_torch(training, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(3, 6, 5, device=device, dtype=dtype)
    for other in (torch.bfloat16, torch.float32):
        residual = torch.randn(3, 6, 5, device=device, dtype=other)
        with torch.autocast(device, torch.bfloat16):
            runs = []
            for is_mine in (False, True):
                mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
                if is_mine:
                    out = cudnn_ops.batch_norm(
                        x, mean, var, training=training, residual=residual, activation="relu"
                    )
                else:
                    out = (F.batch_norm(x, mean, var, training=training) + residual).relu()
                runs.append(out)
        torch.testing.assert_close(*runs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_after_the_forward_is_told(device):
    for training, names in ((True, ("input", "weight")), (False, ("running_mean", "running_var"))):
        for name in names:
            case = replace(RELU_OF_SUM, training=training)
            t = cases.make(case, torch.float32, device, seed=1)
            out = cases.run(case, t)
            with torch.no_grad():
                getattr(t, name).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
    # A step of training changes what one by running statistics has saved.
    t = cases.make(replace(RELU_OF_SUM, training=False), torch.float32, device, seed=1)
    out = cases.run(replace(RELU_OF_SUM, training=False), t)
    cases.run(RELU_OF_SUM, t)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_of_several_steps(device):
    """In place, in their own memory, and as torch's."""
    torch.manual_seed(0)
    ours, theirs = ([torch.zeros(8, device=device), torch.ones(8, device=device)] for _ in "ab")
    addresses = [statistic.data_ptr() for statistic in ours]
    for step in range(5):
        x = torch.randn(4, 8, 3, 3, device=device) * (step + 1) + step
        for momentum in (0.1, 1 / (step + 1)):
            cudnn_ops.batch_norm(x, *ours, training=True, momentum=momentum)
            F.batch_norm(x, *theirs, training=True, momentum=momentum)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [statistic.data_ptr() for statistic in ours] == addresses


@GPU
@POLICIES
@pytest.mark.parametrize("channels", [64, 24, 7])
def test_in_a_graph(channels, policy, device):
    case = replace(RELU_OF_SUM, shape=(4, channels, 16, 16))
    t = cases.make(case, torch.bfloat16, device, seed=1)

    def step():
        out = cases.run(case, t)
        return [out, *torch.autograd.grad(out, t.differentiable, t.grad_out)]

    with cudnn_ops.using_plan_policy(policy):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        before = [statistic.clone() for statistic in t.running]
        with torch.no_grad():
            t.input.copy_(t.input.flip(0) + 1)
        graph.replay()
        replayed = [statistic.clone() for statistic in t.running]
        for statistic, old in zip(t.running, before, strict=True):
            statistic.copy_(old)
        for mine, right in zip(found, step(), strict=True):
            torch.testing.assert_close(mine, right)
        torch.testing.assert_close(replayed, t.running)


def test_other_derivatives_are_refused():
    x = torch.randn(2, 6, 5)
    with pytest.raises(NotImplementedError, match="batch_norm: forward-mode"):
        torch.func.jvp(lambda x: cudnn_ops.batch_norm(x, None, None, training=True), (x,), (x,))
    leaf = x.requires_grad_()
    out = cudnn_ops.batch_norm(leaf, None, None, training=True)
    (grad,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of a norm"):
        grad.sum().backward()


@pytest.mark.parametrize("training", [False, True])
def test_half_precision_is_rounded_once(training):
    """Of a value with a residual; torch rounds the norm first."""
    case = BatchNormCase((4, 8, 9, 9), training=training, residual=True, activation="relu")
    t = cases.make(case, torch.bfloat16, "cpu", seed=1)
    exact = cases.reference(case, t, torch.float64)["out"]
    assert torch.equal(cases.run(case, t), exact.to(torch.bfloat16))
    sdpa.check(cases.run(case, t), exact, exact.to(torch.bfloat16), str(case))
