"""Runs a model over a step's tokens: inputs, attention over the cache, CUDA graphs."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from itertools import accumulate
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cudnn_ops.ops.paged import paged_attention
from cudnn_ops.serving.choosing import Chooser, Chosen
from cudnn_ops.serving.kv_cache import PagedKVCache
from cudnn_ops.serving.memory import ALIGNMENT
from cudnn_ops.serving.ranks import Ranks
from cudnn_ops.serving.scheduler import Batch
from cudnn_ops.serving.sequence import KVSequence


class Attend(Protocol):
    """The function that a model calls once per layer in place of attention."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Stores the tokens' keys and values, and attends to all tokens of their requests so far.

        Args:
            layer: 0 to the cache's ``layers - 1``.
            query: [tokens, heads, head size], with positions applied, in the cache's dtype.
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
            last: int64 [requests], the tokens whose logits are wanted: indices into ``tokens``.
            attend: to be called once for each layer, in any order.

        Returns:
            [requests, vocabulary], in any floating dtype.
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


# Format codes of array and memoryview.
_FORMATS: dict[torch.dtype, Literal["q", "i"]] = {torch.int64: "q", torch.int32: "i"}


class _Inputs:
    """A step's inputs at fixed addresses, as CUDA graphs require; filled by a single copy.

    Args:
        tokens: the largest number of tokens in a step.
        batch: the largest number of requests.
        width: columns of the page table.
        device: where they are.
    """

    def __init__(self, tokens: int, batch: int, width: int, device: torch.device) -> None:
        sizes = {  # The table comes last: the copy ends behind the rows that are used.
            "tokens": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "slots": (torch.int64, (tokens,)),
            "last": (torch.int64, (batch,)),
            "offsets": (torch.int32, (batch + 1,)),
            "lengths": (torch.int32, (batch,)),
            "table": (torch.int32, (batch, width)),
        }
        lengths = [dtype.itemsize * prod(shape) for dtype, shape in sizes.values()]
        # Each begins where any kernel may read it in its largest pieces.
        ends = list(accumulate(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths))
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._host = self._device
        if device.type == "cuda":
            self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=True)
        # Written to as memory: a step writes seven inputs, and by way of tensors that would take a
        # third of a millisecond, in which the GPU waits.
        memory = memoryview((ctypes.c_ubyte * ends[-1]).from_address(self._host.data_ptr()))
        self._views: dict[str, Tensor] = {}
        self._memory: dict[str, memoryview] = {}
        starts = [0, *ends[:-1]]
        for (name, (dtype, shape)), start, length in zip(
            sizes.items(), starts, lengths, strict=True
        ):
            part = slice(start, start + length)
            self._views[name] = self._device[part].view(dtype).view(shape)
            self._memory[name] = memory[part].cast("B").cast(_FORMATS[dtype])
        self._width = width
        self._table_start = starts[-1]

    def __getitem__(self, name: str) -> Tensor:
        """One of the inputs on the device."""
        return self._views[name]

    def write(self, name: str, values: Iterable[int], size: int, padding: int) -> None:
        """Sets the first ``size`` elements of an input, with ``padding`` behind the values."""
        memory = self._memory[name]
        words = array(memory.format, values)
        words.extend([padding] * (size - len(words)))
        memory[:size] = words

    def clear_table(self, batch: int) -> memoryview:
        """The first ``batch`` rows of the page table, all of page 0."""
        memory = self._memory["table"][: batch * self._width]
        memory[:] = array(memory.format, bytes(memory.nbytes))
        return memory

    def upload(self, batch: int) -> None:
        """Copies what was written, of the table ``batch`` rows.

        What is written next must wait until this copy is done.
        """
        if self._host is not self._device:
            size = self._table_start + batch * self._width * self._memory["table"].itemsize
            self._device[:size].copy_(self._host[:size], non_blocking=True)


class ModelRunner:
    """Computes the steps that the scheduler decides on.

    A step in which every request has one token is *decoding*: attention is batched, and on a GPU
    the whole model is replayed from a CUDA graph. Any other packs its queries. On a CPU it is the
    same code with the same padding, run each time.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        max_batch: int,
        chunk: int,
        max_length: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._model, self._cache, self._chunk = model, cache, chunk
        self._device = cache.key_cache(0).device
        self._max_batch = padded_batch(max_batch)
        self._chooser = Chooser(self._device, max_batch)
        # One width for all steps, and a power of 2: attention pads others, by a copy a layer.
        width = 1
        while width * cache.page_size < max_length:
            width *= 2
        self._inputs = _Inputs(chunk + self._max_batch, self._max_batch, width, self._device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self.replays = 0
        """Steps that were replayed from a CUDA graph."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Chosen:
        """Queues a step.

        Its result must have been read before the next one is launched.

        Returns:
            What follows each share's last token. Of no account where a share does not reach its
            request's last one, and on ranks that follow another.
        """
        shares = batch.shares
        counts = [share.stop - share.start for share in shares]
        self._fill(
            [token for share in shares for token in share.request.tokens[share.start : share.stop]],
            [position for share in shares for position in range(share.start, share.stop)],
            batch.slots,
            counts,
            [share.stop for share in shares],
            [share.sequence for share in shares],
        )
        logits, greedy = self._compute(counts)
        if self._device.type == "cuda" and max(counts) == 1:
            self.replays += 1
        if self._ranks is not None and not self._ranks.is_leader:
            return Chosen(greedy)
        return self._chooser.choose(logits, greedy, shares)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds all plans and captures all graphs, by steps that are nothing but padding."""
        sizes = sorted({padded_batch(batch) for batch in range(1, self._max_batch + 1)})
        # From the largest: the smaller graphs then find their memory in the pool that they share.
        for size in reversed(sizes):
            for counts in ([1] * size, [min(2, self._chunk)] + [1] * (size - 1)):
                total = sum(counts)
                self._fill([0] * total, [0] * total, [-1] * total, counts, [0] * size, [])
                self._compute(counts)[1].tolist()

    def _fill(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        counts: list[int],
        lengths: list[int],
        sequences: list[KVSequence],
    ) -> None:
        """Writes the inputs, with padding that is harmless: it is not stored, and sees nothing."""
        batch = padded_batch(len(counts))
        total = len(tokens)
        # Only decoding needs as many tokens as rows.
        size = batch if total == len(counts) else total
        offsets = list(accumulate(counts, initial=0))
        inputs = self._inputs
        inputs.write("tokens", tokens, size, 0)
        inputs.write("positions", positions, size, 0)
        inputs.write("slots", slots, size, -1)
        inputs.write("last", [offset - 1 for offset in offsets[1:]], batch, 0)
        inputs.write("offsets", offsets, batch + 1, total)
        inputs.write("lengths", lengths, batch, 0)
        table = inputs.clear_table(batch)
        self._cache.write_page_table(sequences, table, inputs["table"].shape[1])
        inputs.upload(batch)

    def _compute(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [requests, vocabulary] of the step whose inputs are there, and the greatest's."""
        requests, total = len(counts), sum(counts)
        batch = padded_batch(requests)
        if total > requests:
            offsets = self._inputs["offsets"][: batch + 1]
            # The bound is the same for all steps, for plans differ by it.
            logits, greedy = self._call(
                total, batch, cu_seqlens_q=offsets, max_seqlen_q=self._chunk, is_causal=True
            )
        elif self._device.type == "cuda":
            if batch not in self._graphs:
                self._capture(batch)
            graph, logits, greedy = self._graphs[batch]
            graph.replay()
        else:
            logits, greedy = self._call(batch, batch)
        return logits[:requests], greedy[:requests]

    def _call(self, tokens: int, batch: int, **packing: Any) -> tuple[Tensor, Tensor]:
        """The model; without ``packing``, each of the batch has one query."""
        inputs, cache = self._inputs, self._cache
        slots, lengths = inputs["slots"][:tokens], inputs["lengths"][:batch]
        table = inputs["table"][:batch]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            cache.append(layer, key, value, slots)
            caches = cache.key_cache(layer), cache.value_cache(layer)
            rows = query if packing else query.unsqueeze(1)
            options |= packing
            out = paged_attention(
                rows, *caches, table, lengths, kv_layout=cache.kv_layout, **options
            )
            return out if packing else out.squeeze(1)

        logits = self._model(
            inputs["tokens"][:tokens], inputs["positions"][:tokens], inputs["last"][:batch], attend
        )
        return logits, logits.argmax(-1)

    def _capture(self, batch: int) -> None:
        """Captures decoding of a batch. Runs it before, on the inputs that are there.

        No plan is built during a capture. That the step then is computed twice does no harm: the
        second time writes the same keys and values to the same slots.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._call(batch, batch)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread asks for events meanwhile, which must not end the capture.
        mode = "thread_local" if self._ranks else "global"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            outputs = self._call(batch, batch)
        self._graphs[batch] = (graph, *outputs)
