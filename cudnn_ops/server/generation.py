"""One request as its coroutine sees it: what it generates, and how it ends.

What the coroutine has not fetched yet is merged into one update, so that a slow reader costs no
more than its own output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from cudnn_ops.serving import Request, SamplingParams, TokenLogprobs
from cudnn_ops.serving.request import FinishReason
from cudnn_ops.serving.text import Decode, TextStream


class QueueFull(RuntimeError):
    """There are as many requests as the engine admits; the request was not queued."""


class Stopped(RuntimeError):
    """The engine takes no requests any more: it stops, or its thread has failed."""


class RequestFailed(RuntimeError):
    """A request ended by an error of its own or of its step; ``__cause__`` is the error."""


@dataclass(frozen=True)
class Update:
    """What is new of a request."""

    tokens: list[int]
    """Tokens that were generated."""
    text: str
    """What they add to the text; empty if the engine has no ``decode``."""
    logprobs: list[TokenLogprobs]
    """One for each token, if the request asks for them."""
    finish_reason: FinishReason | None
    """Why the request ended, in its last update."""


class End(NamedTuple):
    """How a request ended."""

    reason: FinishReason | None = None
    stopped_by: object = None
    error: Exception | None = None


class News(NamedTuple):
    """What a step brings for one request."""

    generation: Generation
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    end: End | None


class Generation:
    """One request: an asynchronous iterator of :class:`Update`.

    With ``async with generation:``, a request that has not ended by then is aborted. It belongs to
    the event loop that submitted it.

    Raises:
        RequestFailed: while iterating, if the request fails.
        Stopped: while iterating, if the engine stops before the request's end.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        decode: Decode | None,
        on_abort: Callable[[Generation], object],
    ) -> None:
        """Called by :meth:`AsyncEngine.submit` only; ``on_abort`` frees what the engine holds."""
        self.prompt, self.params = prompt, params
        self.output_tokens = 0
        """Tokens generated so far, of the updates that were fetched."""
        # Done when the engine has queued the request, or will not.
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request: Request | None = None  # the engine's, for its thread alone
        self._on_abort = on_abort
        self._wake = asyncio.Event()
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: End | None = None
        self._is_over = False  # the end was fetched
        self._text = None
        self._shown = 0
        if decode is not None:
            self._text = TextStream(decode, tuple(params.stop_strings))

    def abort(self) -> None:
        """Ends the request, and frees its pages before the next step. Iterating ends too."""
        if self._end is None:
            self._finish(End("abort"))
            self._on_abort(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Update:
        while not self._tokens and self._end is None:
            self._wake.clear()
            await self._wake.wait()
        if self._is_over or (self._end is not None and self._end.reason == "abort"):
            raise StopAsyncIteration
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        end = self._end
        if end is not None and end.error is not None:
            if not tokens:
                self._is_over = True
                raise end.error
            end = None  # what there is comes first
        self._is_over = end is not None
        try:
            text = self._read(tokens, end)
        except Exception as error:
            self.abort()
            raise RequestFailed(f"the text of tokens {tokens} cannot be made: {error}") from error
        return Update(tokens, text, logprobs, None if end is None else end.reason)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _read(self, tokens: list[int], end: End | None) -> str:
        """The text of new tokens, as :attr:`cudnn_ops.generation.Request.text` makes it."""
        stream = self._text
        # One behind the other, as they came: what waits for others is told by how many wait.
        for index, token in enumerate(tokens):
            self.output_tokens += 1
            is_last = end is not None and index == len(tokens) - 1
            is_hidden = is_last and end is not None and isinstance(end.stopped_by, int)
            if stream is not None and stream.stop is None:
                searches = self.output_tokens >= self.params.min_tokens
                stream.feed([] if is_hidden else [token], is_last, searches)
        if stream is None:
            return ""
        shown = stream.shown(end is not None)
        new = shown[self._shown :]
        self._shown = max(self._shown, len(shown))
        return new

    def _accept(self) -> None:
        """The engine has queued it; in the event loop, as the next one."""
        if not self._accepted.done():
            self._accepted.set_result(None)

    def _take(self, news: News) -> None:
        """What the engine's thread has told."""
        if self._end is None:
            self._tokens += news.tokens
            self._logprobs += news.logprobs
            if news.end is not None:
                self._finish(news.end)
            self._wake.set()

    def _finish(self, end: End) -> None:
        self._end = end
        self._wake.set()
        if not self._accepted.done():
            if end.error is not None:
                self._accepted.set_exception(end.error)
            else:
                self._accepted.cancel()
