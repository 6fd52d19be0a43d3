"""Layer norm and RMS norm: results and gradients, layouts, empty and strange rows, compile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from tests.cases import norm as cases
from tests.cases import sdpa
from tests.cases.drawn import check_all
from tests.cases.norm import NormCase
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
RMS = NormCase((6, 100), (100,), is_layer=False)
LAYER = NormCase((6, 100), (100,), is_layer=True, bias="same")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    check_all(cases, 60, device, random.Random(4000 + block))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [RMS, LAYER], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_opcheck(adds, case, device):
    t = cases.make(case, torch.float32, device, seed=1)
    residual = torch.randn_like(t.input).requires_grad_() if adds else None
    rest = (case.normalized, t.weight, t.bias, case.eps, case.is_layer, False)
    arguments = (t.input, residual, *rest)
    for with_stats in (False, True):
        torch.library.opcheck(_ops._norm.default, (*arguments, with_stats))
    _, _, mean, rstd = _ops._norm(*arguments, True)
    torch.library.opcheck(
        _ops._norm_backward.default,
        (
            t.grad_out,
            torch.ones_like(t.grad_out) if adds else None,
            t.input.detach(),
            case.normalized,
            t.weight.detach(),
            mean.detach(),
            rstd.detach(),
            case.is_layer,
            False,
            (True, True, case.is_layer),
        ),
    )


#: Rows and their size: powers of two and not, few and a million, narrow and wide.
SIZES = [
    (1, 64),
    (1, 16384),
    (1, 32768),
    (5, 65536),
    (3, 100000),
    (3, 100001),
    (3, 150000),
    (150, 100000),
    (33, 32768),
    (300, 32768),
    (300, 16384),
    (17, 12288),
    (2049, 4096),
    (513, 1536),
    (1030, 1152),
    (600, 1048),
    (513, 4095),
    (1025, 4100),
    (8193, 2056),
    (70001, 128),
    (1 << 20, 64),
    (1000003, 100),
    (300007, 65),
]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("is_layer", [False, True])
def test_sizes(rows, size, is_layer, device, poisoned):
    is_small = rows * size < 1 << 24  # the rest takes long to draw
    for seed, dtype in enumerate([torch.bfloat16, torch.float32][: 1 + is_small]):
        for zero_centered in (False, True)[: 1 + is_small]:
            bias = "same" if is_layer else ""
            case = NormCase((rows, size), (size,), is_layer, "same", bias, zero_centered)
            cases.check(case, cases.make(case, dtype, device, seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("size", [96, 100, 101, 1024, 20000])
def test_the_sum_is_the_one_that_is_normed(size, is_layer, device, poisoned):
    """In low precision and rows apart: as if the sum were computed first, and rounded."""
    torch.manual_seed(0)
    draw = torch.randn(2, 9, 3, size + 8, device=device).bfloat16()
    x, residual = (part[..., :size].requires_grad_() for part in draw)
    weight = torch.randn(size, device=device).bfloat16().requires_grad_()
    fused, norm = (
        (cudnn_ops.add_layer_norm, cudnn_ops.layer_norm)
        if is_layer
        else (cudnn_ops.add_rms_norm, cudnn_ops.rms_norm)
    )
    out, total = fused(x, residual, (size,), weight)
    expected_total = x + residual
    expected = norm(expected_total, (size,), weight)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(out, expected)
    grads = [torch.randn_like(out), torch.randn_like(out)]
    of_x, of_residual, of_weight = torch.autograd.grad((out, total), (x, residual, weight), grads)
    assert torch.equal(of_x, of_residual)

    def reference(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (total, weight)]
        result = norm(leaves[0], (size,), leaves[1])
        first, of_weight = torch.autograd.grad(result, leaves, grads[0].to(dtype))
        return first + grads[1].to(dtype), of_weight

    exact = reference(torch.float64) if device == "cpu" else reference(torch.float32)
    rough = reference(torch.bfloat16)
    for mine, right, other in zip((of_x, of_weight), exact, rough, strict=True):
        sdpa.check(mine, right.double(), other, "gradient")
    (alone,) = torch.autograd.grad(fused(x, residual, (size,), weight)[1], x, grads[0])
    assert torch.equal(alone, grads[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_keeps_three_digits(device):
    torch.manual_seed(0)
    values = (1000 + torch.randn(64, 512, dtype=torch.float64)).half().to(device)
    out = cudnn_ops.layer_norm(values, (512,))
    exact = F.layer_norm(values.double(), (512,))
    assert (out.double() - exact).abs().max() < 5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["auto", "exact"])
@pytest.mark.parametrize("is_layer", [False, True])
def test_addresses_that_are_no_multiple_of_16(is_layer, policy, device, poisoned):
    """Rows and parameters in flat buffers; cuDNN's plans want other addresses."""
    with cudnn_ops.using_plan_policy(policy):
        for size, weight in ((1024, "same"), (1000, "float32")):
            bias = weight if is_layer else ""
            case = NormCase((33, size), (size,), is_layer, weight, bias, layout="flat")
            cases.check(case, cases.make(case, torch.bfloat16, device, seed=size))
        t = cases.make(NormCase((34, 1024), (1024,), is_layer), torch.bfloat16, device, seed=1)
        residual = cases.in_flat_buffer(t.grad_out[1:])
        x = cases.in_flat_buffer(t.input.detach()[1:])
        fused = cudnn_ops.add_layer_norm if is_layer else cudnn_ops.add_rms_norm
        out, total = fused(x, residual, (1024,), t.weight)
        right = fused(x.clone(), residual.clone(), (1024,), t.weight)
        assert torch.equal(total, right[1])
        torch.testing.assert_close(out, right[0])


#: Rows that take more shared memory than others have than Hopper and Blackwell's largest; more of
#: them than one kernel does with all gradients.
WIDE = [
    (1100, 16384, torch.bfloat16),
    (600, 9000, torch.float16),
    (1100, 8192, torch.float32),
    (2060, 32768, torch.float16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kilobytes", [163, 99])
@pytest.mark.parametrize("is_layer", [False, True])
def test_with_less_shared_memory(is_layer, kilobytes, device, poisoned):
    """What an A100 and an L40S have, on any GPU."""
    _ops._norm_limit_shared_memory(kilobytes << 10)
    try:
        for rows, size, dtype in WIDE:
            bias = "same" if is_layer else ""
            case = NormCase((rows, size), (size,), is_layer, "same", bias)
            cases.check(case, cases.make(case, dtype, device, seed=rows))
    finally:
        _ops._norm_limit_shared_memory(0)


#: Widths that every way to spread a row takes.
WIDTHS = (1, 7, 64, 100, 1000, 1024, 1152, 4096, 4100, 8192, 16384, 20000, 32768, 40000)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equal_numbers_are_their_own_mean(dtype, device):
    """A little beside it, and a small eps makes much of that."""
    value = torch.tensor(10000.123, dtype=dtype).item()
    for width in WIDTHS:
        for rows in (1, 600):
            if rows * width > 1 << 20 and device == "cpu":
                continue
            x = torch.full((rows, width), value, dtype=dtype, device=device, requires_grad=True)
            out = cudnn_ops.layer_norm(x, (width,))
            assert not out.any(), f"{rows} x {width}: {out.abs().max().item()}"
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
def test_numbers_near_the_largest(is_layer, device):
    """float16 as exactly as any others; of bfloat16, whose squares float32 cannot hold, finite."""
    norm = cudnn_ops.layer_norm if is_layer else cudnn_ops.rms_norm
    for width in WIDTHS:
        x = torch.full((3, width), 65504.0, dtype=torch.float16, device=device)
        x[:, ::2] = -65504.0
        exact = F.layer_norm(x.double(), (width,)) if is_layer else x.double().sign()
        sdpa.check(norm(x, (width,)), exact, exact.half(), f"float16 {width}")
        for value in (3e38, -3e38, 1e36):
            x = torch.full((3, width), value, dtype=torch.bfloat16, device=device)
            leaf = x.requires_grad_()
            out = norm(leaf, (width,))
            (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
            assert not out.any()
            assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_without_eps_are_no_numbers_as_in_torch(device):
    zeros = torch.zeros(3, 64, device=device)
    assert cudnn_ops.rms_norm(zeros, (64,), eps=0.0).isnan().all()
    assert cudnn_ops.layer_norm(zeros, (64,), eps=0.0).isnan().all()
    x = torch.randn(3, 64, device=device)
    for ours, torchs in ((cudnn_ops.rms_norm, F.rms_norm), (cudnn_ops.layer_norm, F.layer_norm)):
        torch.testing.assert_close(ours(x, (64,), eps=0.0), torchs(x, (64,), eps=0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((0, 64), (64,)), ((3, 0), (0,)), ((2, 0, 64), (64,)), ((2, 3, 0), (3, 0)), ((0, 0), (0,))],
)
def test_nothing_to_norm(shape, normalized, is_layer, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(normalized, device=device, requires_grad=True)
    out = (cudnn_ops.layer_norm if is_layer else cudnn_ops.rms_norm)(x, normalized, weight)
    assert out.shape == shape
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]
    assert not grads[1].any()
    # And as fake tensors have it, statistics included.
    arguments = (normalized, None, None, 1e-5, is_layer, False, True)
    found = _ops._norm(x.detach(), None, *arguments)
    with FakeTensorMode():
        fake = _ops._norm(torch.ones(shape, device=device), None, *arguments)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in fake]


class Masks(TorchDispatchMode):
    """The gradients that backwards are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _ops._norm_backward.default:
            self.seen.append(tuple(args[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 20000), (3, 1000), (700, 64), (700, 1000), (40, 12000)]
)
def test_frozen_parameters_cost_nothing(size, rows, device):
    """And rows that lie apart, or one behind the other at no distance."""
    torch.manual_seed(0)
    memory = torch.randn(rows, size + 3, device=device)
    for view in (memory[:, 3:], memory[:1, :size].expand(rows, size), memory[:, :size]):
        x = view.detach().requires_grad_()
        weight, bias = torch.randn(2, size, device=device)
        out = cudnn_ops.layer_norm(x, (size,), weight, bias)
        grad_out = torch.randn(size, device=device).expand(rows, size)
        with Masks() as masks:
            (grad,) = torch.autograd.grad(out, x, grad_out)
        assert masks.seen == [(True, False, False)]
        leaf = x.detach().double().requires_grad_()
        right = F.layer_norm(leaf, (size,), weight.double(), bias.double())
        (right_grad,) = torch.autograd.grad(right, leaf, grad_out.double())
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), right_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_zeros(device):
    zeros = torch.zeros(3, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, device=device, dtype=torch.bfloat16)
    for out in (cudnn_ops.rms_norm(zeros, (64,), weight), cudnn_ops.layer_norm(zeros, (64,))):
        assert not out.any()
        (grad,) = torch.autograd.grad(out.sum(), zeros)
        assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_eps_it_is_that_of_torch(dtype, device):
    small = torch.full((2, 64), 1e-3, device=device, dtype=dtype)
    torch.testing.assert_close(cudnn_ops.rms_norm(small, (64,)), F.rms_norm(small, (64,)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_comes_along_and_has_its_gradient(device):
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(*shape, device=device, requires_grad=True)
        for shape in ((5, 64), (5, 64), (64,))
    )
    for ours, theirs in (
        (cudnn_ops.add_rms_norm(x, residual, (64,), weight, 1e-6), F.rms_norm),
        (cudnn_ops.add_layer_norm(x, residual, (64,), weight, eps=1e-6), F.layer_norm),
    ):
        expected_sum = x + residual
        expected = theirs(expected_sum, (64,), weight, eps=1e-6)
        torch.testing.assert_close(ours, (expected, expected_sum))
        leaves = (x, residual, weight)
        found = torch.autograd.grad(ours[0].sin().sum() + ours[1].square().sum(), leaves)
        wanted = torch.autograd.grad(expected.sin().sum() + expected_sum.square().sum(), leaves)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [RMS, LAYER], ids=str)
def test_compiled_without_a_break_for_any_number_of_rows(case, device):
    torch._dynamo.reset()

    def step(x, weight, bias):
        if case.is_layer:
            return cudnn_ops.layer_norm(x * 2, case.normalized, weight, bias).relu()
        return cudnn_ops.rms_norm(x * 2, case.normalized, weight, case.eps).relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        t = cases.make(
            NormCase((rows, 100), (100,), case.is_layer, bias=case.bias), torch.float32, device, 1
        )
        for function in (compiled, step):
            out = function(t.input, t.weight, t.bias)
            grads = torch.autograd.grad(out, t.differentiable, t.grad_out)
            if function is compiled:
                found = (out, *grads)
        torch.testing.assert_close(found, (out, *grads))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_is_that_of_torch(device):
    x = torch.randn(3, 64, device=device)
    weight = torch.randn(64, device=device)
    with torch.autocast(device, torch.bfloat16):
        low = x.bfloat16()
        for mine, other in (
            (cudnn_ops.layer_norm(low, (64,), weight), F.layer_norm(low, (64,), weight)),
            (cudnn_ops.rms_norm(x, (64,), weight), F.rms_norm(x, (64,), weight)),
        ):
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_under_autocast_the_sum_promotes(dtype, other, parameters, is_layer, device):
    """As torch's ``input + residual``; all that comes out has the wider dtype."""
    torch.manual_seed(0)
    x, residual = (
        torch.randn(6, 100, device=device).to(d).requires_grad_() for d in (dtype, other)
    )
    weight, bias = torch.randn(2, 100, device=device, dtype=parameters).unbind()
    leaves = [x, residual, *(p.requires_grad_() for p in (weight, bias)[: 1 + is_layer])]
    grads = torch.randn(2, 6, 100, device=device).unbind()

    norm: Callable[..., torch.Tensor] = F.layer_norm if is_layer else F.rms_norm

    def reference(wide: torch.dtype, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        first, second, *rest = (leaf.to(wide) for leaf in leaves)
        total = first + second
        out = norm(total, (100,), *rest, eps=1e-5)
        by = [grad.to(wide) for grad in grads]
        return [out, total, *torch.autograd.grad((out, total), leaves, by)]

    fused = cudnn_ops.add_layer_norm if is_layer else cudnn_ops.add_rms_norm
    with torch.autocast(device, torch.bfloat16):
        results = fused(x, residual, (100,), *leaves[2:], eps=1e-5)
    found = [*results, *torch.autograd.grad(results, leaves, grads)]
    wanted = [torch.float32, torch.float32, *(leaf.dtype for leaf in leaves)]
    assert [tensor.dtype for tensor in found] == wanted
    exact = reference(torch.float64, [leaf.detach().double().requires_grad_() for leaf in leaves])
    rough = reference(torch.float32, leaves)
    names = ("out", "sum", "input", "residual", "weight", "bias")
    for name, mine, right, low in zip(names, found, exact, rough, strict=False):
        sdpa.check(mine, right, low, name)
    with pytest.raises(TypeError, match="residual must be of input's dtype"):
        fused(x, residual, (100,), *leaves[2:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"normalized_shape": ()}, ValueError, "normalized_shape must have at least one"),
        ({"normalized_shape": (99,)}, ValueError, r"input must end with normalized_shape, \[99\]"),
        ({"weight": torch.ones(99)}, ValueError, r"weight must be of normalized_shape, \[100\]"),
        ({"weight": torch.ones(100, dtype=torch.float16)}, TypeError, "weight must be of the inp"),
        ({"input": torch.ones(6, 100, dtype=torch.int32)}, TypeError, "input must be float16"),
        ({"input": torch.ones(6, 100).to(torch.float8_e5m2)}, TypeError, "input must be float16"),
        ({"input": None}, TypeError, ": input must be a tensor, got None"),
        ({"normalized_shape": 100}, TypeError, r"be a sequence of integers, .*, got 100$"),
        ({"normalized_shape": (100.5,)}, TypeError, r"be a sequence of integers, .*, got tuple$"),
        ({"weight": "ones"}, TypeError, r": weight must be a tensor or None, got 'ones'$"),
        ({"eps": "small"}, TypeError, r": eps must be a number.*, got 'small'$"),
    ],
    ids=str,
)
def test_bad_input(change, error, match, device):
    arguments = {"input": torch.ones(6, 100), "normalized_shape": (100,), **change}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    for function in (cudnn_ops.rms_norm, cudnn_ops.layer_norm):
        with pytest.raises(error, match=rf"^cudnn_ops\.{function.__name__}.*{match}"):
            function(**arguments)
    arguments["residual"] = torch.ones(6, 100, device=device)
    for function in (cudnn_ops.add_rms_norm, cudnn_ops.add_layer_norm):
        changed = arguments["input"]
        if isinstance(changed, torch.Tensor):
            arguments["residual"] = torch.ones(6, 100, device=device).to(changed.dtype)
        with pytest.raises(error, match=rf"^cudnn_ops\.{function.__name__}.*{match}"):
            function(**arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_residual(device):
    x = torch.ones(6, 100, device=device)
    for function in (cudnn_ops.add_rms_norm, cudnn_ops.add_layer_norm):
        name = rf"^cudnn_ops\.{function.__name__}: residual must be"
        with pytest.raises(TypeError, match=f"{name} a tensor, got None"):
            function(x, None, (100,))
        with pytest.raises(TypeError, match=f"{name} of input's dtype, Float; got Half"):
            function(x, x.half(), (100,))
        with pytest.raises(ValueError, match=rf"{name} of input's shape, \[6, 100\]"):
            function(x, x[:5], (100,))


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative_is_refused(device):
    x = torch.randn(3, 64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(cudnn_ops.rms_norm(x, (64,)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of a norm"):
        grad.sum().backward()
