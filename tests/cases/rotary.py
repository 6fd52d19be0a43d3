"""Rotary embedding with its options: cases, inputs, and a reference that turns pair after pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cudnn_ops


@dataclass(frozen=True)
class RotaryCase:
    """A call.

    Attributes:
        name: for test ids.
        kv_heads: how many heads the keys have; None: there are no keys.
        size: of a head.
        interleaved: as in the call, and so are ``rotary_dim`` and ``sections``.
        of_pairs: whether cosines are those of pairs, not of numbers.
        rows: of a table, if there are positions.
        batch: of the angles.
    """

    name: str
    kv_heads: int | None = None
    size: int = 64
    interleaved: bool = False
    rotary_dim: int | None = None
    of_pairs: bool = False
    sections: tuple[int, ...] | None = None
    rows: int | None = None
    batch: int = 1
    position_dtype: torch.dtype = torch.int64

    @property
    def turned(self) -> int:
        return self.rotary_dim or self.size

    @property
    def options(self) -> dict[str, Any]:
        """Those that are no tensors."""
        return {
            "interleaved": self.interleaved,
            "rotary_dim": self.rotary_dim,
            "sections": self.sections,
        }

    def call(self, t: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The public function's results."""
        options = {**self.options, "positions": t["positions"]}
        if self.kv_heads is None:
            return (cudnn_ops.rotary_embedding(t["input"], t["cos"], t["sin"], **options),)
        both = t["input"], t["key"], t["cos"], t["sin"]
        return cudnn_ops.rotary_embedding_qk(*both, **options)


CASES = [
    RotaryCase("both", kv_heads=1),
    RotaryCase("both_of_numbers", kv_heads=5, size=6, batch=2),
    RotaryCase("neighbours", interleaved=True, batch=2),
    RotaryCase("neighbours_both", kv_heads=2, size=128, interleaved=True),
    RotaryCase("neighbours_of_numbers", kv_heads=3, size=10, interleaved=True),
    RotaryCase("neighbours_of_pairs", interleaved=True, rotary_dim=64, of_pairs=True, batch=2),
    RotaryCase("pairs", kv_heads=2, rotary_dim=64, of_pairs=True),
    RotaryCase("pairs_of_numbers", size=12, rotary_dim=12, of_pairs=True),
    RotaryCase("part", kv_heads=1, size=80, rotary_dim=32),
    RotaryCase("part_of_numbers", kv_heads=2, size=96, rotary_dim=20, of_pairs=True),
    RotaryCase("part_neighbours", size=128, interleaved=True, rotary_dim=32, of_pairs=True),
    RotaryCase("one_pair", kv_heads=1, size=9 * 2, interleaved=True, rotary_dim=2),
    RotaryCase("positions", kv_heads=2, rows=40, batch=2),
    RotaryCase("positions_of_32_bits", rows=1, position_dtype=torch.int32),
    RotaryCase("positions_part", interleaved=True, rotary_dim=32, of_pairs=True, rows=9, batch=2),
    RotaryCase("sections", kv_heads=1, sections=(16, 8, 8), batch=2),
    RotaryCase("sections_of_numbers", size=16, sections=(1, 2, 4, 1)),
    RotaryCase("sections_neighbours", interleaved=True, sections=(4, 20, 8), batch=2),
    RotaryCase("one_section", kv_heads=1, sections=(32,)),
    RotaryCase(
        "vision", kv_heads=3, size=80, rotary_dim=80, of_pairs=True, sections=(16, 24), rows=11
    ),
    RotaryCase(
        "everything",
        kv_heads=2,
        interleaved=True,
        rotary_dim=32,
        of_pairs=True,
        sections=(4, 8, 4),
        rows=30,
        batch=2,
        position_dtype=torch.int32,
    ),
]
B, H, S = 2, 3, 7


def draw(
    case: RotaryCase, dtype: torch.dtype, angles: torch.dtype, device: str, layout: str = "BSHD"
) -> dict[str, Tensor | None]:
    """Inputs of a call; queries and keys require gradients.

    Args:
        case: the call.
        dtype: of queries and keys.
        angles: the dtype of cosines and sines.
        device: where all are.
        layout: of heads in memory, "BSHD", or "sliced" out of longer ones.
    """

    def heads(count: int) -> Tensor:
        if layout == "BSHD":
            x = torch.randn(B, S, count, case.size, device=device).to(dtype).transpose(1, 2)
        else:
            x = torch.randn(B, count, S, case.size + 8, device=device).to(dtype)[..., 8:]
        return x.requires_grad_()

    axes = [] if case.sections is None else [len(case.sections)]
    columns = case.turned // 2 if case.of_pairs else case.turned
    rows = [*axes, case.batch, S] if case.rows is None else [case.rows]
    cos, sin = (torch.randn(*rows, columns, device=device).to(angles) for _ in range(2))
    positions = None
    if case.rows is not None:
        positions = torch.randint(case.rows, (*axes, case.batch, S), device=device)
        positions = positions.to(case.position_dtype)
    key = None if case.kv_heads is None else heads(case.kv_heads)
    return {"input": heads(H), "key": key, "cos": cos, "sin": sin, "positions": positions}


def turned(
    case: RotaryCase, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> Tensor:
    """One of the results, in the precision of the arguments: differentiable, pair by pair."""
    pairs = case.turned // 2
    sections = case.sections or (pairs,)
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    parts: list[Tensor] = list(x.unbind(-1))
    for pair, axis in enumerate(axes):
        first = 2 * pair if case.interleaved else pair
        second = first + 1 if case.interleaved else pair + pairs

        def factor(factors: Tensor, number: int, axis: int = axis, pair: int = pair) -> Tensor:
            column = factors[..., pair if case.of_pairs else number]
            if positions is not None:
                column = column[positions if case.sections is None else positions[axis]]
            elif case.sections is not None:
                column = column[axis]
            return column.unsqueeze(1)

        one, other = x[..., first], x[..., second]
        parts[first] = one * factor(cos, first) - other * factor(sin, first)
        parts[second] = other * factor(cos, second) + one * factor(sin, second)
    return torch.stack(parts, -1)
