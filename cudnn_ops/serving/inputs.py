"""The inputs of a step: what the host writes for the model, and where the device reads it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.serving.batch import Batch
from cudnn_ops.serving.memory import ALIGNMENT

# Format codes of array and memoryview.
_FORMATS: dict[torch.dtype, Literal["q", "i"]] = {torch.int64: "q", torch.int32: "i"}


#: Pinned copies that take turns, so that one may be written while another is still being read.
_STAGES = 2


class Inputs:
    """A step's inputs at fixed addresses, as CUDA graphs require; filled by a single copy.

    Args:
        tokens: the largest number of tokens in a step.
        rows: the largest number of tokens whose logits are wanted.
        batch: the largest number of requests.
        width: columns of the page table.
        device: where they are.
    """

    def __init__(
        self, tokens: int, rows: int, batch: int, width: int, device: torch.device
    ) -> None:
        sizes = {  # The table comes last: the copy ends behind the rows that are used.
            "tokens": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "slots": (torch.int64, (tokens,)),
            "last": (torch.int64, (rows,)),
            "places": (torch.int64, (batch,)),
            "sources": (torch.int64, (batch,)),
            "offsets": (torch.int32, (batch + 1,)),
            "lengths": (torch.int32, (batch,)),
            "table": (torch.int32, (batch, width)),
        }
        lengths = [dtype.itemsize * prod(shape) for dtype, shape in sizes.values()]
        # Each begins where any kernel may read it in its largest pieces.
        ends = list(accumulate(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths))
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._stages = [self._device]
        if device.type == "cuda":
            self._stages = [
                torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=True) for _ in range(_STAGES)
            ]
        starts = [0, *ends[:-1]]
        parts = {
            name: slice(start, start + length)
            for name, start, length in zip(sizes, starts, lengths, strict=True)
        }
        self._views = {
            name: self._device[parts[name]].view(dtype).view(shape)
            for name, (dtype, shape) in sizes.items()
        }
        # Written to as memory: a step writes up to nine inputs, and by way of tensors that would
        # take a third of a millisecond, in which the GPU may wait.
        self._memories: list[dict[str, memoryview]] = []
        for stage in self._stages:
            memory = memoryview((ctypes.c_ubyte * ends[-1]).from_address(stage.data_ptr()))
            self._memories.append(
                {
                    name: memory[parts[name]].cast("B").cast(_FORMATS[dtype])
                    for name, (dtype, _) in sizes.items()
                }
            )
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._stages)
        self._turn = 0
        self._width = width
        self._table_start = starts[-1]

    def __getitem__(self, name: str) -> Tensor:
        """One of the inputs on the device."""
        return self._views[name]

    def begin(self) -> None:
        """Call it before a step's inputs are written: their stage may have to be copied first."""
        self._turn = (self._turn + 1) % len(self._stages)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()

    def write(self, name: str, values: Iterable[int], size: int, padding: int) -> None:
        """Sets the first ``size`` elements of an input, with ``padding`` behind the values."""
        memory = self._memories[self._turn][name]
        words = array(memory.format, values)
        words.extend([padding] * (size - len(words)))
        memory[:size] = words

    def clear_table(self, batch: int) -> memoryview:
        """The first ``batch`` rows of the page table, all of page 0."""
        memory = self._memories[self._turn]["table"][: batch * self._width]
        memory[:] = array(memory.format, bytes(memory.nbytes))
        return memory

    def upload(self, batch: int) -> None:
        """Copies what was written, of the table ``batch`` rows."""
        stage = self._stages[self._turn]
        if stage is not self._device:
            size = self._table_start + batch * self._width * self._views["table"].itemsize
            self._device[:size].copy_(stage[:size], non_blocking=True)
            copied = self._copied[self._turn] = self._copied[self._turn] or torch.cuda.Event()
            copied.record()


#: In place of a token that only the device knows.
_UNKNOWN = (0,)


class Packed(NamedTuple):
    """The tokens of a step, one request behind the other."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    last: list[int]
    """The tokens whose logits are wanted."""
    offsets: list[int]
    """Where each request's tokens end."""
    places: Sequence[int] = ()
    """The tokens that only the device knows."""
    sources: Sequence[int] = ()
    """Where these are among those that the step before has chosen."""


def pack(batch: Batch, queries: int) -> Packed:
    """The tokens of a batch.

    Args:
        batch: what to compute.
        queries: how many tokens each request has at least, by padding before its own.
    """
    shares = batch.shares
    if not batch.has_drafts:  # most steps: a list for each request would take the host too long
        offsets = list(accumulate([share.stop - share.start for share in shares]))
        packed = Packed(
            [
                token
                for share in shares
                for token in share.request.tokens[share.start : share.stop] or _UNKNOWN
            ],
            [position for share in shares for position in range(share.start, share.stop)],
            batch.slots,
            [offset - 1 for offset in offsets],
            offsets,
        )
        if not batch.pending:
            return packed
        # The last token of each of those is all that is computed of it.
        awaited = [
            (place, batch.pending[share.request])
            for place, share in zip(packed.last, shares, strict=True)
            if share.request in batch.pending
        ]
        return packed._replace(
            places=[place for place, _ in awaited], sources=[row for _, row in awaited]
        )
    packed = Packed([], [], [], [], [])
    done = 0
    for share in shares:
        tokens = [*share.request.tokens[share.start : share.stop], *share.drafts]
        padding = max(0, queries - len(tokens))
        packed.tokens.extend([*[0] * padding, *tokens])
        packed.positions.extend([*[0] * padding, *range(share.start, share.start + len(tokens))])
        packed.slots.extend([*[-1] * padding, *batch.slots[done : done + len(tokens)]])
        done += len(tokens)
        end = len(packed.tokens)
        packed.last.extend(range(end - share.places, end))
        packed.offsets.append(end)
    return packed
