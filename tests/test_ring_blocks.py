"""The plan of ring attention: every visible score is in one call of one rank, and no other is."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from cudnn_ops.distributed.blocks import Block, Plan, plan_of


def visible(plan: Plan, low: float, high: float) -> torch.Tensor:
    """Which keys the queries of the whole sequence see."""
    i = torch.arange(plan.ranks * plan.length)[:, None]
    j = torch.arange(plan.ranks * plan.length_kv)
    seen = (j - i >= low) & (j - i <= high)
    if plan.starts:
        inner = torch.tensor(plan.starts[1:-1], dtype=torch.long)
        sequence = torch.bucketize(j, inner, right=True)
        seen &= sequence[:, None] == sequence
    return seen


def place(order: str, rank: int, ranks: int, length: int) -> torch.Tensor:
    """The positions that a rank holds."""
    if order == "contiguous":
        return torch.arange(length) + rank * length
    half = torch.arange(length // 2)
    return torch.cat([half + rank * len(half), half + (2 * ranks - 1 - rank) * len(half)])


def painted(block: Block, rows: int, columns: int) -> torch.Tensor:
    """The scores that one call computes."""
    scores = torch.zeros(rows, columns, dtype=torch.int)
    starts = block.starts or (0, max(rows, columns))
    for start, end in pairwise(starts):
        height = min(block.row_end, block.row + end) - block.row - start
        width = min(block.column_end, block.column + end) - block.column - start
        i, j = torch.arange(height)[:, None], torch.arange(width)
        seen = torch.ones(height, width, dtype=torch.bool)
        if block.left >= 0:
            seen &= j >= i - block.left
        if block.right >= 0:
            seen &= j <= i + block.right
        row, column = block.row + start, block.column + start
        scores[row : row + height, column : column + width] += seen.int()
    return scores


def draw(rng: random.Random) -> tuple[Plan, float, float]:
    ranks, order = rng.randint(1, 5), rng.choice(["contiguous", "zigzag"])
    unit = 2 if order == "zigzag" else 1
    length = unit * rng.randint(0, 7)
    is_packed = rng.random() < 0.4
    length_kv = length if is_packed or rng.random() < 0.5 else unit * rng.randint(0, 7)
    starts: tuple[int, ...] = ()
    if is_packed:
        inner = sorted(rng.randint(0, ranks * length) for _ in range(rng.randint(0, 5)))
        starts = (0, *inner, ranks * length)
    window = (rng.choice([-1, 0, 1, 4, 9, 30]), rng.choice([-1, 0, 1, 4, 9, 30]))
    is_causal, bottom_right = rng.random() < 0.4, rng.random() < 0.3
    shift = ranks * (length_kv - length) if bottom_right else 0
    low = -torch.inf if window[0] < 0 else shift - window[0]
    high = shift if is_causal else torch.inf if window[1] < 0 else shift + window[1]
    plan = plan_of(ranks, order, length, length_kv, is_causal, window, bottom_right, starts)
    return plan, low, high


@pytest.mark.parametrize("seed", range(10))
def test_every_visible_score_is_computed_once(seed):
    rng = random.Random(seed)
    for _ in range(60):
        plan, low, high = draw(rng)
        expected = visible(plan, low, high).int()
        for rank in range(plan.ranks):
            rows = place(plan.order, rank, plan.ranks, plan.length)
            for source in range(plan.ranks):
                columns = place(plan.order, source, plan.ranks, plan.length_kv)
                blocks = plan.blocks(rank, source)
                computed = torch.zeros(plan.length, plan.length_kv, dtype=torch.int)
                for block in blocks:
                    part = painted(block, plan.length, plan.length_kv)
                    assert part.any(), f"{block} of {plan} computes nothing"
                    computed += part
                assert torch.equal(computed, expected[rows][:, columns]), (plan, rank, source)
                if blocks:
                    assert (rank - source) % plan.ranks <= plan.farthest[source]


def calls(plan: Plan) -> list[list[int]]:
    """How many calls each rank makes for each source."""
    every = range(plan.ranks)
    return [[len(plan.blocks(rank, source)) for source in every] for rank in every]


def test_a_step_is_one_call():
    causal = plan_of(4, "zigzag", 6, 6, True, (-1, -1), False)
    assert calls(causal) == [[1] * 4] * 4
    assert causal.farthest == (3, 3, 3, 3)
    full = plan_of(4, "zigzag", 6, 6, False, (-1, -1), False)
    assert calls(full) == [[1] * 4] * 4
    assert full.blocks(0, 3) == [Block(0, 6, 0, 6)]


def test_work_is_equal_in_zigzag_order():
    plan = plan_of(4, "zigzag", 6, 6, True, (-1, -1), False)
    work = [
        sum(int(painted(b, 6, 6).sum()) for source in range(4) for b in plan.blocks(rank, source))
        for rank in range(4)
    ]
    assert work == [75] * 4


def test_keys_travel_as_far_as_a_query_sees_them():
    plan = plan_of(5, "contiguous", 8, 8, True, (9, -1), False)
    assert plan.farthest == (2, 2, 2, 1, 0)
    assert calls(plan) == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    causal = plan_of(4, "contiguous", 8, 8, True, (-1, -1), False)
    assert causal.farthest == (3, 2, 1, 0)
    packed = plan_of(4, "contiguous", 8, 8, False, (-1, -1), False, (0, 8, 20, 24, 32))
    assert packed.farthest == (0, 1, 3, 0)


def most_at_one_place(spans: list[range]) -> int:
    return max(Counter(place for span in spans for place in span).values(), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_how_many_parts_a_sum_has(seed):
    rng = random.Random(seed)
    for _ in range(60):
        plan, _, _ = draw(rng)
        for rank in range(plan.ranks):
            by_source = [plan.blocks(rank, source) for source in range(plan.ranks)]
            rows = [range(b.row, b.row_end) for blocks in by_source for b in blocks]
            assert plan.parts_of_queries(rank) == most_at_one_place(rows)
            for source, blocks in enumerate(by_source):
                columns = [range(b.column, b.column_end) for b in blocks]
                assert plan.parts_of_keys(rank, source) == most_at_one_place(columns)
