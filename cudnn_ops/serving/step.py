"""A step of the engine: what is queued of it, and how its requests get their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from cudnn_ops.serving.batch import Batch
from cudnn_ops.serving.choosing import Chosen
from cudnn_ops.serving.request import Request
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
    extra_tokens: int = 0
    """That were computed for requests that had ended by then."""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(eq=False)
class Step:
    """A step whose model is queued, and whose tokens have not been accepted."""

    batch: Batch
    logits: Tensor
    """[rows, vocabulary]. Overwritten by the next step, before which tokens must be chosen."""
    greedy: Tensor
    """int64 [rows], the tokens of the greatest logits."""
    pages: int
    """In use, with those of this step."""
    began: float
    """When it was planned."""
    chosen: Chosen | None = None
    """None until the choice of its tokens is queued."""
    tokens: list[int] = field(default_factory=list)
    """One for each row of the logits: one or, with drafts, several for each share."""

    @property
    def is_ahead(self) -> bool:
        """Whether it was queued while the step before was computed."""
        return self.batch.is_ahead

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests has not ended."""
        return any(share.is_held for share in self.batch.shares)

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
            if not share.is_held:
                outcome.extra_tokens += share.stop - share.start
            if not (share.is_held and share.is_last):
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
