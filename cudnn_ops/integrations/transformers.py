"""``attn_implementation="cudnn_ops"`` for the models of Hugging Face transformers.

    import cudnn_ops.integrations.transformers

    cudnn_ops.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cudnn_ops")

Two functions are registered: :func:`cudnn_ops_attention` computes attention, and
:func:`cudnn_ops_mask` describes once per forward pass what the layers must mask. The latter decides
how fast the former can be: causal masks, windows, padding and packed sequences are passed to cuDNN
as a few numbers, and only other masks become a tensor over all queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import cudnn_ops
from cudnn_ops.integrations.transformers_fp8 import attend_in_fp8, tell
from cudnn_ops.integrations.transformers_rotary import fuse_rotary_

try:
    from transformers import AttentionInterface, AttentionMaskInterface

    from cudnn_ops.integrations.transformers_masks import (
        NO_WINDOW,
        CompactMask,
        cudnn_ops_mask,
        full_mask,
    )
except ImportError as error:
    raise ImportError(
        "cudnn_ops.integrations.transformers needs Hugging Face transformers, 5.17 or later (it is "
        f"tested up to 5.23): {error}; install it with: pip install 'transformers>=5.17'"
    ) from error

#: Offsets of the queries' and the keys' sequences, and the longest of each.
Packing = tuple[Tensor, Tensor, int | Tensor, int | Tensor]

__all__ = ["CompactMask", "cudnn_ops_attention", "cudnn_ops_mask", "fuse_rotary_", "register"]


def register(
    name: str = "cudnn_ops",
    *,
    compact_masks: bool = True,
    packing_under_compile: bool = True,
    fp8_from: int | None = None,
) -> None:
    """Registers ``attn_implementation=name`` with transformers; a second call changes the options.

    Args:
        name: the implementation's name; must not contain the name of one of transformers' own.
        compact_masks: False passes a tensor [batch, 1, queries, keys] to models for every mask that
            is not merely causal: slower, for models that append keys of their own to it
            (DeepSeek-V4).
        packing_under_compile: ``torch.compile`` cannot check whether ``position_ids`` restart, so
            without an ``attention_mask`` every training step uses the full mask of a packed batch.
            False asserts that they do not restart unless ``cu_seq_lens_q`` and the like are passed,
            and avoids that mask. Without effect outside of ``torch.compile``.
        fp8_from: the number of queries from which attention is computed in FP8, by
            :func:`cudnn_ops.scaled_dot_product_attention_fp8`, in training too; None: never. Of
            few queries, as in decoding, rounding costs more than it saves. FP8 supports no packed
            sequences, dropout, softcap or sinks, no masks other than causal ones, windows and
            padding at the end, and no heads over 128 but those of 192 with values of 128: such
            calls are computed in 16 bits, with one warning for each reason. FP8 requires compute
            capability 9.0 or newer.

    Raises:
        ValueError: ``fp8_from`` is less than 2.
    """
    if fp8_from is not None and fp8_from < 2:
        raise ValueError(f"fp8_from must be None or at least 2 queries, got {fp8_from}")
    mask_function: Callable[..., Any] = full_mask
    if compact_masks:
        mask_function = partial(cudnn_ops_mask, packing_under_compile=packing_under_compile)
    attend = cudnn_ops_attention
    if fp8_from is not None:
        attend = partial(cudnn_ops_attention, fp8_from=fp8_from)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_function)


def cudnn_ops_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CompactMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    output_attentions: bool | None = None,
    fp8_from: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``.

    Args:
        module: the layer; its ``is_causal`` is used if the argument is None.
        query: [batch, heads, length, head size].
        key: [batch, heads_kv, length_kv, head size]; it is not expanded.
        value: [batch, heads_kv, length_kv, value head size].
        attention_mask: the result of :func:`cudnn_ops_mask`, which describes everything that is
            masked; or a tensor that broadcasts to [batch, heads, length, length_kv], True or 0
            where a query sees a key. None: causal if ``is_causal``, with the window; queries and
            keys start at the same token, or there is one query and it comes last.
        dropout: probability that a weight is dropped; models pass 0 when they are not training.
        scaling: factor of the scores; None stands for ``1 / sqrt(head size)``.
        sliding_window: how many keys a query sees, including its own; used if there is no mask.
        softcap: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        is_causal: whether no query sees a key after its own.
        s_aux: [heads], the logits of attention sinks.
        cu_seq_lens_q: int [sequences + 1], the offset of each sequence in the flattened batch. The
            four arguments are passed together, as for transformers' FlashAttention; they take
            precedence over ``attention_mask``.
        cu_seq_lens_k: likewise for the keys.
        max_length_q: at least the length of the longest sequence; a tensor makes the host wait.
        max_length_k: likewise for the keys.
        position_bias: added to the scores, and differentiable (T5's); broadcasts to [batch, heads,
            length, length_kv].
        sinks: a logit for each query (Inkling 2): not supported.
        output_attentions: not supported.
        fp8_from: as in :func:`register`.
        kwargs: arguments of other implementations, ignored.

    Returns:
        [batch, length, heads, value head size], contiguous, and None in place of the weights.

    Raises:
        ValueError: ``output_attentions`` is set, or packed sequences have padding.
        NotImplementedError: packed sequences with a ``position_bias``; ``sinks``; a layer with keys
            that its mask does not cover. Also all errors of the operators.
    """
    if output_attentions:
        raise ValueError(
            "cudnn_ops does not support output_attentions=True; "
            'use model.set_attn_implementation("eager") to get attention weights'
        )
    if sinks is not None:
        raise NotImplementedError(
            f"cudnn_ops has sinks of one logit for each head, and {type(module).__name__} has one "
            'for each query; use model.set_attn_implementation("eager") for this model'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    length, length_kv = query.shape[2], key.shape[2]
    compact = attention_mask if isinstance(attention_mask, CompactMask) else None
    if compact is not None:
        causal, window = True, compact.window
        if compact.sizes is not None and compact.sizes[1:] != (length, length_kv):
            raise NotImplementedError(
                f"the mask is one of {compact.sizes[1]} queries and {compact.sizes[2]} keys, and "
                f"{type(module).__name__} has {length} and {length_kv}: it adds keys that the mask "
                "does not know; register another name with compact_masks=False for this model"
            )
    elif attention_mask is None and sliding_window is not None and length_kv > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    else:
        window = NO_WINDOW
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window_size": window,
    }

    given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    has_equal_tokens = query.shape[0] * length == key.shape[0] * length_kv
    packing = _packing(compact, given, is_one=causal and has_equal_tokens)
    if packing is not None:
        if position_bias is not None:
            raise NotImplementedError(
                "cudnn_ops has no packed attention with a position_bias; give each sequence a row "
                "of its own, with an attention_mask for the padding"
            )
        if fp8_from is not None and packing[2] >= fp8_from:
            tell("packed sequences")
        return _packed(query, key, value, packing, scaling, causal, options), None

    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    seen = length_kv
    if compact is not None:
        seen -= compact.unwritten
    elif mask is None and causal and 1 < length < length_kv:
        seen = length  # a static cache before its first token
    if seen < length_kv:
        key, value = key[:, :, :seen], value[:, :, :seen]
        position_bias = None if position_bias is None else position_bias[..., :seen]
    if compact is not None:
        if compact.padding is not None:
            mask = compact.padding[:, None, None, :seen]
        options["seq_lens_q"] = options["seq_lens_kv"] = compact.lengths
    if compact is not None or attention_mask is None:
        options["is_causal"] = bool(causal and length > 1)
        options["bottom_right"] = bool((compact is not None or length == 1) and length != seen)
    if position_bias is not None:
        mask = _with_bias(mask, position_bias)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = None
    if fp8_from is not None and length >= fp8_from:
        out = attend_in_fp8(query, key, value, mask, scaling, options)
    if out is None:
        out = cudnn_ops.scaled_dot_product_attention(
            query, key, value, mask, scale=scaling, enable_gqa=True, **options
        )
    return out.transpose(1, 2).contiguous(), None


def _packing(
    compact: CompactMask | None, given: tuple[Any, Any, Any, Any], *, is_one: bool
) -> Packing | None:
    """The offsets of packed sequences; ``is_one``: queries and keys have the same."""
    if any(part is None for part in given):
        if compact is None or compact.cu_seqlens is None:
            return None
        return compact.cu_seqlens, compact.cu_seqlens, compact.longest, compact.longest
    if compact is not None and (compact.padding is not None or compact.lengths is not None):
        raise ValueError(
            "cu_seq_lens_q and an attention_mask with padding contradict each other: packed "
            "sequences have no padding; leave attention_mask out"
        )
    if is_one:
        # No key is older than its sequence's first query: equal offsets, and as one tensor they
        # make the backward faster.
        return given[0], given[0], given[2], given[2]
    return given


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    causal: bool,
    options: dict[str, Any],
) -> Tensor:
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bounds = [int(n) if isinstance(n, Tensor) else n for n in packing[2:]]
    given = (q, k, v, packing[0], packing[1], bounds[0], bounds[1])
    out = cudnn_ops.varlen_attention(*given, softmax_scale=scaling, causal=causal, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A bias of the scores, -inf where the mask hides a key."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else bias + mask
