"""Tensors that a question describes: by a tensor, or by a shape, a dtype and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: What describes a tensor: a tensor (its data are not read), or its shape and dtype, or its
#: shape, dtype and strides in elements. Without strides it is contiguous.
TensorSpec = (
    Tensor | tuple[Sequence[int], torch.dtype] | tuple[Sequence[int], torch.dtype, Sequence[int]]
)


def meta_tensor(spec: TensorSpec, name: str) -> Tensor:
    """A tensor without data.

    Raises:
        ValueError: ``spec`` describes none; the message has ``name``.
    """
    if isinstance(spec, Tensor):
        return torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device="meta")
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            f"{name} must be a tensor, (shape, dtype) or (shape, dtype, strides), got {spec!r}"
        )
    shape, dtype = spec[:2]
    if len(spec) == 3:
        return torch.empty_strided(shape, spec[2], dtype=dtype, device="meta")
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_tensors(
    q: TensorSpec, k: TensorSpec | None, v: TensorSpec | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value without data; a key that is None is like the query, a value the key."""
    query = meta_tensor(q, "q")
    key = query if k is None else meta_tensor(k, "k")
    return query, key, key if v is None else meta_tensor(v, "v")


def optional_tensor(
    spec: TensorSpec | torch.dtype | bool | None,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor | None:
    """A tensor that a call may have: True stands for this shape and dtype, a dtype for that one."""
    if isinstance(spec, torch.dtype):
        return torch.empty(shape, dtype=spec, device="meta")
    if spec is None or isinstance(spec, bool):
        return torch.empty(shape, dtype=dtype, device="meta") if spec else None
    return meta_tensor(spec, name)


def offsets_tensor(spec: TensorSpec | int | None, name: str) -> Tensor:
    """Offsets of packed sequences: a tensor or its description, or the number of sequences."""
    if isinstance(spec, int):
        return torch.empty(spec + 1, dtype=torch.int32, device="meta")
    if spec is None:
        raise ValueError(f"{name} is missing: the offsets, or the number of sequences")
    return meta_tensor(spec, name)
