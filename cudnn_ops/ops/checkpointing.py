"""What to keep under selective activation checkpointing."""

from __future__ import annotations

import torch

_ops = torch.ops.cudnn_ops


def checkpoint_ops() -> list[torch._ops.OpOverload]:
    """The operators whose results are dearer to compute again than to keep: a policy's list.

    ``torch.utils.checkpoint`` sees the operator that runs, which for attention with a gradient is
    the one that returns the log-sum-exp too; both are listed. So are packed attention,
    convolutions, and the state of dropout's generator, without which a result that was kept and a
    gradient that is computed would drop different weights. Norms, gated activations and rotary
    embedding are as cheap as reading what was kept, and are not. For eager mode and
    ``torch.compile``::

        from functools import partial
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        keep = [*cudnn_ops.checkpoint_ops(), torch.ops.aten.mm.default]
        context_fn = partial(create_selective_checkpoint_contexts, keep)
        out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    Returns:
        A new list, to which a model's other operators may be added.

    Example:
        >>> import torch, cudnn_ops
        >>> torch.ops.cudnn_ops.sdpa.default in cudnn_ops.checkpoint_ops()
        True
    """
    return [
        _ops.sdpa.default,
        _ops.sdpa_with_lse.default,
        _ops.varlen_attention.default,
        _ops.varlen_attention_with_lse.default,
        _ops._attention_rng_state.default,
        _ops._conv.default,
    ]
