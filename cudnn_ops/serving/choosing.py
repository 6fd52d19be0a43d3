"""Choosing a step's next tokens from its logits, by each request's own options.

All requests of a batch are served by the same few kernels, whatever each of them asks for: the host
lists who changes which logits, and uploads the lists together. Where nobody asks for more than the
greatest logit, nothing is launched here. The tokens stay on the device, where the next step may
take them from, and are copied to the host meanwhile; reading the copy is the step's only wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from cudnn_ops.serving.batch import Share
from cudnn_ops.serving.edits import Edits, TokenCounts, upload
from cudnn_ops.serving.request import Branch, TokenLogprobs

# What stands for a token where none can be chosen.
_NOTHING_ALLOWED, _NOT_FINITE = -1, -2


class NothingAllowed(RuntimeError):
    """No token may follow a request's output: its options exclude all of them."""


class Chosen:
    """A step's next tokens, which the device may still be computing.

    Args:
        tokens: int64 [rows]; negative where there is none.
        branches: what the rows continue, by row, for what the tokens alone do not tell.
        errors: why some of them have none.
        logprobs: float64 [rows, 2 + 2 n]: the token, its log probability, and those and the ids of
            the n most likely tokens; None if nobody asks for them.
    """

    def __init__(
        self,
        tokens: Tensor,
        branches: Iterable[tuple[int, Branch]] = (),
        errors: dict[int, Exception] | None = None,
        logprobs: Tensor | None = None,
    ) -> None:
        self.tokens = tokens
        """On the device, valid until a later step is queued."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """Of rows that asked for them, by row; there once ``read`` was called."""
        self.errors = errors or {}
        """Of rows that failed, likewise."""
        self._branches = branches
        results = tokens if logprobs is None else logprobs
        self._copy, self._copied = results, None
        if results.is_cuda:
            # To other memory than pinned one it would be copied while the host waits.
            self._copy = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            self._copy.copy_(results, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(results.device))

    def read(self) -> list[int]:
        """Waits for the device, and returns each row's token; of no account if it failed."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._copy.dim() == 1:
            tokens: list[int] = self._copy.tolist()
        else:
            rows = self._copy.tolist()
            tokens = [int(row[0]) for row in rows]
            self._read_logprobs(rows)
        if min(tokens) < 0:
            for row, branch in self._branches:
                if tokens[row] < 0 and row not in self.errors:
                    self.errors[row] = _why_none(tokens[row], branch)
        return tokens

    def _read_logprobs(self, rows: list[list[float]]) -> None:
        count = len(rows[0]) // 2 - 1
        for row, branch in self._branches:
            asked = branch.request.params.logprobs
            if asked is not None:
                token, logprob, *top = rows[row]
                pairs = zip(map(int, top[count:]), top[: min(asked, count)], strict=False)
                self.logprobs[row] = TokenLogprobs(int(token), logprob, tuple(pairs))


def _why_none(code: int, branch: Branch) -> Exception:
    after = f"after {branch.output_tokens} tokens of output"
    if code == _NOT_FINITE:
        return RuntimeError(f"the model's logits {after} are not finite: NaN, or infinity")
    return NothingAllowed(
        f"no token may follow {after}: allowed_tokens, bad_words and min_tokens exclude all that "
        "the model allows"
    )


class Chooser:
    """Chooses tokens on one device, for steps of at most ``max_batch`` requests."""

    def __init__(self, device: torch.device, max_batch: int) -> None:
        self._device, self._max_batch = device, max_batch
        self._counts: TokenCounts | None = None  # once somebody asks for penalties

    def choose(self, logits: Tensor, greedy: Tensor, shares: Sequence[Share]) -> Chosen:
        """Queues the choice of what follows each request's last token and each draft token.

        Args:
            logits: [rows, vocabulary], a row for each place of a share; not changed.
            greedy: int64 [rows], the tokens of :func:`greatest`.
            shares: a step's.
        """
        for share in shares:
            if not share.request.params._is_plain:
                break
        else:
            return Chosen(greedy, _branches(shares))
        try:
            return self._choose(logits, list(_branches(shares)))
        except BaseException:
            self._counts = None  # perhaps not what the host takes them for
            raise

    def _choose(self, logits: Tensor, branches: Sequence[tuple[int, Branch]]) -> Chosen:
        batch, vocabulary = logits.shape
        edits = Edits(vocabulary, logits.device)
        errors: dict[int, Exception] = {}
        penalized: dict[int, Branch] = {}
        options = [(0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)] * batch  # greedy, no penalties
        for row, branch in branches:
            params = branch.request.params
            if params._edits_logits:
                try:
                    edits.add(row, branch)
                except Exception as error:  # whatever a function of the user's raises
                    errors[row] = error
                    continue
            if params._has_penalties:
                penalized[row] = branch
            options[row] = (
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                branch.number,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        parts = edits.parts()
        parts["options"] = torch.tensor(options, dtype=torch.float64).flatten()
        if penalized:
            parts |= self._counts_for(vocabulary).parts(penalized, batch)
        parts = upload(parts, self._device)
        table = parts["options"].view(batch, -1)

        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.clone() if edits else wide
        edits.add_biases_(scores, parts)
        if penalized:
            scores = self._counts_for(vocabulary).penalize(scores, table[:, 5:], parts)
        edits.exclude_(scores, parts)
        if any(row[0] for row in options):
            tokens, best = sample(scores, table[:, :5])
        else:
            best, tokens = scores.max(-1)
        none = torch.where(best == -torch.inf, _NOTHING_ALLOWED, _NOT_FINITE)
        tokens = torch.where(best.isfinite(), tokens, none)
        counts = (branch.request.params.logprobs for _, branch in branches)
        asked = [count for count in counts if count is not None]
        logprobs = with_logprobs(wide, tokens, min(max(asked), vocabulary)) if asked else None
        return Chosen(tokens, branches, errors, logprobs)

    def _counts_for(self, vocabulary: int) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self._max_batch, vocabulary, self._device)
        return self._counts


def _branches(shares: Sequence[Share]) -> Iterator[tuple[int, Branch]]:
    """What the rows of a step continue, without those that continue no last token.

    Nor are there those of requests that have ended since the step was planned.
    """
    row = 0
    for share in shares:
        if share.is_last and share.is_held:
            for count in range(share.places):
                yield row + count, Branch(share.request, share.drafts[:count])
        row += share.places


def greatest(logits: Tensor) -> Tensor:
    """The tokens of the greatest logits [rows, vocabulary]; negative where they are not finite."""
    best, tokens = logits.max(-1)
    return torch.where(best.abs() < torch.inf, tokens, _NOT_FINITE)


def with_logprobs(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """float64 [rows, 2 + 2 count], as :class:`Chosen` reads it.

    Args:
        logits: [rows, vocabulary], the model's.
        tokens: int64 [rows], the chosen ones; a negative one stands for none.
        count: how many of the most likely tokens to tell.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = tokens[:, None]
    columns = [chosen.double(), (logits.gather(1, chosen.clamp_min(0)) - total).double()]
    if count:
        values, ids = logits.topk(count)
        columns += [(values - total).double(), ids.double()]
    return torch.cat(columns, 1)


def sample(logits: Tensor, options: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token for each row, with options for each row.

    In the order of transformers: temperature; ``top_k``; ``top_p`` of what ``top_k`` leaves;
    ``min_p``, which is relative to the most likely token. The caller provides the random numbers,
    so that a row's result depends on no other row.

    Args:
        logits: [batch, vocabulary].
        options: float64 [batch, 5]: temperature (0: greedy), top_k (0: all), top_p, min_p, and a
            uniform random number in [0, 1).

    Returns:
        int64 [batch], the tokens; float64 [batch], the greatest logits, NaN where one is NaN.
    """
    temperature, top_k, top_p, min_p, number = options[:, :, None].unbind(1)  # each [batch, 1]
    is_greedy = temperature == 0
    # float64: over a large vocabulary the sum of float32 probabilities is off by more than the
    # smallest of them, and the last tokens could never be drawn.
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = (ordered / temperature.masked_fill(is_greedy, 1.0)).softmax(-1)
    rank = torch.arange(weights.shape[1], device=weights.device)
    # A greedy row is one whose only token is its first.
    top_k = top_k.masked_fill(top_k == 0, weights.shape[1]).masked_fill(is_greedy, 1.0)
    weights = weights.masked_fill(rank >= top_k, 0.0)
    reached = weights.cumsum(-1)
    # Even where min_p is 0, tokens of no probability, which are excluded ones, are not kept.
    least = (min_p * weights[:, :1]).clamp_min(torch.finfo(torch.float64).tiny)
    kept = (reached - weights < top_p * reached[:, -1:]) & (weights >= least)
    reached = weights.masked_fill(~kept, 0.0).cumsum(-1)
    chosen = (reached <= number * reached[:, -1:]).sum(-1, keepdim=True)
    # Rounding may make the number reach the whole sum, after which no token is kept.
    chosen = torch.minimum(chosen, kept.sum(-1, keepdim=True) - 1).clamp_min(0)
    return tokens.gather(1, chosen).squeeze(1), ordered[:, 0]
