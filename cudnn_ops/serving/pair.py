"""Two engines of different processes that talk to each other: by keys of a store, without waiting.

What they say is in :mod:`cudnn_ops.serving.handover`; here is how, and how one of them learns that
the other is lost.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import ProcessGroup

from cudnn_ops.serving.engine import Engine

#: How many ends of pairs were made here, so that each pair has keys of its own in the store.
_made: Counter[tuple[str, ProcessGroup, tuple[int, int]]] = Counter()


class PairEnd:
    """One end of a pair: what sender and receiver have in common."""

    ROLE, OTHER = "", ""

    def __init__(
        self,
        engine: Engine,
        peer: int,
        group: ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._op = f"cudnn_ops.generation.{type(self).__name__}"
        if engine._ranks is not None:
            raise ValueError(f"{self._op}: engine must be on one rank, got one with a mesh")
        if not timeout > 0:
            raise ValueError(f"{self._op}: timeout must be more than 0 seconds, got {timeout!r}")
        known = distributed.group.WORLD if group is None else group
        if known is None:
            raise ValueError(f"{self._op}: torch.distributed.init_process_group was not called")
        rank = known.rank()
        if not 0 <= peer < known.size() or peer == rank:
            raise ValueError(
                f"{self._op}: peer must be another rank of the group's {known.size()}, got {peer}"
            )
        self.engine, self._peer, self._group, self._timeout = engine, peer, known, timeout
        pair = (rank, peer) if self.ROLE == "sender" else (peer, rank)
        self._key = (self.ROLE, known, pair)
        _made[self._key] += 1
        number = _made[self._key]
        ranks = [distributed.get_global_rank(known, each) for each in pair]
        prefix = f"cudnn_ops/handover/{ranks[0]}-{ranks[1]}/{number}"
        store = distributed.distributed_c10d._get_default_store()
        self._store = distributed.PrefixStore(prefix, store)
        self._is_lost = False
        self._said, self._beat = 0.0, 0  # when and what this end last said
        self._heard, self._pulse = time.monotonic(), b""  # when and what the other end last said
        self._agree()

    def _facts(self) -> dict[str, Any]:
        cache, engine = self.engine.cache, self.engine
        names = ("layers", "page_size", "heads_kv", "head_size", "value_size", "kv_layout")
        facts = {f"cache.{name}": getattr(cache, name) for name in names}
        facts["the cache's dtype"] = str(cache.key_cache(0).dtype)
        return facts | {"decode": engine._decode is not None, "max_length": engine.max_length}

    def _agree(self) -> None:
        """Both ends compare their engines; raises ValueError on both."""
        own, key = f"facts/{self.ROLE}", f"facts/{self.OTHER}"
        self._say(own, pickle.dumps(self._facts()))
        with self._naming("waiting for the other end to be created"):
            try:
                self._store.wait([key], timedelta(seconds=self._timeout))
            except RuntimeError:
                # As if this end had not been made, either: both count their pairs.
                _made[self._key] -= 1
                self._store.delete_key(own)
                raise
        facts = {self.ROLE: self._facts(), self.OTHER: pickle.loads(self._store.get(key))}
        for name, sent in facts["sender"].items():
            taken = facts["receiver"][name]
            if taken < sent if name == "max_length" else taken != sent:
                raise ValueError(
                    f"{self._op}: {name} is {sent} of the sender's engine and {taken} of the "
                    "receiver's; their caches must have equal pages, both decode or neither, and "
                    "the receiver's max_length must be at least the sender's"
                )
        self._heard = time.monotonic()

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """A context whose RuntimeErrors mean that the other end is lost, and say so."""
        try:
            yield
        except RuntimeError as error:
            raise self._lose(f"while {doing}") from error

    def _lose(self, why: str) -> RuntimeError:
        """Gives up what is on its way between the ends; the error to raise."""
        self._is_lost = True
        error = RuntimeError(f"{self._op}: the {self.OTHER}, rank {self._peer}, is lost {why}")
        self._give_up(error)
        return error

    def _give_up(self, error: RuntimeError) -> None:
        raise NotImplementedError

    def _keep_alive(self) -> None:
        """Tells the other end that this one is there, and looks whether that one is."""
        now = time.monotonic()
        if now - self._said < self._timeout / 20:
            return
        self._said, self._beat = now, self._beat + 1
        with self._naming("asking the store"):
            self._store.set(f"alive/{self.ROLE}", str(self._beat))
            key = f"alive/{self.OTHER}"
            pulse = self._store.get(key) if self._store.check([key]) else b""
        if pulse != self._pulse:
            self._pulse, self._heard = pulse, now
        elif now - self._heard > self._timeout:
            raise self._lose(f"after {self._timeout} seconds without a step of it")

    def _say(self, key: str, said: bytes = b"") -> None:
        """Tells the other end something under a key."""
        self._store.set(key, said)  # type: ignore[arg-type]  # it accepts bytes, too

    def _take(self, key: str) -> bytes | None:
        """What the other end has said under a key, which is removed; None if it has not yet."""
        if not self._store.check([key]):
            return None
        said = self._store.get(key)
        self._store.delete_key(key)
        return said
