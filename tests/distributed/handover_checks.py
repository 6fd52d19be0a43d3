"""Prefill and decoding in two processes: what each of them checks."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
from torch import distributed

from cudnn_ops.generation import (
    Engine,
    KVReceiver,
    KVSender,
    PromptLookup,
    Request,
    SamplingParams,
)
from tests.cases.generation import make_engine, make_prompts
from tests.distributed.processes import device

#: By a prompt's tokens: no two are the same.
Outputs = dict[tuple[int, ...], tuple[list[int], str | None, str | None]]


def unit() -> int:
    """Tokens of a page."""
    return 4 if device().type == "cpu" else 16


def engine_of(pages: int, **options: Any) -> Engine:
    return make_engine(device().type, pages, decode=decode, overlap=True, **options)


def decode(tokens: list[int]) -> str:
    return "".join(f"{token:02d}" for token in tokens)


def jobs_of(count: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "top_k": 20},
        {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "logprobs": 2},
        {"stop_strings": ["7"], "min_tokens": 2},
    ]
    return [
        ([index, *prompt], SamplingParams(draw.randint(2, 5 * unit()), **kinds[index % 4]))
        for index, prompt in enumerate(make_prompts(count, unit(), 7))
    ]


def outputs_of(requests: list[Request]) -> Outputs:
    assert len({tuple(request.prompt) for request in requests}) == len(requests)
    return {tuple(each.prompt): (each.output, each.finish_reason, each.text) for each in requests}


def check_empty(engine: Engine) -> None:
    usage = engine.cache.usage()
    assert usage.in_use == usage.sequences == 0
    assert engine.running == engine.waiting == 0


def check_equal() -> None:
    """Two engines give what one gives: options of all kinds, few pages, drafts on one side."""
    jobs = jobs_of(30)
    alone = engine_of(200)
    expected = [alone.submit(*job) for job in jobs]
    list(alone.run())
    if distributed.get_rank() == 0:
        sender = KVSender(engine_of(40), 1)
        assert not sender.engine.overlap
        requests = [
            sender.engine.submit(*job, priority=index % 3, timeout=1e6)
            for index, job in enumerate(jobs)
        ]
        ended = list(sender.run())
        sender.close()
        assert sorted(ended, key=lambda each: each.serial) == requests
        moved = [each for each in requests if each.finish_reason == "moved"]
        assert all(each.output for each in requests)
        done: Any = outputs_of([each for each in requests if each.finish_reason != "moved"])
        check_empty(sender.engine)
        assert len(moved) > 20
        assert sender.pending == 0
        distributed.send_object_list([done], 1)
        return
    receiver = KVReceiver(engine_of(30, speculation=PromptLookup(3, 2, 1)), 0)
    received = list(receiver.run())
    stats = receiver.engine.stats
    # What was received was not computed: of each output token itself at most, with three drafts.
    assert stats.restored_tokens >= sum(len(request.prompt) for request in received)
    assert stats.computed_tokens <= 4 * stats.output_tokens + stats.preemptions * 20 * unit()
    check_empty(receiver.engine)
    ended_there: list[Any] = [None]
    distributed.recv_object_list(ended_there, 0)
    both = outputs_of(received) | ended_there[0]
    assert len(both) == len(jobs)
    if device().type == "cpu":
        assert both == outputs_of(expected)
    for request in received:
        assert request.origin is not None
        assert request.stats.seconds is not None
        assert request.stats.time_to_first_token is not None
        assert request.stats.output_tokens == len(request.output)
        if request.params.logprobs is not None:
            assert [each.token for each in request.logprobs] == request.output


def check_timeouts() -> None:
    """The time at the sender counts."""
    if distributed.get_rank() == 0:
        sender = KVSender(engine_of(40), 1)
        params = SamplingParams(80)
        requests = [sender.engine.submit([1, 2], params, timeout=each) for each in (60.0, 1e6)]
        requests[0]._submitted -= 50
        list(sender.run())
        sender.close()
        assert {request.finish_reason for request in requests} == {"moved"}
    else:
        receiver = KVReceiver(engine_of(40), 0)
        while len(receiver.engine._limited) < 2:
            receiver.step()
        late, other = receiver.engine._limited
        assert late._timeout == 60
        assert 50 < late.age(time.perf_counter()) < 60
        late._submitted -= 11
        assert set(receiver.run()) == {late, other}
        assert (late.finish_reason, other.finish_reason) == ("timeout", "length")
        assert (other.priority, late.priority) == (0, 0)
        check_empty(receiver.engine)


def check_functions_that_cannot_be_sent() -> None:
    if distributed.get_rank() == 0:
        sender = KVSender(engine_of(40), 1)
        params = SamplingParams(4, allowed_tokens=lambda output: range(9))
        request = sender.engine.submit([1, 2, 3], params)
        assert list(sender.run()) == [request]
        assert "params must be picklable" in str(request.error)
        check_empty(sender.engine)
        sender.close()
    else:
        assert list(KVReceiver(engine_of(40), 0).run()) == []


def check_engines_that_differ() -> None:
    message = r"max_length is \d+ of the sender's engine and \d+ of the receiver's; their caches"
    is_sender = distributed.get_rank() == 0
    engine = engine_of(40) if is_sender else engine_of(8)
    with pytest.raises(ValueError, match=message):
        (KVSender if is_sender else KVReceiver)(engine, 1 if is_sender else 0)
    with pytest.raises(ValueError, match="peer must be another rank of the group's 2, got"):
        KVSender(engine, distributed.get_rank())
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds, got 0"):
        KVSender(engine, 1 - distributed.get_rank(), timeout=0)


def check_an_end_that_never_comes() -> None:
    if distributed.get_rank() == 0:
        with pytest.raises(RuntimeError, match="the receiver, rank 1, is lost while waiting for"):
            KVSender(engine_of(40), 1, timeout=0.5)
    else:
        time.sleep(1)
    distributed.barrier()


def check_a_receiver_that_stops() -> None:
    """Its requests fail within the timeout, and leave no page."""
    if distributed.get_rank() == 0:
        sender = KVSender(engine_of(40), 1, timeout=2.0)
        requests = [sender.engine.submit([token, 2], SamplingParams(9)) for token in (1, 2)]
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"the receiver, rank 1, is lost after 2\.0 s"):
            list(sender.run())
        assert time.monotonic() - began < 20
        for request in requests:
            assert request.finish_reason == "error"
            assert "is lost" in str(request.error)
        check_empty(sender.engine)
    else:
        KVReceiver(engine_of(40), 0, timeout=2.0)
    distributed.barrier()


def check_a_sender_that_stops() -> None:
    """What was received is served to its end."""
    if distributed.get_rank() == 0:
        sender = KVSender(engine_of(40), 1, timeout=2.0)
        sender.engine.submit([1, 2], SamplingParams(9))
        list(sender.run())
    else:
        receiver = KVReceiver(engine_of(40), 0, timeout=2.0)
        request = next(receiver.run())
        assert len(request.output) == 9
        with pytest.raises(RuntimeError, match=r"the sender, rank 0, is lost after 2\.0 seconds"):
            list(receiver.run())
        assert list(receiver.run()) == []
        check_empty(receiver.engine)
    distributed.barrier()


def check_pair() -> None:
    for check in (
        check_equal,
        check_timeouts,
        check_functions_that_cannot_be_sent,
        check_engines_that_differ,
        check_an_end_that_never_comes,
        check_a_receiver_that_stops,
        check_a_sender_that_stops,
        check_equal,
    ):
        check()


def check_a_killed_receiver() -> str:
    """The process is gone in the middle of serving, without a word."""
    if distributed.get_rank() == 1:
        receiver = KVReceiver(engine_of(40), 0, timeout=3.0)
        while not receiver.engine.stats.output_tokens:
            receiver.step()
        os._exit(0)
    sender = KVSender(engine_of(40), 1, timeout=3.0)
    requests = [sender.engine.submit([token, 2], SamplingParams(60)) for token in range(12)]
    with pytest.raises(RuntimeError, match="the receiver, rank 1, is lost"):
        list(sender.run())
    assert {request.finish_reason for request in requests} <= {"moved", "error", None}
    for request in requests:
        sender.engine.abort(request)
    check_empty(sender.engine)
    return "fine"
