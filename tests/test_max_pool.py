"""Max pooling: results, gradients, memory orders, what is saved, compile, graphs, mistakes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.ops.image_order import is_channels_last
from tests.cases import max_pool as cases
from tests.cases.max_pool import CASES, MaxPoolCase
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEM = MaxPoolCase((3, 16, 12, 10), 3, 2, 1)
#: Of an inner operator: kernel, stride, padding, dilation.
STEM_NUMBERS = [3, 3], [2, 2], [1, 1], [1, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case, device, poisoned):
    for dtype in DTYPES:
        cases.check(case, dtype, device)


def test_float64():
    for case in CASES[::5]:
        cases.check(case, torch.float64, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_drawn(device, poisoned):
    rng = random.Random(3)
    for _ in range(60):
        kernel = rng.choice([1, 2, 3, 4, 7, (2, 5), (3, 1)])
        height, width = cases.pair_of(kernel)[0], cases.pair_of(kernel)[-1]
        case = MaxPoolCase(
            (
                rng.randint(1, 3),
                rng.choice([1, 3, 8, 12, 20]),
                rng.randint(13, 24),
                rng.randint(13, 24),
            ),
            kernel,
            rng.choice([None, 1, 2, 3, (1, 2), (3, 2)]),
            (rng.randint(0, height // 2), rng.randint(0, width // 2)),
            rng.choice([1, 1, 2, (1, 2)]),
            rng.random() < 0.5,
            rng.choice(["random", "ties", "nan"]),
            rng.choice(["last", "first", "sliced", "flat"]),
            rng.choice(["last", "first", "sliced", "expanded"]),
        )
        cases.check(case, rng.choice(DTYPES), device)


@pytest.mark.parametrize("device", DEVICES)
def test_results_have_the_inputs_memory_order(device):
    for layout in ("last", "first"):
        for has_batch in (True, False):
            shape = STEM.shape if has_batch else STEM.shape[1:]
            x = cases.laid_out(torch.randn(shape, device=device), layout).requires_grad_()
            out = cudnn_ops.max_pool2d(x, 3, 2, 1)
            (grad,) = torch.autograd.grad(out.sum(), x)
            for one in (out, grad):
                image = one if has_batch else one.unsqueeze(0)
                assert is_channels_last(image) == (layout == "last")
                assert one.is_contiguous() == (layout == "first")


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_wanted_is_kept(device):
    x = cases.make(STEM, torch.float32, device)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = cudnn_ops.max_pool2d(x, 3, 2, 1)
        cudnn_ops.max_pool2d(x.detach(), 3, 2, 1)
    assert [(one.dtype, one.shape) for one in kept] == [(torch.uint8, out.shape)]
    for with_offsets in (False, True):
        _, offsets = _ops._max_pool2d(x.detach(), *STEM_NUMBERS, False, with_offsets)
        assert offsets.dtype == torch.uint8
        assert offsets.shape == (out.shape if with_offsets else (0,))


@pytest.mark.parametrize("device", DEVICES)
def test_saved_offsets_may_come_back_with_other_strides(device):
    x = cases.make(STEM, torch.float32, device)
    grad_out = cases.grad_of(STEM, cudnn_ops.max_pool2d(x, 3, 2, 1))
    (expected,) = torch.autograd.grad(cudnn_ops.max_pool2d(x, 3, 2, 1), x, grad_out)
    for change in (
        lambda tensor: tensor.contiguous(),
        lambda tensor: cases.laid_out(tensor, "sliced"),
        lambda tensor: cases.laid_out(tensor, "flat"),
    ):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, change):
            (found,) = torch.autograd.grad(cudnn_ops.max_pool2d(x, 3, 2, 1), x, grad_out)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_input_and_output_may_change_behind_the_forward(device):
    leaf = cases.make(STEM, torch.float32, device)
    x = leaf * 1
    out = cudnn_ops.max_pool2d(x, 3, 2, 1)
    grad_out = cases.grad_of(STEM, out)
    (expected,) = torch.autograd.grad(out, leaf, grad_out, retain_graph=True)
    with torch.no_grad():
        x.fill_(7)
        out.fill_(7)
    (found,) = torch.autograd.grad(out, leaf, grad_out)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_two_gradients(device):
    x = cases.make(STEM, torch.float32, device).detach()
    for layouts in itertools.product(("last", "first", "flat"), repeat=2):
        out, offsets = _ops._max_pool2d(x, *STEM_NUMBERS, False, True)
        one, other = (
            cases.laid_out(torch.randn(out.shape, device=device), layout) for layout in layouts
        )
        size = list(x.shape[2:])
        found = _ops._max_pool2d_backward(one, offsets, other, size, *STEM_NUMBERS)
        right = _ops._max_pool2d_backward(one + other, offsets, None, size, *STEM_NUMBERS)
        torch.testing.assert_close(found, right)
        assert found.stride() == right.stride() == x.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_large_windows_are_torchs(device):
    x = torch.randn(1, 8, 20, 20, device=device).requires_grad_()
    for kernel, padding in ((16, 8), ((1, 256), (0, 128)), ((16, 16), 0)):
        out = cudnn_ops.max_pool2d(x, kernel, 1, padding)
        assert torch.equal(out, F.max_pool2d(x, kernel, 1, padding))
        torch.autograd.grad(out.sum(), x)
    assert cudnn_ops.max_pool2d(x, (15, 17), 1).shape == (1, 8, 6, 4)
    with pytest.raises(NotImplementedError, match="at most 255 numbers in a window"):
        _ops._max_pool2d(x, [16, 16], [1, 1], [0, 0], [1, 1], False, False)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    for layout, dtype in itertools.product(("last", "first"), (torch.float32, torch.float16)):
        x = cases.make(MaxPoolCase((2, 8, 7, 6), 3, layout=layout), dtype, device)
        torch.library.opcheck(_ops.max_pool2d.default, (x, [3, 3], [2, 2], [1, 1]))
        torch.library.opcheck(_ops._max_pool2d.default, (x, *STEM_NUMBERS, False, True))
        plain = x.detach()
        torch.library.opcheck(_ops._max_pool2d.default, (plain, *STEM_NUMBERS, True, False))
        torch.library.opcheck(_ops._max_pool2d_size.default, (plain, *STEM_NUMBERS, True))
        out, offsets = _ops._max_pool2d(plain, *STEM_NUMBERS, False, True)
        for more in (None, out):
            arguments = (out, offsets, more, [7, 6], *STEM_NUMBERS)
            torch.library.opcheck(_ops._max_pool2d_backward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    torch._dynamo.reset()

    def step(x: Tensor) -> Tensor:
        out = cudnn_ops.max_pool2d(x * 2, 3, 2, 1)
        return (cudnn_ops.max_pool2d(out, (2, 1), ceil_mode=True) + 1).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for layout, size in itertools.product(("last", "first"), ((9, 12), (14, 11), (21, 8))):
        x = cases.make(MaxPoolCase((2, 8, *size), 3, layout=layout), torch.float32, device)
        results = []
        for function in (compiled, step):
            out = function(x)
            results.append((out, *torch.autograd.grad(out.sum(), x)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_without_samples(device):
    x = torch.randn(0, 8, 6, 6, device=device, requires_grad=True)
    out = cudnn_ops.max_pool2d(x, 2)
    assert out.shape == (0, 8, 3, 3)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
def test_is_a_function_of_modules_arguments(device):
    """All ways to write numbers that torch's function has."""
    x = torch.randn(2, 8, 12, 12, device=device)
    for module in (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 3)), nn.MaxPool2d(2, ceil_mode=True)):
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        given = {name: getattr(module, name) for name in names}
        assert torch.equal(cudnn_ops.max_pool2d(x, **given), module(x))
    assert torch.equal(cudnn_ops.max_pool2d(x, [3], [2], [1]), F.max_pool2d(x, 3, 2, 1))
    assert torch.equal(cudnn_ops.max_pool2d(x, torch.Size([3, 2])), F.max_pool2d(x, (3, 2)))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_keeps_the_dtype(device):
    with torch.autocast(device, torch.bfloat16):
        assert cudnn_ops.max_pool2d(torch.ones(1, 8, 4, 4, device=device), 2).dtype == torch.float32


MISTAKES = [
    ((0,), ValueError, r"kernel_size must be positive.*got \[0, 0\]"),
    (((3, -1),), ValueError, r"kernel_size must be positive.*got \[3, -1\]"),
    ((3, 0), ValueError, r"stride must be positive.*got \[0, 0\]"),
    ((3, 1, 0, 0), ValueError, r"dilation must be positive.*got \[0, 0\]"),
    ((3, 1, 2), ValueError, r"padding must not be negative.*half of kernel_size.*got \[2, 2\]"),
    ((3, 1, -1), ValueError, r"padding must not be negative.*got \[-1, -1\]"),
    ((7,), ValueError, r"kernel_size \[7, 7\] is larger than the padded input, \[2, 8, 6, 6\]"),
    (
        (3, 1, 1, 4),
        ValueError,
        r"kernel_size .* is larger than the padded input.*dilation \[4, 4\]",
    ),
    (((1, 2, 3),), ValueError, r"kernel_size must be one number, or one for H and one for W"),
    (((),), ValueError, r"kernel_size must be one number"),
    ((2, (1, 2, 3)), ValueError, r"stride must be one number"),
    ((2, 1, ()), ValueError, r"padding must be one number"),
    (("3",), TypeError, r"kernel_size must be a whole number, or one for H and one for W; got '3'"),
    ((2.0,), TypeError, r"kernel_size must be a whole number.*got 2.0"),
    ((2, (1, 1.5)), TypeError, r"stride must be a whole number.*got \(1, 1.5\)"),
    ((2, 1, None), TypeError, r"padding must be a whole number.*got None"),
    ((2, 1, 0, 1, "no"), TypeError, r"ceil_mode must be True or False, got .no."),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake[0]))
def test_mistakes_in_numbers(mistake, device):
    numbers, error, match = mistake
    with pytest.raises(error, match=rf"(?s)^cudnn_ops\.max_pool2d: {match}"):
        cudnn_ops.max_pool2d(torch.ones(2, 8, 6, 6, device=device), *numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_in_the_input(device):
    x = torch.ones(2, 8, 6, 6, device=device)
    for wrong, error, match in (
        (x[0, 0], ValueError, r"input must be \[N, C, H, W\] or \[C, H, W\]; got \[6, 6\]"),
        (x[None], ValueError, r"input must be \[N, C, H, W\]"),
        (x[:, :0], ValueError, "input must not be empty but for its batch"),
        (x[..., :0], ValueError, "input must not be empty but for its batch"),
        (x.int(), TypeError, "input must be float16, bfloat16 or float32"),
        (x.to(torch.float8_e4m3fn), TypeError, "input must be float16"),
        (None, TypeError, "input must be a tensor"),
        (1.0, TypeError, "input must be a tensor, got 1.0"),
    ):
        with pytest.raises(error, match=rf"^cudnn_ops\.max_pool2d: {match}"):
            cudnn_ops.max_pool2d(wrong, 2)


def test_other_derivatives_are_refused():
    x = torch.randn(2, 6, 5, 5)
    with pytest.raises(NotImplementedError, match="max_pool2d: forward-mode"):
        torch.func.jvp(lambda x: cudnn_ops.max_pool2d(x, 2), (x,), (x,))
    leaf = x.requires_grad_()
    out = cudnn_ops.max_pool2d(leaf, 2)
    weight = torch.ones_like(out).requires_grad_()
    (grad,) = torch.autograd.grad(out, leaf, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of max_pool2d"):
        grad.sum().backward()


@pytest.mark.gpu
def test_float64_is_for_cpus():
    with pytest.raises(TypeError, match="input must be float16, bfloat16 or float32 on a GPU"):
        cudnn_ops.max_pool2d(torch.ones(2, 8, 6, 6, device="cuda", dtype=torch.float64), 2)


@pytest.mark.gpu
def test_in_a_graph():
    x = cases.make(STEM, torch.bfloat16, "cuda")
    grad_out = cases.grad_of(STEM, cudnn_ops.max_pool2d(x, 3, 2, 1))

    def step() -> tuple[Tensor, ...]:
        out = cudnn_ops.max_pool2d(x, 3, 2, 1)
        return out.detach(), *torch.autograd.grad(out, x, grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.copy_(x.flip(0) + 1)
    graph.replay()
    for mine, right in zip(found, step(), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count():
    x = torch.zeros(33, 64, 1024, 1024, dtype=torch.bfloat16, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    x[-1, -1, -1, -1] = 3
    x.requires_grad_()
    out = cudnn_ops.max_pool2d(x, 3, 2, 1)
    assert out[-1, -1, -1, -1] == 3
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad[-1, -1, -1, -1] == 1
    assert grad[-1, -1, -2, -2] == 0
