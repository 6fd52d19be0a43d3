"""Passing tensors from rank to rank while other work goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup

from cudnn_ops.distributed.group import naming_the_ranks

_MOST_TENSORS = 2  # in a message


class Message(NamedTuple):
    """Tensors for a rank of the group, or from one."""

    tensors: Sequence[Tensor]
    peer: int
    kind: int = 0
    """Messages of one kind arrive as they left. Those of two kinds may be under way at a time."""


@dataclass(frozen=True)
class Transfer:
    """Messages under way.

    On CUDA they are on the stream of the process group: it begins when all that was launched before
    is done, and runs beside what is launched next.
    """

    op: str
    group: ProcessGroup
    messages: tuple[Message, ...]
    """Kept, and with them their memory, until the transfer is waited for."""
    works: list[distributed.Work]

    def wait(self) -> None:
        """Lets the current stream wait for it; on a CPU, the caller."""
        peers = sorted({message.peer for message in self.messages})
        with naming_the_ranks(self.op, self.group, f"passing keys and values to or from {peers}"):
            for work in self.works:
                work.wait()


def start_transfer(
    op: str, group: ProcessGroup, sends: Sequence[Message], receives: Sequence[Message]
) -> Transfer:
    """Begins to send and to receive dense tensors; every rank's must match in number and order.

    Args:
        op: the public function's name, for the message of a rank that does not answer.
        group: the ranks.
        sends: what goes out, of which nothing may change until the transfer is waited for.
        receives: what is written; likewise.
    """
    parts = [
        P2POp(
            function,
            tensor,
            group=group,
            group_peer=message.peer,
            tag=message.kind * _MOST_TENSORS + index,
        )
        for function, messages in ((distributed.isend, sends), (distributed.irecv, receives))
        for message in messages
        for index, tensor in enumerate(message.tensors)
    ]
    with naming_the_ranks(op, group, "passing keys and values"):
        works = distributed.batch_isend_irecv(parts) if parts else []
    return Transfer(op, group, (*sends, *receives), works)
