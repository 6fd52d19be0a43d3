"""Attention over more keys, merged into what is there: cases, and the formula in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cudnn_ops.ops.merge import merge_attention_state_

#: [batch, heads, length, size]. Sizes of whole pieces of 8 numbers, and of none; one row; more
#: rows than a block has; heads that fill 16 lanes once, twice and not at all.
SHAPES = (
    *((1, 4, 9, 128), (2, 3, 17, 64), (1, 2, 3, 256), (3, 1, 5, 192), (2, 5, 1, 8), (1, 1, 1, 1)),
    *((1, 3, 7, 5), (2, 2, 6, 100), (1, 1, 40, 72), (0, 2, 3, 16), (2, 2, 0, 16), (1, 2, 3, 0)),
)
#: Tokens before heads or heads before tokens; rows of a larger tensor; rows at odd addresses.
LAYOUTS = ("bshd", "bhsd", "rows", "odd")


@dataclass(frozen=True)
class Case:
    """A call; with ``is_wide``, into a state of float32."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    is_wide: bool
    layout: str

    def __str__(self) -> str:
        state = "float32" if self.is_wide else "narrow"
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype)[6:]} {state} {self.layout}"


def _cases() -> list[Case]:
    dtypes = (torch.float16, torch.bfloat16)
    kinds = itertools.cycle(itertools.product(dtypes, (False, True), LAYOUTS))
    # 16 kinds: each shape meets five of them, and in the end every kind occurs.
    return [Case(shape, *next(kinds)) for shape in SHAPES for _ in range(5)]


CASES = _cases()


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of [batch, heads, length, size], in memory as the layout says."""
    if layout == "bhsd":
        return tensor.clone()
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, length, size = tensor.shape
    before, room = (4, size) if layout == "rows" else (1, size + 1)
    around = tensor.new_full((batch, heads, length + before + 2, room), math.nan)
    found = around[:, :, before : before + length, room - size :]
    return found.copy_(tensor)


def check(
    case: Case, to_device: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> None:
    """Beside the formula in float64: within half a unit in the last place, and what is around."""
    torch.manual_seed(sum(case.shape))
    wide = torch.float32 if case.is_wide else case.dtype
    out = torch.randn(case.shape).to(wide)
    part = torch.randn(case.shape).to(case.dtype)
    lse, part_lse = (10 * torch.randn(case.shape[:3]) for _ in range(2))
    for number, side in enumerate((lse, part_lse, lse, part_lse)):
        side.view(-1)[number::7] = -math.inf  # what sees no key, on one side or on both
    out, part = (_laid_out(tensor, case.layout) for tensor in (out, part))
    largest = torch.maximum(lse, part_lse).double().nan_to_num(neginf=0.0).unsqueeze(-1)
    shares = [(side.double().unsqueeze(-1) - largest).exp() for side in (lse, part_lse)]
    total = shares[0] + shares[1]
    terms = [share * x.double() / total for share, x in zip(shares, (out, part), strict=True)]
    terms = [term.where(total > 0, 0.0) for term in terms]
    exact = terms[0] + terms[1]
    exact_lse = torch.logaddexp(lse.double(), part_lse.double())

    given = [to_device(tensor) for tensor in (out, lse, part, part_lse)]
    merge_attention_state_(*given)
    found, found_lse = back(given[0]), back(given[1])
    torch.testing.assert_close(found_lse.double(), exact_lse, rtol=1e-6, atol=2e-6)
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}[wide]
    size = sum(term.abs() for term in terms)
    room = exact.abs() * 2.0**-digits + size * 4e-6 + 2.0**-24
    assert ((found.double() - exact).abs() <= room).all(), case


def check_what_is_no_number(
    to_device: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
):
    """A part that sees nothing counts for nothing, whatever it holds; NaN stays NaN."""
    some = (0.5, -math.inf, math.nan, 3e38, -3e38)
    pairs = list(itertools.product(some, some))
    sides = [torch.tensor(side).view(1, 1, -1) for side in zip(*pairs, strict=True)]
    out, part = (torch.full((1, 1, len(pairs), 16), x, dtype=torch.bfloat16) for x in (2.0, 4.0))
    for side, state in zip(sides, (out, part), strict=True):
        state[side == -math.inf] = math.nan
    given = [to_device(tensor) for tensor in (out, sides[0], part, sides[1])]
    merge_attention_state_(*given)
    rows, sums = back(given[0])[0, 0], back(given[1])[0, 0].tolist()
    for (a, b), row, both in zip(pairs, rows, sums, strict=True):
        if math.isnan(a) or math.isnan(b):
            assert math.isnan(both), (a, b)
            assert row.isnan().all(), (a, b)
            continue
        peak = max(a, b)
        seen = [side > -math.inf and side >= peak - 100 for side in (a, b)]
        right = {(False, False): 0.0, (True, False): 2.0, (False, True): 4.0, (True, True): 3.0}
        assert row.tolist() == [right[seen[0], seen[1]]] * 16, (a, b)
        both_seen = math.log(2) if all(seen) else 0.0
        assert both == pytest.approx(peak + both_seen, rel=1e-6), (a, b)
