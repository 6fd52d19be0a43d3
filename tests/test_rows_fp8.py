"""Rows rounded to 8 bits behind norms and activations, and linear layers on them."""

from __future__ import annotations

import pytest
import torch

import cudnn_ops
from cudnn_ops.ops.rows_fp8 import RowsFp8
from tests.cases.fp8 import FORMATS
from tests.cases.rows_fp8 import CASES, check
from tests.conftest import DEVICES
from tests.test_quantize import CHECKS, same_bits

_op = torch.ops.cudnn_ops._rows_fp8.default
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, device, poisoned):
    for dtype in (*DTYPES, *((torch.float64,) if device == "cpu" else ())):
        for fp8 in FORMATS:
            if dtype == torch.float16 and case.kind not in ("rows", "norm"):
                continue  # products of rows that are far apart are too large for it
            check(case, dtype, fp8, lambda x: x.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 1e-45, 3e38], ids=str)
def test_what_is_no_scale(number, device):
    """One row has it, the others have their own scales."""
    x = torch.randn(3, 40, device=device)
    before = cudnn_ops.quantize_rows_fp8(x)
    x[1] = 0
    x[1, 7] = number
    found, wanted = cudnn_ops.quantize_rows_fp8(x), cudnn_ops.quantize_fp8(x[1])
    same_bits(found.data[1], wanted.data)
    same_bits(found.descale[1], wanted.descale)
    same_bits(found.amax[1], wanted.amax)
    for one, other in zip(found, before, strict=True):
        same_bits(one[::2].contiguous(), other[::2].contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_equal_rows_and_nothing_to_norm(device):
    ones = torch.full((2, 48), 3.0, device=device)
    found = cudnn_ops.rms_norm_fp8(ones)
    assert set(found.data.float().flatten().tolist()) == {448.0}
    torch.testing.assert_close(found.amax, torch.ones(2, 1, device=device))
    zeros = cudnn_ops.rms_norm_fp8(ones * 0)
    assert not zeros.data.float().any()
    assert (zeros.descale == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 8)], ids=str)
def test_nothing(shape, device):
    x = torch.ones(shape, device=device)
    rows = cudnn_ops.quantize_rows_fp8(x)
    assert rows.data.shape == shape
    assert rows.descale.shape == rows.amax.shape == (*shape[:-1], 1)
    assert (rows.descale == 1).all()
    assert not rows.amax.any()
    all_of_them = cudnn_ops.rms_norm_fp8(x, scale=torch.full((1,), 4.0, device=device))
    assert all_of_them.descale.tolist() == [0.25]
    assert all_of_them.amax.tolist() == [0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, weight = torch.randn(2, 5, 48, device=device), torch.randn(48, device=device)
    one = torch.ones(1, device=device)
    for arguments in (
        (x, None, None, None, 0, 0.0, False, FORMATS[0]),
        (x, x, weight, one, 1, 1e-5, True, FORMATS[1]),
        (x, x.sin(), None, None, 2, 0.0, False, FORMATS[0]),
    ):
        torch.library.opcheck(_op, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    def layer(x, residual, weight):
        rows, total = cudnn_ops.add_rms_norm_fp8(x, residual, weight)
        gated = cudnn_ops.swiglu_fp8(x, residual)
        return rows.descale, gated.data.float() * gated.descale, total + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    weight = torch.randn(48, device=device)
    for count in (5, 9):
        inputs = torch.randn(count, 48, device=device), torch.randn(count, 48, device=device)
        for one, other in zip(compiled(*inputs, weight), layer(*inputs, weight), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batched", [(0, 0, None), (1, None, None), (0, 1, 0), (None, None, 0)])
@pytest.mark.parametrize("is_known", [False, True])
def test_vmap(is_known, batched):
    """As a call for each sample, which has its own largest magnitude."""
    torch.manual_seed(2)
    scale = torch.tensor([9.0]) if is_known else None
    x, residual = (torch.randn(4, 4, 48) for _ in range(2))
    weight = torch.randn(4, 48) if batched[2] == 0 else torch.randn(48)
    inputs = [
        tensor if dim is not None or name == "weight" else tensor[0]
        for name, tensor, dim in zip(
            ["x", "residual", "weight"], (x, residual, weight), batched, strict=True
        )
    ]

    def norm(x, residual, weight):
        rows, total = cudnn_ops.add_rms_norm_fp8(x, residual, weight, scale=scale)
        gated = cudnn_ops.swiglu_fp8(x, residual, scale)
        plain = cudnn_ops.quantize_rows_fp8(x, scale)
        return *rows, total, *gated, *plain

    found = torch.vmap(norm, in_dims=batched)(*inputs)
    for index in range(4):
        sample = [
            tensor if dim is None else tensor.select(dim, index)
            for tensor, dim in zip(inputs, batched, strict=True)
        ]
        for one, other in zip(found, norm(*sample), strict=True):
            torch.testing.assert_close(one[index].float(), other.float())


X = torch.ones(3, 16)
MISTAKES = {
    "an integer": (cudnn_ops.quantize_rows_fp8, (X.int(),), {}, TypeError, "input must be float16"),
    "a list": (
        *(cudnn_ops.quantize_rows_fp8, ([1.0],), {}, TypeError),
        r"^cudnn_ops\.quantize_rows_fp8: input must be a tensor, got list",
    ),
    "rows": (
        *(cudnn_ops.rms_norm_fp8, (cudnn_ops.quantize_rows_fp8(X),), {}, TypeError),
        r"^cudnn_ops\.rms_norm_fp8: input must be a tensor, got RowsFp8",
    ),
    "a number as scale": (
        *(cudnn_ops.swiglu_fp8, (X, X, 2.0), {}, TypeError),
        r"^cudnn_ops\.swiglu_fp8: scale must be a tensor or None, got 2.0",
    ),
    "a list as gate": (
        *(cudnn_ops.swiglu_fp8, ([1.0], X), {}, TypeError),
        r"^cudnn_ops\.swiglu_fp8: gate must be a tensor, got list",
    ),
    "a list as up": (cudnn_ops.swiglu_fp8, (X, [1.0]), {}, TypeError, "_fp8: up must be a tensor"),
    "a list as residual": (
        *(cudnn_ops.add_rms_norm_fp8, (X, [1.0]), {}, TypeError),
        r"^cudnn_ops\.add_rms_norm_fp8: residual must be a tensor, got list",
    ),
    "a word as dtype": (
        *(cudnn_ops.rms_norm_fp8, (X,), {"dtype": "e4m3"}, TypeError),
        "dtype must be a torch.dtype, got 'e4m3'",
    ),
    "a number": (cudnn_ops.quantize_rows_fp8, (X[0, 0],), {}, ValueError, "must have a dimension"),
    "scales": (cudnn_ops.rms_norm_fp8, (X,), {"scale": torch.ones(3)}, ValueError, "scale must be"),
    "format": (cudnn_ops.rms_norm_fp8, (X,), {"dtype": torch.half}, TypeError, "dtype must be fl"),
    "weight": (cudnn_ops.rms_norm_fp8, (X, torch.ones(3)), {}, ValueError, r"must be \[16\]"),
    "weight's dtype": (cudnn_ops.rms_norm_fp8, (X, torch.ones(16).half()), {}, TypeError, "weight"),
    "epsilon": (cudnn_ops.rms_norm_fp8, (X, None, -1.0), {}, ValueError, "eps must be at least 0"),
    "residual": (
        *(cudnn_ops.add_rms_norm_fp8, (X, X[:2]), {}, ValueError),
        r"^cudnn_ops\.add_rms_norm_fp8: residual must be of the input's shape",
    ),
    "no residual": (cudnn_ops.add_rms_norm_fp8, (X, None), {}, TypeError, "residual must be a ten"),
    "up": (cudnn_ops.swiglu_fp8, (X, X.half()), {}, TypeError, "up must be of the gate's dtype"),
    "no up": (cudnn_ops.swiglu_fp8, (X, None), {}, TypeError, "up must be a tensor, got None"),
    "activation": (
        *(cudnn_ops.swiglu_fp8, (X, X), {"activation": "relu"}, ValueError),
        "activation must be one of silu, gelu, gelu_tanh, got 'relu'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    function, arguments, options, error, match = MISTAKES[name]
    with pytest.raises(error, match=match):
        function(*arguments, **options)


def test_there_is_no_derivative():
    x = X.clone().requires_grad_()
    for rows in (cudnn_ops.rms_norm_fp8(x), cudnn_ops.swiglu_fp8(x, X)):
        with pytest.raises(RuntimeError, match="_fp8 has no derivative"):
            rows.amax.sum().backward()


def rows_and_weight(device: str, scales: tuple[float | None, float | None]):
    torch.manual_seed(5)
    x = torch.randn(2, 17, 96, device=device) * torch.logspace(-1, 1, 17, device=device)[:, None]
    weight = torch.randn(80, 96, device=device) * 0.1
    given = (None if s is None else torch.tensor([s], device=device) for s in scales)
    rows = (cudnn_ops.quantize_rows_fp8(*pair) for pair in zip((x, weight), given, strict=True))
    return x, weight, *rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [(None, None), (9.0, 900.0), (9.0, None), (None, 900.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(has_bias, scales, device):
    """Beside float64 of what was rounded: products in the tensor cores' sums, one rounding."""
    x, weight, rows, columns = rows_and_weight(device, scales)
    bias = torch.randn(80, device=device, dtype=torch.bfloat16) if has_bias else None
    out = cudnn_ops.linear_fp8(rows, columns, bias)
    assert out.shape == (2, 17, 80)
    assert out.is_contiguous()
    exact = (rows.data.double() * rows.descale) @ (columns.data.double() * columns.descale).T
    exact = exact if bias is None else exact + bias.double()
    best = (exact.bfloat16() - exact).abs()
    assert ((out - exact).abs() <= 2 * best + 4e-3 * exact.abs().amax(-1, keepdim=True)).all()
    if scales == (None, None):
        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert (out - wanted).norm() < 0.045 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_linear_of_16_bits(device):
    _, _, rows, columns = rows_and_weight(device, (9.0, 900.0))
    assert cudnn_ops.linear_fp8(rows, columns, out_dtype=torch.float16).dtype == torch.float16


ROWS = cudnn_ops.quantize_rows_fp8(torch.ones(3, 32))
WEIGHT = cudnn_ops.quantize_rows_fp8(torch.ones(16, 32))
ELSEWHERE = RowsFp8(*(x.to("meta") for x in WEIGHT))

MISTAKES_OF_LINEAR = {
    "16 bits": (
        *((torch.ones(3, 32).half(), WEIGHT), TypeError),
        "input must be numbers of 8 bits with their descales, .* got a tensor of torch.float16",
    ),
    "no descale": ((ROWS, WEIGHT.data), TypeError, "weight must .* got a tensor of torch.float8"),
    "none": ((None, WEIGHT), TypeError, "input must be numbers of 8 bits .* got NoneType"),
    "a tuple": ((ROWS, (WEIGHT.data, WEIGHT.descale)), TypeError, "weight must .* got tuple"),
    "float32": (
        *((RowsFp8(torch.ones(3, 32), *ROWS[1:]), WEIGHT), TypeError),
        "input must be float8_e4m3fn .* got torch.float32",
    ),
    "the other format": (
        *((ROWS, cudnn_ops.quantize_rows_fp8(torch.ones(16, 32), dtype=FORMATS[1])), TypeError),
        "weight must be float8_e4m3fn .* got torch.float8_e5m2",
    ),
    "two descales": (
        *((RowsFp8(ROWS.data, ROWS.descale[:2], ROWS.amax), WEIGHT), ValueError),
        r"descale of input must be float32 on cpu, one number or 3, .* got torch.float32 \(2, 1\)",
    ),
    "descales of 16 bits": (
        *((ROWS, RowsFp8(WEIGHT.data, WEIGHT.descale.half(), WEIGHT.amax)), ValueError),
        "descale of weight must be float32 on cpu",
    ),
    "devices": ((ROWS, ELSEWHERE), ValueError, "weight must .* on cpu as the input is; .* meta"),
    "one number": (
        *((RowsFp8(ROWS.data[0, 0], ROWS.descale[0], ROWS.amax), WEIGHT), ValueError),
        r"input must have a dimension, .* got \(\) on cpu",
    ),
    "sizes": (
        *((ROWS, RowsFp8(*(x[:8] for x in WEIGHT))), ValueError),
        r"multiples of 16, for an input \(3, 32\); got \(8, 32\)",
    ),
    "bias": ((ROWS, WEIGHT, torch.ones(16)), ValueError, r"bias must be \[16\] in torch.bfloat16"),
    "a list as bias": ((ROWS, WEIGHT, [1.0]), TypeError, "bias must be a tensor or None, got list"),
    "bias elsewhere": (
        *((ROWS, WEIGHT, torch.ones(16, dtype=torch.bfloat16, device="meta")), ValueError),
        "bias must be .* on cpu; got .* on meta",
    ),
}


@pytest.mark.parametrize("name", MISTAKES_OF_LINEAR)
def test_mistakes_of_linear(name):
    arguments, error, match = MISTAKES_OF_LINEAR[name]
    with pytest.raises(error, match=rf"^cudnn_ops\.linear_fp8: .*{match}"):
        cudnn_ops.linear_fp8(*arguments)


def test_float16_takes_one_descale_each():
    with pytest.raises(TypeError, match="out_dtype must be bfloat16, or float16 where"):
        cudnn_ops.linear_fp8(ROWS, WEIGHT, out_dtype=torch.float16)
    one = cudnn_ops.quantize_fp8(torch.ones(3, 32)), cudnn_ops.quantize_fp8(torch.ones(16, 32))
    torch.testing.assert_close(
        cudnn_ops.linear_fp8(*one, out_dtype=torch.float16), torch.full((3, 16), 32.0).half()
    )


@pytest.mark.gpu
def test_many_rows():
    torch.manual_seed(0)
    x = torch.randn(70_001, 512, device="cuda", dtype=torch.bfloat16)
    x[5, 3] = -90.0
    scale = torch.full((1,), 3.0, device="cuda")
    found, wanted = cudnn_ops.quantize_rows_fp8(x, scale), cudnn_ops.quantize_fp8(x, scale)
    same_bits(found.data, wanted.data)
    same_bits(found.amax, wanted.amax)
    each = cudnn_ops.quantize_rows_fp8(x[:60_000])
    same_bits(each.data, cudnn_ops.quantize_fp8(x[:60_000], dim=0).data)


@pytest.mark.gpu
def test_replayed():
    x = torch.randn(4, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cudnn_ops.rms_norm_fp8(x)
    x.mul_(-5)
    graph.replay()
    for one, other in zip(captured, cudnn_ops.rms_norm_fp8(x), strict=True):
        same_bits(one, other)
