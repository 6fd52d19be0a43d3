"""Prefill and decoding apart: one engine computes prompts, another one goes on with the requests.

Both are processes of one group of ``torch.distributed``. Keys and values are sent from device to
device by the group's backend; what is said about them goes through the group's store, which can be
asked without waiting. So neither engine ever waits for the other one's step:

    sender                          receiver
    offer/<request>: its state ──>  takes it when it has a place and pages
                               <──  take/<request>
    sent/<n>: which request's
    keys and values it sends;
    its pages are free         ──>  receives them, and serves the request
                               <──  done/<n>
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from cudnn_ops.serving.edits import upload
from cudnn_ops.serving.engine import Engine
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.pair import PairEnd
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.step import GeneratedToken

#: How long an engine that has nothing to do waits before it asks again, in seconds.
_PAUSE = 0.001


class KVSender(PairEnd):
    """Computes prompts in one process, and hands the requests over to a :class:`KVReceiver`.

    Requests are submitted to ``engine`` as ever, whose steps do not overlap any more: what follows
    a first token is the receiver's to compute. A step computes their prompts and first tokens.
    Behind these a request belongs to the receiver's engine, and the one here has the
    ``finish_reason`` ``"moved"``. Its pages are kept until the receiver has room, and then freed.
    The output is that of one engine alone, up to rounding in other batch shapes.

    Both ends must be stepped all the time, also if there is nothing to do: one that makes no step
    within ``timeout`` counts as lost. Then the requests that were on their way fail, and the step
    raises RuntimeError.

    Args:
        engine: without a mesh. Its cache's pages must be as the receiver's.
        peer: the receiver's rank in the group.
        group: both processes are in it; None stands for the default group. NCCL sends between
            GPUs, gloo on CPUs.
        timeout: in seconds.

    Raises:
        RuntimeError: the receiver is not created within the timeout.
        ValueError: an engine with a mesh; a rank that is not another one of the group; engines that
            do not fit together; a timeout that is not more than 0.
    """

    ROLE, OTHER = "sender", "receiver"

    def __init__(
        self,
        engine: Engine,
        peer: int,
        group: ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Waits for the other end."""
        self._offers: dict[int, Request] = {}  # by number; they hold pages
        self._sends: dict[int, list[Any]] = {}  # by number: tensors, and what sends them
        self._offered = self._sent = 0
        super().__init__(engine, peer, group, timeout)
        engine._stop_overlapping()

    @property
    def pending(self) -> int:
        """Requests that are on their way to the receiver."""
        return len(self._offers) + len(self._sends)

    def step(self) -> list[GeneratedToken]:
        """Steps the engine, and hands over the requests that have their first tokens.

        Returns:
            As :meth:`Engine.step`.

        Raises:
            RuntimeError: the receiver is lost.
        """
        if not self._is_lost:
            self._keep_alive()
            with self._naming("handing requests over"):
                self._serve()
        engine = self.engine
        generated: list[GeneratedToken] = []
        if engine.running or engine.waiting:
            try:
                generated = engine.step()
            except OutOfPages:
                if not self._offers:  # whose pages come back when they are taken
                    raise
        if not self._is_lost:
            for request in list(engine._scheduler.running):
                if request.output:
                    self._offer(request)
        return generated

    def run(self) -> Iterator[Request]:
        """Steps until no request is left here, and yields each when it has ended or moved.

        Raises:
            RuntimeError: the receiver is lost.
        """
        seen: set[Request] = set()
        while self.engine.running or self.engine.waiting or self.pending:
            seen.update(self.engine._scheduler.running, self.engine._scheduler.waiting)
            if not self.step() and not self.engine.running:
                time.sleep(_PAUSE)
            ended = [request for request in seen if request.is_finished]
            seen.difference_update(ended)
            yield from sorted(ended, key=lambda request: request.serial)

    def close(self) -> None:
        """Tells the receiver that no request will follow, so that its ``run`` ends."""
        if not self._is_lost:
            with self._naming("closing"):
                self._store.set("closed", str(self._offered))

    def _offer(self, request: Request) -> None:
        """Takes a request from the engine, with its pages, and tells the receiver."""
        now = time.perf_counter()
        try:
            state = pickle.dumps(request.state())
        except Exception as error:  # of functions, say
            self.engine._scheduler.finish(request)
            request.fail(ValueError(f"{self._op}: params must be picklable: {error}"), now)
            return
        self.engine._scheduler.running.remove(request)
        if request.is_limited:
            self.engine._limited.remove(request)
        self._offers[self._offered] = request
        with self._naming("offering a request"):
            self._say(f"offer/{self._offered}", state)
        self._offered += 1

    def _serve(self) -> None:
        """Sends what the receiver takes, and forgets what it has."""
        for number in list(self._offers):
            if self._take(f"take/{number}") is not None:
                request = self._offers[number]
                assert request.sequence is not None
                tensors = _read(self.engine.cache, request.sequence.pages)
                self.engine._scheduler._release(request)
                self.engine._scheduler._forget(request)
                del self._offers[number]
                # Before they are: NCCL's first message waits until both ends have called.
                said = {"number": number, "seconds": request.age(time.perf_counter())}
                self._say(f"sent/{self._sent}", pickle.dumps(said))
                works = [
                    distributed.isend(each, group=self._group, group_dst=self._peer)
                    for each in tensors
                ]
                self._sends[self._sent] = [*tensors, *works]
                self._sent += 1
                request.end("moved", time.perf_counter())
        for number in list(self._sends):
            if self._take(f"done/{number}") is not None:
                for each in self._sends.pop(number):
                    if isinstance(each, distributed.Work):
                        each.wait()

    def _give_up(self, error: RuntimeError) -> None:
        for request in self._offers.values():
            self.engine._scheduler._release(request)
            self.engine._scheduler._forget(request)
            request.fail(error, time.perf_counter())
        self._offers.clear()
        self._sends.clear()


class KVReceiver(PairEnd):
    """Goes on with the requests that a :class:`KVSender` hands over.

    A request that arrives has its first tokens in its ``output`` already, and the number of the
    sender's request in ``origin``. Its figures and timeouts include the time before. The engine may
    serve requests of its own besides.

    Args:
        engine: without a mesh. Its cache's pages must be as the sender's.
        peer: the sender's rank in the group.
        group: as the sender's.
        timeout: as the sender's, in seconds.

    Raises:
        RuntimeError: the sender is not created within the timeout.
        ValueError: as :class:`KVSender`.
    """

    ROLE, OTHER = "receiver", "sender"

    def __init__(
        self,
        engine: Engine,
        peer: int,
        group: ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Waits for the other end."""
        self._offers: dict[int, dict[str, Any]] = {}  # by number, those to be taken
        self._taken: dict[int, dict[str, Any]] = {}
        self._seen = self._received = 0
        self._last: int | None = None  # how many offers there are in all, once that is known
        super().__init__(engine, peer, group, timeout)

    @property
    def pending(self) -> int:
        """Requests that are on their way from the sender."""
        return len(self._offers) + len(self._taken)

    @property
    def is_open(self) -> bool:
        """Whether requests may still come."""
        return not self._is_lost and self._last != self._received

    def step(self) -> list[GeneratedToken]:
        """Receives what has come, and steps the engine.

        Returns:
            As :meth:`Engine.step`.

        Raises:
            RuntimeError: the sender is lost. What has been received can be served on.
        """
        if self.is_open:
            self._keep_alive()
            with self._naming("receiving requests"):
                self._receive()
        if self.engine.running or self.engine.waiting:
            return self.engine.step()
        return []

    def run(self) -> Iterator[Request]:
        """Steps until the sender has closed and no request is left; yields each when it ends.

        Raises:
            RuntimeError: the sender is lost. Call it again to serve what has been received.
        """
        while self.is_open or self.engine.running or self.engine.waiting:
            generated = self.step()
            yield from dict.fromkeys(request for request, _ in generated if request.is_finished)
            if not self.engine.running:
                time.sleep(_PAUSE)

    def _receive(self) -> None:
        while (offer := self._take(f"offer/{self._seen}")) is not None:
            self._offers[self._seen] = pickle.loads(offer)
            self._seen += 1
        if self._last is None and self._store.check(["closed"]):
            self._last = int(self._store.get("closed"))
        for number in sorted(
            self._offers, key=lambda each: (-self._offers[each]["priority"], each)
        ):
            if not self._has_room(self._offers[number]):
                break
            self._taken[number] = self._offers.pop(number)
            self._say(f"take/{number}")
        # In the order in which they are sent.
        while (sent := self._take(f"sent/{self._received}")) is not None:
            said = pickle.loads(sent)
            state = self._taken[said["number"]]
            engine, cache = self.engine, self.engine.cache
            count = -(-state["length"] // cache.page_size)
            tensors = [
                torch.empty((count, *each.shape[1:]), dtype=each.dtype, device=each.device)
                for each in cache.by_page()
            ]
            for each in tensors:
                flat = each.view(torch.uint8)
                distributed.recv(flat, group=self._group, group_src=self._peer)
            state["seconds"] = said["seconds"]
            request = Request.resume(state, next(engine._serials), engine._decode)
            request.kept = _Landed(cache, tensors, state["length"])
            engine._enqueue(request)
            del self._taken[said["number"]]
            self._say(f"done/{self._received}")
            self._received += 1

    def _has_room(self, state: dict[str, Any]) -> bool:
        """Whether the engine could serve a request at once, beside those that are on their way."""
        engine, size = self.engine, self.engine.cache.page_size
        if engine.waiting or engine.running + len(self._taken) >= engine.max_batch:
            return False
        states = [state, *self._taken.values()]
        needed = sum(-(-len(each["tokens"]) // size) for each in states)
        # One to spare for each that runs, unless there is none.
        spare = engine.running + len(self._taken)
        return needed + spare <= engine.cache.available

    def _give_up(self, error: RuntimeError) -> None:
        self._offers.clear()
        self._taken.clear()


class _Landed(NamedTuple):
    """Keys and values that came from another process."""

    cache: PagedKVCache
    tensors: list[Tensor]
    length: int
    first: int = 0

    def restore(self, pages: Any, skipped: int) -> None:
        """As :class:`~cudnn_ops.serving.kept.Kept` says."""
        index = upload({"index": torch.tensor(pages)}, self.tensors[0].device)["index"]
        for source, target in zip(self.tensors, self.cache.by_page(), strict=True):
            target.index_copy_(0, index, source[skipped:])

    def drop(self) -> None:
        """They are freed with this."""


def _read(cache: PagedKVCache, pages: tuple[int, ...]) -> list[Tensor]:
    """Bytes of keys and of values: copies, in the order of the pages."""
    index = upload({"index": torch.tensor(pages)}, cache.key_cache(0).device)["index"]
    return [each.index_select(0, index).view(torch.uint8) for each in cache.by_page()]
