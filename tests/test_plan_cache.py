"""The plan cache: counters, limit, eviction, threads. Plans for a described GPU fill it here."""

from __future__ import annotations

import threading

import pytest
import torch

import cudnn_ops
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case
from tests.conftest import deterministic

pytestmark = pytest.mark.usefixtures("fresh_cache")


def plan(length: int, **kwargs):
    return explain("sdpa", ((1, 2, length, 64), torch.bfloat16), device="h200", **kwargs)


def counters() -> tuple[int, int, int, int]:
    info = cudnn_ops.cache_info()
    return info.hits, info.builds, info.evictions, info.size


def test_hits_and_builds():
    assert counters() == (0, 0, 0, 0)
    plan(64)
    plan(64)
    plan(128)
    assert counters() == (1, 2, 0, 2)
    cudnn_ops.cache_clear()
    assert counters() == (0, 0, 0, 0)
    plan(64)
    assert counters() == (0, 1, 0, 1)


def test_whatever_changes_the_graph_changes_the_key():
    plan(64)
    plan(64, is_causal=True)
    plan(64, with_lse=True)
    explain("sdpa_backward", ((1, 2, 64, 64), torch.bfloat16), device="h200")
    with deterministic():
        explain("sdpa_backward", ((1, 2, 64, 64), torch.bfloat16), device="h200")
    explain("sdpa", ((1, 2, 64, 64), torch.float16), device="h200")
    explain("sdpa", ((1, 2, 64, 64), torch.bfloat16), device="a100")
    explain("sdpa", ((1, 2, 64, 64), torch.bfloat16, (8192, 64, 128, 1)), device="h200")
    assert counters() == (0, 8, 0, 8)


def test_the_least_recently_used_goes_first():
    cudnn_ops.set_cache_limit(2)
    plan(64)
    plan(128)
    plan(64)  # 128 is now the older one
    plan(192)
    assert counters() == (1, 3, 1, 2)
    plan(64)
    plan(192)
    assert counters() == (3, 3, 1, 2)
    plan(128)
    assert counters() == (3, 4, 2, 2)


def test_a_smaller_limit_evicts_at_once():
    for length in (64, 128, 192):
        plan(length)
    cudnn_ops.set_cache_limit(1)
    assert cudnn_ops.cache_info()[:6] == (0, 3, 0, 2, 1, 1)


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_below_one_are_refused(limit):
    with pytest.raises(ValueError, match="at least 1"):
        cudnn_ops.set_cache_limit(limit)


def test_what_is_refused_is_not_kept():
    for _ in range(2):
        assert not explain(
            "sdpa_backward", ((1, 2, 64, 512), torch.bfloat16), device="h200"
        ).supported
    assert counters() == (0, 0, 0, 0)


def test_many_threads_build_a_plan_once():
    barrier = threading.Barrier(8)
    answers = []

    def ask() -> None:
        barrier.wait()
        answers.append(plan(320))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert cudnn_ops.cache_info().builds == 1
    assert cudnn_ops.cache_info().hits == 7


CASE = Case(2, 4, 2, 96, 96, 64, 64, is_causal=True)


@pytest.mark.gpu
def test_scale_is_passed_at_run_time():
    inputs = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    for scale in (None, 0.1, 0.2, 1.0):
        torch.ops.cudnn_ops.sdpa(*inputs, is_causal=True, scale=scale, enable_gqa=True)
    assert counters() == (3, 1, 0, 1)


@pytest.mark.gpu
def test_memory_elsewhere_takes_the_same_plan():
    """Addresses, and strides of dimensions of size 1, are no part of a plan."""
    query = torch.randn(1, 96, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    other = torch.randn(2, 96, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[1:]
    odd = query.as_strided(query.shape, (7, *query.stride()[1:]))
    for tensor in (query, other, odd):
        torch.ops.cudnn_ops.sdpa(tensor, tensor, tensor)
    assert counters() == (2, 1, 0, 1)


@pytest.fixture
def exact_plans():
    with cudnn_ops.using_plan_policy("exact"):
        yield


@pytest.mark.gpu
def test_plans_are_evicted_while_they_run(exact_plans):
    cudnn_ops.set_cache_limit(1)
    lengths = [64, 128, 192, 256]
    inputs = {s: torch.randn(4, 8, s, 64, device="cuda").bfloat16() for s in lengths}
    expected = {s: torch.ops.cudnn_ops.sdpa(t, t, t) for s, t in inputs.items()}
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the calls below are all queued before the first one runs
    results = [(s, torch.ops.cudnn_ops.sdpa(t, t, t)) for _ in range(3) for s, t in inputs.items()]
    torch.cuda.synchronize()
    assert cudnn_ops.cache_info().evictions >= 12
    for length, result in results:
        assert torch.equal(result, expected[length])


@pytest.mark.gpu
def test_threads_and_streams_share_plans(exact_plans):
    inputs = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    expected = torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
    torch.cuda.synchronize()
    results = []

    def attend() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                leaves = [t.detach().requires_grad_() for t in inputs]
                out = torch.ops.cudnn_ops.sdpa(*leaves, **CASE.kwargs())
                out.backward(torch.ones_like(out))
            torch.cuda.current_stream().synchronize()
        results.append(out.detach())

    threads = [threading.Thread(target=attend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(result, expected) for result in results)
    assert cudnn_ops.cache_info().builds == 3  # inference, training forward, backward
