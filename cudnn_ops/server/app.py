"""The HTTP server: OpenAI's routes over an :class:`~cudnn_ops.server.AsyncEngine`.

``create_app`` makes the application for any ASGI server; ``python -m cudnn_ops serve`` runs it with
uvicorn.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from cudnn_ops.server.async_engine import AsyncEngine
from cudnn_ops.server.generation import Generation, Update
from cudnn_ops.server.tokenizer import Tokenizer

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import Receive, Scope, Send

    from cudnn_ops.server.answers import DONE, Answer, Choice, event, usage_of
    from cudnn_ops.server.errors import APIError, as_api_error
    from cudnn_ops.server.metrics import Metrics
    from cudnn_ops.server.protocol import (
        ChatRequest,
        CommonRequest,
        CompletionRequest,
        as_invalid,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the HTTP server needs FastAPI, uvicorn and prometheus-client: {error}; install them "
        "with: pip install 'cudnn_ops[server]'",
        name=error.name,
    ) from error

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

#: The status that stands for a client that has left, in the metrics alone.
_LEFT = 499
#: What the page may do: its own script and style, and requests to this server.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Body = TypeVar("Body", bound=CommonRequest)


class _Events(StreamingResponse):
    """Server-sent events of generations, which end with the response, however that ends."""

    def __init__(self, pieces: AsyncIterator[str], generations: Sequence[Generation]) -> None:
        super().__init__(
            pieces,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                generation.abort()


@dataclass(frozen=True)
class _Job:
    """An admitted request."""

    answer: Answer
    generations: list[Generation]
    choices: list[Choice]
    prompt_tokens: int
    arrived: float
    route: str


def create_app(
    serving: AsyncEngine,
    tokenizer: Tokenizer,
    model: str,
    *,
    api_key: str | None = None,
    max_body_bytes: int = 4 << 20,
) -> FastAPI:
    """The application: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, and a page.

    ``/health`` and ``/metrics`` are for whoever watches it. The application starts the engine's
    thread, and stops it when it ends.

    Args:
        serving: serves the requests; not started yet.
        tokenizer: makes tokens of text and text of tokens.
        model: the name that clients use.
        api_key: what clients must send as ``Authorization: Bearer``; None asks for nothing. The
            page, ``/health`` and ``/metrics`` are open to all.
        max_body_bytes: the largest request body.

    Raises:
        ModuleNotFoundError: while importing this module, without FastAPI or prometheus-client.

    Example:
        >>> import json, torch
        >>> from urllib.request import urlopen
        >>> from cudnn_ops import PagedKVCache
        >>> from cudnn_ops.generation import Engine
        >>> from cudnn_ops.server import AsyncEngine
        >>> from cudnn_ops.server.app import create_app
        >>> from cudnn_ops.server.running import serve_in_thread
        >>> class Bytes:
        ...     stop_tokens, has_chat = frozenset(), False
        ...     encode = staticmethod(lambda text: list(text.encode()))
        ...     decode = staticmethod(lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> following = torch.eye(256).roll(1, 1)  # stands for a model: b follows a
        >>> cache = PagedKVCache(1, 8, 16, 1, 16, dtype=torch.float32, device="cpu")
        >>> engine = Engine(lambda tokens, positions, last, attend: following[tokens[last]], cache)
        >>> serving = AsyncEngine(engine, decode=Bytes.decode, vocabulary=256)
        >>> body = json.dumps({"prompt": "abc", "max_tokens": 4, "temperature": 0}).encode()
        >>> with serve_in_thread(create_app(serving, Bytes(), "alphabet")) as url:
        ...     answer = json.load(urlopen(f"{url}/v1/completions", body))
        >>> answer["choices"][0]["text"]
        'defg'
    """
    return _Server(serving, tokenizer, model, api_key, max_body_bytes).app()


class _Server:
    """The routes and what they share."""

    def __init__(
        self,
        serving: AsyncEngine,
        tokenizer: Tokenizer,
        model: str,
        api_key: str | None,
        max_body_bytes: int,
    ) -> None:
        self._serving, self._tokenizer, self._model = serving, tokenizer, model
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._most_bytes = max_body_bytes
        self._metrics = Metrics(serving)
        self._created = int(time.time())
        # Tokenizers are not thread-safe, and a long text must not hold up the event loop.
        self._encoder = ThreadPoolExecutor(1, "tokenizer")

    def app(self) -> FastAPI:
        """The application with its routes."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with self._serving:
                yield
            self._encoder.shutdown(wait=False)

        # No pages of FastAPI's: they load their scripts from elsewhere.
        app = FastAPI(title="cudnn_ops", lifespan=lifespan, docs_url=None, redoc_url=None)
        for path, answer, body in (
            ("/v1/completions", self.completions, CompletionRequest),
            ("/v1/chat/completions", self.chat, ChatRequest),
        ):
            schema = {"content": {"application/json": {"schema": body.model_json_schema()}}}
            extra = {"requestBody": {**schema, "required": True}}
            app.post(path, response_model=None, openapi_extra=extra)(answer)
        app.get("/v1/models", response_model=None)(self.models)
        app.get("/v1/models/{name:path}", response_model=None)(self.one_model)
        app.get("/health", response_model=None)(self.health)
        app.get("/metrics", response_model=None)(self.metrics)
        app.get("/", response_model=None)(self.page)
        app.add_exception_handler(APIError, _tell)
        app.add_exception_handler(HTTPException, _tell_http)
        return app

    # Routes

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._counted(request, CompletionRequest, "completions")

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._counted(request, ChatRequest, "chat")

    async def models(self, request: Request) -> dict[str, object]:
        """``GET /v1/models``."""
        self._check_key(request)
        return {"object": "list", "data": [self._card()]}

    async def one_model(self, request: Request, name: str) -> dict[str, object]:
        """``GET /v1/models/NAME``."""
        self._check_key(request)
        self._check_model(name)
        return self._card()

    async def health(self) -> Response:
        """``GET /health``: 200 while requests are taken, else 503."""
        if self._serving.is_ready:
            return JSONResponse({"status": "ok"})
        failed = self._serving.error is not None
        return JSONResponse({"status": "failed" if failed else "stopping"}, 503)

    async def metrics(self) -> Response:
        """``GET /metrics``."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        """``GET /``: a page to talk to the model."""
        text = files("cudnn_ops.server").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_POLICY})

    # What they are made of

    async def _counted(self, request: Request, kind: type[CommonRequest], route: str) -> Response:
        """An answer, counted by its status; a stream by that of its begin."""
        status = _LEFT
        try:
            response = await self._generate(request, kind, route)
            status = response.status_code
            return response
        except APIError as error:
            status = error.status
            raise
        except ClientDisconnect:  # nobody reads this
            return Response(status_code=_LEFT)
        except Exception as error:  # a fault of the server's
            _log.exception("%s: an error that was not expected", route)
            told = as_api_error(error)
            status = told.status
            return told.response()
        finally:
            self._metrics.requests.labels(route, str(status)).inc()

    async def _generate(self, request: Request, kind: type[Body], route: str) -> Response:
        arrived = time.perf_counter()
        self._check_key(request)
        body = await self._body(request, kind)
        if body.model is not None:
            self._check_model(body.model)
        job = await self._admit(body, arrived, route)
        try:
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return _Events(self._events(job, usage), job.generations)
            return await self._whole(request, job)
        except BaseException:
            for generation in job.generations:
                generation.abort()
            raise

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")  # as it was sent
        if not hmac.compare_digest(given, self._key):
            raise APIError(401, "a valid API key is needed", code="invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"there is no model {name!r}, but {self._model!r}"
            raise APIError(404, message, "model", "model_not_found")

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "cudnn_ops",
            "max_model_len": self._serving.engine.max_length,
            "has_chat": self._tokenizer.has_chat,
        }

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        most = self._most_bytes
        too_large = APIError(413, f"a body has at most {most} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise too_large
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            message = f"the body is not JSON: {error}"
            raise APIError(400, message, code="invalid_json") from None
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            raise as_invalid(error.errors(include_url=False), data) from None

    async def _encode(self, function: Any, *args: object) -> list[int]:
        loop = asyncio.get_running_loop()
        tokens: list[int] = await loop.run_in_executor(self._encoder, function, *args)
        return tokens

    async def _prompts(self, body: CommonRequest) -> list[list[int]]:
        """The prompts' tokens."""
        if isinstance(body, ChatRequest):
            if not self._tokenizer.has_chat:
                raise APIError(
                    400,
                    "this model has no chat template: use /v1/completions, or start the server "
                    "with --chat-template",
                    "messages",
                )
            try:
                messages = [message.flat() for message in body.messages]
                return [await self._encode(self._tokenizer.encode_chat, messages)]
            except ValueError as error:
                raise APIError(400, f"messages: {error}", "messages") from None
        assert isinstance(body, CompletionRequest)
        return [
            await self._encode(self._tokenizer.encode, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]

    async def _admit(self, body: CommonRequest, arrived: float, route: str) -> _Job:
        """Submits all choices of all prompts, or none."""
        prompts = await self._prompts(body)
        serving, most = self._serving, self._serving.engine.max_length
        if len(prompts) * body.n > serving.capacity:
            raise APIError(
                400,
                f"{len(prompts)} prompts with n={body.n} are {len(prompts) * body.n} requests, and "
                f"this server admits {serving.capacity} at once",
                "n",
            )
        wanted = body.wanted_tokens
        for prompt in prompts:
            if len(prompt) + (1 if wanted is None else wanted) > most:
                raise APIError(
                    400,
                    f"this model's context has room for {most} tokens, and the prompt has "
                    f"{len(prompt)}" + ("" if wanted is None else f", with {wanted} to generate"),
                    "messages" if isinstance(body, ChatRequest) else "prompt",
                    "context_length_exceeded",
                )
        generations: list[Generation] = []
        choices: list[Choice] = []
        echoes = isinstance(body, CompletionRequest) and body.echo
        try:
            for prompt in prompts:
                text = self._tokenizer.decode(prompt) if echoes else None
                for _ in range(body.n):
                    params = body.params(
                        most - len(prompt), self._tokenizer.stop_tokens, len(choices)
                    )
                    generations.append(await serving.submit(prompt, params))
                    choices.append(Choice(text))
        except BaseException as error:
            for generation in generations:
                generation.abort()
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        prompt_tokens = sum(map(len, prompts))
        self._metrics.prompt_tokens.inc(prompt_tokens)
        is_chat = isinstance(body, ChatRequest)
        wants = body.wanted_logprobs is not None
        answer = Answer(is_chat, self._model, self._text_of, wants)
        return _Job(answer, generations, choices, prompt_tokens, arrived, route)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token])

    async def _whole(self, request: Request, job: _Job) -> Response:
        """The answer in one piece; nobody computes it for a client that has left."""

        async def collect() -> None:
            async for index, update in self._updates(job):
                job.choices[index].add(update)

        async def leave() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(collect()), asyncio.create_task(leave())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            await tasks[0]
        except ClientDisconnect:
            raise
        except Exception as error:
            raise as_api_error(error) from error
        finally:
            for task in tasks:
                task.cancel()
        self._metrics.whole.observe(time.perf_counter() - job.arrived)
        usage = usage_of(job.prompt_tokens, job.choices)
        return JSONResponse(job.answer.whole(job.choices, usage))

    async def _events(self, job: _Job, wants_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events; an error in its midst is the last but one of them."""
        answer = job.answer
        usage = {"usage": None} if wants_usage else {}
        for index, choice in enumerate(job.choices):
            begin = answer.begin(index, choice)
            if begin is not None:
                yield event(begin | usage)
        try:
            async for index, update in self._updates(job):
                choice = job.choices[index]
                choice.add(update)
                choice.pieces.clear()  # they are on their way
                if update.text or update.logprobs or update.finish_reason:
                    yield event(answer.piece(index, choice, update) | usage)
        except Exception as error:
            yield event(as_api_error(error).body())
        else:
            self._metrics.whole.observe(time.perf_counter() - job.arrived)
            if wants_usage:
                yield event(answer.end(usage_of(job.prompt_tokens, job.choices)))
        yield DONE

    async def _updates(self, job: _Job) -> AsyncIterator[tuple[int, Update]]:
        """Updates of all choices as they come, and their times."""
        latest = dict.fromkeys(range(len(job.choices)), job.arrived)
        has_begun: set[int] = set()
        async for index, update in _merged(job.generations):
            now = time.perf_counter()
            since, latest[index] = now - latest[index], now
            if index in has_begun:
                self._metrics.between.observe(since / max(1, len(update.tokens)))
            else:
                has_begun.add(index)
                self._metrics.first.observe(since)
            yield index, update


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Update]]:
    """What several generations bring, each with its number."""
    if len(generations) == 1:
        async for update in generations[0]:
            yield 0, update
        return
    # One at a time: what the reader does not take waits in the generations, and is merged there.
    arrived: asyncio.Queue[tuple[int, Update] | BaseException | None] = asyncio.Queue(1)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for update in generation:
                await arrived.put((index, update))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            one = await arrived.get()
            if one is None:
                left -= 1
            elif isinstance(one, BaseException):
                raise one
            else:
                yield one
    finally:
        for task in tasks:
            task.cancel()


async def _tell(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _tell_http(request: Request, error: Exception) -> Response:
    """An error of the routing: no such path, or another method."""
    assert isinstance(error, HTTPException)
    told = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response = told.response()
    headers: Mapping[str, str] = error.headers or {}
    response.headers.update(headers)
    return response
