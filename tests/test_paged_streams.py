"""Decoding on several streams, in several threads and in graphs: what calls share is written first.

No host waits for that.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from tests.cases import paged as cases
from tests.test_paged import DECODE

_ops = torch.ops.cudnn_ops

pytestmark = pytest.mark.gpu

#: Batches that no other test has, for what calls of a batch share is made once in a process.
BATCHES = {"host": 192, "threads": 384, "capture": 256}


def make(batch: int) -> cases.Tensors:
    """Nothing of it has to be copied: the batch and the table are those that a plan declares."""
    case = replace(DECODE, lengths=(1,) * batch, lengths_kv=(40,) * (batch - 1) + (64,))
    t = cases.make(case, torch.bfloat16, "cuda", seed=batch)
    assert t.page_table.shape == (batch, 4)
    return t


def build_plan(t: cases.Tensors) -> None:
    """By a call that shares nothing, for its table has to be copied."""
    wide = torch.cat([t.page_table, t.page_table], 1)[:, :4]
    assert not wide.is_contiguous()
    _ops.paged_attention(*t.arguments[:3], wide, t.seq_lens_kv, **t.options)
    torch.cuda.synchronize()


def expected(t: cases.Tensors) -> torch.Tensor:
    """Torch's attention of each sequence, in float32: at most 64 keys of two heads."""
    rows = []
    for query, keys, values in zip(t.query, t.keys, t.values, strict=True):
        key, value = (
            tokens.float().transpose(0, 1).repeat_interleave(2, 0) for tokens in (keys, values)
        )
        scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        rows.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.stack(rows)


def check(t: cases.Tensors, out: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), expected(t), rtol=2e-2, atol=2e-2)


def test_the_first_call_of_a_batch_does_not_wait():
    t = make(BATCHES["host"])
    build_plan(t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = _ops.paged_attention(*t.arguments, **t.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(t, out)


def test_threads_on_streams_of_their_own():
    """The first of them is busy: what it has yet to write the others wait for, on the device."""
    t = make(BATCHES["threads"])
    build_plan(t)
    right = expected(t)
    torch.cuda.synchronize()
    started = threading.Barrier(8)
    wrong: list[BaseException] = []

    def run(number: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                if number % 2 == 0:
                    torch.cuda._sleep(50_000_000)
                started.wait(timeout=60)
                for _ in range(50):
                    out = _ops.paged_attention(*t.arguments, **t.options)
                    torch.testing.assert_close(out.float(), right, rtol=2e-2, atol=2e-2)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.alone  # what the busy stream is given is a second
def test_a_graph_does_not_read_what_another_stream_has_yet_to_write():
    t = make(BATCHES["capture"])
    build_plan(t)
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.ones(3, dtype=torch.int32, device="cuda")  # to load a kernel may wait for all streams
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)  # a second
        before = _ops.paged_attention(*t.arguments, **t.options)
    # Not torch.cuda.graph, which waits for all streams first.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = _ops.paged_attention(*t.arguments, **t.options)
        graph.capture_end()
        graph.replay()
    stream.synchronize()
    assert not busy.query(), "the busy stream was to be busy until here"
    check(t, out)
    busy.synchronize()
    check(t, before)
