"""The gradients of FP8 attention in FP8: results, layouts, mistakes, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from tests.cases import sdpa_fp8_backward as cases
from tests.cases.fp8 import CASES, DISTRIBUTIONS, FORMATS, Case
from tests.conftest import DEVICES
from tests.test_sdpa_fp8 import CHECKS

_op = torch.ops.cudnn_ops._sdpa_fp8_backward.default
E4M3, E5M2 = FORMATS
GROUPED = Case(heads=6, heads_kv=2, length=33, length_kv=33, options={"is_causal": True})


@pytest.mark.parametrize("device", ["cpu"])  # of `poisoned`
@pytest.mark.parametrize("grad_out", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, dtype, grad_out, device, poisoned):
    cases.check(cases.make(case, device, dtype, grad_out), torch.bfloat16)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], GROUPED, CASES[18]], ids=str)
def test_kinds_of_inputs(case, grad_dtype, distribution):
    for seed in range(3):
        call = cases.make(case, "cpu", distribution=distribution, seed=seed)
        cases.check(call, grad_dtype)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("case", CASES[:-2], ids=str)
def test_the_gradient_of_exact_attention(case, distribution):
    cases.check_straight(cases.make(case, "cpu", distribution=distribution))


def test_a_part_of_the_keys():
    """The probabilities are those of the log-sum-exp that is given, as the parts of a ring are."""
    case = Case(heads_kv=2)
    call = cases.make(case, "cpu")
    whole = call(grad_dtype=torch.float32)
    grad, query, key, value, out, lse = call.tensors
    parts = []
    for keys in (slice(0, 40), slice(40, None)):
        call.tensors = (grad, query, key[:, :, keys], value[:, :, keys], out, lse)
        parts.append(call(grad_dtype=torch.float32))
    torch.testing.assert_close(parts[0].query + parts[1].query, whole.query)
    for name in ("key", "value"):
        found = torch.cat([getattr(part, name) for part in parts], 2)
        torch.testing.assert_close(found, getattr(whole, name))


def test_memory_as_it_lies():
    call = cases.make(GROUPED, "cpu")
    expected = call()
    *tensors, lse = call.tensors
    call.tensors = (*(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in tensors), lse.mT.mT)
    for mine, other in zip(call(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_scales_at_the_ends_of_the_range():
    """A gradient of the output that is tiny, or large, gives gradients that are."""
    call = cases.make(GROUPED, "cpu")
    expected = call(grad_dtype=torch.float32)
    for factor in (2.0**-60, 2.0**60):
        call.scales["descale_do"] = call.scales["descale_do"] * factor
        for mine, other in zip(call(grad_dtype=torch.float32), expected, strict=True):
            torch.testing.assert_close(mine, other * factor, rtol=1e-5, atol=0)
        call.scales["descale_do"] = call.scales["descale_do"] / factor


@pytest.mark.parametrize("case", CASES[:4] + CASES[-5:], ids=str)
def test_opcheck(case):
    call = cases.make(case, "cpu")
    arguments = (*call.tensors, *call.scales.values(), torch.bfloat16)
    torch.library.opcheck(_op, arguments, call.options, test_utils=CHECKS, rtol=2e-2, atol=2e-2)


def test_compiled_with_other_lengths():
    attend = torch.compile(
        cudnn_ops.sdpa_fp8_backward, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (33, 64, 70):
        call = cases.make(replace(GROUPED, length=length, length_kv=length), "cpu")
        expected = call()
        found = attend(*call.tensors, **call.scales, **call.options)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)
            assert mine.stride() == other.stride()


def test_vmap():
    calls = [cases.make(GROUPED, "cpu", seed=seed) for seed in range(3)]
    tensors, scales = zip(*((call.tensors, call.scales) for call in calls), strict=True)
    *numbers_of_8_bits, lse = zip(*tensors, strict=True)
    stacked = [
        torch.stack([x.view(torch.uint8) for x in one]).view(one[0].dtype)
        for one in numbers_of_8_bits
    ]
    names = list(scales[0])
    numbers = [torch.stack([one[name] for one in scales]) for name in names]

    def gradients(*args: Any) -> Any:
        given = dict(zip(names, args[6:], strict=True))
        return cudnn_ops.sdpa_fp8_backward(*args[:6], **given, is_causal=True)

    found = torch.vmap(gradients)(*stacked, torch.stack(lse), *numbers)
    for mine, *each in zip(found, *(call() for call in calls), strict=True):
        torch.testing.assert_close(mine, torch.stack(each))


def test_flops():
    call = cases.make(replace(CASES[0], head_size=192, value_size=128), "cpu")
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == 2 * 2 * 4 * 96 * 96 * (3 * 192 + 2 * 128)


X = torch.ones(1, 2, 8, 32)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no query": ({"query": None}, TypeError, "query must be a tensor, got None"),
    "bfloat16": ({"query": X.bfloat16()}, TypeError, "query must be float8_e4m3fn or float8_e5m2"),
    "gradient of 16 bits": ({"grad_out": X.half()}, TypeError, "grad_out must be float8"),
    "two formats": ({"out": X.to(E5M2)}, TypeError, "of one dtype; query is .*fn and out .*5m2"),
    "head size": (
        {name: X[..., :24].to(E4M3) for name in ("query", "key")},
        ValueError,
        "multiples of 16",
    ),
    "heads": (
        {name: torch.cat([X, X[:, :1]], 1).to(E4M3) for name in ("key", "value")},
        ValueError,
        "must be a multiple",
    ),
    "size of the output": ({"out": X[:, :1].to(E4M3)}, ValueError, "out must be as the forward's"),
    "rank of the gradient": ({"grad_out": X[0].to(E4M3)}, ValueError, r"grad_out must be a dense"),
    "size of the gradient": ({"grad_out": X[..., :16].to(E4M3)}, ValueError, "grad_out must be as"),
    "log-sum-exp of 16 bits": ({"lse": X[..., 0].half()}, TypeError, "lse must be float32"),
    "log-sum-exp of packed sequences": ({"lse": X[0, ..., 0]}, ValueError, "lse must be the log"),
    "descales of heads": ({"descale_v": torch.ones(2)}, ValueError, "descale_v must be one float"),
    "no scale": ({"scale_dp": None}, TypeError, "scale_dp must be a tensor, got None"),
    "a number as scale": ({"scale_dp": 1.0}, TypeError, "scale_dp must be a tensor, got 1.0"),
    "gradients of 8 bits": ({"grad_dtype": E4M3}, TypeError, "grad_dtype must be bfloat16 or"),
    "a negative factor": ({"scale": -1.0}, ValueError, "scale must be a normal, positive"),
    "window": ({"window_size": 3}, TypeError, r"must be \(left, right\)"),
    "a list": ({"seq_lens_kv": [3]}, TypeError, "must be a tensor"),
    "too long": ({"seq_lens_q": torch.tensor([9]).int()}, ValueError, "holds lengths from 9"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    data = dict.fromkeys(("grad_out", "query", "key", "value", "out"), X.to(E4M3))
    names = [f"descale_{one}" for one in ("q", "k", "v", "o", "do")]
    scales = dict.fromkeys((*names, "scale_dp"), torch.ones(1))
    with pytest.raises(error, match=match) as raised:
        cudnn_ops.sdpa_fp8_backward(**{**data, "lse": X[..., 0], **scales, **change})
    assert "sdpa_fp8_backward" in str(raised.value)


def test_it_has_no_derivative():
    call = cases.make(GROUPED, "cpu")
    call.scales["descale_q"] = call.scales["descale_q"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="sdpa_fp8_backward has no derivative"):
        call().query.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(
            lambda lse: (
                cudnn_ops.sdpa_fp8_backward(
                    *call.tensors[:5], lse, **call.scales, **call.options
                ).query
            ),
            call.tensors[5:],
            call.tensors[5:],
        )


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("grad_out", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, grad_out, device, poisoned):
    """By cuDNN on Blackwell; elsewhere it is refused with the reason, and the process lives."""
    call = cases.make(case, device, grad_dtype=grad_out)
    if torch.cuda.get_device_capability()[0] < 10:
        with pytest.raises(NotImplementedError, match=r"needs a Blackwell .* 8 bits alone"):
            call()
        torch.cuda.synchronize()
    elif case.options.get("window_size") and case.length > case.length_kv and not case.is_padded:
        with pytest.raises(NotImplementedError, match="max_s_q <= max_s_kv"):
            call()
    else:
        cases.check_in_8_bits(call)
