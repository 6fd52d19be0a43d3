"""The gradients of ring attention, step by step.

Keys and values pass on as in the forward (ring_steps.py). The sums of their gradients follow one
step behind, and in the end return to where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_ops.distributed.blocks import Block
from cudnn_ops.distributed.passing import Message, Transfer, start_transfer
from cudnn_ops.distributed.ring_steps import (
    SUMS,
    Call,
    Keys,
    as_batched,
    as_packed,
    computing_parts,
    dense_like,
    ended,
    offsets_of,
)
from cudnn_ops.ops.sdpa import lse_dtype

_ops = torch.ops.cudnn_ops

#: Numbers of the query in one call of the backward, whose workspace grows with them: it has the
#: gradient of the query in float32, and those of key and value for each query head.
_BACKWARD_NUMBERS = 2**25


class Saved(NamedTuple):
    """What a backward is computed from; ``lse`` and ``out`` are over the keys of all ranks."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class Part(NamedTuple):
    """What a call of the backward adds to the gradients of the keys that are held."""

    where: tuple[slice, slice, slice]
    """Of [B, H, S, D]."""
    key: Tensor
    value: Tensor | None
    """None: nothing."""


def _are_apart(parts: list[Part]) -> bool:
    """Whether no number is in two of them: each has other heads, and each block has the first."""
    return len({part.where[1].start for part in parts}) == len(parts)


def _places(total: Tensor, parts: list[Part], index: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the key (0) or the value (1), each with its place in ``total``, [B, S, H, D]."""
    heads_first = total.transpose(1, 2)
    gradients = [(part.where, (part.key, part.value)[index]) for part in parts]
    return [(heads_first[where], grad) for where, grad in gradients if grad is not None]


class _QueryGradient:
    """The sum of all blocks' parts: in the query's dtype where it is of two parts at most.

    Those are added up in one rounding. All else is summed up in float32.
    """

    def __init__(self, call: Call, saved: Saved) -> None:
        self._query = saved.query
        parts = call.plan.parts_of_queries(call.rank) * (1 if saved.grad_lse is None else 2)
        self._dtype = saved.query.dtype if parts <= 2 else lse_dtype(saved.query.dtype)
        self._sum: Tensor | None = None
        self._is_first = False

    def begin(self, block: Block) -> None:
        """Goes over to the parts of the next block."""
        self._is_first = self._sum is None
        if self._sum is None:
            self._sum = dense_like(self._query, dtype=self._dtype)
            if (block.row, block.row_end) != (0, self._query.shape[2]):
                self._sum.zero_()
                self._is_first = False

    def add(self, where: tuple[slice, slice, slice], part: Tensor, is_first: bool) -> None:
        """``is_first``: of the block's parts at this place."""
        assert self._sum is not None
        if self._is_first and is_first:
            self._sum[where].copy_(part)
        else:
            self._sum[where].add_(part)

    def result(self) -> Tensor:
        if self._sum is None:
            return dense_like(self._query).zero_()
        if self._dtype == self._query.dtype:
            return self._sum
        return dense_like(self._query).copy_(self._sum)


class _Sums:
    """Gradients of keys and values.

    A rank keeps its own queries' part. The others' sum follows the keys, one step behind, to the
    ranks that add theirs, and comes home from the last of them; in float32, but where it is one
    part, which lost its digits when it was computed.
    """

    def __init__(self, call: Call, key: Tensor, value: Tensor) -> None:
        self._call, self._like = call, (key, value)
        self._own: list[Tensor] = []
        self._held: list[Tensor] = []
        self._home: list[Tensor] = []
        self._arriving: list[Tensor] = []
        self._transfer: Transfer | None = None

    def _dtype(self, source: int) -> torch.dtype:
        """Of the sum of what other ranks compute for the keys of ``source``."""
        plan, narrow = self._call.plan, self._like[0].dtype
        adds_once = plan.farthest[source] == 1
        is_one_part = adds_once and plan.parts_of_keys((source + 1) % plan.ranks, source) == 1
        return narrow if is_one_part else lse_dtype(narrow)

    def _empty(self, dtype: torch.dtype) -> list[Tensor]:
        return [dense_like(tensor, dtype=dtype).transpose(1, 2) for tensor in self._like]

    def _sum_of(self, parts: list[Part], dtype: torch.dtype) -> list[Tensor]:
        sums = self._empty(dtype)
        for index, total in enumerate(sums):
            found = _places(total, parts, index)
            covered = sum(gradient.numel() for _, gradient in found)
            if _are_apart(parts) and covered == total.numel():
                for place, gradient in found:
                    place.copy_(gradient)
            else:
                total.zero_()
                for place, gradient in found:
                    place.add_(gradient)
        return sums

    def add_and_pass_on(self, step: int, parts: list[Part]) -> None:
        """Waits for the sums of the keys held in this step, adds to them, and hands them over."""
        call = self._call
        source = call.neighbour(-step)
        travels, next_travels = call.travels(source), call.travels(call.neighbour(-step - 1))
        self.arrive()
        sends, receives = [], []
        if step == 0:
            narrow = self._like[0].dtype
            self._own = self._sum_of(parts, narrow if _are_apart(parts) else lse_dtype(narrow))
        elif step <= travels:
            if step == 1:
                self._held = self._sum_of(parts, self._dtype(source))
            else:
                for index, held in enumerate(self._held):
                    for place, gradient in _places(held, parts, index):
                        place.add_(gradient)
            peer = call.neighbour(1) if step < travels else source
            sends.append(Message(self._held, peer, SUMS))
        if 0 < step < next_travels:
            self._arriving = self._empty(self._dtype(call.neighbour(-step - 1)))
            receives.append(Message(self._arriving, call.neighbour(-1), SUMS))
        if step == call.travels(call.rank) > 0:
            self._home = self._empty(self._dtype(call.rank))
            receives.append(Message(self._home, call.neighbour(step), SUMS))
        self._transfer = start_transfer(call.op, call.group, sends, receives)

    def arrive(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._held, self._arriving, self._transfer = self._arriving, [], None

    def result(self) -> tuple[Tensor, Tensor]:
        self.arrive()
        results = []
        for place, like in enumerate(self._like):
            own = self._own[place].transpose(1, 2)
            if self._home:
                home = self._home[place].transpose(1, 2)
                own = torch.add(own, home, out=dense_like(like))
            elif own.dtype != like.dtype:
                own = dense_like(like).copy_(own)
            results.append(own)
        return results[0], results[1]


@computing_parts()
def backward(
    call: Call, saved: Saved, wants_query: bool, wants_key: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key and value; None for those that are not wanted."""
    # A probability is exp(score - lse): none in a row that sees nothing.
    nothing = saved.lse == -math.inf
    saved = saved._replace(lse=saved.lse.masked_fill(nothing, math.inf))
    if saved.grad_lse is not None:
        saved = saved._replace(grad_lse=saved.grad_lse.masked_fill(nothing, 0.0))
    grad_query = _QueryGradient(call, saved) if wants_query else None
    keys, sums = Keys(call, saved.key, saved.value), _Sums(call, saved.key, saved.value)
    for step in range(call.ranks):
        keys.pass_on(step)
        parts: list[Part] = []
        with ended(keys, sums):
            if keys.held:
                key, value = keys.heads_first()
                held = saved._replace(key=key, value=value)
                for block in call.plan.blocks(call.rank, call.neighbour(-step)):
                    for part in _gradients(call, block, held, grad_query):
                        parts += [part] if wants_key else []
        if wants_key:
            sums.add_and_pass_on(step, parts)
        keys.arrive()
    of_query = None if grad_query is None else grad_query.result()
    return of_query, *(sums.result() if wants_key else (None, None))


def gradient_of_sinks(saved: Saved, sinks: Tensor) -> Tensor:
    """What this rank's queries contribute; csrc/ops/attention/sinks.h has the formula."""
    lse = saved.lse
    weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp_().masked_fill_(lse == -math.inf, 0.0)
    terms = torch.zeros_like(lse)
    if saved.grad_out is not None:
        terms = terms - (saved.grad_out.to(lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        terms = terms + saved.grad_lse
    return weight.mul_(terms).sum((0, 2)).to(sinks.dtype)


def _head_groups(block: Block, saved: Saved) -> Iterator[tuple[slice, slice]]:
    """Heads of the queries and of the keys for one call each, so that its workspace is bounded."""
    heads, heads_kv = saved.query.shape[1], saved.key.shape[1]
    group = heads // max(heads_kv, 1)
    numbers = saved.query.shape[0] * group * (block.row_end - block.row) * saved.query.shape[3]
    at_once = max(1, _BACKWARD_NUMBERS // max(numbers, 1))
    for first in range(0, heads_kv, at_once):
        end = min(first + at_once, heads_kv)
        yield slice(first * group, end * group), slice(first, end)


def _gradients(
    call: Call, block: Block, saved: Saved, grad_query: _QueryGradient | None
) -> Iterator[Part]:
    """Adds to the gradient of the queries; yields what the keys' sums are to receive."""
    rows, columns = slice(block.row, block.row_end), slice(block.column, block.column_end)
    if grad_query is not None:
        grad_query.begin(block)
    for heads, heads_kv in _head_groups(block, saved):
        of_query, of_key = (slice(None), heads, rows), (slice(None), heads_kv, columns)
        given = Saved(
            None if saved.grad_out is None else saved.grad_out[of_query],
            None if saved.grad_lse is None else saved.grad_lse[of_query],
            saved.query[of_query],
            saved.key[of_key],
            saved.value[of_key],
            saved.out[of_query],
            saved.lse[of_query],
        )
        is_first = True
        for one in (given, _of_lse(given)):
            if one is None or one.grad_out is None:
                continue
            grads = _one_gradient(call, block, one)
            if grad_query is not None:
                grad_query.add(of_query, grads[0], is_first)
            yield Part(of_key, grads[1], grads[2] if one is given else None)
            is_first = False


def _of_lse(given: Saved) -> Saved | None:
    """What gives, by the backward of attention, the gradients that come by the log-sum-exp.

    csrc/ops/attention/lse_gradient.h says how. No gradient of the value comes of it.
    """
    if given.grad_lse is None:
        return None
    value = torch.zeros_like(given.value)
    value[..., :2] = 1.0
    grad_out = torch.zeros_like(given.out)
    grad_out[..., 0] = given.grad_lse
    grad_out[..., 1] = given.grad_lse - grad_out[..., 0]
    return given._replace(grad_out=grad_out, value=value, out=torch.zeros_like(given.out))


def _one_gradient(call: Call, block: Block, given: Saved) -> tuple[Tensor, Tensor, Tensor]:
    options = {"deterministic": call.deterministic, **call.options(block)}
    tensors = given.grad_out, given.query, given.key, given.value, given.out
    if not block.starts:
        return _ops._sdpa_backward.default(*tensors, given.lse, **options)[:3]
    packed = [as_packed(tensor) for tensor in tensors if tensor is not None]
    offsets = offsets_of(block, given.query.device)
    grads = _ops._varlen_backward.default(*packed, given.lse[0].contiguous(), *offsets, **options)
    grad_query, grad_key, grad_value = (as_batched(grad) for grad in grads[:3])
    return grad_query, grad_key, grad_value
