"""``python -m cudnn_ops serve``: a folder, an address, and an end that loses nothing."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from cudnn_ops.__main__ import main
from cudnn_ops.integrations.transformers_serving import ServedModel
from cudnn_ops.server import command
from cudnn_ops.server.running import bind
from tests.cases.server import events, make_transformers_model, write_folder

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SLOW = {"prompt": "abc", "temperature": 0, "max_tokens": 6000, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("models") / "tiny-llama", max_position_embeddings=8192
    )


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command in a process of its own, and a client of it."""
    process = subprocess.Popen(
        [*(sys.executable, "-m", "cudnn_ops", "serve", str(folder)), "--port", "0", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 300)
        line = process.stdout.readline() if ready else ""
        found = re.search(r"at (http://\S+): ", line)
        assert found, process.stderr.read() if process.poll() is not None else "it does not start"
        with httpx.Client(base_url=found[1], timeout=120) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_it_is_told_to_end(folder):
    """SIGTERM: what runs is finished, new requests get 503, and the status is 0."""
    with served(folder, "--grace", "300", "--max-batch", "4") as (process, client):
        assert client.get("/health").json() == {"status": "ok"}
        card = client.get("/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"], card["has_chat"]) == ("tiny-llama", 8192, True)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
        assert client.post("/v1/chat/completions", json=body).json()["choices"] == answer["choices"]
        assert "<title>cudnn_ops</title>" in client.get("/").text

        wanted = 600
        with client.stream(
            "POST",
            "/v1/completions",
            json={
                **SLOW,
                "max_tokens": wanted,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ) as response:
            pieces = events(response.iter_lines())
            next(pieces)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=client.base_url, timeout=120) as other:
                status = 200
                while status == 200:
                    status = other.get("/health").status_code
                assert status == 503
                refused = other.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "server_stopping"
            assert list(pieces)[-1]["usage"]["completion_tokens"] == wanted
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "SIGTERM: no new requests; 1 to finish\n"


def test_the_grace_time_ends(folder):
    """What runs then is told so; a second signal ends it all at once."""
    with served(folder, "--grace", "0.2", "--draft-tokens", "2") as (process, client):
        with client.stream("POST", "/v1/completions", json={**SLOW, "stream": True}) as response:
            pieces = events(response.iter_lines())
            next(pieces)
            process.send_signal(signal.SIGTERM)
            *_, last = pieces
        assert last["error"]["code"] == "server_stopping"
        assert process.wait(60) == 0

    with served(folder, "--grace", "300") as (process, client):
        status: list[str] = []

        def ask() -> None:
            try:
                status.append(str(client.post("/v1/completions", json=SLOW).status_code))
            except httpx.TransportError:
                status.append("gone")

        thread = threading.Thread(target=ask)
        thread.start()
        while "cudnn_ops_running 1.0" not in httpx.get(f"{client.base_url}/metrics").text:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        while httpx.get(f"{client.base_url}/health").status_code == 200:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
        thread.join()
        assert status[0] in ("500", "503", "gone")


def test_a_key_from_the_environment(folder, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "CUDNN_OPS_API_KEY", "sesame")
    options = ("--name", "my/model", "--max-length", "100", "--dtype", "bfloat16")
    with served(folder, *options, "--cache-dtype", "float8_e4m3fn") as (_, client):
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer sesame"
        assert client.get("/v1/models/my/model").json()["max_model_len"] == 100
        answer = client.post("/v1/completions", json={**SLOW, "max_tokens": 9}).json()
        assert answer["usage"]["completion_tokens"] == 9


def test_how_many_pages():
    model = ServedModel(make_transformers_model("llama", torch.float32))
    page = model.page_bytes(16)
    assert command.pages_of(model, 2, 16, None) == 4 * 2 * 256 // 16  # a small model's most
    assert command.pages_of(model, 2, 16, 10.5 * page / (1 << 30)) == 10
    fp8 = torch.float8_e4m3fn
    assert command.pages_of(model, 2, 16, 10.5 * page / (1 << 30), fp8) == 4 * 10 + 2
    with pytest.raises(ValueError, match="--cache-gib"):
        command.pages_of(model, 2, 16, 0.5 * page / (1 << 30))


@pytest.mark.gpu
def test_how_many_pages_a_gpu_has():
    model = ServedModel(make_transformers_model("llama", torch.bfloat16).cuda())
    assert (
        command.pages_of(model, 10**9, 16, None) * model.page_bytes(16)
        < torch.cuda.mem_get_info()[0]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/nowhere"], "is no folder of a model of transformers: it has no config.json"),
        (["{folder}", "--grace", "-1"], "--grace must be at least 0 and finite, got -1.0"),
        (["{folder}", "--grace", "nan"], "--grace must be at least 0 and finite, got nan"),
        (["{folder}", "--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (
            ["{folder}", "--max-body-bytes", "0"],
            "--max-body-bytes must be a whole number, at least 1",
        ),
        (["{folder}", "--max-batch", "0"], "--max-batch must be a whole number, at least 1, got 0"),
        (["{folder}", "--page-size", "3"], "page_size must be a power of 2, got 3"),
        (["{folder}", "--page-size", "0"], "--page-size must be a whole number, at least 1, got 0"),
        (["{folder}", "--max-waiting", "-1"], "--max-waiting must be a whole number, at least 0"),
        (["{folder}", "--max-length", "9000"], "max_length must be 1 to 8192"),
        (["{folder}", "--cache-gib", "0"], "the cache has room for 0 bytes"),
        (["{folder}", "--chat-template", "{folder}/nowhere"], "No such file"),
        (["{folder}", "--port", "{taken}"], "cannot be served"),
        (["{folder}", "--host", "256.0.0.1"], "cannot be served"),
    ],
    ids=str,
)
def test_mistakes_end_with_a_line(folder, arguments, message, capsys):
    """And status 2, and no traceback."""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        if "--port" not in arguments:
            arguments = [*arguments, "--port", "0"]
        filled = [each.format(folder=folder, taken=port) for each in arguments]
        assert main(["serve", *filled]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # behind the bar of a model that loads
    assert error.startswith("error: ")
    assert message in error


def test_another_kind_of_model_is_refused(tmp_path, capsys):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "error: models of the kind 'gpt2' are not served" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(folder, capsys):
    assert main(["serve", str(folder), "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda needs a GPU, and torch finds none\n"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("fastapi", "the HTTP server needs FastAPI, uvicorn and prometheus-client"),
        ("prometheus_client", "the HTTP server needs FastAPI, uvicorn and prometheus-client"),
        ("uvicorn", "the HTTP server needs uvicorn"),
        ("transformers", "pip install 'transformers>=5.17'"),
    ],
)
def test_what_is_not_installed_is_named(folder, missing, message, monkeypatch, capsys):
    for name in list(sys.modules):
        if re.match(r"cudnn_ops\.(server\.|integrations\.transformers)", name):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["serve", str(folder), "--port", "0"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    if missing != "transformers":
        assert error.endswith("pip install 'cudnn_ops[server]'")


def test_the_package_imports_no_server():
    code = "import cudnn_ops, sys; print({'fastapi', 'uvicorn', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
