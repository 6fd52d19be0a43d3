"""Who runs a norm on a GPU: our kernels, for any number of rows, or cuDNN's plan for just one."""

from __future__ import annotations

import json
import math

import pytest
import torch

import cudnn_ops
from cudnn_ops import _C, plan_requests, using_plan_policy, warmup
from cudnn_ops.plans import norm_tuning, timing
from cudnn_ops.plans.tables import NORM_PLANS, TABLES, EngineTable, load_tables
from tests.cases import norm as cases
from tests.cases.norm import NormCase

SIZE = 4096
FAST, SLOW = 8192, 32768
"""Rows for which the table of these tests has cuDNN faster, and not."""


CHOICES = [
    (plan, is_layer, 2 * SIZE, rows, rows == FAST, "")
    for plan in range(3)
    for is_layer in (False, True)
    for rows in (FAST, SLOW)
]


@pytest.fixture
def set_table():
    """Sets a table for the GPU at hand; the package's own is put back afterwards."""
    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor

    def of_version(version: int) -> None:
        _C.set_norm_table(sm, version, CHOICES)
        cudnn_ops.cache_clear()

    yield of_version
    _C.set_norm_table(sm, 0, [])
    load_tables()


@pytest.fixture
def table(set_table):
    set_table(_C.cudnn_version())


def both_ways(is_layer: bool, rows: int, size: int = SIZE, **options) -> None:
    case = NormCase((rows, size), (size,), is_layer, bias="same" if is_layer else "", **options)
    cases.check(case, cases.make(case, torch.bfloat16, "cuda", seed=rows))


def built() -> int:
    info = cudnn_ops.cache_info()
    return info.builds + info.loads


def test_a_norm_is_timed_by_its_plan_and_by_our_kernels(monkeypatch):
    """Which of them runs is a matter of the policy."""
    ms = {"exact": 2.0, "polymorphic": 3.0}
    sample = lambda _, call: call() or ms[cudnn_ops.plan_policy()]
    monkeypatch.setattr(timing.GpuSample, "__call__", sample)
    assert norm_tuning._gpu_ms(lambda: None) == (2.0, 3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_layer", [False, True])
def test_new_numbers_of_rows_build_nothing(is_layer, table):
    before = built()
    for rows in (1, 2, 100, 1000, 1023, 1025, 2049):
        both_ways(is_layer, rows)
    assert built() == before


@pytest.mark.gpu
@pytest.mark.parametrize("is_layer", [False, True])
def test_a_size_that_is_called_often_gets_cudnn_s_plan(is_layer, table):
    with using_plan_policy("auto", promote_after=2):
        before = built()
        for _ in range(2):
            both_ways(is_layer, FAST - 24)
        assert built() == before
        both_ways(is_layer, FAST - 24)
        assert built() == before + 2  # the forward and the backward
        both_ways(is_layer, FAST - 24)
        both_ways(is_layer, FAST - 24, layout="sliced")  # rows apart are not for cuDNN
        for _ in range(4):
            # Where our kernels are faster at one of the sizes around it, and nearer to the other.
            both_ways(is_layer, FAST + 24)
            # Wider than any size that was measured.
            both_ways(is_layer, FAST, 2 * SIZE)
        assert built() == before + 2


@pytest.mark.gpu
@pytest.mark.parametrize(("newer", "counts"), [(-1, True), (1, False)])
def test_a_table_counts_with_its_cudnn_and_newer_ones(newer, counts, set_table):
    set_table(_C.cudnn_version() + newer)
    before = built()
    with using_plan_policy("auto", promote_after=1):
        for _ in range(2):
            both_ways(False, FAST)
    assert (built() > before) is counts


@pytest.mark.gpu
def test_warmed_up_it_has_the_plan_from_the_first_call(table):
    requests = plan_requests("rms_norm", ((FAST, SIZE), torch.bfloat16))
    assert [request.op for request in requests] == ["norm", "norm_backward"]
    assert not warmup(requests, progress=False).refused
    before = cudnn_ops.cache_info()
    both_ways(False, FAST)
    after = cudnn_ops.cache_info()
    assert (after.builds, after.loads) == (before.builds, before.loads)
    assert after.hits > before.hits


@pytest.mark.gpu
@pytest.mark.parametrize("is_layer", [False, True])
def test_the_exact_policy_asks_cudnn(is_layer, table):
    before = built()
    with using_plan_policy("exact"):
        both_ways(is_layer, 48)
    assert built() == before + 2


@pytest.mark.gpu
def test_a_cuda_graph_gets_what_builds_nothing(table):
    x = torch.randn(FAST, SIZE, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(SIZE, device="cuda", dtype=torch.bfloat16)
    with using_plan_policy("auto", promote_after=0):
        before = built()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cudnn_ops.rms_norm(x, (SIZE,), weight, 1e-6)
        assert built() == before
    x.copy_(torch.randn_like(x))
    out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (SIZE,), weight, 1e-6))


@pytest.mark.gpu
def test_tuning_measures_both(tmp_path):
    timings = norm_tuning.tune_norms([(1024, 2048)], workers=2)
    assert {(t.plan, t.is_layer) for t in timings} == {
        (plan, is_layer) for plan in NORM_PLANS for is_layer in (False, True)
    }
    assert all(math.isfinite(t.cudnn_ms) and t.ours_ms > 0 and t.engine for t in timings)
    path = tmp_path / "table.json"
    norm_tuning.write_table(path, timings)
    assert len(EngineTable.read(path).entries) == len(timings)


def test_the_package_s_tables_have_every_standard_size():
    wanted = {
        (plan, is_layer, *size)
        for plan in NORM_PLANS
        for is_layer in (False, True)
        for size in norm_tuning.STANDARD_SIZES
    }
    paths = list(TABLES.glob("norms_sm*.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text())["entries"]
        timings = [norm_tuning.NormTiming(**entry) for entry in found]
        assert {(t.plan, t.is_layer, t.columns, t.rows) for t in timings} == wanted
        assert all(str(t) and t.engine.startswith("eng") for t in timings)


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees none"):
        norm_tuning.tune_norms()


def test_requests_name_the_plans():
    words = [str(request) for request in plan_requests("layer_norm", ((8, 64), torch.half))]
    assert len(words) == 2
    assert len(plan_requests("rms_norm", ((8, 64), torch.half), training=False)) == 1
