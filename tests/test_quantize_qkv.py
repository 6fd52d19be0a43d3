"""Query, key and value under scales of each head, which attention undoes by one descale."""

from __future__ import annotations

import math

import pytest
import torch

import cudnn_ops
from tests.cases import fp8 as cases
from tests.cases.fp8 import FORMATS
from tests.conftest import DEVICES

E4M3 = FORMATS[0]


def draw(heads: int, heads_kv: int, device: str, apart: float) -> list[torch.Tensor]:
    """Key heads that are ``apart`` times smaller, one after the other, and queries that undo it."""
    case = cases.Case(heads=heads, heads_kv=heads_kv)
    query, key, value = cases.draw(case, device)
    sizes = torch.tensor([apart**-head for head in range(heads_kv)], device=device).view(-1, 1, 1)
    group = heads // heads_kv
    return [query / sizes.repeat_interleave(group, 0), key * sizes, value * sizes]


def scales_of(heads: torch.Tensor, data: torch.Tensor) -> list[float]:
    """By which each head was multiplied: of its largest number, a power of two."""
    found = []
    for index in range(heads.shape[1]):
        given, rounded = heads[:, index].double(), data[:, index].double()
        ratio = float(rounded.abs().max() / given.abs().max())
        found.append(2.0 ** round(math.log2(ratio)))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("heads_kv", [1, 3, 6])
@pytest.mark.parametrize("apart", [1.0, 37.0, 800.0])
def test_one_descale_undoes_the_scales_of_all_heads(apart, heads_kv, dtype, device):
    query, key, value = draw(6, heads_kv, device, apart)
    found = cudnn_ops.quantize_qkv_fp8(query, key, value, dtype=dtype)
    most = torch.finfo(dtype).max
    of_query, of_key = scales_of(query, found.query), scales_of(key, found.key)
    of_groups = [scale for scale in of_key for _ in range(6 // heads_kv)]
    products = {a * b for a, b in zip(of_query, of_groups, strict=True)}
    assert products == {1 / float(found.descale_q)}
    assert float(found.descale_k) == 1
    for heads, scales, data in ((query, of_query, found.query), (key, of_key, found.key)):
        factors = torch.tensor(scales, device=device, dtype=torch.float64).view(-1, 1, 1)
        wide = (heads.double() * factors).float()
        assert wide.abs().max() <= most
        assert torch.equal(data.float(), wide.to(dtype).float())
        assert data.stride() == heads.stride()
    largest = found.key.float().abs().amax((0, 2, 3))
    assert (largest > most / 2 * 0.9).all()  # a power of two away from the largest at most
    assert found.query.float().abs().max() > most / 2 * 0.9
    of_value = cudnn_ops.quantize_fp8(value, dim=1, dtype=dtype)
    assert torch.equal(of_value.data.float(), found.value.float())
    assert torch.equal(of_value.descale, found.descale_v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [1.0, 1e4])
def test_attention_of_heads_far_apart(apart, device):
    """As exact in each head as attention on the head alone; under one scale most would vanish."""
    tensors = draw(6, 3, device, apart)
    found = cudnn_ops.quantize_qkv_fp8(*tensors)
    out = cudnn_ops.sdpa_fp8(**found._asdict(), is_causal=True)
    plain = [cudnn_ops.quantize_fp8(x) for x in tensors]
    names = ("descale_q", "descale_k", "descale_v")
    scales = {name: x.descale for name, x in zip(names, plain, strict=True)}
    coarse = cudnn_ops.sdpa_fp8(*(x.data for x in plain), **scales, is_causal=True)
    case = cases.Case(heads=2, heads_kv=1, options={"is_causal": True})
    errors, errors_of_one = [], []
    for head in range(3):
        pair = slice(2 * head, 2 * head + 2)
        alone = [tensors[0][:, pair], *(x[:, head : head + 1] for x in tensors[1:])]
        exact = cases.reference(case, alone).out
        data, descales = cases.inputs(alone, E4M3)
        wide = [x.double() * d.double() for x, d in zip(data, descales.values(), strict=True)]
        best = cases.root_mean_square(cases.reference(case, wide).out - exact)
        size = cases.root_mean_square(exact)
        # Of the output, on Hopper to 8 bits; of probabilities, on a GPU.
        allowed = 1.15 * best + (0.04 if device == "cuda" else 2.0**-9) * size
        errors.append(cases.root_mean_square(out[:, pair].double() - exact) / allowed)
        errors_of_one.append(cases.root_mean_square(coarse[:, pair].double() - exact) / allowed)
    assert max(errors) <= 1, errors
    assert (max(errors_of_one) > 5) == (apart > 1)


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_nothing_and_of_no_number(device):
    """A head that is 0, infinite or NaN changes no other."""
    query, key, value = draw(6, 3, device, 10.0)
    plain = cudnn_ops.quantize_qkv_fp8(query[:, :2], key[:, :1], value[:, :1])
    for filled in (0.0, math.nan, math.inf):
        for tensor in (query[:, 2:], key[:, 1:], value[:, 1:]):
            tensor.fill_(filled)
        found = cudnn_ops.quantize_qkv_fp8(query, key, value)
        assert found.descale_q.isfinite().all()
        wide = [x.float() for x in (found.query[:, :2], found.key[:, :1], found.value[:, :1])]
        for one, other in zip(wide, plain, strict=False):
            assert torch.equal(one, other.float())
        assert torch.equal(found.descale_q, plain.descale_q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponents", [(31, 31), (-60, -60), (31, -60), (-60, 31)])
def test_magnitudes_at_the_ends(exponents, device):
    query, key, value = draw(4, 2, device, 1.0)
    query = query * (2.0 ** exponents[0] / query.abs().max())
    key = key * (2.0 ** exponents[1] / key.abs().max())
    found = cudnn_ops.quantize_qkv_fp8(query, key, value)
    product = 1 / float(found.descale_q)
    scores = found.query.double() @ found.key.double().repeat_interleave(2, 1).mT / product
    exact = query.double() @ key.double().repeat_interleave(2, 1).mT
    tiny = 2.0**-100  # what the exponential of such a score does not notice
    assert cases.root_mean_square(scores - exact) <= 0.06 * cases.root_mean_square(exact) + tiny


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    compiled = torch.compile(cudnn_ops.quantize_qkv_fp8, fullgraph=True, dynamic=True)
    for length in (33, 50):
        case = cases.Case(heads=6, heads_kv=3, length=length, length_kv=length)
        tensors = cases.draw(case, device)
        expected = cudnn_ops.quantize_qkv_fp8(*tensors)
        for one, other in zip(compiled(*tensors), expected, strict=True):
            assert torch.equal(one.float(), other.float())
            assert one.stride() == other.stride()


X = torch.ones(1, 4, 8, 32)
MISTAKES = {
    "three dimensions": ((X[0], X, X), r"query must be a tensor \[batch, .* got \(4, 8, 32\)"),
    "a list": ((X, [1.0], X), "key must be a tensor .* got list"),
    "heads": ((X, X[:, :3], X[:, :3]), "must be a multiple of the key's, .* got 4, 3 and 3"),
    "no heads": ((X, X[:, :0], X[:, :0]), "got 4, 0 and 0"),
    "heads of the value": ((X, X[:, :2], X), "value must have as many as key; got 4, 2 and 4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    arguments, match = MISTAKES[name]
    with pytest.raises(ValueError, match=f"cudnn_ops.quantize_qkv_fp8: .*{match}"):
        cudnn_ops.quantize_qkv_fp8(*arguments)


def test_types():
    with pytest.raises(TypeError, match="input must be float16"):
        cudnn_ops.quantize_qkv_fp8(X.int(), X.int(), X.int())
    with pytest.raises(TypeError, match="dtype must be float8_e4m3fn"):
        cudnn_ops.quantize_qkv_fp8(X, X, X, dtype=torch.float16)
