"""Packed attention: the cases, their tensors, and each sequence by itself as the reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.cases import sdpa, sdpa_features
from tests.cases.sdpa_features import Features, Results

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class Sequences:
    """Sequences with this many queries and keys; ``one`` has the rest, its own lengths aside."""

    lengths: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    one: Features

    def sequence(self, index: int) -> Features:
        """One of them by itself."""
        return replace(
            self.one,
            batch=1,
            length=self.lengths[index],
            length_kv=self.lengths_kv[index],
            layout="bhsd",
        )


@dataclass(frozen=True)
class Packed(Sequences):
    """Sequences one behind the other."""

    gaps: tuple[int, ...] = ()
    """Unused tokens behind each sequence, of queries and of keys; empty: none."""
    offsets: torch.dtype = torch.int32
    together: bool = False
    """Whether query, key and value lie side by side, [tokens, 3, H, D]."""
    same: bool = False
    """Whether one tensor of offsets serves both."""
    lse: bool = False
    """Whether the log-sum-exp has a gradient too."""

    def __str__(self) -> str:
        return (
            f"{self.lengths}x{self.lengths_kv}gaps{self.gaps}-{str(self.offsets)[6:]}"
            f"{'-together' * self.together}{'-same' * self.same}{'-lse' * self.lse}-{self.one}"
        )

    def kwargs(self) -> dict[str, Any]:
        one = self.one
        return {
            "softmax_scale": one.scale,
            "causal": one.is_causal,
            "window_size": one.window_size,
            "bottom_right": one.bottom_right,
            "softcap": one.softcap,
            "dropout_p": one.dropout_p,
            "deterministic": one.deterministic,
        }

    def starts(self, lengths: tuple[int, ...]) -> list[int]:
        gaps = self.gaps or (0,) * len(lengths)
        starts = [0]
        for length, gap in zip(lengths, gaps, strict=True):
            starts.append(starts[-1] + length + gap)
        return starts


@dataclass(frozen=True)
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    offsets: tuple[Tensor, Tensor, int, int]
    extras: dict[str, Tensor]


def make(case: Packed, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    """Random values; NaN in the gaps, which nothing may read."""
    generator = torch.Generator().manual_seed(seed)
    one = case.one

    def packed(lengths: tuple[int, ...], heads: int, size: int) -> Tensor:
        starts = case.starts(lengths)
        memory = torch.full((starts[-1], heads, size), math.nan, dtype=torch.float64)
        for start, length in zip(starts, lengths, strict=False):
            shape = (length, heads, size)
            memory[start : start + length] = torch.randn(
                shape, generator=generator, dtype=torch.float64
            )
        return memory.to(dtype)

    q = packed(case.lengths, one.heads, one.head_size)
    k = packed(case.lengths_kv, one.heads_kv, one.head_size)
    v = packed(case.lengths_kv, one.heads_kv, one.value_size)
    grad_out = packed(case.lengths, one.heads, one.value_size).nan_to_num()
    # Drawn last, so that everything else is the same without it.
    grad_lse = packed(case.lengths, one.heads, 1).float().nan_to_num().squeeze(-1).t()
    if case.together:
        q, k, v = torch.stack([q, k, v], 1).to(device).unbind(1)
    cu_q = torch.tensor(case.starts(case.lengths), dtype=case.offsets, device=device)
    cu_k = torch.tensor(case.starts(case.lengths_kv), dtype=case.offsets, device=device)
    longest = (max(case.lengths, default=0), max(case.lengths_kv, default=0))
    extras = sdpa_features.make_extras(one, dtype, device, seed)
    if case.gaps:
        extras["seqused_q"] = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        extras["seqused_k"] = torch.tensor(case.lengths_kv, dtype=torch.int32, device=device)
    return Tensors(
        q.to(device),
        k.to(device),
        v.to(device),
        grad_out.to(device),
        grad_lse.to(device) if case.lse else None,
        (cu_q, cu_q if case.same else cu_k, *longest),
        extras,
    )


def run(case: Packed, tensors: Tensors) -> Results:
    leaves = [t.detach().requires_grad_() for t in (tensors.q, tensors.k, tensors.v)]
    extras = dict(tensors.extras)
    if case.one.sinks:
        extras["sinks"] = extras["sinks"].detach().requires_grad_()
    out, lse = _ops.varlen_attention_with_lse(*leaves, *tensors.offsets, **case.kwargs(), **extras)
    wanted = [*leaves, extras["sinks"]] if case.one.sinks else leaves
    results, given = [out], [tensors.grad_out]
    if tensors.grad_lse is not None:
        results.append(lse)
        given.append(tensors.grad_lse)
    grads = torch.autograd.grad(results, wanted, given)
    query, key, value = grads[:3]
    grad_sinks = grads[3] if case.one.sinks else None
    return Results(out.detach(), lse.detach(), query, key, value, None, grad_sinks)


def _parts(case: Packed, tensors: Tensors, index: int) -> tuple[slice, slice]:
    slices = []
    for lengths in (case.lengths, case.lengths_kv):
        start = case.starts(lengths)[index]
        slices.append(slice(start, start + lengths[index]))
    return slices[0], slices[1]


def _one(packed: Tensor, tokens: slice) -> Tensor:
    return packed[tokens].transpose(0, 1).unsqueeze(0).contiguous()


def kept(case: Packed, tensors: Tensors, index: int) -> Tensor | None:
    """Which weights of a sequence the operator keeps: with one-hot values a weight is an output."""
    if not case.one.dropout_p:
        return None
    queries, keys = _parts(case, tensors, index)
    width, count = case.one.value_size, case.lengths_kv[index]
    result = torch.zeros(1, case.one.heads, case.lengths[index], count, dtype=torch.bool)
    result = result.to(tensors.q.device)
    for start in range(0, count, width):
        some = min(width, count - start)
        one_hot = torch.zeros_like(tensors.v).contiguous()
        rows = slice(keys.start + start, keys.start + start + some)
        one_hot[rows, :, :some] = torch.eye(some, dtype=one_hot.dtype, device=one_hot.device)[
            :, None
        ]
        out = _ops.varlen_attention(
            tensors.q, tensors.k, one_hot, *tensors.offsets, **case.kwargs(), **tensors.extras
        )
        result[0, ..., start : start + some] = out[queries].transpose(0, 1)[..., :some] != 0
    return result


def check(case: Packed, tensors: Tensors, actual: Results) -> None:
    """Each sequence against the float64 reference, and nothing but them."""
    covered_q = torch.zeros(tensors.q.shape[0], dtype=torch.bool, device=tensors.q.device)
    covered_k = torch.zeros(tensors.k.shape[0], dtype=torch.bool, device=tensors.q.device)
    extras = {n: t for n, t in tensors.extras.items() if not n.startswith("seqused")}
    terms = []
    for index in range(len(case.lengths)):
        queries, keys = _parts(case, tensors, index)
        covered_q[queries] = True
        covered_k[keys] = True
        one = case.sequence(index)
        inputs = (_one(tensors.q, queries), _one(tensors.k, keys), _one(tensors.v, keys))
        grad_out = _one(tensors.grad_out, queries)
        part = Results(
            _one(actual.out, queries),
            actual.lse[:, queries].unsqueeze(0),
            _one(actual.grad_query, queries),
            _one(actual.grad_key, keys),
            _one(actual.grad_value, keys),
        )
        mask = kept(case, tensors, index)
        grad_lse = None
        if tensors.grad_lse is not None:
            grad_lse = tensors.grad_lse[:, queries].unsqueeze(0)
        sdpa_features.check(one, inputs, extras, grad_out, part, grad_lse, mask)
        if case.one.sinks:
            exact = sdpa_features.reference(
                one, inputs, extras, grad_out, torch.float64, mask, grad_lse
            )
            terms.append(dict(exact.items())["grad_sinks"])
    assert not actual.out[~covered_q].any()
    assert not actual.grad_query[~covered_q].any()
    assert not actual.grad_key[~covered_k].any()
    assert not actual.grad_value[~covered_k].any()
    if terms:
        of_all = torch.stack(terms)
        grad_sinks = dict(actual.items())["grad_sinks"]
        error = (grad_sinks.double() - of_all.sum(0)).abs().max().item()
        size = of_all.abs().sum(0).max().item() + case.one.heads
        assert error <= 20 * sdpa.FLOOR[tensors.q.dtype] * size, f"{case} grad_sinks: {error}"


def draw(rng: random.Random) -> Packed:
    """Any combination that packed attention takes."""
    while True:
        one = sdpa_features.draw(rng, on_gpu=False)
        if not one.lengths and not one.mask:
            break
    count = rng.randint(1, 5)

    def lengths() -> tuple[int, ...]:
        return tuple(
            rng.choice([0, 1, rng.randint(1, 9), rng.randint(60, 70), rng.randint(1, 200)])
            for _ in range(count)
        )

    same = rng.random() < 0.5
    first = lengths()
    gaps = tuple(rng.randint(0, 3) for _ in range(count)) if rng.random() < 0.3 else ()
    together = same and one.heads == one.heads_kv and one.head_size == one.value_size
    return Packed(
        lengths=first,
        lengths_kv=first if same else lengths(),
        one=one,
        gaps=gaps,
        offsets=rng.choice([torch.int32, torch.int64]),
        together=together and rng.random() < 0.7,
        same=same and rng.random() < 0.7,
        lse=one.dropout_p == 0 and rng.random() < 0.2,
    )
