"""What ends a request: stop tokens, sequences, strings across the borders of tokens; its text."""

from __future__ import annotations

import random
import re

import pytest
import torch

from cudnn_ops.generation import Engine, Request, SamplingParams
from cudnn_ops.serving.text import TextStream
from tests.cases.generation import serve_at_random
from tests.cases.sampling import chain, make_engine, make_table

pytestmark = pytest.mark.usefixtures("overlap")

#: Pieces of text by token; characters begin and end in the middle of some.
PIECES = [b"<s>", b"a", b"b", b"ab", b"abc", b" ", b"\n\n", "\u00e9".encode(), b"\xf0\x9f"]
PIECES += [b"\x98\x80", b"ca", b"bca", b"cab", b"x\xc3", b"\xa9", b"b\nc"]
PIECES += [bytes([ord("A") + index]) for index in range(40 - len(PIECES))]


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def serve(*followers: int, **options) -> Request:
    """A request whose tokens are these, until something ends it."""
    engine = make_engine(chain(*followers), decode=decode)
    params = SamplingParams(**{"max_tokens": len(followers)} | options)
    request = engine.submit([0], params)
    list(engine.run())
    assert engine.cache.usage().in_use == 0
    return request


def test_stop_strings_end_the_text_before_them():
    request = serve(1, 3, 10, 4, 16, stop_strings=["bca"])  # a ab ca abc
    assert (request.text, request.stopped_by) == ("aa", "bca")
    assert request.finish_reason == "stop"
    assert request.output == [1, 3, 10]
    # Of several, the first in the text counts; in the middle of a token too.
    request = serve(16, 15, 17, stop_strings=["c", "\nc", "zz"])
    assert (request.text, request.stopped_by) == ("Ab", "\nc")
    request = serve(4, stop_strings=["abc"])
    assert (request.text, request.output) == ("", [4])
    request = serve(1, 3, 16, stop_strings=["abc", "zz"])
    assert (request.text, request.finish_reason) == ("aabA", "length")
    assert request.stopped_by is None


def test_stop_strings_at_the_last_token_stop():
    request = serve(1, 2, stop_strings=["ab"])
    assert (request.finish_reason, request.text) == ("stop", "")
    # A character that will never be complete is text at the end.
    request = serve(1, 8, stop_strings=["ab"])
    assert (request.finish_reason, request.text) == ("length", "a\ufffd")


def test_stop_sequences_end_the_text_before_them():
    request = serve(1, 2, 3, 4, 5, stop_sequences=[[9], [3, 4]])
    assert (request.output, request.text) == ([1, 2, 3, 4], "ab")
    assert (request.finish_reason, request.stopped_by) == ("stop", (3, 4))
    request = serve(1, 2, 3, stop_tokens=[2])
    assert (request.output, request.text, request.stopped_by) == ([1, 2], "a", 2)
    # The prompt, token 0, is not part of one.
    request = serve(1, 2, 3, stop_sequences=[(0, 1), (1, 2, 3)])
    assert (request.output, request.stopped_by) == ([1, 2, 3], (1, 2, 3))
    assert request.text == ""


def test_nothing_stops_before_min_tokens():
    request = serve(1, 2, 16, 1, 2, 17, stop_strings=["ab"], min_tokens=3)
    assert (request.output, request.text) == ([1, 2, 16, 1, 2], "abA")
    # What began before counts if it ends after.
    request = serve(1, 2, 16, stop_strings=["ab"], min_tokens=2)
    assert (request.output, request.text) == ([1, 2], "")
    request = serve(1, 2, 16, 1, 2, 17, stop_sequences=[[1, 2]], min_tokens=3)
    assert request.output == [1, 2, 16, 1, 2]
    # Stop tokens are not even chosen: the greatest logit besides is token 0's.
    request = serve(1, 2, 3, 2, 2, stop_tokens=[2], min_tokens=2)
    assert request.output[:2] == [1, 0]


def test_text_needs_a_decoder():
    engine = make_engine(chain(1))
    with pytest.raises(
        ValueError, match=r"^stop_strings are \('a',\), and this engine makes no te"
    ):
        engine.submit([1], SamplingParams(stop_strings=["a"]))
    request = engine.submit([1], SamplingParams(2, stop_sequences=[[1, 1]]))
    list(engine.run())
    assert request.text is None
    assert request.finish_reason == "stop"
    with pytest.raises(ValueError, match=r"^decode must be None or a function of token ids, got 3"):
        make_engine(chain(1), decode=3)


def test_text_only_grows():
    """Random tokens and stops, read at random times; the end is what was decoded at once."""
    draw = random.Random(1)
    stops = ["ab", "bcab", "\n\n", "\u00e9a", "\U0001f600"]
    engine = make_engine(make_table(3, scale=0.3), decode=decode)
    jobs = []
    for seed in range(200):
        strings = draw.sample(stops, draw.randint(0, 3))
        sequences = [[draw.randrange(40) for _ in range(draw.randint(2, 3))] for _ in range(9)]
        params = SamplingParams(
            draw.randint(5, 40),
            temperature=1.0,
            seed=seed,
            stop_strings=strings,
            stop_sequences=draw.choice([(), sequences]),
            stop_tokens=draw.choice([(), (20,)]),
            logit_bias=dict.fromkeys(range(1, 16), 4.0),
        )
        jobs.append(([seed % 40], params))
    requests = [engine.submit(*job) for job in jobs]
    seen = dict.fromkeys(requests, "")
    while engine.running or engine.waiting:
        engine.step()
        for request in requests:
            if draw.random() < 0.5:
                text = request.text
                assert text.startswith(seen[request])
                seen[request] = text
    reasons = set()
    for request in requests:
        text, params = request.text, request.params
        assert text.startswith(seen[request])
        reasons.add(type(request.stopped_by))
        stop = (request.stopped_by,) if isinstance(request.stopped_by, int) else request.stopped_by
        hidden = len(stop) if isinstance(stop, tuple) else 0
        full = decode(request.output[: len(request.output) - hidden])
        found = [full.find(stop) for stop in params.stop_strings if stop in full]
        assert text == full[: min(found, default=len(full))]
        assert bool(found) == isinstance(request.stopped_by, str)
        if found:
            assert full.startswith(text + request.stopped_by)
    assert reasons == {int, tuple, str, type(None)}


def test_streams_decode_each_token_a_few_times_only():
    calls: list[int] = []

    def counted(tokens: list[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    stream = TextStream(counted, ("zz",))
    tokens = torch.randint(0, 40, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    for token in tokens:
        stream.feed([token], False, True)
    assert sum(calls) < 8 * len(tokens)
    # Bytes that never become a character do not pile up either.
    calls.clear()
    for _ in range(2000):
        stream.feed([8], False, True)
    assert sum(calls) < 40 * 2000


def test_words_may_be_written_differently_at_the_beginning():
    """As by SentencePiece: the first word has no space before it."""
    words = ["one", "two", "three"]

    def spaced(tokens: list[int]) -> str:
        return " ".join(words[token] for token in tokens)

    stream = TextStream(spaced)
    for token in (0, 1, 2, 1):
        stream.feed([token], False, True)
    assert stream.shown(True) == "one two three two"


def test_a_decoder_that_raises_fails_its_request_alone():
    def picky(tokens: list[int]) -> str:
        if 5 in tokens:
            raise KeyError("no piece 5")
        return decode(tokens)

    engine = make_engine(chain(1, 5), decode=picky)
    failing = engine.submit([0], SamplingParams(4, stop_strings=["zz"]))
    other = engine.submit([0], SamplingParams(4))
    assert set(engine.run()) == {failing, other}
    assert failing.finish_reason == "error"
    assert failing.output == [1, 5]
    assert isinstance(failing.error, KeyError)
    assert other.output == [1, 5, 5, 5]
    assert (engine.stats.failed, engine.stats.finished) == (1, 1)
    assert engine.cache.usage().in_use == 0


def test_stops_of_random_requests_are_those_of_a_search():
    """Against regular expressions over everything that would have come."""
    table = make_table(11, scale=0.2)
    engine: Engine = make_engine(table, decode=decode)
    free = [([index % 40], SamplingParams(60, temperature=1.0, seed=index)) for index in range(40)]
    unstopped = serve_at_random(engine, free)
    strings = ["AB", "a", "ca", "Q", "KLM"]
    for job, whole in zip(free, unstopped, strict=True):
        seed = job[1].seed
        params = SamplingParams(60, temperature=1.0, seed=seed, stop_strings=strings)
        request = engine.submit(job[0], params)
        list(engine.run())
        full = decode(whole.output)
        found = re.search("|".join(strings), full)
        assert request.text == (full[: found.start()] if found else full)
        assert whole.output[: len(request.output)] == request.output
