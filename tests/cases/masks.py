"""Compact masks, and what they hide, independent of what they say of it themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_ops.integrations.transformers import CompactMask


def visible_pairs(
    mask: Tensor | CompactMask | None, batch: int, length: int, length_kv: int
) -> Tensor:
    """[batch, 1, length, length_kv], True where a query sees a key."""
    if isinstance(mask, Tensor):
        return mask
    mask = mask or CompactMask()
    rows = torch.arange(length).view(-1, 1) + length_kv - length
    columns = torch.arange(length_kv)
    visible = (columns <= rows).expand(batch, 1, -1, -1)
    if mask.window[0] >= 0:
        visible = visible & (columns >= rows - mask.window[0])
    if mask.padding is not None:
        visible = visible & mask.padding[:, None, None, :]
    if mask.lengths is not None:
        visible = visible & (columns < mask.lengths.view(-1, 1, 1, 1))
    if mask.cu_seqlens is not None:
        lengths = mask.cu_seqlens.diff()
        assert mask.longest == lengths.max()
        index = torch.arange(len(lengths)).repeat_interleave(lengths).view(batch, length)
        visible = visible & (index.unsqueeze(-1) == index.unsqueeze(-2)).unsqueeze(1)
    return visible


def compact_masks() -> dict[str, CompactMask]:
    empty = CompactMask(sizes=(2, 9, 9), device="cpu")
    return {
        "causal": empty,
        "window": empty._replace(window=(2, 0)),
        "padding": empty._replace(padding=torch.arange(9).expand(2, -1) > 1),
        "lengths": empty._replace(lengths=torch.tensor([9, 5], dtype=torch.int32)),
        "packed": empty._replace(
            cu_seqlens=torch.tensor([0, 4, 9, 18], dtype=torch.int32), longest=9
        ),
        "cache": empty._replace(sizes=(2, 3, 9)),
        "empty cache": empty._replace(sizes=(2, 3, 9), unwritten=6),
    }
