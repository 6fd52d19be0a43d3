"""MXFP8: rounding by blocks, and attention on what it makes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cudnn_ops
from tests.cases import fp8, sdpa
from tests.cases.fp8 import DISTRIBUTIONS, FORMATS, Case
from tests.conftest import DEVICES
from tests.test_sdpa_fp8 import CHECKS

_op = torch.ops.cudnn_ops._sdpa_mxfp8.default
E4M3, E5M2 = FORMATS


def place(row: int, column: int, columns: int) -> int:
    """Where a scale lies, by the layout's definition: tiles of 128 x 4, 512 bytes each.

    NVIDIA, "cuBLAS", section "1D block scaling factors layout".
    """
    tile = (row // 128) * (columns // 4) + column // 4
    return 512 * tile + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def widened(data: Tensor, descale: Tensor, dim: int) -> Tensor:
    """Every number times its scale, one by one, in float64."""
    bytes_, wide = descale.view(torch.uint8), data.double()
    columns = bytes_.shape[-1]
    out = torch.empty_like(wide)
    for batch, head in torch.cartesian_prod(*map(torch.arange, data.shape[:2])).tolist():
        flat = bytes_[batch, head].flatten()
        for i in range(data.shape[2]):
            for j in range(0, data.shape[3], 1 if dim == -2 else 32):
                row, column = (i, j // 32) if dim == -1 else (j, i // 32)
                scale = 2.0 ** (int(flat[place(row, column, columns)]) - 127)
                many = slice(j, j + 32) if dim == -1 else j
                out[batch, head, i, many] = wide[batch, head, i, many] * scale
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("sizes", [(1, 2, 33, 64), (2, 1, 150, 48), (1, 1, 7, 192)])
def test_rounding(sizes, dim, dtype, distribution, device):
    """The smallest power of two under which nothing is too large; then half a unit at most."""
    torch.manual_seed(0)
    x = DISTRIBUTIONS[distribution](torch.randn(sizes)).to(device)
    data, descale = cudnn_ops.quantize_mxfp8(x, dim=dim, dtype=dtype)
    assert (data.dtype, data.shape, data.stride()) == (dtype, x.shape, x.stride())
    rows, size = (sizes[2], sizes[3]) if dim == -1 else (sizes[3], sizes[2])
    padded = math.ceil(rows / 128) * 128, math.ceil(size / 128) * 4
    assert descale.shape == (*sizes[:2], *padded)
    wide = widened(data.cpu(), descale.cpu(), dim)
    exact = x.cpu().double()
    blocks = (exact if dim == -1 else exact.mT).split(32, -1)
    rounded = (wide if dim == -1 else wide.mT).split(32, -1)
    most = torch.finfo(dtype).max
    for one, mine in zip(blocks, rounded, strict=True):
        amax = one.abs().amax(-1, keepdim=True)
        scale = 2.0 ** torch.ceil(torch.log2(amax / most))
        best = (one / scale).to(dtype).double() * scale
        torch.testing.assert_close(mine, best, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_at_the_ends_of_the_range(device):
    x = torch.zeros(1, 1, 2, 128, device=device)
    x[..., 32:64], x[..., 64:96], x[0, 0, 0, 100] = 3e38, 1e-38, torch.nan
    data, descale = cudnn_ops.quantize_mxfp8(x)
    wide = cudnn_ops.ops.mxfp8.dequantized(data, descale, -1)
    assert not wide[..., :32].any()
    torch.testing.assert_close(wide[..., 32:96], x[..., 32:96], rtol=2.0**-4, atol=0)
    assert wide[0, 0, 0, 96:].isnan().all()
    assert not wide[0, 0, 1, 96:].any()


def test_rounding_of_memory_as_it_lies():
    x = torch.randn(2, 40, 3, 64).transpose(1, 2)
    data, descale = cudnn_ops.quantize_mxfp8(x, dim=-2)
    assert data.stride() == x.stride()
    again, same = cudnn_ops.quantize_mxfp8(x.contiguous(), dim=2)
    assert torch.equal(data.float(), again.float())
    assert torch.equal(descale.view(torch.uint8), same.view(torch.uint8))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"input": None}, TypeError, "input must be a tensor, got None"),
        ({"input": torch.ones(1, 1, 2, 2, dtype=torch.float64)}, TypeError, "got torch.float64"),
        ({"input": torch.ones(2, 2)}, ValueError, r"\[batch, heads, length, head size\]; got \(2"),
        ({"dim": 1}, ValueError, "dim must be -1 or -2, got 1"),
        ({"dtype": torch.int8}, TypeError, "dtype must be float8_e4m3fn or"),
    ],
)
def test_mistakes_in_rounding(given, error, match):
    with pytest.raises(error, match=match):
        cudnn_ops.quantize_mxfp8(**{"input": torch.ones(1, 1, 2, 2), **given})


def _case(length: int = 96, length_kv: int = 96, size: int = 64, value: int = 64, **options: Any):
    return Case(2, 4, 4, length, length_kv, size, value, options=options)


CASES = [
    _case(),
    _case(is_causal=True),
    Case(heads=6, heads_kv=2, length=33, length_kv=33, options={"is_causal": True}),
    Case(heads_kv=1, layout="bhsd"),
    _case(17, 77, is_causal=True, bottom_right=True),
    _case(77, 17, is_causal=True),
    _case(1, 130),
    _case(130, 1),
    _case(130, 130, window_size=(16, 0)),
    _case(100, 130, window_size=(20, 7), bottom_right=True),
    _case(65, 65, 16, 16, is_causal=True),
    _case(65, 65, 80, 80),
    _case(65, 65, 128, 128, is_causal=True, scale=0.3),
    _case(150, 150, 192, 128, is_causal=True),
    _case(0, 16),
    _case(16, 0),
]


def make(case: Case, device: str, dtype: torch.dtype = E4M3, distribution: str = "normal"):
    """Operands, their scales by name, and both multiplied, in float64."""
    tensors = fp8.draw(case, device, distribution=distribution)
    dims = (-1, -1, -2)
    pairs = [
        cudnn_ops.quantize_mxfp8(x, dim=dim, dtype=dtype)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    scales = {f"descale_{name}": one.descale for name, one in zip("qkv", pairs, strict=True)}
    wide = [
        cudnn_ops.ops.mxfp8.dequantized(one.data, one.descale, dim).double()
        for one, dim in zip(pairs, dims, strict=True)
    ]
    return [one.data for one in pairs], scales, wide


@pytest.mark.parametrize("device", ["cpu"])  # of `poisoned`
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, dtype, distribution, device, poisoned):
    data, scales, wide = make(case, device, dtype, distribution)
    found = cudnn_ops.sdpa_mxfp8(*data, **scales, **case.options)
    assert found.out.dtype == torch.bfloat16
    order = found.out.transpose(1, 2) if case.layout == "bshd" else found.out
    assert order.is_contiguous()
    exact, rough = fp8.reference(case, wide), fp8.reference(case, [x.float() for x in wide])
    sdpa.check(found.out, exact.out, rough.out.bfloat16(), f"{case} out")
    sdpa.check(found.lse, exact.lse, rough.lse.float(), f"{case} lse")
    torch.testing.assert_close(found.amax_o, exact.amax_o.float().reshape(1))


def test_small_blocks_beside_large_ones():
    """Under one scale, what is a millionth of the largest number is rounded to zero."""
    case = _case(200, 200)
    tensors = fp8.draw(case, "cpu")
    tensors[2][..., 32:] *= 1e-6
    exact = fp8.reference(case, tensors).out[..., 32:]
    query, key, value = (
        cudnn_ops.quantize_mxfp8(x, dim=dim) for x, dim in zip(tensors, (-1, -1, -2), strict=True)
    )
    found = cudnn_ops.sdpa_mxfp8(
        *(query.data, key.data, value.data),
        descale_q=query.descale,
        descale_k=key.descale,
        descale_v=value.descale,
    ).out[..., 32:]
    assert fp8.root_mean_square(found - exact) < 0.1 * fp8.root_mean_square(exact)
    data, scales = fp8.inputs(tensors, E4M3)
    assert not cudnn_ops.sdpa_fp8(*data, **scales)[..., 32:].any()


@pytest.mark.parametrize("case", [*CASES[:5], *CASES[-2:]], ids=str)
def test_opcheck(case):
    data, scales, _ = make(case, "cpu")
    arguments = (*data, *scales.values(), torch.bfloat16)
    torch.library.opcheck(_op, arguments, case.options, test_utils=CHECKS, rtol=2e-2, atol=2e-2)


def test_compiled_with_other_lengths():
    attend = torch.compile(cudnn_ops.sdpa_mxfp8, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (33, 64, 150):
        case = replace(CASES[2], length=length, length_kv=length)
        data, scales, _ = make(case, "cpu")
        expected = cudnn_ops.sdpa_mxfp8(*data, **scales, is_causal=True)
        for mine, other in zip(attend(*data, **scales, is_causal=True), expected, strict=True):
            torch.testing.assert_close(mine, other)


X = torch.ones(1, 2, 8, 32)
SCALES = dict.fromkeys(("descale_q", "descale_k"), torch.ones(1, 2, 128, 4)) | {
    "descale_v": torch.ones(1, 2, 128, 4)
}
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "bfloat16": ({"query": X.bfloat16()}, TypeError, "quantize_mxfp8 makes them"),
    "two formats": ({"value": X.to(E5M2)}, TypeError, "of one dtype"),
    "float32 scales": (
        {"descale_q": SCALES["descale_q"]},
        ValueError,
        r"descale_q must be the scales of cudnn_ops.quantize_mxfp8\(..., dim=-1\): float8_e8m0fnu",
    ),
    "scales of other blocks": (
        {"descale_v": torch.ones(1, 2, 4, 128).to(torch.float8_e8m0fnu)},
        ValueError,
        r"descale_v .*dim=-2\).*\[1, 2, 128, 4\].*got Float8_e8m0fnu \[1, 2, 4, 128\]",
    ),
    "no scales": ({"descale_k": None}, TypeError, "descale_k must be a tensor, got None"),
    "head size": (
        {
            **dict.fromkeys(("query", "key"), torch.ones(1, 2, 8, 256).to(E4M3)),
            "descale_q": torch.ones(1, 2, 128, 8).to(torch.float8_e8m0fnu),
        },
        NotImplementedError,
        "up to 128, and 192 .* got 256 and 32",
    ),
    "queries that see nothing": (
        {"is_causal": True, "bottom_right": True, "key": X[:, :, :4].to(E4M3)}
        | {"value": X[:, :, :4].to(E4M3)},
        NotImplementedError,
        "every query must see a key; of 8 queries and 4 keys",
    ),
    "queries behind the window": (
        {"window_size": (2, 0), "key": X[:, :, :4].to(E4M3), "value": X[:, :, :4].to(E4M3)},
        NotImplementedError,
        "every query must see a key",
    ),
    "output": ({"out_dtype": E4M3}, TypeError, "out_dtype must be bfloat16 or float16"),
    "window": ({"window_size": 3}, TypeError, r"must be \(left, right\)"),
    "a negative scale": ({"scale": -1.0}, ValueError, "scale must be a normal, positive"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    data = dict.fromkeys(("query", "key", "value"), X.to(E4M3))
    scales = {name: x.to(torch.float8_e8m0fnu) for name, x in SCALES.items()}
    with pytest.raises(error, match=match) as raised:
        cudnn_ops.sdpa_mxfp8(**{**data, **scales, **change})
    assert "sdpa_mxfp8" in str(raised.value)


def test_it_has_no_derivative():
    data, scales, _ = make(CASES[0], "cpu")
    scales["descale_q"] = scales["descale_q"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="sdpa_mxfp8 has no derivative"):
        cudnn_ops.sdpa_mxfp8(*data, **scales).out.sum().backward()


@pytest.mark.gpu
def test_what_a_gpu_has_none_of_is_refused_with_the_reason():
    if torch.cuda.get_device_capability()[0] == 10 and cudnn_ops._C.cudnn_version() >= 92100:
        pytest.skip("this one has MXFP8")
    data, scales, _ = make(CASES[0], "cuda")
    with pytest.raises(NotImplementedError, match=r"Blackwell|9\.21"):
        cudnn_ops.sdpa_mxfp8(*data, **scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, dtype):
    if torch.cuda.get_device_capability()[0] != 10 or cudnn_ops._C.cudnn_version() < 92100:
        pytest.skip("needs a Blackwell, and cuDNN 9.21")
    data, scales, wide = make(case, "cuda", dtype)
    if case.length == 1:
        with pytest.raises(NotImplementedError, match="a single query"):
            cudnn_ops.sdpa_mxfp8(*data, **scales, **case.options)
        return
    found = cudnn_ops.sdpa_mxfp8(*data, **scales, **case.options)
    exact = fp8.reference(case, wide)
    off = fp8.root_mean_square(found.out.double() - exact.out)
    # Probabilities are rounded to 8 bits.
    assert off <= 0.05 * fp8.root_mean_square(exact.out)
    rough = exact.lse.float() + fp8.rounding_of_scores(case, wide)
    sdpa.check(found.lse, exact.lse, rough.where(exact.lse.isfinite(), exact.lse.float()), "lse")
