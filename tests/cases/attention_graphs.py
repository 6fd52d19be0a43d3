"""Attention in graphs: tensors, masks, repeated heads, and what a replacement says of a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from cudnn_ops.ops.arguments import bind
from tests.cases.compiler import Rewritten

BATCH, HEADS, LENGTH, SIZE = 2, 4, 9, 16


def qkv(length_kv: int = LENGTH, heads_kv: int = HEADS) -> list[Tensor]:
    return [
        torch.randn(BATCH, heads, length, SIZE, dtype=torch.float64)
        for heads, length in ((HEADS, LENGTH), (heads_kv, length_kv), (heads_kv, length_kv))
    ]


def told(found: Rewritten) -> dict[str, Any]:
    """What the one call of our operator says about its mask."""
    (node,) = found.ours
    return told_by(node)


def told_by(node: fx.Node) -> dict[str, Any]:
    call = bind(torch.ops.cudnn_ops.sdpa.default, node.args, node.kwargs)
    return {
        "causal": call.is_causal,
        "window": tuple(call.window_size),
        "bottom_right": call.bottom_right,
        "mask": call.attn_mask is not None,
    }


def mask_as(
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    mask: bool = False,
) -> dict[str, Any]:
    return {"causal": causal, "window": window, "bottom_right": bottom_right, "mask": mask}


def upper_triangle_filled(n: int, m: int) -> Tensor:
    hidden = torch.triu(torch.ones(n, m), diagonal=1).bool()
    return torch.zeros(n, m, dtype=torch.float64).masked_fill(
        hidden, torch.finfo(torch.float64).min
    )


def compared(n: int, m: int) -> Tensor:
    return torch.arange(m)[None, :] <= torch.arange(n)[:, None]


def slopes(q: Tensor, padding: Tensor) -> Tensor:
    return -0.5 * (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs().double()


def blocks(q: Tensor, padding: Tensor) -> Tensor:
    block = torch.arange(q.shape[2]) // 3
    return block[:, None] == block


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, n, length, size)
    return x.reshape(batch, heads * n, length, size)


def unsqueezed(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).reshape(batch, heads * n, length, size)


def interleaved(x: Tensor, n: int) -> Tensor:
    return torch.repeat_interleave(x, n, dim=1)


def interleaved_method(x: Tensor, n: int) -> Tensor:
    return x.repeat_interleave(n, -3)


REPEATS = [repeat_kv, unsqueezed, interleaved, interleaved_method]
