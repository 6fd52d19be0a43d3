"""The zoo of models: its list, its measurement on a small model, and files of several runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks import bench_zoo, tables, turns, whole_models
from benchmarks.harness import OURS, Row, Rows, in_process
from benchmarks.zoo_models import ZOO, Entry
from tests.cases.benchmarks import must_wait


class Small(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Dropout(p))
        self.pooler = nn.Linear(16, 4)  # without a gradient, as BERT's

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.layers(x)
        return result, self.pooler(result)


def _inputs(device: torch.device) -> dict[str, Any]:
    return {"x": torch.randn(4, 16, dtype=torch.bfloat16, device=device)}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SMALL = Entry("small", "torch", lambda _: Small(), _inputs, lambda out: out[0])


def test_at_least_eighteen_models_of_four_libraries():
    assert len({entry.name for entry in ZOO}) == len(ZOO) >= 18
    libraries = {entry.library for entry in ZOO}
    assert libraries == {"transformers", "torchvision", "timm", "diffusers"}


@pytest.mark.parametrize("trains", [False, True])
def test_a_small_model_is_compiled_and_held_to_float32(trains, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rows = Rows({"commit": "abc"})
    bench_zoo.measure_case(SMALL, trains, rows, rounds=1, device="cpu")
    kind = "training" if trains else "inference"
    seconds = [(f"small, {kind}", name, "compile_s") for name in bench_zoo.COMPILERS]
    assert [(row["case"], row["impl"], row["metric"]) for row in rows.rows] == seconds
    # What an earlier run has compiled takes no such time.
    bench_zoo.measure_case(SMALL, trains, rows, rounds=1, device="cpu")
    assert len(rows.rows) == len(seconds)


def test_beside_others_one_model_at_a_time_is_in_float32(tmp_path, monkeypatch):
    """And nobody is timed meanwhile."""
    others_wait = []

    def results(*args):
        others_wait.append(must_wait(tmp_path))
        return results_of(*args)

    results_of = whole_models.results_of
    monkeypatch.setattr(whole_models, "results_of", results)
    monkeypatch.setenv(turns.FOLDER_VARIABLE, str(tmp_path))
    bench_zoo.measure_case(SMALL, False, Rows({}), rounds=1, device="cpu")
    assert others_wait == [True, True, *(False for _ in ("eager", *bench_zoo.COMPILERS))]


def test_a_wrong_result_is_refused(monkeypatch):
    monkeypatch.setattr(bench_zoo, "COMPILERS", {"wrong": {"backend": lambda *_: _twice}})
    with pytest.raises(RuntimeError, match=r"small, inference: wrong is off by .* in its result"):
        bench_zoo.measure_case(SMALL, False, Rows({}), rounds=1, device="cpu")


@pytest.mark.parametrize("piece", [7, 24, 100])
def test_the_error_of_a_vector_is_that_of_its_pieces(piece, monkeypatch):
    monkeypatch.setattr(whole_models, "_PIECE", piece)
    exact = torch.randn(6, 8)
    found = (exact + 0.1 * torch.randn(6, 8)).bfloat16()
    assert whole_models.error(found, exact) == pytest.approx(
        float((found.double() - exact).norm() / exact.double().norm())
    )
    found[5, 7] = torch.nan
    assert math.isnan(whole_models.error(found, exact))
    assert math.isnan(whole_models.error(exact, torch.zeros(6, 8)))
    with pytest.raises(RuntimeError, match=r"a result is \[8, 6\], not \[6, 8\]"):
        whole_models.error(exact.view(8, 6), exact)


def test_wrong_gradients_are_refused(monkeypatch):
    monkeypatch.setattr(bench_zoo, "COMPILERS", {OURS: {"backend": _twice_the_gradients}})
    off = r"small, training: cudnn_ops is off by .* in its gradients"
    with pytest.raises(RuntimeError, match=off):
        bench_zoo.measure_case(SMALL, True, Rows({}), rounds=1, device="cpu")


def test_of_what_drops_numbers_ours_alone_is_compiled_once_more(monkeypatch):
    """To be held to float32: the others would take minutes."""
    compiled = []

    def right(graph: Any, _: Any) -> Any:
        compiled.append("right")
        return graph

    def wrong(*args: Any) -> Any:
        compiled.append("wrong")
        return _twice_the_gradients(*args)

    compilers = {OURS: {"backend": right}, "compile": {"backend": wrong}}
    monkeypatch.setattr(bench_zoo, "COMPILERS", compilers)
    bench_zoo.measure_case(SMALL, True, Rows({}), rounds=1, device="cpu")
    assert compiled == ["right", "right", "wrong"]
    nothing = Entry("small", "torch", lambda _: Small(p=0.0), _inputs, lambda out: out[0])
    with pytest.raises(RuntimeError, match=r"training: compile is off by .* in its gradients"):
        bench_zoo.measure_case(nothing, True, Rows({}), rounds=1, device="cpu")


def test_what_is_checked_drops_nothing():
    model = nn.Sequential(
        nn.Dropout(0.5), StochasticDepth(0.4, "row"), DropPath(0.3), nn.LPPool1d(2.0, 3)
    )
    attention = T5Attention(T5Config(dropout_rate=0.2))
    model.add_module("attention", attention)
    x = torch.randn(4, 6, 8)
    with whole_models.nothing_dropped(model):
        assert torch.equal(model[:3].train()(x), x)
        assert attention.dropout == 0.0
        assert model[3].norm_type == 2.0
    assert (model[0].p, model[1].p, model[2].drop_prob, attention.dropout) == (0.5, 0.4, 0.3, 0.2)


def test_batch_norms_learn_the_statistics_of_the_inputs():
    norm = nn.BatchNorm1d(4)
    x = torch.randn(64, 4) * 3 + 1
    whole_models.learn_statistics(norm, {"input": x})
    assert norm.momentum == 0.1
    torch.testing.assert_close(norm.eval()(x), (x - x.mean(0)) / x.std(0), atol=1e-3, rtol=1e-3)


def test_one_part_that_fails_leaves_the_others(monkeypatch):
    def run_part(part: str, rows: Rows, rounds: int) -> None:
        if part == "second":
            raise RuntimeError("off")
        rows.add(part, OURS, "step_ms", 1.0)

    monkeypatch.setattr(bench_zoo, "PARTS", ["first", "second", "third"])
    monkeypatch.setattr(bench_zoo, "run_part", run_part)
    rows = Rows({})
    with pytest.raises(RuntimeError, match="second: off"):
        bench_zoo.run(rows, 1)
    assert [row["case"] for row in rows.rows] == ["first", "third"]


def test_a_part_is_a_model_in_one_mode(monkeypatch):
    measured = []
    monkeypatch.setattr(bench_zoo, "ZOO", [SMALL])
    monkeypatch.setattr(bench_zoo, "measure_case", lambda *args: measured.append(args[:2]))
    monkeypatch.setattr(bench_zoo, "_set_triton_ptxas_path", lambda: None)  # of this process
    for mode in ("inference", "training"):
        bench_zoo.run_part(f"small, {mode}", Rows({}), 1)
    assert measured == [(SMALL, False), (SMALL, True)]
    assert {part.rsplit(", ", 1)[0] for part in bench_zoo.PARTS} == {entry.name for entry in ZOO}


def _twice(*_: Any) -> tuple[Tensor, Tensor]:
    return torch.full((4, 16), 9.0), torch.full((4, 4), 9.0)


PTXAS_OF_A_PART = """
from benchmarks import bench_zoo
from benchmarks.harness import Rows

bench_zoo.measure_case = lambda *_: None
bench_zoo.run_part(bench_zoo.PARTS[0], Rows({}), 1)

from triton.backends.nvidia.compiler import get_ptxas

print(get_ptxas(90).path)
"""


def test_a_part_and_inductor_s_workers_compile_with_one_ptxas(monkeypatch):
    """Its version is part of the name by which Triton finds what was compiled."""
    ptxas = Path(torch.__file__).with_name("bin") / "ptxas"
    if not ptxas.exists():
        pytest.skip("this PyTorch has no ptxas")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    printed = in_process(PTXAS_OF_A_PART).splitlines()
    assert Path(printed[-1]) == ptxas


def test_rows_of_some_models_join_those_of_an_earlier_run():
    old: list[Row] = [
        {"case": "a", "impl": OURS, "metric": "step_ms", "value": 1.0, "commit": "oldest"},
        {"case": "b", "impl": OURS, "metric": "step_ms", "value": 1.0},
        {"case": "c", "impl": OURS, "metric": "step_ms", "value": 1.0},
    ]
    rows = Rows({"commit": "new"})
    rows.add("b", OURS, "step_ms", 2.0)
    rows.merge_into(old, "old")
    assert [(r["case"], r["value"], r["commit"]) for r in rows.rows] == [
        ("a", 1.0, "oldest"),
        ("c", 1.0, "old"),
        ("b", 2.0, "new"),
    ]


def test_the_table():
    rows = Rows({})
    for impl, ms in ((OURS, 1.0), ("eager", 3.0), ("compile", 2.0), ("compile max-autotune", 1.5)):
        for metric in ("step_ms", "peak_mib", "compile_s"):
            rows.add("x, training", impl, metric, ms)
    heading, line, mean = tables.zoo(rows.rows)
    assert len(heading) == len(line) == len(mean)
    assert line == ["x, training", "1.00", "3.00x", "2.00x", "1.50x", "1.00 / 2.00", "0.50"]
    assert mean[2:5] == ["3.00x", "2.00x", "1.50x"]
    for impl, ms in ((OURS, 1.0), ("eager", 12.0), ("compile", 8.0)):  # beside others
        for metric in ("step_ms", "peak_mib"):
            rows.add("y, inference", impl, metric, ms)
    _, _, line, mean = tables.zoo(rows.rows)
    assert line == ["y, inference", "1.00", "12.00x", "8.00x", "", "", "0.12"]
    assert mean[2:5] == ["6.00x", "4.00x", "1.50x"]


def test_what_no_model_has_gets_no_column():
    rows = Rows({})
    for impl, ms in ((OURS, 1.0), ("eager", 3.0), ("compile", 2.0)):
        for metric in ("step_ms", "peak_mib"):
            rows.add("x, training", impl, metric, ms)
    assert tables.zoo(rows.rows) == [
        ["", "ours", "vs eager", "vs compile", "MiB, of compile"],
        ["x, training", "1.00", "3.00x", "2.00x", "0.50"],
        ["geometric mean", "", "3.00x", "2.00x", ""],
    ]


def test_both_modes_of_a_model_are_one_line():
    rows = Rows({})
    for case, factor in (("x, 4 layers, inference", 1.0), ("x, 4 layers, training", 4.0)):
        for impl, ms in ((OURS, 1.0), ("eager", 3.0), ("compile", 2.0)):
            rows.add(case, impl, "step_ms", factor * ms)
    rows.add("y, training", OURS, "step_ms", 1.0)
    rows.add("y, training", "compile", "step_ms", 8.0)
    assert tables.zoo_models(rows.rows) == [
        ["", *("inference", "vs eager", "vs compile"), *("training", "vs eager", "vs compile")],
        ["x, 4 layers", "1.00", "3.00x", "2.00x", "4.00", "3.00x", "2.00x"],
        ["y", "", "", "", "1.00", "", "8.00x"],
        ["geometric mean", "", "3.00x", "2.00x", "", "3.00x", "4.00x"],
    ]


def _twice_the_gradients(graph: Any, _: Any) -> Any:
    return lambda *inputs: tuple(2 * out - out.detach() for out in graph(*inputs))
