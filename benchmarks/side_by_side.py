"""Several parts of a benchmark at a time, on all GPUs: compiled side by side, timed in turns.

`python -m benchmarks.side_by_side zoo --jobs 8 --out FILE` runs each part of bench_zoo in a process
of its own and puts its rows into the file as it ends. A part that fails, for want of memory beside
the others as it may be, runs once more with a GPU for itself. What a part prints is in FILE's
folder. `--compiled DIR` keeps what was compiled and tuned: parts that `--limit` interrupts can go
on in a later run, and parts of one model run one after the other, each with what those before it
tuned. Each part has its share of the cores as compile threads; $TORCHINDUCTOR_COMPILE_THREADS sets
another number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import ceil
from pathlib import Path

import torch

from benchmarks import turns
from benchmarks.harness import ROOT, Rows

#: Between an interrupt, upon which a benchmark writes what it has, and its end.
GRACE_S = 15.0
_POLL_S = 0.1


@dataclass
class Runner:
    """Runs commands, a few at a time.

    Attributes:
        command: of a part, and the file for its rows.
        out: where all rows go.
        logs: a folder for what the parts print.
        gpus: their numbers; none where there is no GPU.
        jobs: how many run at a time.
        limit_s: after how many seconds what runs is interrupted and nothing more begins.
        compiled: a folder where what parts compile stays, for a run after this one.
        model_of: the model of a part. Parts of one model share a folder in `compiled`, so they run
            one after the other.
    """

    command: Sequence[str]
    out: Path
    logs: Path
    gpus: Sequence[int]
    jobs: int
    limit_s: float
    compiled: Path | None = None
    model_of: Callable[[str], str] = str
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _gpu_of: dict[str, int] = field(default_factory=dict)

    def run(self, parts: Sequence[str]) -> list[str]:
        """The parts that failed twice, were interrupted or did not begin."""
        end = time.monotonic() + self.limit_s
        with tempfile.TemporaryDirectory(prefix="turns-") as folder:
            again = self._run(parts, self.jobs, Path(folder), end)
            return self._run(again, max(len(self.gpus), 1), Path(folder), end)

    def _run(self, parts: Sequence[str], jobs: int, folder: Path, end: float) -> list[str]:
        waiting, failed = list(parts), []
        while (waiting or self._running) and time.monotonic() < end:
            while len(self._running) < jobs and (part := self._next(waiting)):
                waiting.remove(part)
                self._start(part, folder)
            failed += self._ended(folder)
            time.sleep(_POLL_S)
        failed += self._running
        self._interrupt(folder)
        return [*failed, *waiting]

    def _next(self, waiting: Sequence[str]) -> str | None:
        """The first that shares what it compiles with none that runs."""
        busy = [self._shared_by(part) for part in self._running]
        return next((part for part in waiting if self._shared_by(part) not in busy), None)

    def _shared_by(self, part: str) -> str:
        # What is not kept is timed from nothing.
        return self.model_of(part) if self.compiled else part

    def _start(self, part: str, folder: Path) -> None:
        used = list(self._gpu_of.values())
        environment = dict(os.environ)
        threads = ceil((os.cpu_count() or 1) / self.jobs)
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        # Inductor drops the candidates that take longer to compile, as they do beside others.
        environment.setdefault("TORCHINDUCTOR_PRECOMPILATION_TIMEOUT_SECONDS", "3600")
        compiled = (self.compiled or folder) / f"cache-{_file_name(self._shared_by(part))}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled.resolve())
        if self.gpus:
            gpu = self._gpu_of[part] = min(self.gpus, key=used.count)
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        own = turns.folder_of(self._gpu_of.get(part, 0), folder)
        own.mkdir(exist_ok=True)
        environment[turns.FOLDER_VARIABLE] = str(own)
        rows = folder / f"{_file_name(part)}.json"
        command = [*self.command, "--only", part, "--out", str(rows)]
        log_file = self.logs / f"{_file_name(part)}.log"
        with log_file.open("wb") as log, turns.between_turns(own):
            process = self._running[part] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            turns.join(own, process.pid)

    def _ended(self, folder: Path) -> list[str]:
        """Takes in what has ended; the parts that did not end well."""
        bad: list[str] = []
        for part, process in list(self._running.items()):
            if process.poll() is None:
                continue
            turns.leave(turns.folder_of(self._gpu_of.pop(part, 0), folder), process.pid)
            del self._running[part]
            self._merge(folder / f"{_file_name(part)}.json")
            print(f"{part}: {'done' if process.returncode == 0 else 'failed'}", flush=True)
            bad += [part] * (process.returncode != 0)
        return bad

    def _merge(self, found: Path) -> None:
        if not found.exists():
            return
        new = json.loads(found.read_text())
        rows = Rows(new["env"])
        rows.rows = new["rows"]
        if self.out.exists():
            old = json.loads(self.out.read_text())
            rows.merge_into(old["rows"], old["env"]["commit"])
        rows.write(self.out)

    def _interrupt(self, folder: Path) -> None:
        processes = [process.pid for process in self._running.values()]
        turns.send(processes, signal.SIGCONT)
        for process in self._running.values():
            process.send_signal(signal.SIGINT)
        end = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < end:
            self._ended(folder)
            time.sleep(_POLL_S)
        turns.send([process.pid for process in self._running.values()], signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self._ended(folder)


def _file_name(part: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in part)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side")
    parser.add_argument("benchmark", help="one that has parts, such as zoo")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for all rows")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="parts at a time")
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="SECONDS", help="after which it ends"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument(
        "--compiled", type=Path, metavar="DIR", help="keep what is compiled, for a part to go on"
    )
    args = parser.parse_args(arguments)
    module = import_module(f"benchmarks.bench_{args.benchmark}")
    known = getattr(module, "PARTS", ())
    if unknown := set(args.only or ()).difference(known):
        parser.error(f"{sorted(unknown)[0]!r} is no part of the benchmark {args.benchmark}")
    if not known:
        parser.error(f"the benchmark {args.benchmark} has no parts")
    logs = args.out.parent / f"{args.out.stem}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    gpus = range(torch.cuda.device_count())
    command = [sys.executable, "-m", module.__name__]
    model_of = getattr(module, "model_of", str)
    runner = Runner(command, args.out, logs, gpus, args.jobs, args.limit, args.compiled, model_of)
    failed = runner.run(args.only or known)
    for part in failed:
        print(f"failed: {part}; {logs / _file_name(part)}.log says why")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
