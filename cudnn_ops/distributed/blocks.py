"""Which queries of a rank see which keys of another, as calls that attention can compute.

A rank's queries and keys are chunks of the sequence. Of two chunks the visible scores are a band of
a rectangle; cut to the rows and columns that it touches, the band contains the diagonal from the
first row and column, and is a window aligned top-left.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from cudnn_ops.distributed.order import Chunk, chunks_of


class Band(NamedTuple):
    """A query sees the keys at positions from ``low`` to ``high`` beyond its own."""

    low: float
    high: float


class Block(NamedTuple):
    """One call of attention: rows [row, row_end) of the rank's queries, columns likewise."""

    row: int
    row_end: int
    column: int
    column_end: int
    left: int = -1
    right: int = -1
    """The window, aligned top-left; -1 for all keys on that side."""
    starts: tuple[int, ...] = ()
    """Not empty: a packed call, of sequences at these offsets among rows and columns alike."""


def block_of(queries: Chunk, keys: Chunk, band: Band) -> Block | None:
    """What the chunks' queries see of the keys; None if nothing."""
    distance = keys.start - queries.start
    low, high = band.low - distance, band.high - distance
    rows = max(0, -high), min(queries.size, keys.size - low)
    columns = max(0, low), min(keys.size, queries.size + high)
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return None
    shift = columns[0] - rows[0]
    left, right = shift - low, high - shift
    return Block(
        int(queries.local + rows[0]),
        int(queries.local + rows[1]),
        int(keys.local + columns[0]),
        int(keys.local + columns[1]),
        -1 if left >= rows[1] - rows[0] - 1 else int(left),
        -1 if right >= columns[1] - columns[0] - 1 else int(right),
    )


def joined(blocks: Iterable[Block]) -> list[Block]:
    """The same with fewer calls: blocks that lie side by side and see everything are one."""
    result: list[Block] = []
    for block in blocks:
        whole = block
        while (other := next((one for one in result if _union(one, whole)), None)) is not None:
            result.remove(other)
            whole = _union(other, whole) or whole
        result.append(whole)
    return result


def _union(one: Block, other: Block) -> Block | None:
    if any(block[4:] != (-1, -1, ()) for block in (one, other)):
        return None
    if one[:2] == other[:2] and one.column_end == other.column:
        return one._replace(column_end=other.column_end)
    if one[2:4] == other[2:4] and one.row_end == other.row:
        return one._replace(row_end=other.row_end)
    return None


@dataclass(frozen=True)
class Plan:
    """A call's geometry: the same on all ranks, so that each knows what the others need."""

    ranks: int
    order: str
    length: int
    """Of the queries of one rank."""
    length_kv: int
    band: Band
    starts: tuple[int, ...] = ()
    """Of packed sequences in the whole batch; empty: one sequence."""

    def blocks(self, rank: int, source: int) -> list[Block]:
        """What a rank's queries see of the keys that come from ``source``."""
        if (rank, source) not in self._known:
            self._known[rank, source] = self._blocks(rank, source)
        return self._known[rank, source]

    @cached_property
    def _known(self) -> dict[tuple[int, int], list[Block]]:
        return {}

    def parts_of_queries(self, rank: int) -> int:
        """How many blocks a query of the rank is in, at most."""
        return self._parts_of_queries[rank]

    @cached_property
    def _parts_of_queries(self) -> tuple[int, ...]:
        every = range(self.ranks)
        return tuple(
            most_parts((b.row, b.row_end) for source in every for b in self.blocks(rank, source))
            for rank in every
        )

    def parts_of_keys(self, rank: int, source: int) -> int:
        """How many blocks of the rank's queries a key from ``source`` is in, at most."""
        blocks = self.blocks(rank, source)
        return most_parts((block.column, block.column_end) for block in blocks)

    def _blocks(self, rank: int, source: int) -> list[Block]:
        if self.length == 0 or self.length_kv == 0:
            return []
        queries = chunks_of(self.order, rank, self.ranks, self.length)
        keys = chunks_of(self.order, source, self.ranks, self.length_kv)
        if self.starts:
            return self._packed_blocks(queries, keys)
        if queries == keys and self.band == Band(-math.inf, 0):
            # Ascending positions: causal by position is causal by place.
            return [Block(0, self.length, 0, self.length_kv, -1, 0)]
        found = (block_of(some, others, self.band) for some in queries for others in keys)
        return joined([block for block in found if block is not None])

    def _packed_blocks(self, queries: tuple[Chunk, ...], keys: tuple[Chunk, ...]) -> list[Block]:
        blocks, own = [], []
        for some in queries:
            for others in keys:
                if some == others:
                    own.append(some)
                elif (block := self._across(some, others)) is not None:
                    blocks.append(block)
        return joined([*self._within(own), *joined(blocks)])

    def _within(self, chunks: list[Chunk]) -> list[Block]:
        """What lies in the same chunks: any number of sequences, in one call."""
        if not chunks:
            return []
        first, offsets = chunks[0].local, [0]
        for chunk in chunks:
            inner = self.starts[
                bisect_right(self.starts, chunk.start) : bisect_left(
                    self.starts, chunk.start + chunk.size
                )
            ]
            place = chunk.local - first - chunk.start
            offsets += [start + place for start in inner] + [place + chunk.start + chunk.size]
        left, right = (-1 if math.isinf(side) else abs(int(side)) for side in self.band)
        end = first + offsets[-1]
        if len(offsets) == 2:
            return [replace_window(Block(first, end, first, end), left, right)]
        return [Block(first, end, first, end, left, right, tuple(offsets))]

    def _across(self, queries: Chunk, keys: Chunk) -> Block | None:
        """What different chunks share: at most the one sequence that lies between them too."""
        later = max(queries.start, keys.start)
        index = bisect_right(self.starts, later) - 1
        span = self.starts[index], self.starts[index + 1]
        pieces = []
        for chunk in (queries, keys):
            start, end = max(chunk.start, span[0]), min(chunk.start + chunk.size, span[1])
            if start >= end:
                return None
            pieces.append(Chunk(chunk.local + start - chunk.start, start, end - start))
        return block_of(pieces[0], pieces[1], self.band)

    @cached_property
    def farthest(self) -> tuple[int, ...]:
        """For each rank, how many passes its keys travel: no rank beyond sees them."""
        return tuple(
            next(
                (
                    distance
                    for distance in range(self.ranks - 1, 0, -1)
                    if self.blocks((source + distance) % self.ranks, source)
                ),
                0,
            )
            for source in range(self.ranks)
        )


def most_parts(spans: Iterable[tuple[int, int]]) -> int:
    """How many of the spans hold the place that is in most of them."""
    # At one place spans end before others begin.
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    return max(accumulate(step for _, step in changes), default=0)


def replace_window(block: Block, left: int, right: int) -> Block:
    """The block with a window, -1 where that hides nothing."""
    size = block.row_end - block.row
    return block._replace(
        left=-1 if left >= size - 1 else left, right=-1 if right >= size - 1 else right
    )


@lru_cache(maxsize=256)
def plan_of(
    ranks: int,
    order: str,
    length: int,
    length_kv: int,
    is_causal: bool,
    window_size: tuple[int, int],
    bottom_right: bool,
    starts: tuple[int, ...] = (),
) -> Plan:
    """The plan of a call, from its arguments."""
    left, right = window_size
    shift = (length_kv - length) * ranks if bottom_right and not starts else 0
    band = Band(
        -math.inf if left < 0 else shift - left,
        shift if is_causal else math.inf if right < 0 else shift + right,
    )
    return Plan(ranks, order, length, length_kv, band, starts)
