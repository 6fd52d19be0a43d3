"""Running the application with uvicorn: in the foreground until a signal comes, or in a thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fastapi import FastAPI

from cudnn_ops.server.async_engine import AsyncEngine

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the HTTP server needs uvicorn: {error}; install it with: pip install 'cudnn_ops[server]'",
        name=error.name,
    ) from error

__all__ = ["serve_in_thread"]

#: Seconds that open connections get to read the ends of their answers.
_LAST_WORDS = 5
#: Seconds that a server in a thread gets to start.
_START = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which does not listen yet: a port that is taken is told at once.

    Args:
        host: a name or an address.
        port: 0 stands for any that is free.

    Raises:
        OSError: the address cannot be had.
    """
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise OSError(f"{host}:{port} cannot be served: {error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address of a socket."""
    host, port, *_ = bound.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_LAST_WORDS
    )


class _Draining(uvicorn.Server):
    """Ends when it is told to by a signal, but not before its requests have, within a grace time.

    Meanwhile new requests get status 503, and so does whoever asks for ``/health``. A second signal
    ends it at once.
    """

    def __init__(self, app: FastAPI, serving: AsyncEngine, grace: float, message: str) -> None:
        super().__init__(_config(app))
        self._serving, self._grace, self._message = serving, grace, message
        self._signals: list[int] = []
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._message, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals.append(sig)
        if len(self._signals) > 1:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._drain is None:
            name = signal.Signals(self._signals[0]).name
            print(f"{name}: no new requests; {self._serving.unfinished} to finish", flush=True)
            self._drain = asyncio.create_task(self._serving.stop(self._grace))
        if self._drain is not None and self._drain.done():
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    app: FastAPI, serving: AsyncEngine, bound: socket.socket, *, grace: float, message: str
) -> None:
    """Serves in the main thread until SIGTERM or SIGINT comes.

    Args:
        app: of :func:`cudnn_ops.server.app.create_app`.
        serving: its engine.
        bound: where to listen.
        grace: how many seconds requests get to finish then.
        message: printed as soon as requests are taken.
    """
    _Draining(app, serving, grace, message).run([bound])


@contextmanager
def serve_in_thread(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serves in a thread of this process, and gives the address.

    Args:
        app: of :func:`cudnn_ops.server.app.create_app`.
        host: where to listen.
        port: likewise; 0 stands for any that is free.

    Raises:
        OSError: the address cannot be had.
        RuntimeError: the application does not start.
    """
    bound = bind(host, port)
    server = uvicorn.Server(_config(app))
    has_ended = threading.Event()
    has_begun = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve([bound]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        has_begun.set()
        await task

    def run_and_tell() -> None:
        try:
            with suppress(SystemExit):  # where the application does not start, which it logs
                asyncio.run(run())
        finally:
            has_ended.set()
            has_begun.set()

    thread = threading.Thread(target=run_and_tell, name="uvicorn", daemon=True)
    thread.start()
    try:
        if not has_begun.wait(_START) or has_ended.is_set():
            raise RuntimeError("the server has not started")
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
