"""Instance norm: a group norm of each channel, with running statistics as torch keeps them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa
from tests.cases.group_norm import channels_last, lay_out
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["first", "last", "sliced", "flat"])
def test_results_gradients_and_statistics(layout, dtype, device):
    shapes = [(2, 6, 5), (3, 8, 7, 9), (1, 5, 2, 3, 4), (2, 3, 33, 31)]
    for seed, (shape, use_input_stats, activation, kind) in enumerate(
        itertools.product(shapes, (True, False), ("none", "silu"), ("same", "float32", ""))
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*sizes, generator=generator):
            return torch.randn(sizes, generator=generator, dtype=torch.float64)

        channels = shape[1]
        x = lay_out((draw(*shape) * 2 + 1).to(dtype).to(device), layout).requires_grad_()
        grad = lay_out(draw(*shape).to(dtype).to(device), layout)
        mean, var = draw(channels), draw(channels).abs() + 0.5
        ours = [statistic.float().to(device) for statistic in (mean, var)]
        parameters = []
        if kind:
            wide = torch.float32 if kind == "float32" else dtype
            parameters = [draw(channels).to(wide).to(device).requires_grad_() for _ in range(2)]
        out = cudnn_ops.instance_norm(
            *(x, *ours, *(parameters or (None, None)), use_input_stats, 0.3),
            activation=activation,
        )
        found = [out, *torch.autograd.grad(out, [x, *parameters], grad), *ours]
        results = []
        for precision in (torch.float64, dtype):
            leaf, *own = (one.detach().to(precision).requires_grad_() for one in (x, *parameters))
            wide = torch.promote_types(precision, torch.float32)
            statistics = [one.float().to(device).to(wide) for one in (mean, var)]
            weight, bias = own or (None, None)
            if precision != torch.float64:
                statistics = [one.to(precision) for one in statistics]
            expected = F.instance_norm(
                leaf.contiguous(), *statistics, weight, bias, use_input_stats, 0.3
            )
            expected = F.silu(expected) if activation == "silu" else expected
            # Of a gradient of another order torch computes a wrong one.
            by = grad.to(precision).contiguous()
            grads = torch.autograd.grad(expected, [leaf, *own], by)
            results.append([expected, *grads, *statistics])
        for mine, exact, rough in zip(found, *results, strict=True):
            name = f"{shape} {use_input_stats} {activation} {kind}"
            sdpa.check(mine, exact, rough.to(mine.dtype), name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_input_stats", [False, True])
def test_opcheck(use_input_stats, device):
    x = torch.randn(2, 6, 5, 4, device=device, requires_grad=True)
    mean, var, weight, bias = torch.rand(4, 6, device=device).unbind()
    arguments = (x, mean, var, weight, bias, use_input_stats)
    torch.library.opcheck(_ops.instance_norm.default, arguments, {"activation": "silu"})
    torch.library.opcheck(_ops.instance_norm.default, (x,))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break_for_any_size(device):
    torch._dynamo.reset()

    def step(x, mean, var, weight):
        return cudnn_ops.instance_norm(x * 2, mean, var, weight, activation="silu").sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for sizes in ((2, 5, 7), (3, 9, 8)):
        x = torch.randn(sizes[0], 6, *sizes[1:], device=device)
        weight = torch.randn(6, device=device, requires_grad=True)
        runs = []
        for function in (compiled, step):
            running = [torch.ones(6, device=device) for _ in range(2)]
            leaf = x.clone().requires_grad_()
            out = function(leaf, *running, weight)
            runs.append([out, *running, *torch.autograd.grad(out.sum(), (leaf, weight))])
        torch.testing.assert_close(*runs)


MISTAKES = [
    ({"input": torch.ones(12)}, ValueError, r"input must be \[N, C, ...\].*got \[12\]"),
    ({"input": None}, TypeError, "input must be a tensor, got None"),
    ({"input": torch.ones(2, 12, 1)}, ValueError, "Expected more than 1 spatial element"),
    ({"input": torch.ones(2, 12)}, ValueError, "Expected more than 1 spatial element"),
    ({"running_mean": torch.ones(3)}, ValueError, r"running_mean must be \[12\].*got \[3\]"),
    ({"running_mean": None}, ValueError, "both, or neither; got running_var alone"),
    ({"running_mean": torch.ones(12, requires_grad=True)}, ValueError, "must not require a grad"),
    (
        {"running_mean": None, "running_var": None, "use_input_stats": False},
        ValueError,
        "running_mean and running_var are missing",
    ),
    ({"activation": "relu"}, ValueError, 'activation must be "none" or "silu", got "relu"'),
    ({"momentum": None}, TypeError, "momentum must be a number, got None"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message):
    given = {"input": torch.ones(2, 12, 3)}
    given |= {"running_mean": torch.ones(12), "running_var": torch.ones(12)}
    with pytest.raises(error, match=f"(?s)cudnn_ops.instance_norm: .*{message}"):
        cudnn_ops.instance_norm(**(given | change))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_order_and_nothing(device):
    x = channels_last(torch.randn(2, 6, 5, 4, device=device))
    out = cudnn_ops.instance_norm(x)
    assert out.stride() == x.stride()
    with FakeTensorMode() as mode:
        assert cudnn_ops.instance_norm(mode.from_tensor(x)).stride() == x.stride()
    for shape in ((0, 6, 4), (2, 6, 0)):
        running = [torch.full((6,), 5.0, device=device) for _ in range(2)]
        empty = torch.ones(shape, device=device, requires_grad=True)
        out = cudnn_ops.instance_norm(empty, *running)
        assert torch.autograd.grad(out.sum(), empty)[0].shape == shape
        assert all((statistic == 5).all() for statistic in running)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_that_of_torch(dtype, device):
    x, weight = torch.randn(2, 6, 5, device=device), torch.randn(6, device=device)
    with torch.autocast(device, torch.bfloat16):
        mine = cudnn_ops.instance_norm(x.to(dtype), weight=weight, bias=weight)
        other = F.instance_norm(x.to(dtype), weight=weight, bias=weight)
    assert mine.dtype == other.dtype
    torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)
