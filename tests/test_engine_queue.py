"""Who is served first, who is late, and streams: the engine's queue."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cudnn_ops.generation import Engine, Piece, PromptLookup, Request, SamplingParams
from tests.cases.generation import generate_alone, make_engine, make_model, make_prompts
from tests.cases.sampling import cycle
from tests.cases.sampling import make_engine as make_table_engine

pytestmark = pytest.mark.usefixtures("overlap")


def digits(tokens: list[int]) -> str:
    return "".join(f"{token:02d} " for token in tokens)


def submit_all(engine: Engine, priorities: list[int], **options: Any) -> list[Request]:
    params = SamplingParams(max_tokens=6)
    return [
        engine.submit([10 + index, 3, index], params, priority=priority, **options)
        for index, priority in enumerate(priorities)
    ]


# Priorities


def test_higher_priorities_come_first_and_then_the_oldest():
    engine = make_engine("cpu", 60, max_batch=1)
    requests = submit_all(engine, [0, 5, -3, 5, 0, 7])
    order = [requests[index] for index in (5, 1, 3, 0, 4, 2)]
    assert list(engine.run()) == order
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize("options", [{"max_batch": 2}, {"pages": 7}], ids=str)
def test_a_higher_priority_preempts_the_last_of_the_lowest(options):
    """Whether a place in the batch is missing, or pages are."""
    engine = make_engine("cpu", **({"pages": 60, "overlap": False} | options))
    params = SamplingParams(max_tokens=8)
    high, low, young = (
        engine.submit([token] * 6, params, priority=priority)
        for token, priority in ((1, 3), (2, 1), (3, 1))
    )
    for _ in range(3):
        engine.step()
    urgent = engine.submit([4] * 6, params, priority=2)
    engine.step()
    assert urgent.output
    assert low.sequence is None
    assert list(engine.run()) == [high, urgent, low, young]
    assert (high.stats.preemptions, low.stats.preemptions, urgent.stats.preemptions) == (0, 1, 0)
    model = make_model("cpu")
    for request in (high, low, young, urgent):
        assert request.output == generate_alone(model, request.prompt, 8)
    assert engine.cache.usage().in_use == 0


def test_equal_priorities_preempt_nobody_for_a_place():
    engine = make_engine("cpu", 60, max_batch=2)
    requests = submit_all(engine, [1, 1, 1, 0])
    assert list(engine.run()) == requests
    assert engine.stats.preemptions == 0


def test_pages_are_taken_from_the_last_in_order():
    """Not from the youngest one, if that has a higher priority."""
    engine = make_engine("cpu", pages=8)
    params = SamplingParams(max_tokens=17)
    old = engine.submit([1] * 7, params, priority=0)
    young = engine.submit([2] * 7, params, priority=1)
    assert list(engine.run()) == [young, old]
    assert (young.stats.preemptions, old.stats.preemptions > 0) == (0, True)


def test_random_priorities_change_no_output():
    engine = make_engine("cpu", pages=26, speculation=PromptLookup(3, 2, 1))
    draw = random.Random(3)
    requests: list[Request] = []
    prompts = make_prompts(60, 4, seed=8)
    while prompts or engine.running or engine.waiting:
        for prompt in [prompts.pop() for _ in range(min(len(prompts), draw.choice([0, 1, 4])))]:
            params = SamplingParams(max_tokens=draw.randint(1, 20))
            requests.append(engine.submit(prompt, params, priority=draw.randint(-2, 2)))
        engine.step()
        ranks = [request.rank for request in engine._scheduler.running]
        assert ranks == sorted(ranks)
    assert engine.stats.preemptions > 5
    model = make_model("cpu")
    for request in requests:
        count = request.params.max_tokens
        assert request.output == generate_alone(model, request.prompt, count)
    assert engine.cache.usage().in_use == 0


# Timeouts


class Clock:
    """In place of the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


def test_late_requests_end_with_what_they_have(monkeypatch):
    clock = Clock(monkeypatch)
    engine = make_engine("cpu", 60, max_batch=2)
    params = SamplingParams(max_tokens=6)
    running = engine.submit([1, 2], params, timeout=5.0)
    patient = engine.submit([3, 4], params, timeout=50.0, queue_timeout=1.0)
    waiting = engine.submit([5, 6], params, timeout=5.0)
    queued = engine.submit([7, 8], params, queue_timeout=4.0)
    last = engine.submit([9, 1], params)
    engine.step()
    engine.step()
    clock.now += 4.5
    assert (queued, None) in engine.step()
    clock.now += 1.0
    late = [request for request, token in engine.step() if token is None]
    assert late == [running, waiting]
    for request, count in ((running, 3), (waiting, 0), (queued, 0)):
        assert request.finish_reason == "timeout"
        assert request.error is None
        assert len(request.output) == count
        assert request.stats.seconds in (4.5, 5.5)
    assert list(engine.run()) == [patient, last]
    assert running.output == generate_alone(make_model("cpu"), [1, 2], 3)
    assert (engine.stats.finished, engine.stats.timed_out) == (2, 3)
    assert engine.cache.usage().in_use == 0


def test_a_run_yields_late_requests(monkeypatch):
    clock = Clock(monkeypatch)
    engine = make_engine("cpu", 60)
    request = engine.submit([1, 2], SamplingParams(max_tokens=6), timeout=1.0)
    clock.now += 2
    assert list(engine.run()) == [request]
    assert engine.step() == []


def test_a_preempted_request_has_not_waited_in_the_queue(monkeypatch):
    clock = Clock(monkeypatch)
    engine = make_engine("cpu", 60, max_batch=1, overlap=False)
    request = engine.submit([1, 2], SamplingParams(max_tokens=6), queue_timeout=1.0)
    engine.step()
    other = engine.submit([3, 2], SamplingParams(max_tokens=6), priority=1)
    engine.step()
    assert request.stats.preemptions == 1
    clock.now += 2
    assert list(engine.run()) == [other, request]
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 1.5}, r"priority must be a whole number, got 1\.5"),
        ({"timeout": 0}, "timeout must be None or more than 0 seconds, got 0"),
        ({"queue_timeout": float("nan")}, "queue_timeout must be None or more than 0 seconds"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    engine = make_engine("cpu", 60)
    with pytest.raises(ValueError, match=message):
        engine.submit([1], **options)
    assert engine.waiting == 0


# Streams


@pytest.mark.parametrize("speculation", [None, PromptLookup(3, 2, 1)])
def test_streams_read_in_turn(speculation):
    engine = make_engine("cpu", 60, decode=digits, speculation=speculation)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=9)) for prompt in make_prompts(4, 4, seed=2)
    ]
    streams = {request: engine.stream(request) for request in requests}
    pieces: dict[Request, list[Piece]] = {request: [] for request in requests}
    while streams:
        for request, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[request]
            else:
                pieces[request].append(piece)
    model = make_model("cpu")
    for request in requests:
        tokens = [token for piece in pieces[request] for token in piece.tokens]
        assert tokens == request.output == generate_alone(model, request.prompt, 9)
        assert "".join(piece.text or "" for piece in pieces[request]) == digits(tokens)
        assert len(pieces[request]) > 2
    # A step serves all streams.
    assert engine.stats.steps < 25


def test_a_stream_holds_back_what_may_be_a_stop():
    engine = make_table_engine(cycle(1, 2, 3, 4), decode=digits)
    request = engine.submit([0], SamplingParams(20, stop_strings=["03 04 "]))
    pieces = list(engine.stream(request))
    assert [piece.tokens for piece in pieces] == [[1], [2], [3], [4]]
    assert [piece.text for piece in pieces] == ["01 ", "02 ", "", ""]


def test_a_stream_without_text_that_is_aborted():
    engine = make_engine("cpu", 60)
    request, other = (engine.submit([token, 2], SamplingParams(9)) for token in (1, 3))
    stream = engine.stream(request)
    assert next(stream).text is None
    assert next(stream).tokens == request.output[1:]
    engine.abort(request)
    assert list(stream) == []
    # What it has generated beside the first stream comes at once.
    assert next(engine.stream(other)).tokens == other.output
    assert len(other.output) == 2
    assert list(engine.run()) == [other]
    assert other.finish_reason == "length"


def test_a_stream_raises_what_its_request_failed_by():
    def follows(output: list[int]) -> range:
        if len(output) == 2:
            raise LookupError("no such state")
        return range(40)

    engine = make_table_engine(cycle(1, 2, 3))
    request = engine.submit([0], SamplingParams(9, allowed_tokens=follows))
    stream = engine.stream(request)
    assert [next(stream).tokens, next(stream).tokens] == [[1], [2]]
    with pytest.raises(LookupError, match="no such state"):
        next(stream)
    with pytest.raises(ValueError, match="request must be one of this engine"):
        engine.stream(make_engine("cpu", 60).submit([1]))
