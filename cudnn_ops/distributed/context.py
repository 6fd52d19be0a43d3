"""Attention inside ``torch.distributed.tensor.experimental.context_parallel``: by the ring.

torch marks that context only by what it replaces in one of its modules, and replaces its own
attention alone. The operators are told, and refuse what would see the rank's own keys alone;
``cudnn_ops.scaled_dot_product_attention`` attends by the ring over the context's mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops import _C
from cudnn_ops.distributed.ring import ring_attention_with_lse
from cudnn_ops.ops import sdpa


def watch(module: ModuleType) -> None:
    """Makes what enters and leaves the context tell attention.

    Args:
        module: torch's, with the context's implementation.
    """
    for name, told in (
        ("_enable_context_parallel_dispatcher_impl", functools.partial(_enter, module)),
        ("_disable_context_parallel_dispatcher_impl", _leave),
    ):
        setattr(module, name, _then(getattr(module, name), told))
    # It may have been entered before, over a mesh that nothing names.
    _C.set_context_parallel(module.F.scaled_dot_product_attention in module._replaced_functions)


def _then(function: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        told(*args, **kwargs)
        return result

    return both


def _enter(module: ModuleType, seq_dim: int, mesh: DeviceMesh) -> None:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        seq_lens_q: Tensor | None = None,
        seq_lens_kv: Tensor | None = None,
        rng_state: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        if seq_lens_q is not None or seq_lens_kv is not None:
            raise NotImplementedError(
                "cudnn_ops.scaled_dot_product_attention: seq_lens_q and seq_lens_kv are not "
                "supported inside torch.distributed.tensor.experimental.context_parallel; pack the "
                "sequences and use cudnn_ops.distributed.ring_attention with cu_seqlens"
            )
        del rng_state  # of a dropout, which the ring refuses
        is_balanced = module._cp_options.enable_load_balance
        return ring_attention_with_lse(
            query,
            key,
            value,
            mesh,
            order="zigzag" if is_balanced else "contiguous",
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            **options,
        )

    _C.set_context_parallel(True)
    sdpa.set_split_attention(attend if seq_dim == 2 else None)


def _leave() -> None:
    _C.set_context_parallel(False)
    sdpa.set_split_attention(None)
