"""Attention over a split sequence: the cases, each rank's part of them, and the whole again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

import cudnn_ops.distributed as ours
from tests.cases import sdpa_features, varlen
from tests.cases.sdpa_features import Features, Results
from tests.cases.varlen import Packed
from tests.distributed.processes import device


@dataclass(frozen=True)
class Split:
    """A problem, dense or packed, and how it is split."""

    case: Features | Packed
    order: str = "contiguous"
    dtype: torch.dtype = torch.float64
    with_lse: bool = False
    """Whether the log-sum-exp has a gradient too."""
    peak: float = 0.0
    """What all scores lie around, at a head size of 64 and without another scale."""
    seed: int = 0

    def __str__(self) -> str:
        more = f"-peak{self.peak}" * bool(self.peak) + "-lse" * self.with_lse
        return f"{self.order}-{str(self.dtype)[6:]}{more}-{self.case}"


@dataclass(frozen=True)
class Problem:
    """The whole of a problem, the same on all ranks."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    grad_lse: Tensor | None
    extras: dict[str, Tensor]
    packed: varlen.Tensors | None = None


def make(split: Split, device: str = "cpu") -> Problem:
    """Fresh random values for each seed; in float64 of the sinks too, which type their gradient."""
    problem = _make(split, device)
    if split.dtype == torch.float64 and "sinks" in problem.extras:
        problem.extras["sinks"] = problem.extras["sinks"].double()
    return problem


def _make(split: Split, device: str) -> Problem:
    case = split.case
    if isinstance(case, Packed):
        tensors = varlen.make(replace(case, lse=split.with_lse), split.dtype, device, split.seed)
        inputs = (tensors.q, tensors.k, tensors.v)
        return Problem(inputs, tensors.grad_out, tensors.grad_lse, tensors.extras, tensors)
    inputs, extras, grad_out = sdpa_features.make_problem(case, split.dtype, device, split.seed)
    if split.peak:
        query, key, value = (tensor.clone() for tensor in inputs)
        query[..., 0], key[..., 0] = 8.0, split.peak
        inputs = (query, key, value)
    grad_lse = None
    if split.with_lse:
        generator = torch.Generator().manual_seed(split.seed)
        shape = (case.batch, case.heads, case.length)
        grad_lse = torch.randn(shape, generator=generator).to(device)
    return Problem(inputs, grad_out, grad_lse, extras)


def part(whole: Tensor, order: str, rank: int, ranks: int, dim: int) -> Tensor:
    """A rank's part, by an index for each token."""
    chunks = torch.arange(whole.shape[dim]).chunk(2 * ranks if order == "zigzag" else ranks)
    mine = [chunks[rank]] + ([chunks[2 * ranks - 1 - rank]] if order == "zigzag" else [])
    return whole.index_select(dim, torch.cat(mine).to(whole.device))


def whole(parts: list[Tensor], order: str, dim: int) -> Tensor:
    """What the parts are of."""
    length = sum(tensor.shape[dim] for tensor in parts)
    at = [part(torch.arange(length), order, rank, len(parts), 0) for rank in range(len(parts))]
    return torch.cat(parts, dim).index_select(dim, torch.cat(at).argsort())


def options_of(split: Split, problem: Problem) -> dict[str, Any]:
    """The keyword arguments of the functions under test."""
    case = split.case
    one = case.one if isinstance(case, Packed) else case
    options = one.kwargs() | problem.extras | {"order": split.order}
    if problem.packed is not None:
        options["cu_seqlens"] = problem.packed.offsets[0].cpu()
    return options


def run_part(
    split: Split, function: Callable[..., tuple[Tensor, Tensor]], group: distributed.ProcessGroup
) -> list[Tensor]:
    """This rank's results and gradients, in the order of ``Results``; the sinks' last."""
    problem = make(split, device().type)
    dim = 0 if problem.packed is not None else 2

    def mine(tensor: Tensor, dim: int) -> Tensor:
        return part(tensor, split.order, group.rank(), group.size(), dim)

    leaves = [mine(tensor, dim).requires_grad_() for tensor in problem.inputs]
    options = options_of(split, problem)
    wanted = list(leaves)
    if "sinks" in options:
        options["sinks"] = options["sinks"].detach().requires_grad_()
        wanted.append(options["sinks"])
    out, lse = function(*leaves, group, **options)
    results, given = [out], [mine(problem.grad_out, dim)]
    if problem.grad_lse is not None:
        results.append(lse)
        given.append(mine(problem.grad_lse, lse.dim() - 1).to(lse.dtype))
    grads = torch.autograd.grad(results, wanted, given)
    return [out.detach(), lse.detach(), *grads]


def run_parts(*calls: tuple[int, str, list[Split]]) -> list[list[list[Tensor]]]:
    """For a number of ranks and the name of a function each, what it is to compute.

    The first of the ranks take part; the others have no results.
    """
    results: list[list[list[Tensor]]] = []
    for ranks, name, splits in calls:
        group = distributed.new_group(list(range(ranks)))
        if not isinstance(group, distributed.ProcessGroup):
            results.append([])
            continue
        results.append([run_part(split, getattr(ours, name), group) for split in splits])
    return results


def joined(split: Split, parts: list[list[Tensor]]) -> Results:
    """The results of the whole, from those of the ranks."""
    dim = 0 if isinstance(split.case, Packed) else 2
    dims = [dim, parts[0][1].dim() - 1, dim, dim, dim]
    of_sinks = [rank[5] for rank in parts if len(rank) > 5]
    out, lse, query, key, value = (
        whole([rank[index] for rank in parts], split.order, dim) for index, dim in enumerate(dims)
    )
    sinks = torch.stack(of_sinks).sum(0) if of_sinks else None
    return Results(out, lse, query, key, value, None, sinks)


def check(split: Split, parts: list[list[Tensor]]) -> None:
    """Holds what the ranks gave against the float64 reference of the whole."""
    problem, actual = make(split), joined(split, parts)
    if problem.packed is not None:
        assert isinstance(split.case, Packed)
        varlen.check(split.case, problem.packed, actual)
    else:
        assert isinstance(split.case, Features)
        sdpa_features.check(
            split.case, problem.inputs, problem.extras, problem.grad_out, actual, problem.grad_lse
        )
