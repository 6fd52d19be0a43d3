"""Draft tokens by a second, smaller model, which keeps keys and values of its own.

A step of the engine first runs the draft model: over what it has not seen of prompts, and then
token by token behind each request that decodes. What it chooses stays on the device until the last
token is chosen, so that the host waits once. It chooses as the request does, by its temperature,
``top_k``, ``top_p`` and ``min_p`` and by the same random number at the same place. So where both
models say the same, a draft is right even of a sampled token, and the seed gives the same drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cudnn_ops.serving.batch import Batch, Share
from cudnn_ops.serving.choosing import sample
from cudnn_ops.serving.edits import upload
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.memory import whole
from cudnn_ops.serving.model_runner import Model, ModelRunner, padded_batch
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.ranks import Ranks
from cudnn_ops.serving.request import Request
from cudnn_ops.serving.sequence import KVSequence

#: What a request may have beside its last token that the draft model has not seen when it drafts:
#: the last of its drafts, if all of them were accepted.
_BEHIND = 2


@dataclass(frozen=True)
class DraftModel:
    """Proposes what a second, smaller model says (Leviathan et al.; Chen et al.).

    Both models must have the same tokens. The draft model keeps a cache of its own, whose pages are
    freed with those of a request; a request that finds none there has no drafts, and loses nothing
    else. Penalties, biases and excluded tokens are not the draft model's concern: what it proposes
    against them is rejected.

    With a mesh the first rank alone runs the draft model, whole, and tells the others what it
    proposes; these may give None for both ``model`` and ``cache``.

    Raises:
        TypeError: ``cache`` is no :class:`~cudnn_ops.PagedKVCache`, or ``model`` cannot be called.
        ValueError: ``num_draft_tokens`` is less than 1.

    Example:
        >>> import torch
        >>> from cudnn_ops import PagedKVCache
        >>> from cudnn_ops.generation import DraftModel
        >>> def model(tokens, positions, last, attend):
        ...     return torch.nn.functional.one_hot((tokens[last] + 1) % 10, 10).float()
        >>> cache = PagedKVCache(1, 64, 16, 1, 64, dtype=torch.float32, device="cpu")
        >>> DraftModel(model, cache, num_draft_tokens=3).num_draft_tokens
        3
    """

    model: Model | None
    """As the engine's: :class:`~cudnn_ops.generation.Model`."""
    cache: PagedKVCache | None
    """Holds the draft model's keys and values; not the engine's cache."""
    num_draft_tokens: int = 4
    """The largest number of draft tokens of a request in a step."""

    def __post_init__(self) -> None:
        whole("num_draft_tokens", self.num_draft_tokens, 1)
        if self.model is None and self.cache is None:
            return
        if not callable(self.model):
            raise TypeError(f"model must be a function or a module, got {self.model!r}")
        if not isinstance(self.cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache, got {self.cache!r}")


class ModelDrafter:
    """Runs a draft model for the requests of one engine.

    Args:
        options: with a model and a cache.
        target: runs the engine's model.
        max_batch: the largest number of requests.
        chunk: the largest number of tokens that the draft model catches up with in a step.
    """

    def __init__(
        self, options: DraftModel, target: ModelRunner, max_batch: int, chunk: int
    ) -> None:
        model, cache = options.model, options.cache
        assert model is not None
        assert cache is not None
        self.num_draft_tokens = options.num_draft_tokens
        self._cache, self._chunk, self._target = cache, chunk, target
        self._device = cache.key_cache(0).device
        self._runner = ModelRunner(
            *(model, cache, max_batch, chunk, target.max_length, None, _BEHIND - 1)
        )
        self._sequences: dict[Request, KVSequence] = {}
        self._proposed: dict[Request, list[int]] = {}

    def warm_up(self) -> None:
        """Builds the plans of all steps, and captures their graphs."""
        self._runner.warm_up()

    def prepare(self, wanted: Mapping[Request, int], running: Sequence[Request]) -> None:
        """Runs the draft model: over what it has not seen, and behind what is wanted."""
        self._proposed = {}
        try:
            for request in running:
                self._settle(request)
            if self._runner.vocabulary is None:
                self._runner.compute_nothing()
            self._catch_up([request for request in running if self._knows(request)])
            self._draft({each: count for each, count in wanted.items() if self._knows(each)})
        except BaseException:
            # What was not computed must not be taken for keys and values.
            for request in running:
                self.release(request)
            raise

    def propose(self, request: Request, count: int) -> list[int]:
        """At most ``count`` of what was prepared."""
        return self._proposed.get(request, [])[:count]

    def release(self, request: Request) -> None:
        """Frees the pages of a request."""
        self._proposed.pop(request, None)
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self._cache.free(sequence)

    def forget(self, request: Request) -> None:
        """Nothing is known of a request without pages."""

    def _settle(self, request: Request) -> None:
        """Keeps what is right of a request's keys and values, and makes its pages known."""
        cache = self._cache
        if request not in self._sequences:
            self._sequences[request] = cache.allocate(request.tokens)
        sequence = self._sequences[request]
        # The engine has accepted drafts as far as they were right, and one token behind them, or
        # none if its step failed. So all but the last token are those that were computed.
        cache.truncate(sequence, min(sequence.length, len(request.tokens) - 1))
        full = sequence.length // cache.page_size
        if full > sequence._committed and cache.prefix_sharing:
            cache.commit(sequence, request.tokens[: full * cache.page_size])

    def _knows(self, request: Request) -> bool:
        """Whether the draft model has the tokens that it has not seen."""
        vocabulary = self._runner.vocabulary
        assert vocabulary is not None
        return max(request.tokens[self._sequences[request].length :]) < vocabulary

    def _catch_up(self, running: Sequence[Request]) -> None:
        """Computes what the draft model lacks of the requests, but for their last tokens."""
        shares: list[Share] = []
        slots: list[int] = []
        # As the engine, which has a token of each request beside the prompts in a step.
        budget = self._chunk + len(running)
        for request in running:
            sequence = self._sequences[request]
            start, behind = sequence.length, len(request.tokens) - sequence.length
            count = min(behind - 1, budget, self._chunk)
            if behind <= _BEHIND or count < 1:
                continue
            try:
                slots += self._cache.extend(sequence, count)
            except OutOfPages:
                continue
            shares.append(Share(request, sequence, start, start + count))
            budget -= count
        if shares:
            self._runner.compute(Batch(shares, slots), 0)

    def _draft(self, wanted: Mapping[Request, int]) -> None:
        """Computes draft tokens of the requests that the draft model has caught up with."""
        shares: list[Share] = []
        counts: list[int] = []
        first: list[int] = []  # slots of what it has not seen
        later: list[list[int]] = []  # of each request's drafts but the last
        for request, count in wanted.items():
            sequence = self._sequences[request]
            start, stop = sequence.length, len(request.tokens)
            if stop - start > _BEHIND:
                continue
            try:
                slots = self._cache.extend(sequence, stop - start + count - 1)
            except OutOfPages:
                continue
            shares.append(Share(request, sequence, start, stop))
            counts.append(count)
            first += slots[: stop - start]
            later.append(slots[stop - start :])
        if not shares:
            return
        rows = self._chain(Batch(shares, first, has_drafts=True), later)
        limit = self._target.vocabulary
        for share, count, drafts in zip(shares, counts, rows, strict=True):
            drafts = drafts[:count]
            # The engine's model may have fewer.
            known = next((i for i, t in enumerate(drafts) if limit is None or t >= limit), count)
            self._proposed[share.request] = drafts[:known]

    @torch.inference_mode()
    def _chain(self, batch: Batch, later: list[list[int]]) -> list[list[int]]:
        """Each request's drafts, one behind the other, and beyond what it has slots for.

        Args:
            batch: what the draft model has not seen.
            later: the slots behind that, of each request.
        """
        shares = batch.shares
        rows, steps = len(shares), 1 + max(map(len, later))
        size = padded_batch(rows)
        slots_of_steps = torch.full((steps - 1, size), -1)
        for row, slots in enumerate(later):
            slots_of_steps[: len(slots), row] = torch.tensor(slots, dtype=torch.int64)
        parts = {"slots": slots_of_steps.flatten()}
        samples = any(share.request.params.temperature for share in shares)
        if samples:
            options = [
                self._options(share.request, step) for step in range(steps) for share in shares
            ]
            parts["options"] = torch.tensor(options, dtype=torch.float64).flatten()
        parts = upload(parts, self._device)
        queries = max(share.stop - share.start for share in shares)
        chosen = torch.empty(steps, rows, dtype=torch.int64, device=self._device)
        for step in range(steps):
            if step == 0:
                logits, tokens = self._runner.compute(batch, queries)
            else:
                places = parts["slots"].view(-1, size)[step - 1]
                logits, tokens = self._runner.advance(chosen[step - 1], places)
            if samples:
                table = parts["options"].view(steps, rows, -1)[step]
                tokens, _ = sample(logits, table)
            # Any token will do where the draft model says NaN.
            torch.clamp(tokens, min=0, out=chosen[step])
        drafts: list[list[int]] = chosen.T.tolist()
        return drafts

    @staticmethod
    def _options(request: Request, ahead: int) -> tuple[float, ...]:
        params = request.params
        return (params.temperature, params.top_k, params.top_p, params.min_p, request.number(ahead))


class RankedDrafter:
    """Of an engine on several ranks: the first rank proposes, and the others learn what.

    Args:
        own: the first rank's; None on the others.
        num_draft_tokens: the largest number for a request.
        ranks: with a leader that has ``own``.
    """

    def __init__(self, own: ModelDrafter | None, num_draft_tokens: int, ranks: Ranks) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._own, self._ranks = own, ranks
        self._proposed: dict[Request, list[int]] = {}

    def warm_up(self) -> None:
        """Of the rank that has the model."""
        if self._own:
            self._own.warm_up()

    def prepare(self, wanted: Mapping[Request, int], running: Sequence[Request]) -> None:
        """Prepares on the first rank, and tells the others; they wait for it."""
        proposed: list[list[int]] = [[] for _ in wanted]
        try:
            if self._own:
                self._own.prepare(wanted, running)
                proposed = [self._own.propose(each, count) for each, count in wanted.items()]
        finally:
            # Also if it failed, for the others wait.
            if wanted:
                proposed = self._ranks.share_drafts(proposed, self.num_draft_tokens)
        self._proposed = dict(zip(wanted, proposed, strict=True))

    def propose(self, request: Request, count: int) -> list[int]:
        """At most ``count`` of what was prepared."""
        return self._proposed.get(request, [])[:count]

    def release(self, request: Request) -> None:
        """Frees the pages of a request, where there are any."""
        if self._own:
            self._own.release(request)

    def forget(self, request: Request) -> None:
        """Nothing is known of a request without pages."""
