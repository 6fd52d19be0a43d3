"""A step of the engine, once it is computed: its requests get their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cudnn_ops.serving.choosing import Chosen
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.scheduler import Batch
from cudnn_ops.serving.stats import SpeculationStats


class GeneratedToken(NamedTuple):
    """One generated token and its request."""

    request: Request
    token: int | None
    """None if the request ended without one: it failed, and ``request.error`` says why, or it was
    late (its ``finish_reason`` is ``"timeout"``)."""


class Piece(NamedTuple):
    """What a request has generated since the piece before."""

    tokens: list[int]
    """With speculation there may be several; none if text was held back before."""
    text: str | None
    """Empty if all of it is held back; None if the engine has no ``decode``."""


@dataclass
class Outcome:
    """What a step has brought."""

    tells: list[int]
    """What ranks that follow are told, a number for each row; empty if there are none."""
    generated: list[GeneratedToken] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class Step(NamedTuple):
    """A step that was computed, and whose tokens have not been accepted."""

    batch: Batch
    tokens: list[int]
    """One for each row of the logits: one or, with drafts, several for each share."""
    chosen: Chosen | None
    """What there is beside the tokens; None if there was nothing to do."""
    pages: int
    began: float

    def accept(self, told: list[int] | None, now: float, tells: bool) -> Outcome:
        """Gives the requests their tokens.

        Draft tokens are accepted as long as they are what was chosen, and one token behind them.
        What was chosen, or went wrong, behind a token that is not accepted would never have been
        computed without drafts.

        Args:
            told: what the first rank says of each row; None there.
            now: the time.
            tells: whether there are ranks to tell.
        """
        chosen, tokens = self.chosen, self.tokens
        assert chosen is not None
        outcome = Outcome([0] * len(tokens) if tells else [])
        generated = outcome.generated
        first = 0
        for share in self.batch.shares:
            request, drafts, row = share.request, share.drafts, first
            first += 1 + len(drafts)
            if not share.is_last:
                continue
            accepted = 0
            for draft in (*drafts, -1):  # no token is -1
                token: int | None = tokens[row]
                if told is not None:
                    token = request.repeat(told[row], now)
                elif row in chosen.errors:
                    token = None
                    request.fail(chosen.errors[row], now)
                else:
                    request.accept(tokens[row], now, chosen.logprobs.get(row))
                generated.append(GeneratedToken(request, token))
                if tells:
                    outcome.tells[row] = -1 if token is None else request.told
                accepted += token == draft
                row += 1
                if request.finish_reason:
                    outcome.ended.append(request)
                    break
                if token != draft:
                    break
            if drafts:
                counted = SpeculationStats(1, len(drafts), accepted)
                request.stats.speculation += counted
                outcome.speculation += counted
        return outcome
