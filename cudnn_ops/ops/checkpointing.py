"""Operators for selective activation checkpointing."""

from __future__ import annotations

import torch

_ops = torch.ops.cudnn_ops


def checkpoint_ops() -> list[torch._ops.OpOverload]:
    """The operators whose results are worth saving: a list for a checkpointing policy.

    ``torch.utils.checkpoint`` sees the operator that runs, which for attention with a gradient is
    the one that also returns the log-sum-exp; both are listed. So are attention in FP8, packed
    attention, attention by a ring (once ``cudnn_ops.distributed`` is imported), convolutions, the
    products of a mixture's experts, and the state of dropout's generator, without which a saved
    result and a recomputed gradient would drop different weights.
    Norms, gated activations and rotary embedding are not: recomputing them is as cheap as reading a
    saved result. In eager mode and under ``torch.compile``::

        from functools import partial
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        keep = [*cudnn_ops.checkpoint_ops(), torch.ops.aten.mm.default]
        context_fn = partial(create_selective_checkpoint_contexts, keep)
        out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    Returns:
        A new list, which may be extended with other operators.

    Example:
        >>> import torch, cudnn_ops
        >>> torch.ops.cudnn_ops.sdpa.default in cudnn_ops.checkpoint_ops()
        True
    """
    ring = [_ops._ring_attention.default] if hasattr(_ops, "_ring_attention") else []
    return [
        *ring,
        _ops.sdpa.default,
        _ops.sdpa_with_lse.default,
        _ops._sdpa_fp8.default,
        _ops.varlen_attention.default,
        _ops.varlen_attention_with_lse.default,
        _ops._attention_rng_state.default,
        _ops._conv.default,
        _ops._grouped_linear.default,
    ]
