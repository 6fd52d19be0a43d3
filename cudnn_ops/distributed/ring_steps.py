"""Ring attention, step by step: what each rank computes while keys and values pass on.

In step ``s`` rank ``r`` holds the keys and values of rank ``r - s``. They leave for ``r + 1`` as
the step begins, so that what the next step needs arrives while this one computes. The forward is
here; ring_backward.py has the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cudnn_ops import _C
from cudnn_ops.distributed.blocks import Block, Plan
from cudnn_ops.distributed.passing import Message, Transfer, start_transfer
from cudnn_ops.ops.merge import merge_attention_state_
from cudnn_ops.ops.sdpa import lse_dtype

_ops = torch.ops.cudnn_ops

KEYS, SUMS = range(2)  # kinds of messages


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


def as_packed(tensor: Tensor) -> Tensor:
    """[1, H, S, D] as [S, H, D]."""
    return tensor[0].transpose(0, 1)


def as_batched(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def offsets_of(block: Block, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
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


class Arriving(Protocol):
    """What is on its way."""

    def arrive(self) -> None:
        """Waits for it."""


@contextmanager
def ended(*passing: Arriving) -> Iterator[None]:
    """Where an exception leaves a step, what is under way ends before its memory goes."""
    try:
        yield
    except Exception:
        for one in passing:
            with suppress(RuntimeError):  # of a rank that does not answer: the first one is told
                one.arrive()
        raise


class Keys:
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
            sends.append(Message(self.held, call.neighbour(1), KEYS))
        self._arriving = []
        if step < call.travels(call.neighbour(-step - 1)):
            self._arriving = [dense_like(tensor).transpose(1, 2) for tensor in self._like]
            receives.append(Message(self._arriving, call.neighbour(-1), KEYS))
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
    """The output and its log-sum-exp over the keys that have come by.

    It is in the query's dtype where no query gets more than two parts, whose sum is rounded once;
    else in that of the log-sum-exp.
    """

    def __init__(self, call: Call, query: Tensor, value: Tensor, sinks: Tensor | None) -> None:
        self._query, self._value_size, self._sinks = query, value.shape[3], sinks
        # A sink is one more factor.
        is_narrow = sinks is None and call.plan.parts_of_queries(call.rank) <= 2
        self._dtype = query.dtype if is_narrow else lse_dtype(query.dtype)
        self._out: Tensor | None = None
        self._lse = query.new_empty(0)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return dense((*self._query.shape[:3], self._value_size), self._query, dtype=dtype)

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        if self._out is None:
            if (block.row, block.row_end) == (0, self._query.shape[2]):
                self._out, self._lse = self._dense(out, self._dtype), lse
                return
            self._out = self._empty(self._dtype).zero_()
            self._lse = lse.new_full(self._query.shape[:3], -math.inf)
        rows = slice(block.row, block.row_end)
        merge_attention_state_(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

    def _dense(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """With the tokens before the heads in memory; what is so already is not copied."""
        if out.dtype == dtype and out.transpose(1, 2).is_contiguous():
            return out
        return self._empty(dtype).copy_(out)

    def result(self) -> tuple[Tensor, Tensor]:
        """In the query's dtype. A sink takes part in the sum once, when all keys have."""
        sinks = self._sinks
        if self._out is None:
            dtype = lse_dtype(self._query.dtype)
            lse = self._query.new_full(self._query.shape[:3], -math.inf, dtype=dtype)
            out = self._empty(self._query.dtype).zero_()
            return out, lse if sinks is None else lse.copy_(sinks.unsqueeze(-1))
        if sinks is not None:
            with_sink = torch.logaddexp(self._lse, sinks.to(self._lse.dtype).unsqueeze(-1))
            share = (self._lse - with_sink).exp_().masked_fill_(self._lse == -math.inf, 0.0)
            self._out.mul_(share.unsqueeze(-1))
            self._lse = with_sink
        return self._dense(self._out, self._query.dtype), self._lse.contiguous()


@computing_parts()
def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's queries over the keys of all ranks."""
    keys, output = Keys(call, key, value), _Output(call, query, value, sinks)
    for step in range(call.ranks):
        keys.pass_on(step)
        with ended(keys):
            if keys.held:
                held = keys.heads_first()
                for block in call.plan.blocks(call.rank, call.neighbour(-step)):
                    output.add(block, *_attend(call, block, query, *held))
        keys.arrive()
    return output.result()


def _attend(
    call: Call, block: Block, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    rows, columns = slice(block.row, block.row_end), slice(block.column, block.column_end)
    inputs = query[:, :, rows], key[:, :, columns], value[:, :, columns]
    if not block.starts:
        return _ops.sdpa_with_lse.default(*inputs, enable_gqa=True, **call.options(block))
    packed = (as_packed(tensor) for tensor in inputs)
    offsets = offsets_of(block, query.device)
    out, lse = _ops.varlen_attention_with_lse.default(*packed, *offsets, **call.options(block))
    return as_batched(out), lse.unsqueeze(0)
