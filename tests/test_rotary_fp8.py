"""Norm, rotation and rounding to 8 bits of query, key and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn_ops
from tests.cases.fp8 import FORMATS
from tests.cases.rotary_fp8 import CASES, check, draw
from tests.conftest import DEVICES
from tests.test_quantize import CHECKS, same_bits

_ops = torch.ops.cudnn_ops
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, dtype, device, poisoned):
    for source in (*DTYPES, *((torch.float64,) if device == "cpu" else ())):
        check(case, draw(case, source), dtype, lambda x: x.to(device))


def like_the_others(device: str, scales=None, dtype=torch.float32, **options):
    """Inputs of 2 heads of the query, 1 of the key, and its results."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, h, 5, 16, device=device).to(dtype) for h in (2, 1, 1))
    angles = torch.randn(1, 5, 16, device=device)
    inputs = (query, key, value, angles.cos(), angles.sin())
    return inputs, cudnn_ops.rotary_embedding_qkv_fp8(*inputs, scales, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_operators_one_behind_the_other(device):
    inputs, found = like_the_others(device)
    turned = cudnn_ops.rotary_embedding_qk(*inputs[:2], *inputs[3:])
    for index, x in enumerate((*turned, inputs[2])):
        data, descale, amax = cudnn_ops.quantize_fp8(x)
        torch.testing.assert_close(found.descale[index], descale[0])
        torch.testing.assert_close(found.amax[index], amax[0])
        # One that lies between two numbers may go to either side.
        step = 0.125 * data.float().abs() + 2.0**-9
        assert ((found[index].float() - data.float()).abs() <= step).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 3e38], ids=str)
def test_what_is_no_scale(number, device):
    """One number of the value, with a scale of its own or not; query and key are as they are."""
    inputs, before = like_the_others(device)
    inputs[2].zero_()
    inputs[2][1, 0, 3, 7] = number
    for per_head in (False, True):
        found = cudnn_ops.rotary_embedding_qkv_fp8(*inputs, per_head=per_head)
        wanted = cudnn_ops.quantize_fp8(inputs[2])
        same_bits(found.value.contiguous(), wanted.data.contiguous())
        same_bits(found.descale[2:], wanted.descale)
        same_bits(found.amax[2:], wanted.amax)
        for name in ("query", "key"):
            same_bits(getattr(found, name).contiguous(), getattr(before, name).contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_too_large_for_a_scale(device):
    _, found = like_the_others(device, torch.full((3,), 1e30, device=device))
    assert set(found.query.float().abs().flatten().tolist()) == {448.0}


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_step_takes_its_scales(device):
    _, first = like_the_others(device)
    _, second = like_the_others(device, 448 / first.amax)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.13, atol=2.0**-9)
    torch.testing.assert_close(first.amax, second.amax, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (2, 0, 5)], ids=str)
def test_nothing(shape, device):
    """No batch, no tokens, no heads of the value."""
    batch, heads, tokens = shape
    query = torch.ones(batch, 2 * heads, tokens, 16, device=device)
    key, angles = (torch.ones(*s, 16, device=device) for s in (shape, (1, tokens)))
    for scales in (None, torch.full((3,), 4.0, device=device)):
        found = cudnn_ops.rotary_embedding_qkv_fp8(query, key, key, angles, angles, scales)
        assert found.query.shape == query.shape
        assert found.amax.tolist() == [0.0] * 3
        assert found.descale.tolist() == [1.0 if scales is None else 0.25] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_attention_of_what_it_makes(device):
    """Against float64 attention on what went in: the error is that of 8 bits."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 130, 64, device=device) for h in (4, 2, 2))
    angles = torch.outer(torch.arange(130.0), 10000 ** (-torch.arange(32) / 32)).repeat(1, 2)
    cos, sin = angles.cos()[None].to(device), angles.sin()[None].to(device)
    weight = torch.ones(64, device=device)
    found = cudnn_ops.rotary_embedding_qkv_fp8(
        *(x.bfloat16() for x in (query, key, value)), cos, sin, query_weight=weight
    )
    of_query, of_key, of_value = found.descale
    out = cudnn_ops.sdpa_fp8(
        *found[:3], descale_q=of_query, descale_k=of_key, descale_v=of_value, is_causal=True
    )
    query = query / query.square().mean(-1, keepdim=True).sqrt()
    turned = cudnn_ops.rotary_embedding_qk(query, key, cos, sin)
    scores = turned[0].double() @ turned[1].double().repeat_interleave(2, 1).mT / 8
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    wanted = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    assert (out - wanted).norm() < 0.08 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    inputs, _ = like_the_others(device)
    weight, positions = torch.ones(16, device=device), torch.zeros(1, 5, dtype=torch.int32)
    angles = (torch.ones(3, 16, device=device),) * 2
    for arguments in (
        (*inputs, None, [0, 0], None, None, None, 1e-6, False, True, FORMATS[0]),
        (
            *(*inputs[:3], *angles, positions.to(device), [1, 0]),
            *(torch.ones(3, device=device), weight, weight, 1e-6, True, False, FORMATS[1]),
        ),
    ):
        torch.library.opcheck(_ops._rotary_fp8.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    def attend(query, key, value, angles):
        found = cudnn_ops.rotary_embedding_qkv_fp8(
            query.sin(), key, value, angles.cos(), angles.sin(), per_head=True
        )
        wide = cudnn_ops.dequantize_fp8(found.value, found.descale[2:], dim=1)
        return found.descale, found.amax, wide

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (5, 9):
        query, key = (torch.randn(2, h, length, 16, device=device) for h in (4, 2))
        inputs = (query, key, key * 2, torch.randn(1, length, 16, device=device))
        for one, other in zip(compiled(*inputs), attend(*inputs), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)


def test_vmap():
    inputs, _ = like_the_others("cpu")
    query, key, value, *angles = inputs
    samples = torch.stack([query, query * 3])

    def turn(query):
        return tuple(cudnn_ops.rotary_embedding_qkv_fp8(query, key, value, *angles))

    found = torch.vmap(turn)(samples)
    for index, sample in enumerate(samples):
        for one, other in zip(found, turn(sample), strict=True):
            torch.testing.assert_close(one[index].float(), other.float())


X = torch.ones(2, 3, 4, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_one_norm_alone(device):
    """A norm of the query leaves the key as it is, and the other way round."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 7, 32, generator=generator).to(device, torch.bfloat16)
        for heads in (4, 2, 2)
    )
    angles = torch.rand(1, 7, 32, generator=generator).to(device)
    weight = torch.rand(32, generator=generator).to(device) + 0.5

    def rounded(**weights: Any) -> cudnn_ops.RotaryFp8:
        return cudnn_ops.rotary_embedding_qkv_fp8(q, k, v, angles.cos(), angles.sin(), **weights)

    neither, both = rounded(), rounded(query_weight=weight, key_weight=weight)
    of_query, of_key = rounded(query_weight=weight), rounded(key_weight=weight)
    assert not neither.query.float().equal(both.query.float())
    for found, query, key in ((of_query, both, neither), (of_key, neither, both)):
        assert found.query.float().equal(query.query.float())
        assert found.key.float().equal(key.key.float())
        assert found.value.float().equal(both.value.float())


MISTAKES = {
    "an integer": ({"query": X.int()}, TypeError, "query must be float16"),
    "two dtypes": ({"key": X.half()}, TypeError, "key must be of the query's dtype"),
    "a value of another": ({"value": X.half()}, TypeError, "value must be of the query's dtype"),
    "a list": ({"value": [1.0]}, TypeError, "value must be a tensor, got list"),
    "heads of the value": ({"value": X[:, :2]}, ValueError, "value must be .B, heads, S, any size"),
    "one too large": (
        {name: torch.ones(2, 3, 4, 258) for name in ("query", "key")}
        | {name: torch.ones(1, 4, 258) for name in ("cos", "sin")},
        ValueError,
        "at most 256 numbers; got 258 of query and key",
    ),
    "a large value": ({"value": torch.ones(2, 3, 4, 257)}, ValueError, "and 257 of value"),
    "angles": ({"cos": torch.ones(1, 4, 8)}, ValueError, "cos and sin must be .B or 1, S, D"),
    "no pairs": ({"sections": []}, ValueError, "sections must be 1 to 4 numbers of pairs"),
    "nothing turns": ({"rotary_dim": 0}, ValueError, "rotary_dim must be even"),
    "a weight": ({"query_weight": torch.ones(8)}, ValueError, r"query_weight must be \[16\]"),
    "a weight's dtype": (
        {"key_weight": torch.ones(16).half()},
        TypeError,
        "key_weight must be of the query's dtype",
    ),
    "two weights": (
        {"query": X.half(), "key": X.half(), "value": X.half()}
        | {"query_weight": torch.ones(16), "key_weight": torch.ones(16).half()},
        TypeError,
        "query_weight and key_weight must be of one dtype",
    ),
    "epsilon": ({"eps": -1.0}, ValueError, "eps must be at least 0, got -1"),
    "bfloat16": ({"dtype": torch.bfloat16}, TypeError, "dtype must be float8_e4m3fn"),
    "one scale": ({"scales": torch.ones(1)}, ValueError, r"scales must be float32 \[3\]"),
    "scales of heads": (
        {"scales": torch.ones(3), "per_head": True},
        ValueError,
        r"scales must be float32 \[5\].*one for each head of the value",
    ),
    "scales of 16 bits": ({"scales": torch.ones(3).half()}, ValueError, "scales must be float32"),
    "too many": (
        {name: torch.ones(1, 1100, 4, 16) for name in ("query", "key", "value")}
        | {"per_head": True},
        ValueError,
        "at most 1022 heads of the value can have a scale each; it has 1100",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    angles = dict.fromkeys(("cos", "sin"), torch.ones(1, 4, 16))
    inputs = {"query": X, "key": X, "value": X, **angles, **change}
    with pytest.raises(error, match=match):
        cudnn_ops.rotary_embedding_qkv_fp8(**inputs)
    on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    with pytest.raises(error, match=match):
        cudnn_ops.rotary_embedding_qkv_fp8(**on_meta)


def test_there_is_no_derivative():
    query = X.clone().requires_grad_()
    found = cudnn_ops.rotary_embedding_qkv_fp8(query, X, X, *(torch.ones(1, 4, 16),) * 2)
    with pytest.raises(RuntimeError, match="rotary_embedding_qkv_fp8 has no derivative"):
        found.amax.sum().backward()


@pytest.mark.gpu
def test_float64_on_a_gpu():
    with pytest.raises(TypeError, match="query must be float16, bfloat16 or float32 on a GPU"):
        like_the_others("cuda", dtype=torch.float64)


@pytest.mark.gpu
def test_many_blocks():
    """Every one of them goes round, and the largest numbers are in the first rows."""
    torch.manual_seed(1)
    query, key = (
        torch.randn(2, 4096, h, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (32, 8)
    )
    value = key.clone()
    query[0, 0, 0, 0] = value[0, 3, 0, 1] = -50.0
    angles = torch.zeros(1, 4096, 128, device="cuda")
    found = cudnn_ops.rotary_embedding_qkv_fp8(query, key, value, angles.cos(), angles.sin())
    for index, x in enumerate((query, key, value)):
        data, _, amax = cudnn_ops.quantize_fp8(x)
        same_bits(found[index], data)
        assert found.amax[index] == amax[0]


@pytest.mark.gpu
def test_replayed():
    inputs, _ = like_the_others("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cudnn_ops.rotary_embedding_qkv_fp8(*inputs)
    inputs[0].mul_(-5)
    graph.replay()
    for one, other in zip(captured, cudnn_ops.rotary_embedding_qkv_fp8(*inputs), strict=True):
        same_bits(one, other)
