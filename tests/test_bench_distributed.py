"""The benchmark of attention over several GPUs, as one process on a CPU: its rows and its table."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import bench_distributed, harness, tables
from benchmarks.harness import Rows
from examples.llama import LlamaConfig
from tests.cases.benchmarks import ENV, SHAPE


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_rows_make_the_table(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 1.0, 2.0, 4.0] * 3)
    mib = iter([3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(bench_distributed, "interleaved", lambda names, rounds: [*names] * rounds)
    monkeypatch.setattr(bench_distributed, "_sample", lambda step: 1e3 * next(times))
    monkeypatch.setattr(bench_distributed, "peak_bytes", lambda step: next(mib) * 2**20)
    monkeypatch.setattr(bench_distributed, "_torch", lambda mesh, step: step())
    rows = Rows(ENV)
    bench_distributed.measure(SHAPE, mesh, rows, rounds=3)
    case = "ring 2,4,2,48,16 causal, 1 GPUs"
    assert harness.pivot(rows.rows, "tokens_per_s") == {
        case: {"cudnn_ops": 192.0, "all_to_all": 96.0, "torch": 48.0, "one gpu": 24.0}
    }
    assert tables.distributed(rows.rows) == [
        ["", "tokens/s", "over one gpu", "MiB", "of one gpu", "vs all_to_all", "vs torch"],
        ["ring 2, 4, 2, 48, 16 causal, 1 GPUs", "192", "8.00x", "3.00", "0.50", "2.00x", "4.00x"],
    ]


def test_who_does_not_support_a_shape_is_left_out(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise NotImplementedError("no grouped heads")

    monkeypatch.setattr(bench_distributed, "_torch", refuse)
    monkeypatch.setattr(bench_distributed, "step_seconds", lambda steps, _: dict.fromkeys(steps, 1))
    monkeypatch.setattr(bench_distributed, "peak_bytes", lambda step: 2**20)
    rows = Rows(ENV)
    bench_distributed.measure(SHAPE, mesh, rows, rounds=1)
    assert {row["impl"] for row in rows.rows} == {"cudnn_ops", "all_to_all", "one gpu"}
    assert "torch does not support 2,4,2,48,16 causal, and is left out: no grouped" in (
        capsys.readouterr().out
    )


def test_a_peer_that_is_wrong_is_left_out(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_distributed, "_torch", lambda mesh, step: [tensor * 1.1 for tensor in step()]
    )
    monkeypatch.setattr(bench_distributed, "step_seconds", lambda steps, _: dict.fromkeys(steps, 1))
    monkeypatch.setattr(bench_distributed, "peak_bytes", lambda step: 2**20)
    rows = Rows(ENV)
    bench_distributed.measure(SHAPE, mesh, rows, rounds=1)
    assert {row["impl"] for row in rows.rows} == {"cudnn_ops", "all_to_all", "one gpu"}
    assert "out is 0.1 away from one GPU's: it is left out" in capsys.readouterr().out
    monkeypatch.setattr(bench_distributed, "MINE", ("torch",))
    with pytest.raises(ArithmeticError, match=r"torch at .* is 0.1 away"):
        bench_distributed.measure(SHAPE, mesh, rows, rounds=1)


def test_rows_of_serving(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of one serves as one GPU does; requests are long enough for all rounds."""
    mib = iter([1.0, 4.0, 9.0])
    monkeypatch.setattr(bench_distributed, "_allocated", lambda: next(mib) * 2**20)
    config = LlamaConfig(1, 32, 4, 2, sequence=64, vocabulary=32)
    rows = Rows(ENV)
    bench_distributed.measure_serving(config, 3, 9, mesh, rows, rounds=2)
    case = "serving, 3 requests, 1 GPUs"
    rates = harness.pivot(rows.rows, "tokens_per_s")[case]
    assert rates.keys() == {"cudnn_ops", "one gpu"}
    assert min(rates.values()) > 0
    assert harness.pivot(rows.rows, "peak_mib") == {case: {"cudnn_ops": 3.0, "one gpu": 5.0}}
    line = tables.distributed(rows.rows)[1]
    assert line[0] == case
    assert line[3:] == ["3.00", "0.60"]


@pytest.mark.parametrize("spread", bench_distributed.SPREADS)
def test_rows_of_training(spread: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of one trains as one process does, by either set of operators."""
    if spread == "FSDP":  # of CPU processes, it asks for an accelerator's streams
        monkeypatch.setattr(bench_distributed, "shard_data", lambda model, mesh: None)
    monkeypatch.setattr(bench_distributed, "_sample", lambda step: step() and 2e3)
    monkeypatch.setattr(bench_distributed, "peak_bytes", lambda step: 3 * 2**20)
    config = LlamaConfig(1, 32, 4, 2, sequence=8, vocabulary=32)
    rows = Rows(ENV)
    bench_distributed.measure_training(config, spread, False, mesh, rows, rounds=1)
    case = f"training, {spread}, 1 GPUs"
    rates = dict.fromkeys(("cudnn_ops", "eager", "products"), 8.0)
    assert harness.pivot(rows.rows, "tokens_per_s") == {case: rates}
    assert tables.distributed(rows.rows)[1] == [case, "8.00", "", "3.00", "", "1.00x", "1.00x"]


def test_the_bound_of_training_computes_every_product(mesh: DeviceMesh) -> None:
    config = LlamaConfig(2, 32, 4, 2, sequence=8, vocabulary=32)
    model = bench_distributed._training(
        config, bench_distributed._attention_alone(), "tensor parallel", False, mesh
    )
    bench_distributed.training_step(model, torch.randint(32, (2, 9)))
    for name, weight in model.named_parameters():
        grad: Any = weight.grad
        is_used = grad is not None and bool(grad.full_tensor().count_nonzero())
        assert is_used == ("norm" not in name), name


def test_training_is_verified() -> None:
    bench_distributed.verify_training("same", (2.0, 3.0), (2.0, 3.01))
    for wrong, name in (((2.1, 3.0), "loss is 2.1"), ((2.0, 3.1), "gradients' norm is 3.1")):
        with pytest.raises(RuntimeError, match=f"ours: the {name}, by stock operators"):
            bench_distributed.verify_training("ours", wrong, (2.0, 3.0))
    with pytest.raises(RuntimeError, match="the loss is nan"):
        bench_distributed.verify_training("ours", (float("nan"), 3.0), (2.0, 3.0))


def test_results_are_verified(mesh: DeviceMesh) -> None:
    right = [torch.ones(3)] * 4
    bench_distributed.verify("same", right, right)
    for place, name in enumerate(("out", "dq", "dk", "dv")):
        wrong = list(right)
        wrong[place] = right[place] * 1.1
        with pytest.raises(ArithmeticError, match=f"ours: {name} is 0.1 away from one GPU's"):
            bench_distributed.verify("ours", wrong, right)


def test_nothing_is_measured_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        bench_distributed.run(Rows(ENV), rounds=1)
    assert ended.value.code == 0
    assert "two GPUs or more: nothing is measured on one" in capsys.readouterr().out
