"""Runs a model over a step's tokens: inputs, attention over the cache, CUDA graphs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from cudnn_ops.ops.paged import paged_attention
from cudnn_ops.ops.paged_plan import paged_plan, paged_uses_plan
from cudnn_ops.serving.batch import Batch
from cudnn_ops.serving.choosing import Chooser, Chosen, greatest
from cudnn_ops.serving.inputs import Inputs, Packed, pack
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.ranks import Ranks
from cudnn_ops.serving.sequence import KVSequence


class Attend(Protocol):
    """The function that a model calls once per layer in place of attention."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Stores the tokens' keys and values, and attends to all tokens of their requests so far.

        Args:
            layer: 0 to the cache's ``layers - 1``.
            query: [tokens, heads, head size], with positions applied, in the cache's dtype; beside
                a cache of ``float8_e4m3fn`` in float16 or bfloat16.
            key: [tokens, heads_kv, head size], likewise.
            value: [tokens, heads_kv, value size].
            options: ``scale``, ``window_size``, ``softcap``, ``sinks``, as
                :func:`cudnn_ops.paged_attention` accepts them.

        Returns:
            [tokens, heads, value size]; causal within each request.
        """
        ...


class Model(Protocol):
    """A transformer as the engine calls it, on the packed tokens of several requests.

    It does not see requests, pages or lengths. On a GPU it is captured in CUDA graphs, so it must
    neither wait for the GPU nor branch on the values of its inputs.
    """

    def __call__(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """The logits of some of the tokens.

        Args:
            tokens: int64 [tokens]. Some may be padding, whose results are not used.
            positions: int64 [tokens], the position of each in its request, from 0.
            last: int64 [rows], the tokens whose logits are wanted: indices into ``tokens``. A row
                for each request's last token; with speculation for its draft tokens too.
            attend: to be called once for each layer, in any order.

        Returns:
            [rows, vocabulary], in any floating dtype.
        """
        ...


def padded_batch(batch: int) -> int:
    """The batch size that serves so many requests: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    Attention's plans are declared for these sizes, so that no other one needs a plan of its own.
    """
    step = 1
    while 4 * step < batch:
        step *= 2
    return -(-batch // step) * step


class ModelRunner:
    """Computes the steps that the scheduler decides on.

    A step in which every request has one token is *decoding*: attention is batched, and on a GPU
    the whole model is replayed from a CUDA graph. If some have draft tokens besides, all have as
    many queries as a request may have, with padding before their own, for attention is aligned at
    the last one. Any other step packs its queries. On a CPU it is the same code with the same
    padding, run each time.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        max_batch: int,
        chunk: int,
        max_length: int,
        ranks: Ranks | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        self._ranks = ranks
        self._verified = 1 + num_draft_tokens  # queries of a request that has drafts
        self._model, self._cache, self._chunk = model, cache, chunk
        self.max_length = max_length
        self._device = cache.key_cache(0).device
        self._max_batch = padded_batch(max_batch)
        self._chooser = Chooser(self._device, max_batch)
        # One width for all steps, and a power of 2: attention pads others, by a copy a layer.
        width = 1
        while width * cache.page_size < max_length:
            width *= 2
        verified = self._max_batch * self._verified
        tokens = max(chunk + self._max_batch, verified)
        # A step that packs its queries may pad fewer rows than these to more.
        rows = padded_batch(verified)
        self._inputs = Inputs(tokens, rows, self._max_batch, width, self._device)
        # By batch and queries of each request.
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._rows = torch.arange(self._max_batch, device=self._device)
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self.replays = 0
        """Steps that were replayed from a CUDA graph."""
        self.vocabulary: int | None = None
        """How many tokens the logits are of; None before the first step."""

    @torch.inference_mode()
    def launch(self, batch: Batch, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queues the model over a step, as :meth:`compute`; :meth:`choose` must follow.

        Args:
            batch: what to compute.
            before: int64 [rows] on the device, what was chosen in the step before; for tokens that
                the host does not know yet.
        """
        queries = 0
        if batch.is_decoding:
            queries = self._verified if batch.has_drafts else 1
        return self.compute(batch, queries, before)

    @torch.inference_mode()
    def choose(self, batch: Batch, logits: Tensor, greedy: Tensor) -> Chosen:
        """Queues the choice of a step's tokens, before any other step is queued.

        Returns:
            What follows each share's last token and, behind that, each of its draft tokens. Of no
            account where a share does not reach its request's last token, and on ranks that follow
            another.
        """
        if self._ranks is not None and not self._ranks.is_leader:
            return Chosen(greedy)
        return self._chooser.choose(logits, greedy, batch.shares)

    @torch.inference_mode()
    def compute(
        self, batch: Batch, queries: int, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queues the model over a batch.

        Args:
            batch: what to compute.
            queries: 1, or as many as a request with drafts has, if no share has more tokens; 0
                packs them.
            before: as :meth:`launch`.

        Returns:
            The logits [rows, vocabulary], a row for each place of a share, and the token of each
            row's greatest, int64 [rows], negative where that is not finite. They may be overwritten
            by the next step.
        """
        if self._device.type == "cuda" and queries:
            self.replays += 1
        packed = pack(batch, queries)
        sequences = [share.sequence for share in batch.shares]
        self._fill(packed, queries, [share.length for share in batch.shares], sequences)
        if packed.places:
            assert before is not None
            self._take(len(packed.places), before)
        return self._compute(packed, queries)

    @torch.inference_mode()
    def advance(self, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Queues one more token of each request of the step before, without the host's knowing it.

        Of that step, each request had the same number of queries, and the page table had the pages
        of what follows already.

        Args:
            tokens: int64 [requests], on the device.
            slots: int64 [requests, padded to :func:`padded_batch`], on the device: where they are
                stored, and -1 for those that are not and are of no account.

        Returns:
            As :meth:`compute`.
        """
        rows, batch = len(tokens), len(slots)
        inputs = self._inputs
        lengths = inputs["lengths"][:batch]
        inputs["tokens"][:rows].copy_(tokens)
        inputs["positions"][:batch].copy_(lengths)
        inputs["slots"][:batch].copy_(slots)
        inputs["last"][:batch].copy_(self._rows[:batch])
        lengths.add_(slots >= 0)
        logits, greedy = self._batched(batch, 1)
        return logits[:rows], greedy[:rows]

    @torch.inference_mode()
    def compute_nothing(self) -> None:
        """Queues a step of padding: then it is known how many tokens the logits are of."""
        packed = Packed([0], [0], [-1], [0], [1])
        self._fill(packed, 1, [0], [])
        self._compute(packed, 1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds all plans and captures all graphs, by steps that are nothing but padding."""
        sizes = sorted({padded_batch(batch) for batch in range(1, self._max_batch + 1)})
        # From the largest: the smaller graphs then find their memory in the pool that they share.
        for size in reversed(sizes):
            prompt = [min(2, self._chunk)] + [1] * (size - 1)
            for queries, counts in (
                *((count, [count] * size) for count in sorted({1, self._verified}, reverse=True)),
                (0 if self._chunk > 1 else 1, prompt),
            ):
                zeros, offsets = [0] * sum(counts), list(accumulate(counts))
                packed = Packed(zeros, zeros, [-1] * len(zeros), [0] * size, offsets)
                self._fill(packed, queries, [0] * size, [])
                self._compute(packed, queries)[1].tolist()

    def release_graphs(self) -> None:
        """Releases the CUDA graphs, which are captured again when they are needed.

        NCCL destroys a communicator only after all graphs with its collectives are gone, and waits
        forever where one is kept (NVIDIA's CUDA graph guide, Troubleshooting, Process Hang).
        """
        self._graphs.clear()
        # The pool is kept as long as a tensor of it is, and no graph may join it any more.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def _fill(
        self, packed: Packed, queries: int, lengths: list[int], sequences: list[KVSequence]
    ) -> None:
        """Writes the inputs, with padding that is harmless: it is not stored, and sees nothing.

        Args:
            packed: the tokens.
            queries: how many each request has if that is the same number for all, else 0.
            lengths: of the requests, with these tokens.
            sequences: where they are stored.
        """
        batch = padded_batch(len(packed.offsets))
        total = len(packed.tokens)
        # Only decoding needs as many tokens as rows.
        size = batch * queries or total
        inputs = self._inputs
        inputs.begin()
        inputs.write("tokens", packed.tokens, size, 0)
        inputs.write("positions", packed.positions, size, 0)
        inputs.write("slots", packed.slots, size, -1)
        inputs.write("last", packed.last, batch * queries or padded_batch(len(packed.last)), 0)
        if packed.places:
            inputs.write("places", packed.places, len(packed.places), 0)
            inputs.write("sources", packed.sources, len(packed.sources), 0)
        inputs.write("offsets", [0, *packed.offsets], batch + 1, total)
        inputs.write("lengths", lengths, batch, 0)
        table = inputs.clear_table(batch)
        self._cache.write_page_table(sequences, table, inputs["table"].shape[1])
        inputs.upload(batch)

    def _take(self, count: int, before: Tensor) -> None:
        """Puts tokens that only the device knows, so many, into their places of the inputs."""
        inputs = self._inputs
        if self._ranks is not None:
            before = self._ranks.share_tokens(before)
        tokens = before.index_select(0, inputs["sources"][:count])
        # Where there is none, its request fails, and any other will do.
        inputs["tokens"].index_copy_(0, inputs["places"][:count], tokens.clamp_min_(0))

    def _compute(self, packed: Packed, queries: int) -> tuple[Tensor, Tensor]:
        """Logits [rows, vocabulary] of the step whose inputs are there, and the greatest's."""
        rows, batch = len(packed.last), padded_batch(len(packed.offsets))
        if not queries:
            offsets = self._inputs["offsets"][: batch + 1]
            # The bound is the same for all steps, for plans differ by it.
            logits, greedy = self._call(
                len(packed.tokens),
                padded_batch(rows),
                batch,
                cu_seqlens_q=offsets,
                max_seqlen_q=self._chunk,
                is_causal=True,
            )
        else:
            logits, greedy = self._batched(batch, queries)
        self.vocabulary = logits.shape[1]
        return logits[:rows], greedy[:rows]

    def _batched(self, batch: int, queries: int) -> tuple[Tensor, Tensor]:
        """As :meth:`_decode`; on a GPU from a CUDA graph."""
        if self._device.type != "cuda":
            return self._decode(batch, queries)
        if (batch, queries) not in self._graphs:
            self._capture(batch, queries)
        graph, logits, greedy = self._graphs[batch, queries]
        graph.replay()
        return logits, greedy

    def _decode(self, batch: int, queries: int) -> tuple[Tensor, Tensor]:
        """The model where each of the batch has so many queries; all of their logits."""
        options = {"is_causal": True} if queries > 1 else {}
        return self._call(batch * queries, batch * queries, batch, queries, **options)

    def _call(
        self, tokens: int, rows: int, batch: int, queries: int = 0, **masking: Any
    ) -> tuple[Tensor, Tensor]:
        """The model on so many tokens, with logits of so many; without ``queries``, packed."""
        inputs, cache = self._inputs, self._cache
        slots, lengths = inputs["slots"][:tokens], inputs["lengths"][:batch]
        table = inputs["table"][:batch]
        # By what they depend on of a layer: layers share them. None where a plan has no effect.
        plans: dict[tuple[int, tuple[int, int]], Tensor | None] = {}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            cache.append(layer, key, value, slots)
            caches = cache.key_cache(layer), cache.value_cache(layer)
            each = query.unflatten(0, (batch, queries)) if queries else query
            options |= masking | cache.descales(layer)
            window = tuple(options.get("window_size", (-1, -1)))
            kind = (query.shape[1], window)
            if kind not in plans:
                arguments = (each, *caches, table, lengths)
                is_used = caches[0].dtype == torch.float8_e4m3fn or (
                    queries > 0 and paged_uses_plan(*arguments, kv_layout=cache.kv_layout)
                )
                plans[kind] = None
                if is_used:
                    plans[kind] = paged_plan(
                        *(each, caches[0], lengths),
                        window_size=window,
                        kv_layout=cache.kv_layout,
                        **masking,
                    )
            if plans[kind] is not None:
                options["plan"] = plans[kind]
            out = paged_attention(
                each, *caches, table, lengths, kv_layout=cache.kv_layout, **options
            )
            return out.flatten(0, 1) if queries else out

        last = inputs["last"][:rows]
        logits = self._model(inputs["tokens"][:tokens], inputs["positions"][:tokens], last, attend)
        return logits, greatest(logits)

    def _capture(self, batch: int, queries: int) -> None:
        """Captures decoding of a batch. Runs it before, on the inputs that are there.

        No plan is built during a capture. That the step then is computed twice does no harm: the
        second time writes the same keys and values to the same slots.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._decode(batch, queries)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread asks for events meanwhile, which must not end the capture.
        mode = "thread_local" if self._ranks else "global"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            outputs = self._decode(batch, queries)
        self._graphs[batch, queries] = (graph, *outputs)
