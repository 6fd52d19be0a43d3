"""What the host waits for while steps overlap: the tokens of one step, once the next is queued."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.serving.choosing import Chosen
from cudnn_ops.serving.model_runner import ModelRunner
from cudnn_ops.serving.scheduler import Scheduler
from cudnn_ops.serving.step import Step
from tests.cases.generation import generate_alone, make_cache, make_engine, make_model, make_prompts
from tests.cases.overlap import decode, jobs_of_every_kind, serve_all
from tests.cases.sampling import make_engine as make_table_engine
from tests.cases.sampling import make_table


def wrap(
    patch: pytest.MonkeyPatch,
    places: dict[str, type],
    around: Callable[[str, Callable[[], Any]], Any],
) -> None:
    """Calls methods, by name and class, by way of a function."""
    for name, owner in places.items():
        patch.setattr(owner, name, wrapped(name, getattr(owner, name), around))


def wrapped(name: str, call: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: around(name, partial(call, *args))


QUEUEING: dict[str, type] = {
    "schedule_ahead": Scheduler,
    "launch": ModelRunner,
    "choose": ModelRunner,
}


class Waits(TorchDispatchMode):
    """Raises where the host would wait for the device, or read what it has computed."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in self.WAITS, f"{name} waits for the device"
        if name in ("to", "_to_copy"):
            assert not any(isinstance(each, torch.device) for each in (*args, *kwargs.values()))
        return func(*args, **kwargs)


@contextmanager
def nothing_is_read() -> Iterator[None]:
    def refused(*args: object, **options: object) -> None:
        raise AssertionError("the host reads what the device has computed")

    with pytest.MonkeyPatch.context() as patch, Waits():
        # Of a tensor on a CPU, these read without an operator.
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refused)
        yield


@pytest.mark.parametrize("kind", ["greedy", "every kind"])
def test_a_step_is_queued_without_reading_the_one_before(kind, monkeypatch):
    """Its plan, its inputs and its model; and the choice of its tokens does not wait either."""
    names: list[str] = []

    def guarded(name: str, call: Callable[[], Any]) -> Any:
        names.append(name)
        with nothing_is_read():
            return call()

    wrap(monkeypatch, QUEUEING, guarded)
    # A table: on a CPU, attention itself looks at the lengths.
    table = make_table(1, vocabulary=64)
    engine = make_table_engine(table, 80, decode=decode, overlap=True)
    jobs = jobs_of_every_kind(5)
    if kind == "greedy":
        jobs = [(prompt, SamplingParams(9, stop_tokens=[7])) for prompt, _ in jobs]
    else:  # what functions allow is looked at, on the CPU
        jobs = [job for job in jobs if job[1].allowed_tokens is None]
    for job in jobs:
        engine.submit(*job)
    assert len(list(engine.run())) == len(jobs)
    assert engine.stats.overlapped > engine.stats.steps / 2
    assert names.count("schedule_ahead") >= engine.stats.overlapped


def test_tokens_are_not_there_before_the_next_step_is_planned(monkeypatch):
    """They are withheld as by a device that is still computing: until the next model begins."""
    withheld: list[tuple[torch.Tensor, torch.Tensor]] = []
    arrived_late = []

    def arrive() -> None:
        for tokens, right in withheld:
            with torch.inference_mode():
                tokens.copy_(right)
        withheld.clear()

    def choose(runner: ModelRunner, *args: Any) -> Chosen:
        chosen = chosen_at_once(runner, *args)
        withheld.append((chosen.tokens, chosen.tokens.clone()))
        with torch.inference_mode():
            chosen.tokens.fill_(10**9)
        return chosen

    def take(runner: ModelRunner, *args: Any) -> None:
        arrived_late.append(len(withheld))
        arrive()
        taken_at_once(runner, *args)

    def read(chosen: Chosen) -> list[int]:
        arrive()
        return read_at_once(chosen)

    chosen_at_once, taken_at_once = ModelRunner.choose, ModelRunner._take
    read_at_once = Chosen.read
    monkeypatch.setattr(ModelRunner, "choose", choose)
    monkeypatch.setattr(ModelRunner, "_take", take)
    monkeypatch.setattr(Chosen, "read", read)
    engine = make_engine("cpu", 80, overlap=True)
    requests = [engine.submit(prompt, SamplingParams(9)) for prompt in make_prompts(12, 4, seed=4)]
    list(engine.run())
    model = make_model("cpu")
    for request in requests:
        assert request.output == generate_alone(model, request.prompt, 9)
    assert arrived_late
    assert set(arrived_late) == {1}


def test_a_step_is_queued_before_the_one_before_is_read(monkeypatch):
    events: list[str] = []

    def recorded(name: str, call: Callable[[], Any]) -> Any:
        events.append(name)
        return call()

    places: dict[str, type] = {"launch": ModelRunner, "choose": ModelRunner}
    wrap(monkeypatch, places | {"read": Chosen, "accept": Step}, recorded)
    engine = make_engine("cpu", 60, overlap=True)
    engine.submit([1, 2, 3], SamplingParams(4))
    list(engine.run())
    ahead = ["choose", "launch", "read", "accept"]
    assert events == ["launch", *ahead, *ahead, *ahead, "choose", "read", "accept"]


# On a GPU


@pytest.mark.gpu
def test_no_step_is_queued_by_waiting_for_the_gpu(monkeypatch):
    """Torch raises at every call that waits, while a step is planned and queued."""

    def guarded(name: str, call: Callable[[], Any]) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine = make_engine("cuda", 60, overlap=True)
    engine.warm_up()
    wrap(monkeypatch, QUEUEING, guarded)
    assert len(serve_all(engine)) == 4
    assert engine.stats.overlapped > 30


@pytest.mark.gpu
@pytest.mark.alone
def test_the_gpu_does_not_idle_between_steps(monkeypatch):
    """The host takes 3 ms to handle a step's tokens, of which the GPU sees nothing.

    Beside 20 other processes the gaps were a third of those without overlap.
    """
    model = make_model("cuda")
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def serve(tokens, positions, last, attend):
        for _ in range(8):  # more than a millisecond each
            torch.mm(large, large)
        return model.serve(tokens, positions, last, attend)

    accept = Step.accept

    def slowly(*args):
        time.sleep(3e-3)
        return accept(*args)

    monkeypatch.setattr(Step, "accept", slowly)
    gaps = {}
    for overlap in (False, True):
        engine = Engine(serve, make_cache("cuda", 60), max_batch=4, overlap=overlap)
        for token in range(4):
            engine.submit([token, 2, 3], SamplingParams(60))
        for _ in range(10):
            engine.step()
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def timed(name: str, call: Callable[[], Any], events: Any = events) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            results = call()
            end.record()
            events.append((begin, end))
            return results

        with monkeypatch.context() as patch:
            wrap(patch, {"_batched": ModelRunner}, timed)
            for _ in range(30):
                engine.step()
        torch.cuda.synchronize()
        between = [end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(events)]
        gaps[overlap] = sorted(between)[len(between) // 2]  # ms
    assert gaps[False] > 3
    assert gaps[True] < gaps[False] / 4
