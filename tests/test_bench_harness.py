"""The benchmarks' harness, without a GPU: clocks, rows, arguments, peers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    harness,
    peers,
)
from benchmarks.harness import Rows
from cudnn_ops.plans import timing
from tests.cases.benchmarks import ENV


class Gpu:
    """Stands in for torch.cuda: logs what it is asked, and its events pass after a long sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.sleeps: list[int] = []
        self.sleep_needed = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleeps.append)
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def event(self, **_: bool) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: None,
            synchronize=lambda: None,
            query=lambda: self.sleeps[-1] < self.sleep_needed,
            elapsed_time=lambda _: float(len(self.sleeps)),
        )

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.log.append(f"enter {name}")
        yield
        self.log.append(f"leave {name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "message"),
    [(False, [], "needs a CUDA GPU"), (True, ["--out", "no/such/x.json"], "is not a folder")],
)
def test_bad_arguments_end_with_a_line(has_gpu, arguments, message, monkeypatch, capsys):
    """And status 2, before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("sys.argv", ["bench_x", *arguments])
    with pytest.raises(SystemExit) as ended:
        harness.main("x", lambda rows, rounds: pytest.fail("it measures"))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_host_time_leaves_synchronization_and_settings_out(gpu: Gpu) -> None:
    times = harness.host_us({"ours": lambda: gpu.log.append("call")}, rounds=1, around=gpu.around)
    warm_up = ["enter ours", *["call"] * timing.WARM_UP_CALLS, "leave ours"]
    batch = ["synchronize", *["call"] * harness.HOST_CALLS, "synchronize"]
    assert gpu.log == [*warm_up, "enter ours", *batch, "leave ours"]
    assert 0 < times["ours"] < 1000


def test_gpu_time_is_taken_only_once_every_call_was_queued(gpu: Gpu) -> None:
    gpu.sleep_needed = 4 * timing.SLEEP_CYCLES
    times = harness.gpu_ms({"ours": lambda: None}, rounds=1)
    rehearsed = [timing.SLEEP_CYCLES << doubling for doubling in range(3)]
    assert gpu.sleeps == [*rehearsed, rehearsed[-1]]
    assert times == {"ours": 4 / timing.GPU_CALLS}


def test_gpu_time_of_every_function_begins_behind_the_same_sleep(gpu: Gpu) -> None:
    """Else the one that is launched the slowest gets the coolest GPU."""

    def needs(sleep: int) -> Callable[[], None]:
        return lambda: setattr(gpu, "sleep_needed", sleep)

    quick, slow = needs(0), needs(8 * timing.SLEEP_CYCLES)
    harness.gpu_ms({"quick": quick, "slow": slow}, rounds=5)
    assert gpu.sleeps[-10:] == [8 * timing.SLEEP_CYCLES] * 10


def test_gpu_time_of_a_function_that_waits_is_refused(gpu: Gpu) -> None:
    gpu.sleep_needed = 1 << 62
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        harness.gpu_ms({"ours": lambda: None}, rounds=1)


def test_a_step_begins_on_an_idle_gpu_and_is_not_put_off(gpu: Gpu) -> None:
    gpu.sleeps.append(0)  # what the events' time is made of
    assert harness.step_ms({"ours": lambda: gpu.log.append("call")}, rounds=2) == {"ours": 1.0}
    assert gpu.log == [*["call"] * timing.WARM_UP_CALLS, *["synchronize", "call"] * 2]


@pytest.mark.parametrize(("enough_at", "rounds"), [(1, 3), (4, 4), (99, 6)])
def test_rounds_end_once_medians_are_enough(gpu: Gpu, enough_at: int, rounds: int) -> None:
    """Of no fewer samples than a few."""
    taken: list[str] = []
    asked: list[dict[str, float]] = []

    def is_enough(medians: Mapping[str, float]) -> bool:
        asked.append(dict(medians))
        return len(taken) >= 2 * enough_at

    def sample(function: Callable[[], object]) -> float:
        taken.append(str(function()))
        return float(len(taken))

    functions = {"ours": lambda: "ours", "stock": lambda: "stock"}
    times = timing.medians(functions, sample, 6, is_enough=is_enough)
    assert sorted(taken) == ["ours"] * rounds + ["stock"] * rounds
    assert times == asked[-1]
    assert len(asked) == rounds - timing.FEW_ROUNDS + 1


def test_rounds_hold_every_function_in_changing_order(gpu: Gpu) -> None:
    harness.gpu_ms(dict.fromkeys("abc", lambda: None), rounds=20, around=gpu.around)
    entered = [entry[-1] for entry in gpu.log if entry.startswith("enter")]
    rounds = ["".join(entered[i : i + 3]) for i in range(3, len(entered), 3)]
    assert len(rounds) == 20
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert len(set(rounds[:6])) == len(set(rounds[6:12])) == 6
    assert rounds[:6] != rounds[6:12]


def test_many_functions_change_their_order() -> None:
    rounds = "".join(timing.interleaved("abcdefgh", 9))
    orders = [rounds[at : at + 8] for at in range(0, len(rounds), 8)]
    assert {"".join(sorted(names)) for names in orders} == {"abcdefgh"}
    assert len(set(orders)) == 9


def test_rows_are_written_as_json(tmp_path: Path) -> None:
    rows = Rows(ENV)
    rows.add("small", "cudnn_ops", "gpu_ms", 0.25)
    rows.write(tmp_path / "new" / "out.json")
    rows.add("large", "cudnn_ops", "gpu_ms", float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.write(tmp_path / "nan.json")
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == {
        "env": ENV,
        "rows": [{"case": "small", "impl": "cudnn_ops", "metric": "gpu_ms", "value": 0.25}],
    }


def test_table_has_a_ratio_for_each_peer() -> None:
    rows = Rows(ENV)
    rows.add("small", "cudnn_ops", "gpu_ms", 0.26)
    rows.add("small", "torch_flash", "gpu_ms", 0.39)
    rows.add("large", "cudnn_ops", "gpu_ms", 12.0)
    rows.add("small", "torch_flash", "peak_mib", 1024.0)
    assert rows.table().splitlines() == [
        "gpu_ms  cudnn_ops  torch_flash  torch_flash/ours",
        "small       0.260        0.390              1.50",
        "large        12.0            -                 -",
        "",
        "peak_mib  torch_flash",
        "small            1024",
    ]


def test_short_numbers() -> None:
    values = (0.0856, 0.5, 100.0, 999.6, 12345.6)
    assert [harness.short(v) for v in values] == ["0.0856", "0.500", "100", "1000", "12346"]


def test_commit_is_dirty_when_the_code_differs_but_not_when_results_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    monkeypatch.delenv("CUDNN_OPS_COMMIT", raising=False)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    git("init", "-q")
    assert harness.commit() == "unknown"
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert len(head := harness.commit()) == 40
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "sdpa.json").touch()
    assert harness.commit() == head
    (tmp_path / "code.py").touch()
    assert harness.commit() == f"{head}-dirty"
    monkeypatch.setenv("CUDNN_OPS_COMMIT", "told")
    assert harness.commit() == "told"


def test_a_torch_backend_is_selected_alone_and_only_inside_its_context() -> None:
    def enabled() -> tuple[bool, bool]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before = enabled()
    for name, expected in (
        ("torch_flash", (True, False)),
        ("torch_cudnn", (False, True)),
        ("torch_default", before),
        ("cudnn_ops", before),
    ):
        with peers.backend(name):
            assert enabled() == expected
        assert enabled() == before


def test_only_third_parties_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "cudnn_ops", None)
    assert list(peers.sdpa("torch_flash", "flash_attn_4")) == ["torch_flash"]
    with pytest.raises(ImportError):
        peers.sdpa("cudnn_ops")


def test_liger_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert list(peers.row_ops("cudnn_ops", "eager", "liger")) == ["cudnn_ops", "eager"]
