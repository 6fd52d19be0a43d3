"""Rounding to 8 bits and back: bit for bit what torch's conversions give under the same scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cudnn_ops
from tests.cases.fp8 import FORMATS
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def expected(
    x: Tensor,
    scale: Tensor | None,
    dim: int | None,
    dtype: torch.dtype,
    power_of_two: bool = False,
):
    """Of a tensor on a CPU, number by number."""
    most = torch.finfo(dtype).max
    groups = [x] if dim is None else list(x.unbind(dim))
    data, descales, amaxes = [], [], []
    for index, group in enumerate(groups):
        wide = group.float()
        amax = wide.abs().max() if wide.numel() else torch.tensor(0.0)
        if scale is not None:
            factor = scale[index]
        elif amax == 0 or not math.isfinite(amax):
            factor = torch.tensor(1.0)
        else:
            factor = torch.minimum(torch.tensor(most) / amax, torch.tensor(2.0**126))
        if scale is None and power_of_two:
            factor = torch.tensor(2.0 ** (math.frexp(factor)[1] - 1))
        scaled = wide * factor
        data.append(scaled.clamp(-most, most).to(dtype))
        descales.append(1 / factor)
        amaxes.append(amax)
    whole = data[0] if dim is None else torch.stack([d.float() for d in data], dim).to(dtype)
    return whole, torch.stack(descales), torch.stack(amaxes)


def same_bits(found: Tensor, wanted: Tensor) -> None:
    found, wanted = found.cpu(), wanted.cpu()
    is_nan = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    as_bits = torch.int32 if wanted.dtype == torch.float32 else torch.uint8
    assert torch.equal(found.view(as_bits)[~is_nan], wanted.view(as_bits)[~is_nan])


def like_in_memory(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """With the same strides, whatever they are."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    if x.numel() == 0:
        return x.to(device, dtype)
    memory = x.as_strided((extent,), (1,)).to(device, dtype)
    return memory.as_strided(x.shape, x.stride())


def check(
    x: Tensor, scale=None, dim=None, dtype=FORMATS[0], device="cpu", power_of_two=False
) -> None:
    given = None if scale is None else scale.to(device)
    on_device = like_in_memory(x, x.dtype, device)
    options = {"dim": dim, "dtype": dtype, "power_of_two": power_of_two}
    found = cudnn_ops.quantize_fp8(on_device, given, **options)
    for one, other in zip(found, expected(x, scale, dim, dtype, power_of_two), strict=True):
        same_bits(one, other)
    assert found.data.stride() == torch.empty_like(x).stride()
    wide = cudnn_ops.dequantize_fp8(found.data, found.descale, dim=dim, dtype=x.dtype)
    assert wide.stride() == found.data.stride()
    factor = found.descale.cpu().reshape([-1 if i == dim else 1 for i in range(x.dim())])
    torch.testing.assert_close(
        wide.cpu(), (found.data.cpu().float() * factor).to(x.dtype), rtol=0, atol=0, equal_nan=True
    )


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 5, 7, 48),
    "heads third": lambda: torch.randn(2, 7, 5, 48).transpose(1, 2),
    "part of a projection": lambda: torch.randn(2, 7, 15, 48)[:, :, 5:10].transpose(1, 2),
    "odd rows": lambda: torch.randn(2, 5, 7, 13)[..., 1:],
    "last dimension strided": lambda: torch.randn(2, 5, 7, 32)[..., ::2],
    "expanded": lambda: torch.randn(2, 1, 7, 16).expand(-1, 5, -1, -1),
    "one row": lambda: torch.randn(1, 1, 1, 33),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits(layout, dtype, device, poisoned):
    torch.manual_seed(len(layout))
    for source in DTYPES:
        low = like_in_memory(LAYOUTS[layout](), source, "cpu")
        for dim in (None, 1, -1, 0):
            own = None if dim is None else dim % 4
            groups = 1 if dim is None else low.shape[dim]
            check(low, None, own, dtype, device)
            check(low, torch.rand(groups) * 300, own, dtype, device)
            check(low, torch.rand(groups) * 300, own, dtype, device, power_of_two=True)
            check(low, None, own, dtype, device, power_of_two=True)


EXTREMES = {
    "zeros": torch.zeros(3, 16),
    "one number": torch.tensor(-3.5),
    "one large": torch.ones(4, 16).index_put(
        (torch.tensor([2]), torch.tensor([3])), torch.tensor(3e4)
    ),
    "tiny": torch.full((2, 16), 1e-38),
    "least": torch.full((2, 16), 1e-45),
    "largest": torch.full((2, 16), torch.finfo(torch.float32).max),
    "infinite": torch.tensor([1.0, math.inf, -math.inf, 500.0]),
    "nan": torch.tensor([1.0, math.nan, -2.0, 3.0]),
    "halves": torch.arange(-512, 512) / 16,
    "nothing": torch.zeros(3, 0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name, dtype, device):
    x = EXTREMES[name].float()
    for scale in (None, torch.tensor([1.0]), torch.tensor([2.0**-20]), torch.tensor([1e30])):
        check(x, scale, None, dtype, device)
    if x.dim() == 2:
        check(x, None, 0, dtype, device)
    check(x, None, None, dtype, device, power_of_two=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_under_a_power_of_two_the_way_back_rounds_nothing(source, dtype, device):
    """Every exponent that the type has, and its numbers that are not normal."""
    kind = torch.finfo(source)
    exponents = range(math.frexp(kind.smallest_normal)[1] - 8, math.frexp(kind.max)[1] - 1)
    for exponent in exponents:
        x = torch.randn(65).double().mul(2.0**exponent / 4).to(device, source)
        found = cudnn_ops.quantize_fp8(x, dtype=dtype, power_of_two=True)
        exact = found.data.cpu().double() * found.descale.cpu().double()
        back = cudnn_ops.dequantize_fp8(found.data, found.descale, dtype=source)
        assert torch.equal(back.cpu().double(), exact), exponent


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_8_bits_comes_back(device):
    for dtype in FORMATS:
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).to(device)
        for wide in DTYPES:
            found = cudnn_ops.dequantize_fp8(numbers, torch.ones(1, device=device), dtype=wide)
            same = numbers.cpu().float().to(wide)
            torch.testing.assert_close(found.cpu(), same, rtol=0, atol=0, equal_nan=True)
        finite = numbers[numbers.float().isfinite()].float()
        again = cudnn_ops.quantize_fp8(finite, torch.ones(1, device=device), dtype=dtype)
        same_bits(again.data, finite.cpu().to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks_and_an_early_maximum(device):
    x = torch.randn(40, 8, 1000, 64).bfloat16()
    x[3, 2, 1, 5] = -30.0
    check(x, None, None, FORMATS[0], device)
    check(x, None, 1, FORMATS[0], device)
    check(x, torch.rand(8) * 99, 1, FORMATS[0], device)


#: Without those that compare tensors of 8 bits by arithmetic, which torch has not for them.
CHECKS = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x = torch.randn(2, 7, 3, 16, device=device).transpose(1, 2)
    one = torch.ones(1, device=device)
    for dim, scale in ((None, None), (None, one), (1, torch.ones(3, device=device))):
        arguments = (x, scale, dim, FORMATS[0], scale is None)
        torch.library.opcheck(_ops._quantize_fp8.default, arguments, test_utils=CHECKS)
    data, descale, _ = cudnn_ops.quantize_fp8(x)
    arguments = (data, descale, None, torch.float16)
    torch.library.opcheck(_ops._dequantize_fp8.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    def both(x):
        data, descale, amax = cudnn_ops.quantize_fp8(x.sin(), dim=1)
        return cudnn_ops.dequantize_fp8(data, descale, dim=1), amax

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for length in (5, 9):
        x = torch.randn(2, 3, length, 16, device=device)
        for found, wanted in zip(compiled(x), both(x), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_exported_by_torch_s_operators(power_of_two, dim, device):
    class Round(torch.nn.Module):
        def forward(self, x):
            options = {"dim": dim, "power_of_two": power_of_two}
            data, descale, amax = cudnn_ops.quantize_fp8(x, **options)
            return data, cudnn_ops.dequantize_fp8(data, descale, dim=dim), descale, amax

    x = torch.randn(2, 7, 3, 16, device=device).transpose(1, 2)
    program = torch.export.export(Round(), (x,))
    program = program.run_decompositions(cudnn_ops.decompositions())
    assert "cudnn_ops" not in str(program.graph)
    for found, expected in zip(program.module()(x), Round()(x), strict=True):
        assert torch.equal(found.float(), expected.float())
        assert found.stride() == expected.stride()


def test_float64_on_a_cpu():
    x = torch.randn(5, 16, dtype=torch.float64)
    same_bits(cudnn_ops.quantize_fp8(x).data, cudnn_ops.quantize_fp8(x.float()).data)


def test_other_errors_stay_what_they_are():
    """Such as that memory ran out: nothing is wrong with the types of the arguments."""
    with pytest.raises(RuntimeError, match="SparseCPU"):
        cudnn_ops.quantize_fp8(torch.ones(3).to_sparse())


MISTAKES = {
    "an integer": ({"input": torch.ones(3).int()}, TypeError, "input must be float16"),
    "a word": ({"power_of_two": "no"}, TypeError, "power_of_two must be True or False, got 'no'"),
    "a list": ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    "bfloat16": ({"dtype": torch.bfloat16}, TypeError, "dtype must be float8_e4m3fn"),
    "a named dimension": ({"dim": "h"}, TypeError, "dim must be a whole number or None, got 'h'"),
    "no such dimension": ({"dim": 3}, ValueError, "dim must be a dimension of the input"),
    "one below": ({"dim": -4}, ValueError, "dim must be a dimension of the input"),
    "scales": ({"scale": torch.ones(2)}, ValueError, r"scale must be float32 \[1\]"),
    "too few": ({"scale": torch.ones(1), "dim": 1}, ValueError, r"scale must be float32 \[3\]"),
    "of 16 bits": ({"scale": torch.ones(1).half()}, ValueError, "scale must be float32"),
    "too many": (
        {"input": torch.ones(70000, 1, 1), "dim": 0},
        ValueError,
        "at most 65535 numbers can have a scale each",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    with pytest.raises(error, match=match):
        cudnn_ops.quantize_fp8(**{"input": torch.ones(2, 3, 4), **change})


def test_mistakes_of_the_way_back():
    data = torch.ones(2, 3).to(FORMATS[0])
    with pytest.raises(TypeError, match="input must be float8_e4m3fn"):
        cudnn_ops.dequantize_fp8(data.float(), torch.ones(1))
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32"):
        cudnn_ops.dequantize_fp8(data, torch.ones(1), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"descale must be float32 \[2\]"):
        cudnn_ops.dequantize_fp8(data, torch.ones(1), dim=0)


def test_there_is_no_derivative():
    x = torch.randn(3, 16, requires_grad=True)
    quantized = cudnn_ops.quantize_fp8(x)
    with pytest.raises(RuntimeError, match="quantize_fp8 has no derivative"):
        quantized.amax.backward()


@pytest.mark.gpu
def test_replayed():
    x = torch.randn(4, 64, device="cuda")
    cudnn_ops.quantize_fp8(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cudnn_ops.quantize_fp8(x)
    x.mul_(-5)
    graph.replay()
    for one, other in zip(captured, cudnn_ops.quantize_fp8(x), strict=True):
        same_bits(one, other)
