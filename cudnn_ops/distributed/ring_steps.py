"""Ring attention, step by step: what each rank computes while keys and values pass on.

In step ``s`` rank ``r`` holds the keys and values of rank ``r - s``. They leave for ``r + 1`` as
the step begins, so that what the next step needs arrives while this one computes. In the backward
the sums of their gradients follow one step behind, and in the end return to where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cudnn_ops import _C
from cudnn_ops.distributed.blocks import Block, Plan
from cudnn_ops.distributed.passing import Message, Transfer, start_transfer
from cudnn_ops.ops.merge import merge_attention_state_
from cudnn_ops.ops.sdpa import lse_dtype

_ops = torch.ops.cudnn_ops

#: Numbers of the query in one call of the backward, whose workspace grows with them: it has the
#: gradient of the query in float32, and those of key and value for each query head.
_BACKWARD_NUMBERS = 2**25

_KEYS, _SUMS = range(2)  # kinds of messages


@dataclass(frozen=True)
class Call:
    """What forward and backward need besides tensors."""

    op: str
    group: ProcessGroup
    plan: Plan
    scale: float | None
    softcap: float
    deterministic: bool | None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def neighbour(self, distance: int) -> int:
        return (self.rank + distance) % self.ranks

    def travels(self, source: int) -> int:
        """How many ranks the keys of ``source`` pass on to."""
        return self.plan.farthest[source]

    def options(self, block: Block) -> dict[str, Any]:
        is_causal = (block.left, block.right) == (-1, 0)
        window = (-1, -1) if is_causal else (block.left, block.right)
        options = {"window_size": window, "softcap": self.softcap}
        if block.starts:
            return {"causal": is_causal, "softmax_scale": self.scale, **options}
        return {"is_causal": is_causal, "scale": self.scale, **options}


@contextmanager
def computing_parts() -> Iterator[None]:
    """Inside it attention to this rank's keys alone is meant (csrc/ops/context_parallel.h)."""
    before = _C.set_computes_parts(True)
    try:
        yield
    finally:
        _C.set_computes_parts(before)


def dense(sizes: Sequence[int], like: Tensor, **kwargs: Any) -> Tensor:
    """[batch, heads, length, size] with the tokens before the heads in memory."""
    batch, heads, length, size = sizes
    return like.new_empty(batch, length, heads, size, **kwargs).transpose(1, 2)


def dense_like(tensor: Tensor, **kwargs: Any) -> Tensor:
    return dense(tensor.shape, tensor, **kwargs)


def _token_major(tensor: Tensor) -> Tensor:
    """[B, S, H, D], dense: what travels. No copy where it lies so already."""
    return tensor.transpose(1, 2).contiguous()


def _packed(tensor: Tensor) -> Tensor:
    """[1, H, S, D] as [S, H, D]."""
    return tensor[0].transpose(0, 1)


def _batched(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _offsets(block: Block, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    is_cuda = device.type == "cuda"  # pinned, so that the host need not wait
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "cudnn_ops.distributed.ring_attention: a CUDA graph cannot capture a call with "
            "cu_seqlens: its replays would repeat the steps that these offsets were planned for"
        )
    starts = torch.tensor(block.starts, dtype=torch.int32, pin_memory=is_cuda)
    starts = starts.to(device, non_blocking=True)
    longest = max(end - start for start, end in pairwise(block.starts))
    return starts, starts, longest, longest


@contextmanager
def _ended(*passing: _Keys | _Sums) -> Iterator[None]:
    """Where an exception leaves a step, what is under way ends before its memory goes."""
    try:
        yield
    except Exception:
        for one in passing:
            with suppress(RuntimeError):  # of a rank that does not answer: the first one is told
                one.arrive()
        raise


class _Keys:
    """Keys and values on their way: those held in this step, while those of the next arrive."""

    def __init__(self, call: Call, key: Tensor, value: Tensor) -> None:
        self._call, self._like = call, (key, value)
        self.held = [_token_major(key), _token_major(value)]
        self._arriving: list[Tensor] = []
        self._transfer: Transfer | None = None

    def pass_on(self, step: int) -> None:
        """Begins to hand over what is held, and to receive what the next step needs."""
        call = self._call
        sends, receives = [], []
        if step < call.travels(call.neighbour(-step)):
            sends.append(Message(self.held, call.neighbour(1), _KEYS))
        self._arriving = []
        if step < call.travels(call.neighbour(-step - 1)):
            self._arriving = [dense_like(tensor).transpose(1, 2) for tensor in self._like]
            receives.append(Message(self._arriving, call.neighbour(-1), _KEYS))
        self._transfer = start_transfer(call.op, call.group, sends, receives)

    def arrive(self) -> None:
        """Goes over to the next step."""
        if self._transfer is not None:
            self._transfer.wait()
        self.held, self._transfer = self._arriving, None

    def heads_first(self) -> tuple[Tensor, Tensor]:
        """What is held, as [B, H, S, D]."""
        key, value = (tensor.transpose(1, 2) for tensor in self.held)
        return key, value


class _Output:
    """The output and its log-sum-exp over the keys that have come by."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._query, self._value_size = query, value.shape[3]
        self._out: Tensor | None = None
        self._lse = query.new_empty(0)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return dense((*self._query.shape[:3], self._value_size), self._query, dtype=dtype)

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        length = self._query.shape[2]
        if self._out is None:
            self._out = self._empty(lse.dtype)
            self._lse = lse.new_empty(self._query.shape[:3])
            if (block.row, block.row_end) == (0, length):
                self._out.copy_(out)
                self._lse.copy_(lse)
                return
            self._out.zero_()
            self._lse.fill_(-math.inf)
        rows = slice(block.row, block.row_end)
        merge_attention_state_(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """In the query's dtype. A sink takes part in the sum once, when all keys have."""
        out = self._empty(self._query.dtype)
        lse = self._query.new_empty(self._query.shape[:3], dtype=lse_dtype(self._query.dtype))
        if self._out is None:
            lse.fill_(-math.inf)
            return out.zero_(), lse if sinks is None else lse.copy_(sinks.unsqueeze(-1))
        if sinks is not None:
            with_sink = torch.logaddexp(self._lse, sinks.to(lse.dtype).unsqueeze(-1))
            share = (self._lse - with_sink).exp_().masked_fill_(self._lse == -math.inf, 0.0)
            self._out.mul_(share.unsqueeze(-1))
            self._lse = with_sink
        return out.copy_(self._out), lse.copy_(self._lse)


@computing_parts()
def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's queries over the keys of all ranks."""
    keys, output = _Keys(call, key, value), _Output(query, value)
    for step in range(call.ranks):
        keys.pass_on(step)
        with _ended(keys):
            if keys.held:
                held = keys.heads_first()
                for block in call.plan.blocks(call.rank, call.neighbour(-step)):
                    output.add(block, *_attend(call, block, query, *held))
        keys.arrive()
    return output.result(sinks)


def _attend(
    call: Call, block: Block, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    rows, columns = slice(block.row, block.row_end), slice(block.column, block.column_end)
    inputs = query[:, :, rows], key[:, :, columns], value[:, :, columns]
    if not block.starts:
        return _ops.sdpa_with_lse.default(*inputs, enable_gqa=True, **call.options(block))
    packed = (_packed(tensor) for tensor in inputs)
    offsets = _offsets(block, query.device)
    out, lse = _ops.varlen_attention_with_lse.default(*packed, *offsets, **call.options(block))
    return _batched(out), lse.unsqueeze(0)


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
    """What a step adds to the gradients of the keys that it holds."""

    where: tuple[slice, slice, slice]
    """Of [B, H, S, D]."""
    key: Tensor
    value: Tensor | None


class _Sums:
    """Gradients of keys and values in float32: they follow one step behind and then return."""

    def __init__(self, call: Call, key: Tensor, value: Tensor) -> None:
        self._call, self._like = call, (key, value)
        self._held: list[Tensor] = []
        self._home: list[Tensor] = []
        self._arriving: list[Tensor] = []
        self._transfer: Transfer | None = None

    def _empty(self) -> list[Tensor]:
        dtype = lse_dtype(self._like[0].dtype)
        return [dense_like(tensor, dtype=dtype).transpose(1, 2) for tensor in self._like]

    def add_and_pass_on(self, step: int, parts: list[Part]) -> None:
        """Waits for the sums of the keys held in this step, adds to them, and hands them over."""
        call = self._call
        source = call.neighbour(-step)
        self.arrive()
        if step == 0:
            self._held = [tensor.zero_() for tensor in self._empty()]
        for part in parts:
            for held, gradient in zip(self._held, (part.key, part.value), strict=True):
                if gradient is not None:
                    held.transpose(1, 2)[part.where].add_(gradient)
        sends, receives = [], []
        if step < call.travels(source):
            sends.append(Message(self._held, call.neighbour(1), _SUMS))
        elif step == call.travels(source):
            if step > 0:
                sends.append(Message(self._held, source, _SUMS))
            else:
                self._home = self._held
        if step < call.travels(call.neighbour(-step - 1)):
            self._arriving = self._empty()
            receives.append(Message(self._arriving, call.neighbour(-1), _SUMS))
        if step == call.travels(call.rank) > 0:
            self._home = self._empty()
            receives.append(Message(self._home, call.neighbour(step), _SUMS))
        self._transfer = start_transfer(call.op, call.group, sends, receives)

    def arrive(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._held, self._arriving, self._transfer = self._arriving, [], None

    def result(self) -> tuple[Tensor, Tensor]:
        self.arrive()
        key, value = (
            dense_like(like).copy_(home.transpose(1, 2))
            for like, home in zip(self._like, self._home, strict=True)
        )
        return key, value


@computing_parts()
def backward(
    call: Call, saved: Saved, wants_query: bool, wants_key: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key and value; None for those that are not wanted."""
    query = saved.query
    grad_query = dense_like(query, dtype=lse_dtype(query.dtype)).zero_() if wants_query else None
    # A probability is exp(score - lse): none in a row that sees nothing.
    nothing = saved.lse == -math.inf
    saved = saved._replace(lse=saved.lse.masked_fill(nothing, math.inf))
    if saved.grad_lse is not None:
        saved = saved._replace(grad_lse=saved.grad_lse.masked_fill(nothing, 0.0))
    keys, sums = _Keys(call, saved.key, saved.value), _Sums(call, saved.key, saved.value)
    for step in range(call.ranks):
        keys.pass_on(step)
        parts: list[Part] = []
        with _ended(keys, sums):
            if keys.held:
                key, value = keys.heads_first()
                held = saved._replace(key=key, value=value)
                for block in call.plan.blocks(call.rank, call.neighbour(-step)):
                    for part in _gradients(call, block, held, grad_query):
                        parts += [part] if wants_key else []
        if wants_key:
            sums.add_and_pass_on(step, parts)
        keys.arrive()
    if grad_query is not None:
        grad_query = dense_like(query).copy_(grad_query)
    return grad_query, *(sums.result() if wants_key else (None, None))


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


def _gradients(call: Call, block: Block, saved: Saved, grad_query: Tensor | None) -> Iterator[Part]:
    """Adds to the gradient of the queries; yields what the keys' sums are to receive."""
    rows, columns = slice(block.row, block.row_end), slice(block.column, block.column_end)
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
        for one in (given, _of_lse(given)):
            if one is None or one.grad_out is None:
                continue
            grads = _one_gradient(call, block, one)
            if grad_query is not None:
                grad_query[of_query].add_(grads[0])
            yield Part(of_key, grads[1], grads[2] if one is given else None)


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
    packed = [_packed(tensor) for tensor in tensors if tensor is not None]
    offsets = _offsets(block, given.query.device)
    grads = _ops._varlen_backward.default(*packed, given.lse[0].contiguous(), *offsets, **options)
    grad_query, grad_key, grad_value = (_batched(grad) for grad in grads[:3])
    return grad_query, grad_key, grad_value
