"""Attention of models of diffusers, by their own processors with another function inside.

A processor calls a global of its module: ``F.scaled_dot_product_attention`` or
``dispatch_attention_fn``, and perhaps ``apply_rotary_emb``. It is changed by giving it a class of
its own, whose ``__call__`` is the same code with another function by that name.
"""

from __future__ import annotations

import copy
import functools
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.nn import functional as F

import cudnn_ops

#: Above this head size the backward depends on the GPU.
_MAX_TRAINED = 128
#: Above this one cuDNN has no kernel.
_MAX_HEAD_SIZE = 512
_NAME = "scaled_dot_product_attention"
_DISPATCH = "dispatch_attention_fn"
_ROTARY = "apply_rotary_emb"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by cuDNN, or by torch where cuDNN has no kernel, such as for float32 on a GPU."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    attend: Any = F.scaled_dot_product_attention
    if _has_kernel(query, key, value, attn_mask):
        attend = cudnn_ops.scaled_dot_product_attention
    out: Tensor = attend(*args, scale=scale, enable_gqa=enable_gqa)
    return out


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if query.dtype != key.dtype or query.dtype != value.dtype:
        return False
    if query.device.type == "cpu":
        return True
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return max(query.shape[-1], value.shape[-1]) <= (_MAX_TRAINED if trains else _MAX_HEAD_SIZE)


def dispatch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    """The ``dispatch_attention_fn`` of diffusers, whose native backend is :func:`attention`.

    Tensors are [batch, length, heads, head size]. A backend that the user chose, and one that is
    split over GPUs, stay as they are.
    """
    native = attention_dispatch.AttentionBackendName.NATIVE
    if backend is None:
        backend, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    if backend != native or parallel_config is not None or attention_kwargs:
        return attention_dispatch.dispatch_attention_fn(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            *(attention_kwargs,),
            backend=backend,
            parallel_config=parallel_config,
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # one of keys alone, as diffusers reads it
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)


def rotate(
    x: Tensor,
    freqs_cis: Any,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """``apply_rotary_emb`` of diffusers by one kernel; by theirs, where it is not of real angles.

    Args:
        x: [batch, length, heads, head size], if ``sequence_dim`` is 1; 2: heads before the length.
        freqs_cis: cosines and sines, each [length, head size].
        use_real: as in diffusers, as are the others.
        use_real_unbind_dim: -1: neighbours are pairs; -2: halves.
        sequence_dim: see ``x``.
    """
    if not use_real or sequence_dim not in (1, 2) or not _are_angles_of(x, freqs_cis, sequence_dim):
        out: Tensor = apply_rotary_emb(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
        return out
    cos, sin = (angle[None].to(x.device) for angle in freqs_cis)
    is_interleaved = use_real_unbind_dim == -1
    if sequence_dim == 2:
        return cudnn_ops.rotary_embedding(x, cos, sin, interleaved=is_interleaved)
    turned = cudnn_ops.rotary_embedding(x.transpose(1, 2), cos, sin, interleaved=is_interleaved)
    return turned.transpose(1, 2)


def _are_angles_of(x: Tensor, angles: Any, sequence_dim: int) -> bool:
    return x.dim() == 4 and all(
        angle.shape == (x.shape[sequence_dim], x.shape[-1])
        and angle.dtype in (x.dtype, torch.float32)
        and not angle.requires_grad
        for angle in angles
    )


def adapted_processor(processor: object) -> object | str | None:
    """The processor with our functions; why there is none; None if it has them already."""
    kind: Any = type(processor)
    call = kind.__call__
    if getattr(kind, "_of_cudnn_ops", False):
        return None
    if isinstance(processor, nn.Module):
        return f"{kind.__name__} has parameters of its own"
    if not kind.__module__.startswith("diffusers.") or not isinstance(call, FunctionType):
        return f"{kind.__name__} is not diffusers'"
    ours = _adapted(kind)
    if ours is None:
        return f"{kind.__name__} does not call scaled_dot_product_attention"
    adapted = copy.copy(processor)
    adapted.__class__ = ours
    return adapted


@functools.cache
def _adapted(kind: type) -> type | None:
    """A subclass of a processor's class, that calls our functions."""
    call = kind.__call__
    assert isinstance(call, FunctionType)
    names = dict(call.__globals__)
    used = _names(call.__code__)
    if _NAME in used and names.get("F") is F:
        names["F"] = _functional()
    elif names.get(_DISPATCH) is attention_dispatch.dispatch_attention_fn and _DISPATCH in used:
        names[_DISPATCH] = dispatch_attention
    else:
        return None
    if names.get(_ROTARY) is apply_rotary_emb:
        names[_ROTARY] = rotate
    code, closure = call.__code__, call.__closure__
    ours = FunctionType(code, names, call.__name__, call.__defaults__, closure)
    ours.__kwdefaults__ = call.__kwdefaults__
    own = {"__call__": ours, "__doc__": kind.__doc__, "_of_cudnn_ops": True}
    return type(f"CudnnOps{kind.__name__}", (kind,), own)


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _functional() -> ModuleType:
    """``torch.nn.functional`` with our attention."""
    ours = ModuleType(F.__name__, F.__doc__)
    vars(ours).update(vars(F))
    ours.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    return ours
