"""Arguments that attention over a split sequence shares, ring or all-to-all: their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_ops.ops.arguments import refuse_one_number

#: cuDNN's unit of a head size.
_UNIT = 8


@dataclass(frozen=True)
class Options:
    """The arguments by keyword; :func:`cudnn_ops.distributed.ring_attention` explains them."""

    mesh_dim: int | str | None = None
    order: str = "contiguous"
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window_size: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens: Tensor | None = None
    deterministic: bool | None = None


_NAMES = tuple(field.name for field in fields(Options))


def options_of(op: str, given: dict[str, Any]) -> Options:
    """Arguments that came by keyword; TypeError for one that the function does not have."""
    for name in given:
        if name not in _NAMES:
            raise TypeError(f"{op} has no argument {name!r}; it has {', '.join(_NAMES)}")
    return Options(**given)


def refuse_mask_and_dropout(op: str, options: Options) -> None:
    """Raises NotImplementedError for what attention over a split sequence does not support."""
    if options.attn_mask is not None:
        raise NotImplementedError(
            f"{op} does not support attn_mask: each rank would need a row of its parts; use "
            "is_causal, window_size or cu_seqlens"
        )
    if options.dropout_p != 0:
        raise NotImplementedError(
            f"{op} does not support dropout_p: what is dropped would depend on the number of "
            f"ranks; got {options.dropout_p}, it accepts 0"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's dtype, where it is on; float64 stays, as in torch."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    cast = [t.to(dtype) if t.dtype != torch.float64 else t for t in (q, k, v)]
    return cast[0], cast[1], cast[2]


def check_tensors(
    op: str, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, sinks: Tensor | None
) -> None:
    """Raises ValueError or TypeError for shapes, dtypes and devices that do not fit.

    Args:
        op: the public function's name.
        q: [batch, heads, length, head size], as ``k`` and ``v`` are.
        k: likewise.
        v: likewise.
        enable_gqa: whether ``heads`` may be a multiple of ``heads_kv``.
        sinks: [heads] or None.
    """
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{op}: q has dtype {q.dtype} and {name} {tensor.dtype}; cast them to one dtype"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"{op}: q is on {q.device} and {name} on {tensor.device}; move them to one device"
            )
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{op}: q has batch size {q.shape[0]} and {name} {tensor.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{op}: q has head size {q.shape[3]} and k {k.shape[3]}; they must be equal (the "
            "value's may differ)"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"{op}: k has {k.shape[1]} heads of length {k.shape[2]} and v {v.shape[1]} of length "
            f"{v.shape[2]}; they must be equal"
        )
    heads, heads_kv = q.shape[1], k.shape[1]
    if heads != heads_kv and (not enable_gqa or heads_kv == 0 or heads % heads_kv):
        rule = (
            "the first must be a multiple of the second"
            if enable_gqa
            else "they must be equal; pass enable_gqa=True for grouped-query attention"
        )
        raise ValueError(f"{op}: q has {heads} heads and k {heads_kv}; {rule}")
    if sinks is not None and (
        tuple(sinks.shape) != (heads,) or not sinks.is_floating_point() or sinks.device != q.device
    ):
        raise ValueError(
            f"{op}: sinks must hold one floating-point number for each query head, [{heads}] on "
            f"{q.device}; got {sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )


def batched(
    op: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as [batch, heads, length, head size]; packed ones are a batch of one."""
    dims, what = 4, "[batch, heads, length, head size]"
    if cu_seqlens is not None:
        dims, what = 3, "[tokens, heads, head size], for cu_seqlens is given"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if hasattr(tensor, "to_local"):  # its class takes long to import
            raise TypeError(
                f"{op}: {name} must be this rank's part, and is a DTensor; pass {name}.to_local()"
            )
        if tensor.dim() != dims:
            raise ValueError(f"{op}: {name} must be {what}; got shape {list(tensor.shape)}")
    if cu_seqlens is None:
        return q, k, v
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{op}: q has {q.shape[0]} tokens and k {k.shape[0]}; with cu_seqlens they must be "
            "equal"
        )
    if (
        cu_seqlens.device.type != "cpu"
        or cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"{op}: cu_seqlens must be an int32 or int64 tensor [sequences + 1] on the CPU, where "
            "the steps are planned (cu_seqlens.cpu(), once for a batch); got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    return q, k, v


def checked_starts(op: str, cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
    """The offsets of the sequences; ValueError if they are none of so many tokens."""
    starts = tuple(cu_seqlens.tolist())
    if not starts or starts[0] != 0 or list(starts) != sorted(starts) or starts[-1] != tokens:
        raise ValueError(
            f"{op}: cu_seqlens must not decrease, and must lead from 0 to the tokens of the whole "
            f"batch, {tokens} on all ranks together; got {list(starts[:8])}"
            f"{' ...' if len(starts) > 8 else ''} to {starts[-1] if starts else 'nothing'}"
        )
    return starts


def check_window(op: str, window_size: tuple[int, int]) -> None:
    refuse_one_number(op.removeprefix("cudnn_ops."), window_size)
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"{op}: window_size must be (left, right), each -1 for no bound or the number of keys "
            f"on that side, got {tuple(window_size)}"
        )


def with_regular_rows(tensor: Tensor) -> Tensor:
    """As the kernels require it: a last stride of 1, and a head size that is a multiple of 8."""
    size = tensor.shape[3]
    if size % _UNIT or size == 0:
        return pad(tensor, (0, max(_UNIT, -(-size // _UNIT) * _UNIT) - size))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
