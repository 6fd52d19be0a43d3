"""Mixtures of experts: cases, their tensors, and plain loops in float64 as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases import sdpa


@dataclass(frozen=True)
class MoeCase:
    """``tokens`` of ``dim`` numbers, each of which goes to ``top_k`` of ``experts``."""

    tokens: int
    top_k: int
    experts: int
    dim: int
    hidden: int = 24
    choice: str = "random"
    """"random": different ones; "one": all to the last; "few": to a quarter of them, some twice;
    "none": some to none; "nobody": all to none."""
    layout: str = "dense"
    """"sliced": rows with gaps; "flat": views of flat buffers, at no multiple of 16 bytes;
    "expanded": all rows are one."""
    index: torch.dtype = torch.int64
    weights: str = "float32"
    """"float32", "same" as the tokens, or "": none."""

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.dim}-{self.top_k}of{self.experts}-h{self.hidden}"
        return f"{sizes}-{self.choice}-{self.layout}-w{self.weights or 'none'}"


CASES = [
    MoeCase(33, 2, 8, 64),
    MoeCase(1, 1, 1, 8, hidden=8),
    MoeCase(7, 4, 4, 33, hidden=5, index=torch.int32, weights="same"),
    MoeCase(50, 3, 16, 40, choice="one", layout="sliced"),
    MoeCase(64, 2, 60, 24, choice="few", layout="flat", weights=""),
    MoeCase(29, 8, 64, 16, choice="none", layout="expanded", weights="same"),
    MoeCase(5, 2, 3, 1, hidden=1, choice="nobody"),
    MoeCase(0, 2, 4, 16),
    MoeCase(6, 0, 4, 16),
    MoeCase(6, 2, 4, 0),
    MoeCase(1500, 6, 128, 32, hidden=16, layout="flat"),  # several blocks of pairs
]


class Tensors(NamedTuple):
    input: Tensor
    experts: Tensor
    weights: Tensor | None
    rows: Tensor
    """Values for each pair, as experts would give them."""
    gate_up: Tensor
    down: Tensor
    grad: Tensor
    """[tokens, dim]."""


def choose(case: MoeCase, generator: torch.Generator) -> Tensor:
    shape = case.tokens, case.top_k
    if case.choice == "one":
        return torch.full(shape, case.experts - 1)
    if case.choice == "nobody":
        return torch.full(shape, -1)
    if case.choice == "few":
        return torch.randint(max(case.experts // 4, 1), shape, generator=generator)
    chosen = torch.rand(case.tokens, case.experts, generator=generator).topk(case.top_k).indices
    if case.choice == "none":
        chosen[torch.rand(shape, generator=generator) < 0.3] = -1
    return chosen


def make(case: MoeCase, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def laid_out(count: int) -> Tensor:
        if case.layout == "sliced":
            return draw(count, case.dim + 8).to(dtype).to(device)[:, : case.dim]
        if case.layout == "flat":
            memory = draw(count * case.dim + 1).to(dtype).to(device)
            return memory[1:].view(count, case.dim)
        if case.layout == "expanded":
            return draw(1, case.dim).to(dtype).to(device).expand(count, -1)
        return draw(count, case.dim).to(dtype).to(device)

    weights = None
    if case.weights:
        kind = torch.float32 if case.weights == "float32" else dtype
        weights = draw(case.tokens, case.top_k).to(kind).to(device).requires_grad_()
    scale = max(case.dim, 1) ** -0.5
    return Tensors(
        laid_out(case.tokens).requires_grad_(),
        choose(case, generator).to(case.index).to(device),
        weights,
        laid_out(case.tokens * case.top_k).requires_grad_(),
        (draw(case.experts, 2 * case.hidden, case.dim) * scale)
        .to(dtype)
        .to(device)
        .requires_grad_(),
        (draw(case.experts, case.dim, case.hidden) * case.hidden**-0.5)
        .to(dtype)
        .to(device)
        .requires_grad_(),
        laid_out(case.tokens),
    )


def places(experts: Tensor, count: int) -> tuple[list[int], list[list[int]]]:
    """Where the rows of each expert end, and the row of each pair, by lists."""
    pairs = experts.flatten().tolist()
    ordered = [pair for group in (*range(count), -1) for pair, e in enumerate(pairs) if e == group]
    row_of = {pair: row for row, pair in enumerate(ordered)}
    positions = [row_of[i] if e >= 0 else -1 - row_of[i] for i, e in enumerate(pairs)]
    ends = [sum(0 <= e <= group for e in pairs) for group in range(count)]
    width = experts.shape[1]
    return ends, [positions[t * width : (t + 1) * width] for t in range(experts.shape[0])]


def permuted(case: MoeCase, t: Tensors, input: Tensor) -> Tensor:
    """The rows, in the precision of ``input``, differentiable."""
    _, positions = places(t.experts, case.experts)
    rows: list[Tensor] = [input.new_zeros(case.dim)] * t.experts.numel()
    for token, of_token in enumerate(positions):
        for position in of_token:
            if position >= 0:
                rows[position] = input[token]
    return torch.stack(rows) if rows else input.new_zeros(0, case.dim)


def combined(case: MoeCase, t: Tensors, rows: Tensor, weights: Tensor | None) -> Tensor:
    """The sums, in the precision of ``rows``."""
    _, positions = places(t.experts, case.experts)
    sums = []
    for token, of_token in enumerate(positions):
        total = rows.new_zeros(case.dim)
        for j, position in enumerate(of_token):
            if position >= 0:
                factor = 1 if weights is None else weights[token, j].to(rows.dtype)
                total = total + factor * rows[position]
        sums.append(total)
    return torch.stack(sums) if sums else rows.new_zeros(0, case.dim)


def mixture(
    t: Tensors, input: Tensor, weights: Tensor | None, gate_up: Tensor, down: Tensor
) -> Tensor:
    """What the experts give for each token, one expert after the other."""
    out = torch.zeros_like(input)
    for expert in range(gate_up.shape[0]):
        token, j = torch.where(t.experts == expert)
        gate, up = (input[token] @ gate_up[expert].t()).chunk(2, -1)
        result = (F.silu(gate) * up) @ down[expert].t()
        if weights is not None:
            result = result * weights[token, j, None].to(result.dtype)
        out = out.index_add(0, token, result)
    return out


def check_all(
    found: list[Tensor], exact: list[Tensor], rough: list[Tensor], names: str, what: object
) -> None:
    for name, mine, right, other in zip(names.split(), found, exact, rough, strict=True):
        assert mine.shape == right.shape, f"{what} {name}"
        sdpa.check(mine, right, other, f"{what} {name}")
