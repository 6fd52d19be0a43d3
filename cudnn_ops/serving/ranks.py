"""One engine on several ranks: the first rank leads, and the others repeat its steps.

Every rank has the whole engine: a scheduler, a cache with its own heads of every page, and a part
of the model. Schedulers decide alike from the same requests and the same tokens, so these are all
that the first rank tells: once a step, in a message between hosts, before the step is computed. The
others choose no token, and do not know by which options tokens are chosen. They learn what the
first rank chose in one step, and which requests it ended, from the message of the next. A step that
is queued before that gets the tokens from device to device. So no rank's rounding matters but the
first one's, nor does any other call a user's function.

Messages are sent to each rank, not broadcast: gloo's threads let go of a broadcast's tensor some
time after the call has returned, and need the interpreter for it. A process that ends just then
aborts, and the last message is the one after which the others end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops.serving.scheduler import State
from cudnn_ops.serving.swap import Rates

OP = "cudnn_ops.generation.Engine"


class Order(enum.IntEnum):
    """What the first rank tells the others to do."""

    STEP = 0
    WARM_UP = 1
    CLOSE = 2


class Submitted(NamedTuple):
    """A request that the others do not know yet."""

    serial: int
    prompt: list[int]
    max_tokens: int
    """All that they must know of its options: it bounds the drafts."""
    priority: int


class Ended(NamedTuple):
    """A request that was aborted, or that was late."""

    serial: int
    reason: Literal["abort", "timeout"]


Event = Submitted | Ended


class Message(NamedTuple):
    """What the first rank tells."""

    order: Order
    chosen: list[int]
    """What it chose in the step before, a number for each row: ``Request.told``."""
    events: list[Event]
    """What happened after that, in this order."""
    state: State
    """Its scheduler's, after all that."""
    rates: Rates
    """What it decides by between swapping and recomputing; of no account without swapping."""


#: Of each group, one for messages between hosts.
_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class Ranks:
    """The ranks of an engine, and their messages.

    Args:
        group: more than one rank.
        device: where the engine computes.
        most: the largest number of tokens in a message.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, most: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.chosen: list[int] = []
        """On the first rank: what it chose and has not told yet."""
        self.events: list[Event] = []
        """On the first rank: what it has not told yet."""
        self._group, self._most = group, most
        with self.naming("joining the other ranks"):
            if group not in _hosts:
                _hosts[group] = _host_group(group, device)
        self._hosts = _hosts[group]

    @classmethod
    def of(cls, mesh: DeviceMesh | ProcessGroup, device: torch.device, most: int) -> Ranks | None:
        """Those of a mesh; None if it is one rank alone.

        Raises:
            RuntimeError: a rank does not answer.
            TypeError: it is no mesh.
            ValueError: it has several dimensions, or no backend for the device; this rank is not in
                it.
        """
        from cudnn_ops.distributed.heads import group_of_heads  # a program may need no ranks

        group = group_of_heads(OP, mesh)
        return cls(group, device, most) if group.size() > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def naming(self, doing: str) -> AbstractContextManager[None]:
        """A context whose RuntimeErrors come from a rank that does not answer, and say so."""
        from cudnn_ops.distributed.group import naming_the_ranks

        return naming_the_ranks(OP, self._group, doing)

    @contextmanager
    def computing(self, doing: str) -> Iterator[None]:
        """The same where the model may raise others, too."""
        try:
            yield
        except RuntimeError as error:
            # What gloo raises has no class of its own.
            if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
                raise
            with self.naming(doing):
                raise

    def check_agreement(self, facts: dict[str, object]) -> None:
        """Raises ValueError, on all ranks, if what they say under a name is not the same."""
        said: list[dict[str, object]] = [{} for _ in range(self.size)]
        with self.naming("comparing its arguments with those of the other ranks"):
            distributed.all_gather_object(said, facts, group=self._hosts)
        for rank, theirs in enumerate(said):
            for name, value in said[0].items():
                if theirs[name] != value:
                    raise ValueError(
                        f"{OP}: {name} is {value} on rank 0 and {theirs[name]} on rank {rank}; "
                        "all ranks must create equal engines, with caches of equal sizes"
                    )

    def check_state(self, own: State, leader: State) -> None:
        """Raises RuntimeError if this rank would decide differently from the first one."""
        if own != leader:
            raise RuntimeError(
                f"{OP}: rank {self.rank} of {self.size} has {own}, and rank 0 has {leader}. What "
                "is done to the cache beside the engine must be done on all ranks alike: close the "
                "engine on rank 0 before it, and follow again after it"
            )

    def tell(self, order: Order, state: State, rates: Rates | None) -> None:
        """Tells the other ranks, as soon as they listen."""
        chosen, events = self.chosen, self.events
        words = [order, len(chosen), len(events), *(rates or (0, 0)), *state, *chosen]
        words += [0] * (self._most - len(chosen))
        with self.naming("telling the other ranks to go on, which must be in follow()"):
            self._send(torch.tensor(words))
            for rank in range(1, self.size) if events else ():
                distributed.send_object_list([events], group=self._hosts, group_dst=rank)
        self.chosen, self.events = [], []

    def share_drafts(self, drafts: list[list[int]], most: int) -> list[list[int]]:
        """The first rank's draft tokens of some requests, on all ranks.

        Args:
            drafts: on the first rank, of each request; on the others, as many lists.
            most: the largest number of a request.
        """
        if self.is_leader:
            words = torch.tensor([[len(row), *row, *[0] * (most - len(row))] for row in drafts])
            with self.naming("telling the other ranks what the draft model proposes"):
                self._send(words)
            return drafts
        words = torch.empty(len(drafts), 1 + most, dtype=torch.int64)
        with self.naming("waiting for what rank 0's draft model proposes"):
            distributed.recv(words, group=self._hosts, group_src=0)
        return [row[: 1 + row[0]][1:] for row in words.tolist()]

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens that the first rank chose in a step, on the device of every rank.

        On a GPU it is queued, so that no host waits.

        Args:
            tokens: int64 [rows], on the first rank; on the others as many, of no account.
        """
        if tokens.is_cuda:
            shared = tokens.clone()
            distributed.broadcast(shared, group=self._group, group_src=0)
            return shared
        if self.is_leader:
            self._send(tokens)
            return tokens
        shared = torch.empty_like(tokens)
        distributed.recv(shared, group=self._hosts, group_src=0)
        return shared

    def _send(self, tensor: torch.Tensor) -> None:
        """Sends it to all other ranks, and waits until they have it."""
        sent = [
            distributed.isend(tensor, group=self._hosts, group_dst=rank)
            for rank in range(1, self.size)
        ]
        for work in sent:
            assert work is not None  # this rank is in the group
            work.wait()

    def hear(self) -> Message:
        """Waits for what the first rank tells."""
        fields = len(State._fields)
        words = torch.empty(5 + fields + self._most, dtype=torch.int64)
        events: list[list[Event]] = [[]]
        with self.naming("waiting for rank 0 to call step() or close()"):
            distributed.recv(words, group=self._hosts, group_src=0)
            order, count, happened, tokens, copied, *rest = words.tolist()
            if happened:
                distributed.recv_object_list(events, group=self._hosts, group_src=0)
        state, chosen = State(*rest[:fields]), rest[fields : fields + count]
        return Message(Order(order), chosen, events[0], state, Rates(tokens, copied))


def _host_group(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """The same ranks by gloo, whose messages need no GPU; it waits as long for a rank."""
    try:
        timeout = group._get_backend(device).options._timeout
    except RuntimeError as error:
        raise ValueError(f"{OP}: mesh has no backend for {device}, where the cache is") from error
    ranks = distributed.get_process_group_ranks(group)
    made = distributed.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
    )
    assert isinstance(made, ProcessGroup)
    return made
