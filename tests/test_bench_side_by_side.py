"""Parts of a benchmark that run beside each other, and are timed in turns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Container
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker

from benchmarks import side_by_side, turns
from benchmarks.side_by_side import Runner
from cudnn_ops.plans import timing
from tests.cases.benchmarks import must_wait

#: A benchmark whose parts say when they had their turns, and when they could do something else.
BENCHMARK = """
import json, sys, time
from pathlib import Path
from benchmarks.turns import is_alone, turn
part, out = sys.argv[2], Path(sys.argv[4])
assert not is_alone()
moments, turned = [], []
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        moments.append(time.monotonic())
        time.sleep(0.005)
work(0.3)
for _ in range(2):
    with turn():
        begin = time.monotonic()
        time.sleep(0.2)
        turned.append((begin, time.monotonic()))
    work(0.2)
if part == "bad":
    sys.exit(3)
row = {"case": part, "impl": "x", "metric": "step_ms", "value": 1.0}
out.write_text(json.dumps({"env": {"commit": "abc"}, "rows": [row]}))
Path(sys.argv[5], part).write_text(json.dumps([moments, turned]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "bench.py"
    root = str(Path(__file__).resolve().parents[1])
    script.write_text(f"import sys; sys.path.insert(0, {root!r})\n{BENCHMARK}")
    return [sys.executable, str(script)]


def _runner(command: list[str], folder: Path, **options: object) -> Runner:
    settings: dict[str, object] = {"gpus": (), "jobs": 3, "limit_s": 60.0, **options}
    return Runner(command, folder / "rows.json", folder, **settings)  # type: ignore[arg-type]


def test_one_is_timed_while_the_others_stand_still(command, tmp_path):
    told = tmp_path / "told"
    told.mkdir()
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        f"import os, sys\nos.execv(sys.executable, [*{command!r}, *sys.argv[1:], {str(told)!r}])\n"
    )
    runner = _runner([sys.executable, str(wrapper)], tmp_path)
    parts = ["a", "b, c", "d"]
    assert runner.run(parts) == []
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {(row["case"], row["commit"]) for row in rows} == {(part, "abc") for part in parts}
    found = {part: json.loads((told / part).read_text()) for part in parts}
    for part, (_, turned) in found.items():
        for begin, end in turned:
            for other in found.keys() - {part}:
                moments, others = found[other]
                assert not any(begin < moment < end for moment in moments)
                assert not any(begin < one < end for pair in others for one in pair)


def test_each_part_has_the_gpu_that_fewest_have(tmp_path):
    """And a folder with those on it."""
    script = (
        "import json, os, sys; from pathlib import Path; import time; time.sleep(0.5); "
        "Path(sys.argv[1], sys.argv[3]).write_text(json.dumps([os.environ[name] for name in "
        f"('CUDA_VISIBLE_DEVICES', {turns.FOLDER_VARIABLE!r})]))"
    )
    told = tmp_path / "told"
    told.mkdir()
    command = [sys.executable, "-c", script, str(told)]
    runner = _runner(command, tmp_path, gpus=(0, 1), jobs=4)
    parts = ["a", "b", "c", "d"]
    assert runner.run(parts) == []
    found = [tuple(json.loads((told / part).read_text())) for part in parts]
    assert found[0] == found[2] != found[1] == found[3]
    assert {gpu for gpu, _ in found} == {"0", "1"}
    assert len({folder for _, folder in found}) == 2


@pytest.mark.parametrize(("cores", "jobs", "threads"), [(16, 8, "2"), (16, 12, "2"), (4, 8, "1")])
def test_every_core_has_a_compile_thread(cores, jobs, threads, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    script = f"import os; assert os.environ['TORCHINDUCTOR_COMPILE_THREADS'] == '{threads}'"
    monkeypatch.setattr(side_by_side.os, "cpu_count", lambda: cores)
    assert _runner([sys.executable, "-c", script], tmp_path, jobs=jobs).run(["a"]) == []


def test_nothing_is_left_out_because_it_compiles_beside_others(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_PRECOMPILATION_TIMEOUT_SECONDS", raising=False)
    found = "torch._inductor.config.precompilation_timeout_seconds"
    script = f"import torch._inductor.config; assert {found} == 3600"
    assert _runner([sys.executable, "-c", script], tmp_path).run(["a"]) == []


@pytest.mark.parametrize("what", ["COMPILE_THREADS", "PRECOMPILATION_TIMEOUT_SECONDS"])
def test_what_is_set_is_kept(what, tmp_path, monkeypatch):
    monkeypatch.setenv(f"TORCHINDUCTOR_{what}", "5")
    script = f"import os; assert os.environ['TORCHINDUCTOR_{what}'] == '5'"
    assert _runner([sys.executable, "-c", script], tmp_path).run(["a"]) == []


def test_whose_time_counts_stands_still(tmp_path, monkeypatch):
    """Processes of another GPU go on while a GPU's time is taken, and not while the host's is."""
    own, other = (turns.folder_of(gpu, tmp_path) for gpu in (0, 1))
    sleepers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    try:
        for folder, sleeper in zip((own, other), sleepers, strict=True):
            folder.mkdir()
            turns.join(folder, sleeper.pid)
        monkeypatch.setenv(turns.FOLDER_VARIABLE, str(own))
        monkeypatch.setattr(timing, "medians", timing.medians)
        monkeypatch.setattr(timing.GpuSample, "__call__", lambda _, function: function() or 0.0)
        # A busy machine takes its time to stop a process.
        monkeypatch.setattr(turns, "STOP_S", 0.5)
        turns.clock_in_turns()
        found: list[list[bool]] = []
        functions = {"x": lambda: found.append([_is_stopped(one.pid) for one in sleepers])}
        timing.gpu_ms(functions, rounds=1)
        timing.cpu_ms(functions, rounds=1)
        assert (found[0], found[-1]) == ([True, False], [True, True])
        # Their stopwatches know of as many.
        assert [len((one / "turns").read_text().splitlines()) for one in (own, other)] == [2, 1]
        assert not any(_is_stopped(sleeper.pid) for sleeper in sleepers)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def test_the_package_s_clock_takes_turns(monkeypatch):
    """By which the compile backend chooses, too."""
    moments = []

    @contextmanager
    def turn(*, of_all_gpus):
        assert of_all_gpus
        moments.append("begin")
        yield
        moments.append("end")

    monkeypatch.setattr(turns, "turn", turn)
    monkeypatch.setattr(timing, "medians", timing.medians)
    turns.clock_in_turns()
    found = timing.cpu_ms({"x": lambda: moments.append("call")}, rounds=2)
    assert found["x"] >= 0
    assert moments == ["begin", "call", "call", "call", "end"]


def test_inductor_tunes_one_by_one(tmp_path, monkeypatch):
    """Whoever has a turn, or times a candidate, has the GPU for itself; it is loaded before."""
    own = turns.folder_of(0, tmp_path)
    own.mkdir()
    others_wait = []

    def candidate():
        others_wait.append(must_wait(own))

    def benchmark(candidate, **_):
        candidate()
        return 1.0

    monkeypatch.setenv(turns.FOLDER_VARIABLE, str(own))
    monkeypatch.setattr(benchmarker, "benchmark_gpu", benchmark)
    turns.tune_one_by_one()
    assert benchmarker.benchmark(candidate, device=torch.device("cuda")) == 1.0
    assert others_wait == [False, True]


def test_a_part_that_fails_runs_once_more(command, tmp_path):
    told = tmp_path / "told"
    told.mkdir()
    wrapper = tmp_path / "wrapper.py"
    count = tmp_path / "count"
    wrapper.write_text(
        "import os, sys\n"
        f"open({str(count)!r}, 'a').write(sys.argv[2] + chr(10))\n"
        f"os.execv(sys.executable, [*{command!r}, *sys.argv[1:], {str(told)!r}])\n"
    )
    runner = _runner([sys.executable, str(wrapper)], tmp_path, jobs=2)
    assert runner.run(["bad", "good"]) == ["bad"]
    assert sorted(count.read_text().split()) == ["bad", "bad", "good"]
    assert [row["case"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [
        "good"
    ]


DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "


@pytest.mark.parametrize("deaf", ["", DEAF])
def test_a_limit_ends_what_runs(deaf, tmp_path, monkeypatch):
    """What does not end upon an interrupt is killed."""
    monkeypatch.setattr(side_by_side, "GRACE_S", 2.0)
    sleeper = [sys.executable, "-c", f"{deaf}import time; time.sleep(60)"]
    runner = _runner(sleeper, tmp_path, jobs=1, limit_s=2.0)
    begin = time.monotonic()
    assert runner.run(["first", "second"]) == ["first", "second"]
    assert time.monotonic() - begin < 30
    assert not runner._running


def test_what_parts_compile_is_kept_where_it_is_asked_for(tmp_path):
    script = tmp_path / "bench.py"
    script.write_text(
        "import os\nfrom pathlib import Path\n"
        "Path(os.environ['TORCHINDUCTOR_CACHE_DIR']).mkdir(parents=True)\n"
    )
    kept = tmp_path / "kept"
    assert _runner([sys.executable, str(script)], tmp_path, compiled=kept).run(["a", "b, c"]) == []
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["cache-a", "cache-b__c"]
    # Else it goes with the run.
    assert _runner([sys.executable, str(script)], tmp_path).run(["d"]) == []
    assert sorted(path.name for path in kept.iterdir()) == names


@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_of_a_model_share_what_is_kept_one_after_the_other(is_kept, tmp_path):
    script = (
        "import os, sys, time; from pathlib import Path; "
        "folder = Path(os.environ['TORCHINDUCTOR_CACHE_DIR']); "
        "folder.mkdir(parents=True, exist_ok=True); "
        "found = sorted(path.name for path in folder.iterdir()); "
        "time.sleep(1.0); (folder / sys.argv[3]).touch(); "
        "Path(sys.argv[1], sys.argv[3]).write_text(' '.join(found))"
    )
    told = tmp_path / "told"
    told.mkdir()
    kept = tmp_path / "kept" if is_kept else None
    command = [sys.executable, "-c", script, str(told)]
    runner = _runner(command, tmp_path, compiled=kept, model_of=lambda part: part[0])
    parts = ["a1", "a2", "a3", "b1"]
    assert runner.run(parts) == []
    found = [(told / part).read_text() for part in parts]
    assert found == (["", "a1", "a1 a2", ""] if is_kept else [""] * 4)


@pytest.mark.parametrize(("busy", "rows"), [(0, 1), (3, 4)])
def test_a_turn_begins_on_an_idle_gpu(busy, rows, sleeps):
    """While it does others' work, one of some equal sleeps takes longer than the rest."""
    sleeps.longer = {(row + 1) * turns._SLEEPS - row for row in range(busy)}
    turns.wait_until_idle()
    assert sleeps.count == rows * turns._SLEEPS


def test_a_turn_begins_though_the_gpu_is_never_idle(sleeps, monkeypatch):
    monkeypatch.setattr(turns, "_MOST_WAIT_S", 0.1)
    sleeps.longer = range(0, 1 << 30, turns._SLEEPS)
    begin = time.monotonic()
    turns.wait_until_idle()
    assert 0.1 <= time.monotonic() - begin < 10
    assert sleeps.count > turns._SLEEPS


class Sleeps:
    """Stands in for a GPU that sleeps: of some sleeps, by their numbers, it does others' work."""

    def __init__(self) -> None:
        self.count, self.now = 0, 0.0
        self.longer: Container[int] = ()

    def sleep(self, _: int) -> None:
        self.count += 1
        self.now += 3.0 if self.count in self.longer else 1.0

    def event(self, **_: bool) -> SimpleNamespace:
        times: list[float] = []
        return SimpleNamespace(
            record=lambda: times.append(self.now),
            elapsed_time=lambda later: later.time() - times[-1],
            time=lambda: times[-1],
        )


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    sleeps = Sleeps()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.sleep)
    monkeypatch.setattr(torch.cuda, "Event", sleeps.event)
    return sleeps


def test_who_ends_in_a_turn_stops_nobody(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        turns.join(tmp_path, sleeper.pid)
        turns.join(tmp_path, 2**22 + 1)  # a process that there is not
        assert turns.members(tmp_path) == [sleeper.pid, 2**22 + 1]
        turns.send(turns.members(tmp_path), signal.SIGSTOP)
        time.sleep(0.5)
        assert _is_stopped(sleeper.pid)
        turns.leave(tmp_path, 2**22 + 1)
        assert turns.members(tmp_path) == [sleeper.pid]
        assert not _is_stopped(sleeper.pid)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_stopwatch_leaves_out_what_others_take(tmp_path, monkeypatch):
    """What it waits for them, and what it stands still, once where both are at a time."""
    own = turns.folder_of(0, tmp_path)
    own.mkdir()
    monkeypatch.setenv(turns.FOLDER_VARIABLE, str(own))
    other = "from benchmarks.turns import turn; import time\nwith turn():\n    time.sleep(1)"
    root = Path(__file__).resolve().parents[1]
    seconds, begin = turns.stopwatch(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", other], cwd=root, start_new_session=True):
        while not (own / "turn").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # it has its turn
        with turns.between_turns(own):
            passed, mine = time.monotonic() - begin, seconds()
    assert passed - 1.3 < mine <= passed - 1
    time.sleep(0.1)
    with turns.turn():  # its own counts
        time.sleep(0.1)
    assert seconds() - mine >= 0.2 + turns.STOP_S


def test_alone_there_is_nothing_to_do():
    assert turns.is_alone()
    with turns.turn():
        pass


def test_the_command_line(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(Runner, "run", lambda self, parts: ran.append((self, parts)) or ["b"])
    out = tmp_path / "new" / "zoo.json"
    only = ["BERT base, training", "DiT-XL/2, inference"]
    arguments = ["--out", str(out), "--compiled", str(tmp_path), "--jobs", "2", "--only"]
    assert side_by_side.main(["zoo", *arguments, *only]) == 1
    ((runner, parts),) = ran
    assert (parts, runner.jobs, runner.compiled) == (only, 2, tmp_path)
    assert [runner.model_of(part) for part in only] == ["BERT base", "DiT-XL/2"]
    assert runner.command[1:] == ["-m", "benchmarks.bench_zoo"]
    assert "failed: b; " in capsys.readouterr().out
    for wrong, message in (
        (["sdpa", *arguments[:2]], "the benchmark sdpa has no parts"),
        (["zoo", *arguments, "BERT"], "'BERT' is no part of the benchmark zoo"),
    ):
        with pytest.raises(SystemExit):
            side_by_side.main(wrong)
        assert message in capsys.readouterr().err
