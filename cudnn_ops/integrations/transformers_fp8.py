"""Which calls of a layer's attention the adapter for transformers computes in FP8."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import cudnn_ops

#: Options of attention that FP8 does not support, and their values where they are off.
_WITHOUT = {"dropout_p": 0.0, "softcap": 0.0, "sinks": None}
_HOPPER = 9

_told: set[str] = set()


def attend_in_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention in FP8, or None, with a warning once for each reason, where there is none.

    Args:
        query: [batch, heads, length, head size], like those of
            :func:`cudnn_ops.scaled_dot_product_attention`.
        key: likewise.
        value: likewise.
        mask: a mask of every query and key, or of the keys of each sequence; None: there is none.
        scaling: factor of the scores.
        options: those of :func:`cudnn_ops.scaled_dot_product_attention`, by name.
    """
    reason = _reason_against(query, value, mask, options)
    if reason:
        tell(reason)
        return None
    given = {name: value for name, value in options.items() if name not in _WITHOUT}
    return cudnn_ops.scaled_dot_product_attention_fp8(query, key, value, scale=scaling, **given)


def tell(reason: str) -> None:
    """Warns once that attention is computed in 16 bits though FP8 was asked for."""
    if reason in _told or torch.compiler.is_compiling():
        return
    _told.add(reason)
    warnings.warn(
        f"cudnn_ops: attention with {reason} is computed in 16 bits, though fp8_from was given",
        stacklevel=2,
    )


def _reason_against(
    query: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> str | None:
    used = [name for name, off in _WITHOUT.items() if options.get(name) != off]
    if used:
        return " and ".join(used)
    if mask is not None:
        return "a mask of other than causal queries, windows and padding at the end"
    sizes = query.shape[3], value.shape[3]
    if any(size % 16 for size in sizes) or (max(sizes) > 128 and sizes != (192, 128)):
        return f"heads of {sizes[0]} and {sizes[1]} numbers"
    has_lengths = options.get("seq_lens_kv") is not None
    is_shifted = options.get("bottom_right") or options["window_size"][0] >= 0
    if has_lengths and is_shifted and _is_hopper(query.device):
        return "padding beside a window or a cache, on Hopper,"
    return None


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
