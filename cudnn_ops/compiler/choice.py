"""Whether a match is swapped: what was asked for, or what was measured on this GPU.

Both candidates, inductor's code for the stock subgraph and for the replacement, run on tensors of
the shapes, dtypes and strides that the graph has, forward and, where gradients are needed,
backward. What decides is the GPU's time and the host's: small models, and large ones on slow
processors, wait for the host. The answer is kept beside the stored plans, so that it is measured
once for each GPU and version.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from cudnn_ops.compiler.measuring import Compiler, Question, Steps
from cudnn_ops.compiler.nodes import has_static_sizes, value_of
from cudnn_ops.compiler.options import Settings
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.report import Candidate, CompileReport
from cudnn_ops.compiler.stored import path_of, write
from cudnn_ops.plans import timing

log = logging.getLogger("cudnn_ops.compiler")

#: Ours must take less than this share of inductor's time: it also ends fusions around it.
WORTHWHILE = 0.97
#: Up to this share of it, the GPU takes as long as for inductor's.
AS_LONG = 1.01
#: From this ratio on a few samples tell which one is faster.
_CLEARLY = 2.0
_ROUNDS = 10
_FILE = "compile_choices.json"

Clock = Callable[[Steps], dict[str, float]]


class Times(NamedTuple):
    """Milliseconds of the GPU and of the host: ours, and what inductor makes of the stock graph."""

    ours: float
    stock: float
    ours_host: float = 0.0
    stock_host: float = 0.0

    def verdict(self) -> tuple[bool, str]:
        """Whether ours is better, and why it is or is not where the GPU's time does not say."""
        if self.ours < WORTHWHILE * self.stock:
            if self.ours_host - self.stock_host < self.stock - self.ours:
                return True, ""
            return False, "it takes more of the host's time than it saves of the GPU's"
        if self.ours <= AS_LONG * self.stock and self.ours_host < WORTHWHILE * self.stock_host:
            return True, "as fast, in less of the host's time"
        return False, "not faster here"


class Chooser:
    """Decides for the graphs of one compilation; remembers what it has measured."""

    def __init__(
        self, settings: Settings, report: CompileReport, clock: Clock | None = None
    ) -> None:
        """``clock``, for tests, measures anywhere, and no time of the host's."""
        self.settings, self.report = settings, report
        self._clock = clock
        self._compiler = Compiler()
        self._failed: dict[str, Exception] = {}
        #: What decided, by the keys of the questions.
        self.decisive: dict[str, Times] = {}
        self._open: dict[str, Question] | None = None

    @contextmanager
    def asking(self) -> Iterator[dict[str, Question]]:
        """Inside, what is not known is not measured, but taken to be faster, and noted."""
        self._open = {}
        try:
            yield self._open
        finally:
            self._open = None

    def answer(self, questions: Mapping[str, Question]) -> None:
        """Measures them all; what fails to be is raised where it is asked for again."""
        left = dict(questions)
        for step in (self._compiler.lower, self._compiler.wait, self._answer):
            for key, question in list(left.items()):
                try:
                    step(question)
                except Exception as error:  # whatever goes wrong, the stock graph is right
                    log.info("a trial failed", exc_info=error)
                    # Without its frames, which keep the tensors of the trial.
                    self._failed[key] = error.with_traceback(None)
                    del left[key]

    def _answer(self, question: Question) -> None:
        times = self._known[question.key] = self._timed(question)
        _remember(question.key, times)

    def __call__(self, pattern: Pattern, found: Found, candidate: Candidate) -> bool:
        """Whether to swap; the candidate gets the reason and the times."""
        settings = self.settings
        if settings.swap is not None:
            if pattern.name not in settings.swap:
                candidate.reason = "not among options['swap']"
                return False
            if found.only_measured:
                candidate.reason = "not measured"
                return False
            candidate.reason = "dry run" if settings.dry_run else "asked for by options['swap']"
            return not settings.dry_run
        if reason := self._unmeasurable(found) or found.only_asked:
            candidate.reason = reason
            return False
        question = Question.of(pattern, found)
        if question.key not in self._known and question.key not in self._failed:
            if settings.dry_run:
                candidate.reason = "dry run: not measured yet"
                return False
            if self._open is not None:
                self._open.setdefault(question.key, question)
                return True
            self.answer({question.key: question})
        if question.key in self._failed:
            raise self._failed[question.key]
        times = self.decisive[question.key] = self._known[question.key]
        candidate.ours_ms, candidate.stock_ms = times.ours, times.stock
        is_faster, candidate.reason = times.verdict()
        if settings.dry_run:
            candidate.reason = "dry run" + (f": {candidate.reason}" if candidate.reason else "")
        return is_faster and not settings.dry_run

    def times_of(self, key: str) -> Times | None:
        """What is known of a question; None where nothing is."""
        return self._known.get(key)

    @functools.cached_property
    def _known(self) -> dict[str, Times]:
        """What was measured before, in this process or in others; read once for all candidates."""
        return {**_in_memory, **_stored(_path())}

    def _unmeasurable(self, found: Found) -> str:
        values = [value_of(node) for node in found.inputs]
        tensors = [value for value in values if value is not None]
        devices = {value.device.type for value in tensors}
        if devices != {"cuda"} and self._clock is None:
            return "its tensors are not on a GPU"
        if devices == {"cuda"} and torch.cuda.get_device_capability(tensors[0].device) < (8, 0):
            return "the GPU has a compute capability below 8.0"
        if not all(map(has_static_sizes, tensors)):
            return "a size is dynamic, and times differ from size to size"
        return ""

    def _timed(self, question: Question) -> Times:
        with self._compiler.steps(question) as steps:
            if self._clock is not None:
                gpu, host = self._clock(steps), dict.fromkeys(steps, 0.0)
            else:
                gpu, host = _times_of(steps)
        return Times(gpu["ours"], gpu["stock"], host["ours"], host["stock"])


def _times_of(steps: Steps) -> tuple[dict[str, float], dict[str, float]]:
    """The GPU's, and the host's where that decides anything; few samples of what is clear."""

    def is_clear(times: Mapping[str, float]) -> bool:
        return max(times.values()) > _CLEARLY * min(times.values())

    def is_outweighed(times: Mapping[str, float]) -> bool:
        difference = times["ours"] - times["stock"]
        return abs(difference - (gpu["stock"] - gpu["ours"])) > max(times.values())

    gpu = timing.gpu_ms(steps, rounds=_ROUNDS, is_enough=is_clear)
    if gpu["ours"] > AS_LONG * gpu["stock"]:
        return gpu, dict.fromkeys(steps, 0.0)
    is_faster = gpu["ours"] < WORTHWHILE * gpu["stock"]
    is_enough = is_outweighed if is_faster else is_clear
    return gpu, timing.host_ms(steps, rounds=_ROUNDS, is_enough=is_enough)


def _path() -> Path | None:
    return path_of(_FILE)


#: Where there is no store.
_in_memory: dict[str, Times] = {}


def _stored(path: Path | None) -> dict[str, Times]:
    """What the file has: nothing where it is missing or damaged."""
    try:
        content = {} if path is None else json.loads(path.read_text())
        return {key: Times(*map(float, times)) for key, times in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, times: Times) -> None:
    _in_memory[key] = times
    if (path := _path()) is not None:
        # Other processes may have added theirs since this one read it.
        write(path, {**_stored(path), key: times})
