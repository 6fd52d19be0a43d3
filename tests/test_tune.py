"""Which engine a plan gets: from cuDNN's heuristics, from a table, from a measurement."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

import cudnn_ops
from cudnn_ops import PlanRequest, TunedPlan, plan_requests
from cudnn_ops import __main__ as command_line
from cudnn_ops.plans.tables import TABLES, EngineTable
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run

pytestmark = pytest.mark.usefixtures("fresh_cache")

SHAPE = ((2, 4, 256, 128), torch.bfloat16)
(REQUEST,) = plan_requests("sdpa", SHAPE, is_causal=True, training=False, plans="exact")
CUDNN = 91900
OTHER_ENGINE = "eng1_k24=3"  # cuDNN offers it on sm90, second


@pytest.fixture
def table(engine_table):
    """Sets the table of sm90 for REQUEST."""
    return partial(engine_table, [REQUEST])


def engine(with_lse: bool = False) -> str:
    cudnn_ops.cache_clear()
    return explain("sdpa", SHAPE, is_causal=True, with_lse=with_lse, device="h200").engine


def test_a_table_decides_for_its_plan_alone(table):
    by_heuristic = engine()
    table(OTHER_ENGINE)
    assert engine() == OTHER_ENGINE != by_heuristic
    assert engine(with_lse=True) == by_heuristic
    cudnn_ops._C.set_engine_table(90, 0, [])
    assert engine() == by_heuristic


def test_a_table_of_another_cudnn_or_gpu_is_not_consulted(table):
    by_heuristic = engine()
    table(OTHER_ENGINE, cudnn=91800)
    assert engine() == by_heuristic
    table(OTHER_ENGINE, sm=80)
    assert engine() == by_heuristic


@pytest.mark.parametrize("name", ["eng77", "eng1_k24=36", ""])
def test_an_engine_that_cudnn_does_not_offer_is_passed_over(table, name):
    by_heuristic = engine()
    table(name)
    assert engine() == by_heuristic


def test_a_stored_plan_keeps_the_engine_it_was_built_with(table, store):
    table(OTHER_ENGINE)
    assert engine() == OTHER_ENGINE
    cudnn_ops._C.set_engine_table(90, 0, [])
    assert engine() == OTHER_ENGINE
    assert cudnn_ops.cache_info().loads == 1


def test_a_measurement_says_what_it_found():
    tuned = TunedPlan(REQUEST, {"eng2": 2.0, "eng1": 1.5, "eng3": math.inf})
    assert (tuned.first, tuned.fastest, tuned.gain) == ("eng2", "eng1", 0.25)
    lines = str(tuned).splitlines()
    assert lines[0] == str(REQUEST)
    assert [line.split()[0] for line in lines[1:]] == ["eng1", "eng2", "eng3"]
    assert "cuDNN's choice" in lines[2]
    assert "does not run" in lines[3]


def make_table() -> EngineTable:
    return EngineTable(90, "a GPU", "a driver", CUDNN, "2.11.0", "2026-01-01")


def test_a_table_takes_in_what_is_worth_it(tmp_path):
    made = make_table()
    made.add(TunedPlan(REQUEST, {"eng2": 1.0, "eng1": 0.99}))
    assert made.entries == []
    made.add(TunedPlan(REQUEST, {"eng2": 1.0, "eng1": 0.9}))
    made.add(TunedPlan(REQUEST, {"eng2": 1.0, "eng1": 0.8}))
    (entry,) = made.entries
    assert entry["engine"] == "eng1"
    assert entry["ms"] == {"eng2": 1.0, "eng1": 0.8}
    assert entry["plan"] == str(REQUEST)
    made.write(tmp_path / "sm90.json")
    assert EngineTable.read(tmp_path / "sm90.json") == made
    made.add(TunedPlan(REQUEST, {"eng2": 1.0, "eng1": 1.0}))
    assert made.entries == []


def test_the_tables_of_the_package():
    """Whatever they name is a plan of this version, and they say where they come from."""
    paths = sorted(TABLES.glob("sm*.json"))
    assert [path.name for path in paths] == ["sm90.json"]
    for path in paths:
        shipped = EngineTable.read(path)
        assert path.name == f"sm{shipped.sm}.json"
        assert all((shipped.gpu, shipped.driver, shipped.cudnn, shipped.torch, shipped.date))
        for entry in shipped.entries:
            assert str(PlanRequest(tuple(entry["words"]))) == entry["plan"]
            assert entry["engine"] in entry["ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_needs_a_gpu(capsys):
    assert command_line.main(["tune", "sdpa"]) == 2
    assert "torch sees none" in capsys.readouterr().err


CASE = Case(2, 4, 2, 200, 200, 64, 64, is_causal=True)


@pytest.mark.gpu
def test_measured_engines_are_stored_and_reused(store):
    inputs = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(CASE, torch.bfloat16, "cuda")
    cudnn_ops._C.take_measurements()
    cudnn_ops.set_autotune(True)
    try:
        for policy in ("exact", "polymorphic"):
            with cudnn_ops.using_plan_policy(policy):
                cases.check_results(CASE, run(CASE, inputs, grad_out), inputs, grad_out)
        measured = cudnn_ops._C.take_measurements()
        assert len(measured) == 2  # a polymorphic plan keeps cuDNN's choice
        for words, engines in measured:
            assert "sdpa" in PlanRequest(tuple(words)).op
            assert len({name for name, _ in engines}) == len(engines) >= 1
            assert all(0 < ms < 10 for _, ms in engines)
        cudnn_ops.cache_clear()
        cases.check_results(CASE, run(CASE, inputs, grad_out), inputs, grad_out)
        assert cudnn_ops._C.take_measurements() == []
        assert cudnn_ops.cache_info()[1:3] == (0, 2)
    finally:
        cudnn_ops.set_autotune(False)


@pytest.mark.gpu
def test_autotune_builds_anew_what_was_stored_unmeasured(store):
    inputs = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
    cudnn_ops.cache_clear()
    cudnn_ops.set_autotune(True)
    try:
        torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
        assert cudnn_ops.cache_info()[1:3] == (1, 0)
    finally:
        cudnn_ops.set_autotune(False)
    cudnn_ops.cache_clear()
    torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
    assert cudnn_ops.cache_info()[1:3] == (0, 1)


@pytest.mark.gpu
def test_tuning_from_python_and_from_the_shell(store, tmp_path, capsys):
    tuned = cudnn_ops.tune_sdpa(*cases.make_inputs(CASE, torch.bfloat16, "cuda"), is_causal=True)
    assert [plan.request.op for plan in tuned] == ["sdpa", "sdpa_backward"]
    assert cudnn_ops._C.autotune() == 0
    assert cudnn_ops.store_info().files == 2
    path = tmp_path / "table.json"
    arguments = ["tune", "sdpa", "-q", "2,4,200,64", "--causal", "--inference"]
    for _ in range(2):
        assert command_line.main([*arguments, "--table", str(path)]) == 0
        assert "(cuDNN's choice)" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["gpu"] == torch.cuda.get_device_name()
    path.write_text(json.dumps(written | {"gpu": "another"}))
    assert command_line.main([*arguments, "--table", str(path)]) == 2
    assert "write another file" in capsys.readouterr().err
