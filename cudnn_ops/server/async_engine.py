"""An engine for asyncio: one thread steps it, coroutines submit requests and get their tokens.

    async with AsyncEngine(engine, decode=tokenizer.decode) as serving:
        generation = await serving.submit(prompt, SamplingParams(max_tokens=100))
        async for update in generation:
            print(update.text, end="")

The engine is touched by its thread alone, which takes orders from a queue between two steps and
hands each step's tokens to the event loop together.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from cudnn_ops.server.generation import (
    End,
    Generation,
    News,
    QueueFull,
    RequestFailed,
    Stopped,
)
from cudnn_ops.serving import (
    Engine,
    GeneratedToken,
    OutOfPages,
    Request,
    SamplingParams,
)
from cudnn_ops.serving.sampling import check_vocabulary
from cudnn_ops.serving.text import Decode

#: After so many failed steps in a row the engine is given up.
_MOST_FAILURES = 3
#: Seconds between two looks at pages that somebody else holds.
_PAGES_PAUSE = 0.02
#: Seconds after which an idle engine makes a step, which ranks that follow it wait for.
_HEARTBEAT = 10.0
#: Seconds that the thread gets to end its last step.
_LAST_STEP = 60.0

Order = Callable[[], None]


class AsyncEngine:
    """Serves the coroutines of one event loop from one :class:`~cudnn_ops.generation.Engine`.

    ``async with`` starts the thread and stops it. From then on until its end nobody else may call
    the engine.

    Errors stay where they belong. A request that cannot be served is refused before it is queued;
    one that fails ends by :class:`RequestFailed`, and the others go on. If a step fails, the
    requests that took part in it fail; if three in a row do, or the GPU cannot be used any more, so
    do all others, and the engine takes no more. In each case all pages are given back.

    Args:
        engine: the first rank's, if there are several.
        vocabulary: how many tokens the model has; others are refused. None checks nothing.
        decode: the text of some tokens, for :attr:`Update.text`; with ``stop_strings`` it must be
            the engine's. It is called in the event loop, while the engine's thread computes.
        max_waiting: how many requests may wait beside those of the largest batch.

    Raises:
        ValueError: a number that is too small.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocabulary: int | None = None,
        decode: Decode | None = None,
        max_waiting: int = 256,
    ) -> None:
        for name, number, least in (("vocabulary", vocabulary, 1), ("max_waiting", max_waiting, 0)):
            if number is not None and (not isinstance(number, int) or number < least):
                raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")
        self.engine = engine
        self.vocabulary = vocabulary
        self.capacity = engine.max_batch + max_waiting
        """How many requests may run and wait at once."""
        self.error: BaseException | None = None
        """What has ended the thread, if it has failed."""
        self._decode = decode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = True  # no order is taken any more; changed while holding the gate
        self._is_stopping = False
        self._open: set[Generation] = set()  # the event loop's: those that the thread may know
        self._idle = asyncio.Event()
        self._idle.set()
        self._live: dict[Request, Generation] = {}  # the thread's
        self._failures = 0

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return not (self._is_closed or self._is_stopping)

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._open)

    async def __aenter__(self) -> AsyncEngine:
        if self._thread is not None:
            raise RuntimeError("an AsyncEngine is started once; create another one")
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cudnn_ops engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None
    ) -> Generation:
        """Queues a request.

        Args:
            prompt: token ids.
            params: how to choose the next tokens; None stands for the defaults.

        Raises:
            QueueFull: there are too many requests.
            Stopped: the engine stops, or has failed.
            ValueError: the request cannot be served, as
                :meth:`cudnn_ops.generation.Engine.submit` says; tokens that the model does not
                have.
        """
        params = SamplingParams() if params is None else params
        tokens = list(prompt)
        self._check_tokens(tokens, params)
        self._check_ready()
        if len(self._open) >= self.capacity:
            raise QueueFull(
                f"{len(self._open)} requests run or wait, and no more are admitted: try again later"
            )
        generation = Generation(tokens, params, self._decode, self._on_abort)
        self._open.add(generation)
        self._idle.clear()
        if not self._order(partial(self._submit, generation)):
            self._forget(generation)
            self._check_ready()
        try:
            await generation._accepted
        except BaseException:
            generation.abort()
            raise
        return generation

    async def stop(self, grace: float = 0.0) -> None:
        """Takes no more requests, waits for those that there are, and ends the thread.

        Args:
            grace: how many seconds to wait; what has not ended by then ends by :class:`Stopped`.
        """
        self._is_stopping = True
        if grace > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, _LAST_STEP)

    # In the event loop

    def _check_ready(self) -> None:
        if self.error is not None:
            raise Stopped(f"the engine has failed: {self.error!r}")
        if self._thread is None:
            raise Stopped("the engine was not started: use it in `async with`")
        if not self.is_ready:
            raise Stopped("the server stops, and takes no more requests")

    def _check_tokens(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """An embedding that is asked for other tokens would end all requests, not this one."""
        if self.vocabulary is not None:
            check_vocabulary("prompt", prompt, self.vocabulary)
            check_vocabulary("logit_bias", params.logit_bias, self.vocabulary)

    def _order(self, order: Order) -> bool:
        """Tells the thread what to do; False if it takes no orders any more."""
        with self._gate:
            if self._is_closed:
                return False
            self._orders.put(order)
            return True

    def _forget(self, generation: Generation) -> None:
        self._open.discard(generation)
        if not self._open:
            self._idle.set()

    def _deliver(self, news: Sequence[News]) -> None:
        for each in news:
            each.generation._take(each)
            if each.end is not None:
                self._forget(each.generation)

    def _on_abort(self, generation: Generation) -> None:
        self._order(partial(self._abort, generation))

    # In the thread

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._obey():
                self._step()
        except BaseException as caught:  # SystemExit too: nobody may wait for a thread that is gone
            error = caught
        finally:
            self._close(error)

    def _obey(self) -> bool:
        """Does what was ordered, and waits for that while there is nothing else to do.

        Returns:
            False when the thread is to end.
        """
        try:
            if not self._live:
                order = self._orders.get(timeout=_HEARTBEAT)
            else:
                order = self._orders.get_nowait()
            while order is not None:
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            return True
        return False

    def _submit(self, generation: Generation) -> None:
        try:
            request = self.engine.submit(generation.prompt, generation.params)
        except Exception as error:
            self._tell(self._deliver, [News(generation, [], [], End(error=error))])
            return
        generation._request = request
        self._live[request] = generation
        self._tell(generation._accept)

    def _abort(self, generation: Generation) -> None:
        request = generation._request
        if request is not None and self._live.pop(request, None) is not None:
            self.engine.abort(request)
        self._tell(self._forget, generation)

    def _step(self) -> None:
        try:
            generated = self.engine.step()
        except OutOfPages:  # somebody else holds them, and nothing is lost
            time.sleep(_PAGES_PAUSE)
            return
        except Exception as error:
            self._failures += 1
            if self._failures == _MOST_FAILURES or isinstance(error, torch.AcceleratorError):
                raise
            self._fail(error)
            return
        self._failures = 0
        if generated:
            self._tell(self._deliver, self._news(generated))

    def _news(self, generated: Sequence[GeneratedToken]) -> list[News]:
        tokens: dict[Request, list[int]] = {}
        for request, token in generated:
            mine = tokens.setdefault(request, [])
            if token is not None:
                mine.append(token)
        news = []
        for request, mine in tokens.items():
            logprobs = request.logprobs[-len(mine) :] if mine else []
            end = None
            generation = self._live[request]
            if request.is_finished:
                del self._live[request]
                failed = None
                if request.error is not None:
                    failed = RequestFailed(str(request.error) or repr(request.error))
                    failed.__cause__ = request.error
                end = End(request.finish_reason, request.stopped_by, failed)
            news.append(News(generation, mine, logprobs, end))
        return news

    def _fail(self, error: Exception) -> None:
        """Ends the requests of a step that has failed: those that hold pages."""
        failed = RequestFailed(f"the step that computed this request has failed: {error}")
        failed.__cause__ = error
        news = []
        for request, generation in list(self._live.items()):
            if request.sequence is not None:
                del self._live[request]
                self.engine.abort(request)
                news.append(News(generation, [], [], End(error=failed)))
        self._tell(self._deliver, news)

    def _close(self, error: BaseException | None) -> None:
        """The thread's last deed: nobody is left waiting, and no page is left held."""
        self.error = error
        with self._gate:
            self._is_closed = True
        stopped = Stopped(
            "the server stops, and this request's time is over"
            if error is None
            else f"the engine has failed: {error!r}"
        )
        stopped.__cause__ = error
        for request in list(self._live):
            try:
                self.engine.abort(request)
            except Exception as failed:  # whatever state the failed step has left
                self.error = self.error or failed
        self._live.clear()
        try:
            self.engine.close()
        except RuntimeError as failed:  # ranks that are gone too
            self.error = self.error or failed
        try:
            self._tell(self._end_all, stopped)
        except RuntimeError:
            return  # the event loop is closed: nobody waits

    def _end_all(self, stopped: Stopped) -> None:
        for generation in list(self._open):
            generation._take(News(generation, [], [], End(error=stopped)))
            self._forget(generation)
