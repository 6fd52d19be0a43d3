"""The HTTP server over a tiny model: OpenAI's routes, streams, errors, clients that leave."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from cudnn_ops.server.app import create_app
from cudnn_ops.server.running import bind, serve_in_thread
from tests.cases.server import BAD, END, NAME, Bytes, Tiny, events, make_tiny, tiny_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Tiny, httpx.Client]]:
    tiny = make_tiny()
    with tiny_server(tiny) as client:
        yield tiny, client
    tiny.check_pages()


@pytest.fixture
def client(shared) -> Iterator[httpx.Client]:
    """Of a server whose pages are all back when a test is over."""
    tiny, client = shared
    yield client
    wait_until(lambda: tiny.serving.unfinished == 0)
    tiny.check_pages()


def wait_until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come to be")


def complete(client: httpx.Client, prompt: object = "abc", **options) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"prompt": prompt, **GREEDY, **options})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict) -> list[dict]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# Answers


def test_a_completion(client):
    body = complete(client)
    assert body["object"] == "text_completion"
    assert body["model"] == NAME
    assert body["id"].startswith("cmpl-")
    assert abs(body["created"] - time.time()) < 60
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "defgh", "logprobs": None, "finish_reason": "length"}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_conversation(client):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = client.post(CHAT, json={"messages": messages, **GREEDY, "model": NAME}).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    message = {"role": "assistant", "content": "\x0b\x0c\r\x0e\x0f", "refusal": None}
    assert choice["message"] == message  # what follows the line break
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len("system: s\nuser: ab\n")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["abc", list(b"abc"), ["abc", "xyz"], [list(b"abc"), [120]]])
def test_several_prompts_and_choices(client, prompt, n):
    body = complete(client, prompt, n=n)
    texts = [choice["text"] for choice in body["choices"]]
    count = 1 if prompt in ("abc", list(b"abc")) else 2
    expected = ["defgh", "abcde" if prompt == ["abc", "xyz"] else "yzabc"][:count]
    assert texts == [text for text in expected for _ in range(n)]
    assert [choice["index"] for choice in body["choices"]] == list(range(count * n))
    assert body["usage"]["completion_tokens"] == 5 * count * n
    pieces = stream(client, COMPLETIONS, {"prompt": prompt, "n": n, **GREEDY})
    streamed = [""] * (count * n)
    for piece in pieces:
        (choice,) = piece["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_streams(client):
    body = {"prompt": "abc", **GREEDY, "stream_options": {"include_usage": True}}
    *pieces, last = stream(client, COMPLETIONS, body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "defgh"
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces[:-1])
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert len({piece["id"] for piece in [*pieces, last]}) == 1
    assert {piece["object"] for piece in pieces} == {"text_completion"}
    assert "usage" not in stream(client, COMPLETIONS, {"prompt": "abc", **GREEDY})[0]

    pieces = stream(client, CHAT, {"messages": HELLO, **GREEDY, "stop": ["\r"]})
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "\x0b\x0c"
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}


def test_tokens_come_one_by_one():
    """And not all at the end: the first is there while the model waits before the next."""
    tiny = make_tiny()
    tiny.model.free = 1
    with (
        tiny_server(tiny) as client,
        client.stream("POST", COMPLETIONS, json={"prompt": "abc", **GREEDY, "stream": True}) as got,
    ):
        came = events(got.iter_lines())
        written = next(came)["choices"][0]["text"]
        assert written == "d"
        assert tiny.model.held.wait(60)
        tiny.model.gate.set()
        assert written + "".join(piece["choices"][0]["text"] for piece in came) == "defgh"


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"stop": "g"}, "def", "stop"),
        ({"stop": ["zz", "fg"]}, "de", "stop"),
        ({"stop": ["fg"], "min_tokens": 5}, "defgh", "length"),
        ({"stop_token_ids": [ord("f")]}, "de", "stop"),
        ({"stop": []}, "defgh", "length"),
        ({"logit_bias": {str(END): 100}}, "", "stop"),
        ({"logit_bias": {str(END): 100}, "ignore_eos": True}, "", "length"),
        ({"logit_bias": {str(ord("Q")): 100}}, "QQQQQ", "length"),
        ({"echo": True}, "abcdefgh", "length"),
        ({"max_tokens": 1}, "d", "length"),
        ({"temperature": 2.0, "top_k": 1}, "defgh", "length"),
        ({"temperature": 2.0, "top_p": 1e-6}, "defgh", "length"),
        ({"temperature": 2.0, "min_p": 1.0}, "defgh", "length"),
        ({"presence_penalty": 2.0, "frequency_penalty": 2, "user": "me"}, "defgh", "length"),
        ({"stop": None, "seed": None, "logprobs": None, "n": None}, "defgh", "length"),
    ],
    ids=str,
)
def test_options(client, options, text, reason):
    (choice,) = complete(client, **options)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    pieces = stream(client, COMPLETIONS, {"prompt": "abc", **GREEDY, **options})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_penalties_reach_the_engine():
    """A bias that repeats a letter, and a penalty that ends it."""
    tiny = make_tiny()
    tiny.model.table.zero_()
    biased = {"logit_bias": {str(ord("Q")): 2, str(ord("R")): 1}}
    with tiny_server(tiny) as client:
        assert complete(client, **biased)["choices"][0]["text"] == "QQQQQ"
        for name, number in (
            ("presence_penalty", 1.5),
            ("frequency_penalty", 1.5),
            ("repetition_penalty", 3.0),
        ):
            text = complete(client, **biased, **{name: number})["choices"][0]["text"]
            assert text.startswith("QR")


def test_seeds(client):
    """The same seed gives the same tokens, and each choice has its own."""
    letters = {str(ord(letter)): 100 for letter in "ABCDEFGH"}
    options = {"temperature": 2.0, "max_tokens": 20, "logit_bias": letters}
    first, again = (complete(client, n=3, seed=5, **options) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["text"] for choice in again["choices"]] == texts
    assert len(set(texts)) == 3
    assert complete(client, seed=6, **options)["choices"][0]["text"] == texts[1]


def test_log_probabilities(client):
    tiny = make_tiny()
    exact = tiny.model.table.log_softmax(-1)
    (choice,) = complete(client, logprobs=2, max_tokens=3)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == ["d", "e", "f"]
    assert told["text_offset"] == [0, 1, 2]
    for index, logprob in enumerate(told["token_logprobs"]):
        row = exact[ord("c") + index]
        assert logprob == pytest.approx(row[ord("d") + index].item(), abs=1e-5)
        assert len(told["top_logprobs"][index]) == 2
        assert max(told["top_logprobs"][index].values()) == logprob
    # What was chosen is told beside the likeliest ones.
    (choice,) = complete(client, logprobs=1, max_tokens=1, logit_bias={"81": 100})["choices"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {"d", "Q"}

    body = {"messages": HELLO, **GREEDY, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == list("\x0b\x0c\r\x0e\x0f")
    assert all(len(each["top_logprobs"]) == 3 for each in content)
    assert content[0]["bytes"] == [11]
    assert content[0]["top_logprobs"][0] == {
        name: content[0][name] for name in ("token", "logprob", "bytes")
    }
    pieces = stream(client, CHAT, body)[1:]
    streamed = [each for piece in pieces for each in piece["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    body.pop("top_logprobs")
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    offsets = [
        offset
        for piece in stream(client, COMPLETIONS, {"prompt": "abc", **GREEDY, "logprobs": 0})
        for offset in piece["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == list(range(5))


def test_tokens_that_cannot_be(client):
    """Of no probability at all: JSON has no infinity."""
    tiny = make_tiny()
    tiny.model.table[ord("c"), ord("d")] = -math.inf
    tiny.model.table[ord("c"), 1:] = -math.inf
    with tiny_server(tiny) as other:
        (choice,) = complete(other, logprobs=3, max_tokens=1)["choices"]
        assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999.0


def test_the_longest_request(client):
    """Without max_tokens a conversation gets all the room that there is, and a completion 16."""
    body = client.post(CHAT, json={"messages": HELLO, "temperature": 0}).json()
    usage = body["usage"]
    assert usage["total_tokens"] == 128
    assert body["choices"][0]["finish_reason"] == "length"
    options = {"max_tokens": None}
    assert complete(client, **options)["usage"]["completion_tokens"] == 16
    body = {"messages": HELLO, "temperature": 0, "max_completion_tokens": 3, "max_tokens": 7}
    assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 3


# Mistakes

INVALID = [
    ({"prompt": ""}, "prompt", "prompt: must not be empty"),
    ({"prompt": []}, "prompt", "prompt: must not be empty"),
    ({"prompt": [""]}, "prompt", "prompt: must not be empty"),
    ({"prompt": [[]]}, "prompt", "prompt: must not be empty"),
    ({"prompt": [1, "a"]}, "prompt", "prompt: "),
    ({"prompt": [1.5]}, "prompt", "prompt: "),
    ({"prompt": [-1]}, "prompt", "prompt: "),
    ({"prompt": [True]}, "prompt", "prompt: "),
    ({"prompt": [256]}, "prompt", "prompt must be of tokens from 0 to 255"),
    ({"prompt": [2**70]}, "prompt", "prompt: "),
    ({"prompt": "\ud800"}, "prompt", "prompt: must be text that can be encoded"),
    ({"prompt": None}, "prompt", "missing field: prompt"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: "),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens: "),
    ({"max_tokens": 2.5}, "max_tokens", "max_tokens: "),
    ({"max_tokens": 126}, "prompt", "this model's context has room for 128 tokens, and the prompt"),
    ({"max_tokens": 10**30}, "prompt", "this model's context has room for 128 tokens"),
    ({"prompt": "a" * 128}, "prompt", "this model's context has room for 128 tokens, and the prom"),
    ({"temperature": -1}, "temperature", "temperature: "),
    ({"temperature": math.nan}, "temperature", "temperature: "),
    ({"temperature": math.inf}, "temperature", "temperature: "),
    ({"temperature": True}, "temperature", "temperature: "),
    ({"top_p": 0}, "top_p", "top_p: "),
    ({"top_k": -2}, "top_k", "top_k: "),
    ({"min_p": 1.5}, "min_p", "min_p: "),
    ({"n": 0}, "n", "n: "),
    ({"n": 129}, "n", "n: "),
    ({"n": 100}, "n", "1 prompts with n=100 are 100 requests, and this server admits 68 at once"),
    ({"stop": ""}, "stop", "stop: "),
    ({"stop": ["a", ""]}, "stop", "stop: "),
    ({"stop": ["a"] * 17}, "stop", "stop: "),
    ({"stop": ["\udfff"]}, "stop", "stop: "),
    ({"seed": 2**63}, "seed", "seed: "),
    ({"seed": "1"}, "seed", "seed: "),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty: "),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty: "),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: keys must be token ids, got 'a'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias: keys must be token ids, got '-1'"),
    ({"logit_bias": {"256": 1}}, "logit_bias", "logit_bias must be of tokens from 0 to 255"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias: "),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias: "),
    ({"logprobs": 6}, "logprobs", "logprobs: "),
    ({"logprobs": True}, "logprobs", "logprobs: "),
    ({"logprobs": 1, "echo": True}, None, "echo cannot be together with logprobs"),
    ({"min_tokens": 6}, "min_tokens", "min_tokens must be at most max_tokens, 5, got 6"),
    ({"stream_options": {"include_usage": True}}, None, "stream_options needs stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unsupported field: stream"),
    ({"stream": "yes"}, "stream", "stream: "),
    ({"best_of": 2}, "best_of", "unsupported field: best_of"),
    ({"suffix": "x"}, "suffix", "unsupported field: suffix"),
]


@pytest.mark.parametrize(("options", "param", "message"), INVALID, ids=str)
def test_invalid_completions(client, options, param, message):
    body = json.dumps({"prompt": "abc", **GREEDY, **options})
    error = error_of(response := client.post(COMPLETIONS, content=body))
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: "),
        ({"messages": None}, "messages", "missing field: messages"),
        ({"messages": ["a"]}, "messages", "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing field: messages.0.con"),
        ({"messages": [{"role": "cook", "content": "a"}]}, "messages", "messages: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages",
            "messages: ",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "messages: must be te"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages",
            "messages: the last message must not be the assistant's",
        ),
        ({"top_logprobs": 2}, None, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: "),
        ({"logprobs": 1}, "logprobs", "logprobs: "),
        ({"tools": []}, "tools", "unsupported field: tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported field: res"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: "),
        (
            {"max_completion_tokens": 126},
            "messages",
            "this model's context has room for 128 tokens, and the prompt has 10, with 126",
        ),
    ],
    ids=str,
)
def test_invalid_conversations(client, options, param, message):
    body = json.dumps({"messages": HELLO, **GREEDY, **options})
    error = error_of(response := client.post(CHAT, content=body))
    assert response.status_code == 400, response.text
    assert error["param"] == param
    assert error["message"].startswith(message)
    if "context" in message:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'prompt': 1}", b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "quotes", "no UTF-8", "deep", "long number"],
)
def test_bad_json(client, body):
    error = error_of(response := client.post(COMPLETIONS, content=body))
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"].startswith("the body is not JSON: ")


@pytest.mark.parametrize("body", [b"[]", b"5", b'"a"', b"null"])
def test_json_that_is_no_object(client, body):
    error = error_of(response := client.post(COMPLETIONS, content=body))
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"] == "the body must be a JSON object"


def test_other_models_and_paths(client):
    response = client.post(COMPLETIONS, json={"prompt": "a", "model": "other"})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (
        404,
        "model",
        "model_not_found",
    )
    assert error["message"] == "there is no model 'other', but 'tiny'"
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == NAME
    assert card["max_model_len"] == 128
    assert card["has_chat"] is True
    assert client.get(f"/v1/models/{NAME}").json() == card
    assert error_of(client.get("/v1/models/some/other"))["code"] == "model_not_found"
    for method, path, status in (("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405)):
        response = client.request(method, path)
        assert response.status_code == status
        assert error_of(response)["message"].startswith(f"{method} {path}: ")
    assert response.headers["allow"] == "POST"
    assert client.get("/docs").status_code == 404  # it would load scripts from elsewhere
    schema = client.get("/openapi.json").json()["paths"][CHAT]["post"]["requestBody"]
    assert "messages" in schema["content"]["application/json"]["schema"]["properties"]


def test_a_model_without_a_chat_template():
    class Plain(Bytes):
        has_chat = False

    tiny = make_tiny()
    with (
        serve_in_thread(create_app(tiny.serving, Plain(), NAME)) as url,
        httpx.Client(base_url=url) as client,
    ):
        response = client.post(CHAT, json={"messages": HELLO})
        assert response.status_code == 400
        assert error_of(response)["message"].startswith("this model has no chat template")
        assert complete(client)["choices"][0]["text"] == "defgh"


# Limits


def test_bodies_that_are_too_large():
    tiny = make_tiny()
    with tiny_server(tiny, max_body_bytes=1000) as client:
        large = json.dumps({"prompt": "a" * 1000}).encode()

        def in_pieces() -> Iterator[bytes]:
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        for content in (large, in_pieces()):
            response = client.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert error_of(response)["message"] == "a body has at most 1000 bytes"
        assert complete(client)["choices"][0]["text"] == "defgh"


def test_keys():
    tiny = make_tiny()
    with tiny_server(tiny, api_key="sesamé") as client:
        name = b"Authorization"
        for header in ([], [(name, b"Bearer sesame")], [(name, "sesamé".encode())]):
            for response in (
                client.post(COMPLETIONS, json={"prompt": "a"}, headers=header),
                client.get("/v1/models", headers=header),
            ):
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        right = [(name, "Bearer sesamé".encode())]
        assert client.get("/v1/models", headers=right).status_code == 200
        response = client.post(COMPLETIONS, json={"prompt": "abc", **GREEDY}, headers=right)
        assert response.json()["choices"][0]["text"] == "defgh"
        assert [client.get(path).status_code for path in ("/", "/health", "/metrics")] == [200] * 3


def test_a_full_queue():
    """Some get 429, and who is in gets an answer; n choices are admitted together, or none."""
    tiny = make_tiny(max_waiting=1)
    with tiny_server(tiny) as client:
        tiny.model.gate.clear()
        answers: list[dict] = []
        threads = [
            threading.Thread(target=lambda: answers.append(complete(client))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: tiny.serving.unfinished == 4)
        waiting = threading.Thread(
            target=lambda: refused.append(
                client.post(COMPLETIONS, json={"prompt": "x", "n": 2, **GREEDY})
            )
        )
        refused: list[httpx.Response] = []
        waiting.start()
        wait_until(lambda: tiny.serving.unfinished == 5)
        response = client.post(COMPLETIONS, json={"prompt": "abc"})
        assert response.status_code == 429
        assert error_of(response)["type"] == "rate_limit_error"
        assert error_of(response)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        tiny.model.gate.set()
        for thread in [*threads, waiting]:
            thread.join()
        assert [answer["choices"][0]["text"] for answer in answers] == ["defgh"] * 4
        wait_until(lambda: tiny.serving.unfinished == 0)
        assert complete(client)["choices"][0]["text"] == "defgh"
    tiny.check_pages()


# Faults


@contextmanager
def raw_request(client: httpx.Client, body: dict) -> Iterator[socket.socket]:
    """A client that can leave when it likes."""
    content = json.dumps(body).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        yield connection


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_clients_that_leave(streams, n):
    """Their requests end, and their pages are back long before they would have finished."""
    tiny = make_tiny(pages=2048, max_length=4096)

    def slowly(*args: Any) -> torch.Tensor:
        time.sleep(0.005)
        return tiny.model(*args)

    tiny.engine._runner._model = slowly
    with tiny_server(tiny) as client:
        body = {"prompt": "abc", "max_tokens": 3000, "temperature": 0, "stream": streams, "n": n}
        with raw_request(client, body) as connection:
            if streams:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
            wait_until(lambda: tiny.engine.running == n)
            other = threading.Thread(target=lambda: answers.append(complete(client)))
            answers: list[dict] = []
            other.start()
        wait_until(lambda: tiny.serving.unfinished == 0)
        other.join()
        assert answers[0]["choices"][0]["text"] == "defgh"
        assert tiny.engine.stats.aborted == n
        assert tiny.engine.stats.output_tokens < 2900 * n
        if not streams:
            wait_until(lambda: 'status="499"} 1.0' in client.get("/metrics").text)
    tiny.check_pages()


def test_clients_that_leave_while_they_send():
    tiny = make_tiny()
    with tiny_server(tiny) as client:
        where = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(where) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            time.sleep(0.05)
        wait_until(lambda: 'status="499"} 1.0' in client.get("/metrics").text)
        assert complete(client)["choices"][0]["text"] == "defgh"


@pytest.mark.parametrize("streams", [True, False])
def test_a_model_that_yields_nan(client, streams):
    """One answer is an error, at once or in the midst of its stream; others are not disturbed."""
    body = {"prompt": [BAD - 2], **GREEDY}
    if not streams:
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == 500
        error = error_of(response)
    else:
        *pieces, failed = stream(client, COMPLETIONS, body)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "\x06\x07"
        error = failed["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "request_failed"
    assert "logits after 2 tokens of output are not finite" in error["message"]
    assert complete(client)["choices"][0]["text"] == "defgh"


def test_an_engine_that_is_lost():
    tiny = make_tiny()
    with tiny_server(tiny) as client:
        assert client.get("/health").status_code == 200
        tiny.model.gate.clear()
        response: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: response.append(client.post(COMPLETIONS, json={"prompt": "abc"}))
        )
        thread.start()
        wait_until(lambda: tiny.engine.running == 1)
        tiny.model.error = SystemExit("killed")
        tiny.model.gate.set()
        thread.join()
        wait_until(lambda: not tiny.serving.is_ready)
        later = client.post(COMPLETIONS, json={"prompt": "abc"})
        for each in (response[0], later):
            assert each.status_code == 503
            assert error_of(each)["type"] == "service_unavailable"
            assert "the engine has failed: SystemExit('killed')" in error_of(each)["message"]
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        assert "cudnn_ops_ready 0.0" in client.get("/metrics").text
    tiny.check_pages()


def test_a_tokenizer_that_raises():
    """What nobody has thought of is an error of that client alone."""

    class Broken(Bytes):
        def encode(self, text: str) -> list[int]:
            if text == "x":
                raise KeyError("no such word")
            return super().encode(text)

    tiny = make_tiny()
    with (
        serve_in_thread(create_app(tiny.serving, Broken(), NAME)) as url,
        httpx.Client(base_url=url) as client,
    ):
        response = client.post(COMPLETIONS, json={"prompt": "x"})
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error"
        assert complete(client)["choices"][0]["text"] == "defgh"


# What watches it


def test_metrics():
    tiny = make_tiny()
    with tiny_server(tiny) as client:
        complete(client)
        stream(client, COMPLETIONS, {"prompt": "abcd", **GREEDY})
        client.post(CHAT, json={})
        text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'cudnn_ops_http_requests_total{route="completions",status="200"}': 2,
        'cudnn_ops_http_requests_total{route="chat",status="400"}': 1,
        "cudnn_ops_prompt_tokens_total": 7,
        "cudnn_ops_generated_tokens_total": 10,
        "cudnn_ops_finished_requests_total": 2,
        "cudnn_ops_time_to_first_token_seconds_count": 2,
        "cudnn_ops_request_seconds_count": 2,
        "cudnn_ops_pages": 64,
        "cudnn_ops_pages_used": 0,
        "cudnn_ops_ready": 1,
        "cudnn_ops_unfinished": 0,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert float(values["cudnn_ops_request_seconds_sum"]) > 0
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    assert ["cudnn_ops_steps_total", "counter"] in types


def test_the_page_has_nothing_from_elsewhere(client):
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http:" not in response.text
    assert "https:" not in response.text


# Starting


def test_an_address_that_is_taken():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be served"):
            bind("127.0.0.1", port)


def test_an_application_that_does_not_start():
    tiny = make_tiny()
    app = create_app(tiny.serving, Bytes(), NAME)
    with serve_in_thread(app) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(RuntimeError, match="has not started"), serve_in_thread(app):
        pass  # the engine's thread has ended
