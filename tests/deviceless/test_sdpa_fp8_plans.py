"""Real cuDNN plans of FP8 attention for GPUs that are not there.

What is expected was read off cuDNN itself, 9.19 where no other version is named: a change here is a
change of cuDNN.
"""

from __future__ import annotations

import pytest
import torch

import cudnn_ops
from cudnn_ops import _C, support
from cudnn_ops.support import explain
from cudnn_ops.support import table as support_table
from tests.deviceless.test_support_table import shown, told_apart

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def tensor(length: int, heads: int = 4, size: int = 64, dtype=E4M3, layout: str = "bshd"):
    if layout == "bhsd":
        return torch.empty(2, heads, length, size, dtype=dtype, device="meta")
    return torch.empty(2, length, heads, size, dtype=dtype, device="meta").transpose(1, 2)


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_the_documentation_says_what_cudnn_says(device, fresh_cache):
    rows = shown(f"fp8-{device}")
    table = support_table.TABLES["fp8"]
    assert rows.pop("") == list(table.columns)
    assert list(rows) == list(table.rows)
    for feature, cells in rows.items():
        if device == "b200" and _C.cudnn_version() >= 92600 and feature != "one query":
            cells[list(table.columns).index("256")] = "forward"  # as the page says of newer ones
        columns = [list(table.columns)[i] for i in told_apart(cells)]
        part = support_table.Table(
            {feature: table.rows[feature]},
            {name: table.columns[name] for name in columns},
            table.ask,
        )
        _, (_, *found) = support_table.as_lines(support_table.support_table(device, part), part)
        assert found == [cells[i] for i in told_apart(cells)], feature


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_lengths_and_groups(with_lse, layout, device):
    for length, length_kv, heads_kv in ((1, 1, 4), (2, 129, 4), (77, 577, 2), (4096, 4096, 1)):
        query, key = (
            tensor(n, heads, layout=layout) for n, heads in ((length, 4), (length_kv, heads_kv))
        )
        for options in ({}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}):
            answer = explain("sdpa_fp8", query, key, device=device, with_lse=with_lse, **options)
            assert answer.supported, (length, length_kv, options, answer.reason)
            assert answer.engine.startswith("eng")


@pytest.mark.parametrize("device", ["a100", "l40s"])
def test_older_gpus_have_none(device):
    answer = explain("sdpa_fp8", tensor(64), device=device)
    assert not answer.supported
    assert "Hopper" in answer.reason or "hopper" in answer.reason


def described(device: str, **options) -> str:
    with cudnn_ops.record_shapes() as requests:
        explain("sdpa_fp8", tensor(100), tensor(130), device=device, **options)
    (request,) = map(str, requests)
    return request


def test_hopper_writes_8_bits_alone():
    for out_dtype, on_hopper, on_blackwell in (
        (torch.bfloat16, "e4m3", "bf16"),
        (torch.float16, "e4m3", "fp16"),
        (E5M2, "e5m2", "e5m2"),
    ):
        assert f"out={on_hopper}[" in described("h200", out_dtype=out_dtype)
        assert f"out={on_blackwell}[" in described("b200", out_dtype=out_dtype)


def test_no_query_of_a_plan_without_lengths_sees_nothing():
    """What is hidden is cut off, and the band counts from the first key: Hopper asks for both."""
    plan = described("h200", is_causal=True, bottom_right=True)
    assert "left=-1, right=30, bottom_right=0" in plan
    assert "query=e4m3[2, 4, 100, 64]" in plan
    query, key = tensor(100), tensor(60)
    for options, shapes in (
        ({"is_causal": True, "bottom_right": True}, ("query=e4m3[2, 4, 60, ", "right=0, ")),
        ({"window_size": (10, 0)}, ("query=e4m3[2, 4, 70, ", "left=10, ")),
        ({"is_causal": True}, ("query=e4m3[2, 4, 100, ", "key=e4m3[2, 4, 60, ")),
    ):
        words, refusal = support.plan_key(
            "sdpa_fp8", query, key, None, with_lse=False, polymorphic=False, **options
        )
        assert not refusal
        plan = str(cudnn_ops.PlanRequest(tuple(words)))
        assert all(shape in plan for shape in shapes), plan


def test_a_single_query_is_given_twice():
    words, _ = support.plan_key(
        "sdpa_fp8", tensor(1), tensor(50), None, with_lse=False, polymorphic=False
    )
    assert "query=e4m3[2, 4, 2, 64]" in str(cudnn_ops.PlanRequest(tuple(words)))


def test_nothing_to_see_needs_no_plan():
    _, refusal = support.plan_key(
        "sdpa_fp8", tensor(5), tensor(0), None, with_lse=False, polymorphic=False
    )
    assert "needs no plan" in refusal


@pytest.mark.parametrize("lengths", [1, 8, 15, 16])
def test_few_queries_of_192_on_blackwell(lengths):
    query, key, value = tensor(lengths, size=192), tensor(320, size=192), tensor(320, size=128)
    answer = explain("sdpa_fp8", query, key, value, device="b200")
    assert answer.supported == (lengths >= 16)
    assert answer.supported or "fp8-few-queries-of-192-on-blackwell" in answer.reason


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_plans_for_a_warm_up(device):
    requests = cudnn_ops.plan_requests("sdpa_fp8", tensor(64), is_causal=True, device=device)
    assert [str(request).partition("(")[0] for request in requests] == ["sdpa_fp8"]


HAS_MXFP8 = _C.cudnn_version() >= 92100


def test_mxfp8_needs_a_newer_cudnn():
    answer = explain("sdpa_mxfp8", tensor(64), device="b200")
    assert answer.supported == HAS_MXFP8
    assert HAS_MXFP8 or "requires cuDNN 9.21.0" in answer.reason


@pytest.mark.skipif(not HAS_MXFP8, reason="needs cuDNN 9.21")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_mxfp8_on_blackwell(layout):
    masks = (
        {"is_causal": True, "bottom_right": True},
        {"window_size": (50, 0)},
        {"window_size": (50, 20), "bottom_right": True},
        {"out_dtype": torch.float16},
        {"is_causal": True},
    )
    sizes = ((2, 129, 4), (300, 300, 1), (77, 577, 2), (5, 1, 4), (4096, 4096, 1))
    for (length, length_kv, heads_kv), options in zip(sizes, masks, strict=True):
        query, key = (
            tensor(n, heads, layout=layout) for n, heads in ((length, 4), (length_kv, heads_kv))
        )
        answer = explain("sdpa_mxfp8", query, key, device="b200", **options)
        assert answer.supported, (length, length_kv, options, answer.reason)


@pytest.mark.skipif(not HAS_MXFP8, reason="needs cuDNN 9.21")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (80, 80), (128, 128), (128, 64), (192, 128)])
def test_mxfp8_by_head_size(sizes, dtype):
    size, value_size = sizes
    query = tensor(300, 8, size, dtype)
    key, value = (tensor(300, 2, one, dtype) for one in (size, value_size))
    for device in ("b200", "b300")[: 1 + (size == 64)]:
        answer = explain("sdpa_mxfp8", query, key, value, device=device, is_causal=True)
        assert answer.supported, (device, answer.reason)


def test_what_is_refused_of_mxfp8():
    for length, size in ((1, 64), (15, 192)):
        query, value = tensor(length, size=size), tensor(length, size=min(size, 128))
        answer = explain("sdpa_mxfp8", query, query, value, device="b200")
        assert not answer.supported
        assert "no kernel for a single query, nor for less than 16" in answer.reason
    with pytest.raises(NotImplementedError, match="up to 128, and 192"):
        explain("sdpa_mxfp8", tensor(64, size=256), device="b200")
    for device in ("h200", "a100", "rtx_5090"):
        assert not explain("sdpa_mxfp8", tensor(64, size=128), device=device).supported
    _, refusal = support.plan_key(
        "sdpa_mxfp8", tensor(5), tensor(0), None, with_lse=False, polymorphic=False
    )
    assert "needs no plan" in refusal


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_on_blackwell(layout):
    """Heads that share keys, lengths that are multiples of nothing, every mask."""
    masks = (
        {"is_causal": True, "bottom_right": True},
        {"window_size": (50, 0)},
        {"window_size": (50, 20)},
        {},
        {"is_causal": True},
    )
    sizes = ((1, 1, 4), (2, 129, 4), (77, 577, 2), (300, 300, 1), (4096, 4096, 1))
    for (length, length_kv, heads_kv), options in zip(sizes, masks, strict=True):
        query, key = (
            tensor(n, heads, layout=layout) for n, heads in ((length, 4), (length_kv, heads_kv))
        )
        answer = explain("sdpa_fp8_backward", query, key, device="b200", **options)
        assert answer.supported, (length, length_kv, options, answer.reason)
        assert answer.engine.startswith("eng")


@pytest.mark.parametrize(
    ("dtype", "grad_out", "grad_dtype"),
    [(E4M3, E4M3, torch.float16), (E4M3, E5M2, torch.bfloat16), (E5M2, E5M2, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (80, 80), (128, 128), (128, 64), (192, 128)])
def test_gradients_by_head_size_and_format(sizes, dtype, grad_out, grad_dtype):
    size, value_size = sizes
    query = tensor(300, 8, size, dtype)
    key, value = (tensor(300, 2, one, dtype) for one in (size, value_size))
    options = {"grad_out": grad_out, "grad_dtype": grad_dtype, "is_causal": True}
    for device in ("b200", "b300")[: 1 + (size == 64)]:
        answer = explain("sdpa_fp8_backward", query, key, value, device=device, **options)
        assert answer.supported, (device, answer.reason)


LENGTHS = {"seq_lens_q": True, "seq_lens_kv": True}


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ((100, 130, 64), LENGTHS, ""),
        ((100, 130, 64), {**LENGTHS, "is_causal": True}, ""),
        ((130, 100, 64), {**LENGTHS, "window_size": (20, 0)}, ""),
        ((128, 192, 64), {**LENGTHS, "is_causal": True, "bottom_right": True}, ""),
        (
            (100, 130, 64),
            {**LENGTHS, "is_causal": True, "bottom_right": True},
            "with s_q multiple of 64",
        ),
        ((130, 100, 64), {"window_size": (40, 0)}, "max_s_q <= max_s_kv"),
        ((100, 100, 256), {}, "d_qk"),
        ((100, 100, 192), {}, "d_v"),
    ],
)
def test_what_gradients_are_refused(sizes, options, reason):
    length, length_kv, size = sizes
    query, key = tensor(length, size=size), tensor(length_kv, size=size)
    answer = explain("sdpa_fp8_backward", query, key, device="b200", **options)
    assert answer.supported != bool(reason)
    assert reason in answer.reason


@pytest.mark.parametrize("device", ["h200", "a100", "l40s"])
def test_no_gradients_before_blackwell(device):
    answer = explain("sdpa_fp8_backward", tensor(64, size=128), device=device)
    assert not answer.supported
    assert "needs a Blackwell" in answer.reason
    assert "gradients of 8 bits alone, for heads of 128 alone" in answer.reason


def test_gradients_of_what_is_visible_alone():
    query, key = tensor(100), tensor(60)
    for options, shapes in (
        (
            {"is_causal": True, "bottom_right": True},
            ("query=e4m3[2, 4, 60, ", "grad_query=bf16[2, 4, 60, ", "right=0, "),
        ),
        ({"is_causal": True}, ("grad_out=e5m2[2, 4, 100, ", "grad_key=bf16[2, 4, 60, ")),
    ):
        words, refusal = support.plan_key(
            "sdpa_fp8_backward",
            *(query, key, None),
            with_lse=False,
            polymorphic=False,
            sm=100,
            grad_out=E5M2,
            **options,
        )
        assert not refusal
        plan = str(cudnn_ops.PlanRequest(tuple(words)))
        assert all(shape in plan for shape in shapes), plan
    words, _ = support.plan_key(
        "sdpa_fp8_backward", tensor(1), tensor(9), None, with_lse=False, polymorphic=False, sm=100
    )
    assert "grad_query=bf16[2, 4, 2, 64]" in str(cudnn_ops.PlanRequest(tuple(words)))
    _, refusal = support.plan_key(
        "sdpa_fp8_backward", tensor(5), tensor(0), None, with_lse=False, polymorphic=False, sm=100
    )
    assert "needs no plan" in refusal


def test_a_warm_up_of_gradients(fresh_cache):
    requests = cudnn_ops.plan_requests("sdpa_fp8_backward", tensor(64), device="b200")
    assert [request.op for request in requests] == ["sdpa_fp8_backward"]
    report = cudnn_ops.warmup(requests, device="b200", progress=False)
    assert report.refused == {}
    assert cudnn_ops.warmup(requests, device="b200", progress=False).ready == 1
    with pytest.raises(ValueError, match="needs a Blackwell"):
        cudnn_ops.plan_requests("sdpa_fp8_backward", tensor(64), device="h200")
