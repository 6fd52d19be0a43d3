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
