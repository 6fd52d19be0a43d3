"""What a step computes: the requests' shares in it, and where their tokens are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cudnn_ops.serving.request import Request
from cudnn_ops.serving.sequence import KVSequence


class Share(NamedTuple):
    """One request's part of a step: tokens ``start`` to ``stop - 1``, and draft tokens after them.

    Their slots are allocated.
    """

    request: Request
    sequence: KVSequence
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    """Only where ``start`` is the request's last token."""

    @property
    def places(self) -> int:
        """At how many places of the request a next token is chosen."""
        return 1 + len(self.drafts)

    @property
    def length(self) -> int:
        """How many tokens of the request there are with these."""
        return self.stop + len(self.drafts)

    @property
    def is_last(self) -> bool:
        """Whether it ends with the request's last token, so that a new token is generated."""
        return self.stop == len(self.request.tokens)

    @property
    def is_held(self) -> bool:
        """Whether the request still has its pages: it has not ended since this was planned."""
        return self.request.sequence is self.sequence


@dataclass(frozen=True)
class Batch:
    """The shares of a step, and the slots of their tokens in the same order."""

    shares: list[Share]
    slots: list[int]
    has_drafts: bool = False
    """Whether any of the shares has."""
    pending: Mapping[Request, int] = field(default_factory=dict)
    """Requests of which the host does not know the last token yet: its row in the step before."""
    is_ahead: bool = False
    """Whether it was planned while the step before was computed."""

    @property
    def is_decoding(self) -> bool:
        """Whether each request has one token, beside drafts."""
        return max([share.stop - share.start for share in self.shares]) == 1

    def chosen(self) -> dict[Request, int]:
        """The requests that will have a new token by this, with its row. Without drafts."""
        return {share.request: row for row, share in enumerate(self.shares) if share.is_last}
