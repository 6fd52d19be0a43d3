"""``attn_implementation="cudnn_ops"`` for the models of Hugging Face transformers.

    import cudnn_ops.integrations.transformers

    cudnn_ops.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cudnn_ops")

Two functions are registered: :func:`cudnn_ops_attention` computes, and :func:`cudnn_ops_mask` says
once per forward pass what the layers will have to hide. It is the second that decides how fast the
first can be: a causal mask, a window, padding and packed sequences are told to cuDNN by a few
numbers, and only what is none of these becomes a mask of every query and key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_ops
from cudnn_ops.integrations.transformers_rotary import fuse_rotary_

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        "cudnn_ops.integrations.transformers needs Hugging Face transformers, 5.17 or later; "
        "install it with: pip install 'transformers>=5.17'"
    ) from error

__all__ = ["CompactMask", "cudnn_ops_attention", "cudnn_ops_mask", "fuse_rotary_", "register"]

_NO_WINDOW = (-1, -1)


class CompactMask(NamedTuple):
    """What queries see of the keys, causally, in a few numbers; the last query is at the last key.

    A tuple, so that whatever moves a layer's arguments between devices moves what is in here.

    Attributes:
        window: (left, right), as ``cudnn_ops.scaled_dot_product_attention`` takes it.
        padding: bool [batch, keys], False hides a key; None: there is nothing to hide.
        lengths: int32 [batch], how many tokens there are before each sequence's padding; None: all.
        cu_seqlens: int32 [sequences + 1], where each packed sequence begins among the batch's
            tokens, row after row; None: each row is one sequence.
        longest: with ``cu_seqlens``, the length of the longest sequence.
    """

    window: tuple[int, int] = _NO_WINDOW
    padding: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0

    @property
    def ndim(self) -> int:
        """That of the mask that it stands for: not 2, as transformers' masks of padding are."""
        return 4


def register(
    name: str = "cudnn_ops", *, compact_masks: bool = True, packing_under_compile: bool = True
) -> None:
    """Makes ``attn_implementation=name`` known to transformers; again changes the options.

    Args:
        name: what to ask for. Must not contain the name of one of transformers' own.
        compact_masks: False gives models a tensor [batch, 1, queries, keys] wherever there is
            anything to hide but the future: slower, for models that look into their mask.
        packing_under_compile: ``torch.compile`` cannot look whether ``position_ids`` restart, so
            that without an ``attention_mask`` every training step gets the mask of a packed batch,
            of every query and key. False promises that they do not restart unless
            ``cu_seq_lens_q`` and the like are given too, and there is no mask. Nothing changes
            outside of ``torch.compile``.
    """
    mask_function = sdpa_mask
    if compact_masks:
        mask_function = partial(cudnn_ops_mask, packing_under_compile=packing_under_compile)
    AttentionInterface.register(name, cudnn_ops_attention)
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
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``.

    Args:
        module: the layer; its ``is_causal`` stands where the argument is None.
        query: [batch, heads, length, head size].
        key: [batch, heads_kv, length_kv, head size]; is not expanded.
        value: [batch, heads_kv, length_kv, value head size].
        attention_mask: from :func:`cudnn_ops_mask`, which then says all of what is hidden. A
            tensor does so too, and broadcasts to [batch, heads, length, length_kv], True or 0 where
            a query sees a key. None: the future is hidden if ``is_causal``, and what is beyond the
            window; queries and keys begin at the same token, or there is one query and it comes
            last.
        dropout: probability that a weight is dropped; models pass 0 when they are not training.
        scaling: factor of the scores; None stands for ``1 / sqrt(head size)``.
        sliding_window: how many keys a query sees, itself included; for where there is no mask.
        softcap: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        is_causal: whether a query sees no key beyond itself.
        s_aux: [heads], the logits of attention sinks.
        cu_seq_lens_q: int [sequences + 1], where each sequence begins in the flattened batch. The
            four of these are given together, as for transformers' FlashAttention; they go before
            ``attention_mask``.
        cu_seq_lens_k: likewise for the keys.
        max_length_q: at least the length of the longest sequence; a tensor is waited for.
        max_length_k: likewise for the keys.
        position_bias: not taken.
        output_attentions: not taken.
        kwargs: what other implementations take and this one has no use for.

    Returns:
        [batch, length, heads, value head size], contiguous, and None in place of the weights.

    Raises:
        ValueError: weights are asked for, or packed sequences come with padding.
        NotImplementedError: ``position_bias``. And all that cudnn_ops raises.
    """
    if output_attentions:
        raise ValueError(
            "cudnn_ops does not keep the attention weights that output_attentions=True asks for; "
            'use model.set_attn_implementation("eager") where they are wanted'
        )
    if position_bias is not None:
        raise NotImplementedError(
            "the cudnn_ops attention of transformers does not take position_bias; "
            'use model.set_attn_implementation("sdpa") for this model'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    length, length_kv = query.shape[2], key.shape[2]
    window = _NO_WINDOW
    if sliding_window is not None and length_kv > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    compact = attention_mask if isinstance(attention_mask, CompactMask) else CompactMask()
    if isinstance(attention_mask, CompactMask):
        causal, window = True, attention_mask.window
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window_size": window,
    }

    packing: tuple[Tensor, Tensor, int | Tensor, int | Tensor] | None = None
    if (
        cu_seq_lens_q is not None
        and cu_seq_lens_k is not None
        and max_length_q is not None
        and max_length_k is not None
    ):
        if compact.padding is not None or compact.lengths is not None:
            raise ValueError(
                "cu_seq_lens_q and an attention_mask with padding contradict each other: packed "
                "sequences have no padding; leave attention_mask out"
            )
        packing = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if causal and query.shape[0] * length == key.shape[0] * length_kv:
            # No key is older than its sequence's first query: equal offsets, and as one tensor they
            # make the backward faster.
            packing = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    elif compact.cu_seqlens is not None:
        packing = (compact.cu_seqlens, compact.cu_seqlens, compact.longest, compact.longest)
    if packing is not None:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        longest_q, longest_k = (int(n) if isinstance(n, Tensor) else n for n in packing[2:])
        out = cudnn_ops.varlen_attention(
            q,
            k,
            v,
            packing[0],
            packing[1],
            longest_q,
            longest_k,
            softmax_scale=scaling,
            causal=causal,
            **options,
        )
        return out.unflatten(0, (query.shape[0], length)), None

    if isinstance(attention_mask, CompactMask):
        if compact.padding is not None:
            options["attn_mask"] = compact.padding[:, None, None, :]
        options["seq_lens_q"] = options["seq_lens_kv"] = compact.lengths
        options["bottom_right"] = length != length_kv
        options["is_causal"] = length > 1
    elif attention_mask is not None:
        options["attn_mask"] = attention_mask
        options["window_size"] = _NO_WINDOW
    elif length == 1:
        options["bottom_right"] = length_kv > 1
    else:
        options["is_causal"] = causal
        if causal and length_kv > length:
            # A static cache before its first token: nobody sees the keys that are to come.
            key, value = key[:, :, :length], value[:, :, :length]
    out = cudnn_ops.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=True, **options
    )
    return out.transpose(1, 2).contiguous(), None


def cudnn_ops_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | CompactMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    packing_under_compile: bool = True,
    **kwargs: Any,
) -> Tensor | CompactMask | None:
    """A mask function of transformers' ``AttentionMaskInterface``, beside :func:`sdpa_mask`.

    Where the mask is causal, perhaps with a window, padding or packed sequences, and the last query
    belongs to the last key, it is a :class:`CompactMask`, or None if it hides the future alone.
    Everything else (static caches, which have keys to come; chunks; blocks that see themselves;
    masks of the user's) is what ``sdpa_mask`` makes of it.

    Without an ``attention_mask`` the host does not wait for the GPU here; with one it does so once,
    to see whether there is padding and where. Under ``torch.compile`` it never does, and takes it
    that there is.

    Args:
        batch_size: as in ``transformers.masking_utils.sdpa_mask``; likewise the rest.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query; a tensor for static caches.
        kv_offset: position of the first key.
        mask_function: what a query sees.
        attention_mask: bool [batch, tokens], False for padding; or what this function returned, as
            ``generate`` hands it to the model, which asks again.
        local_size: the window or the chunk.
        allow_is_causal_skip: set by transformers where ``mask_function`` is causal, and local if
            there is a ``local_size``, and nothing else.
        allow_is_bidirectional_skip: likewise for a mask that hides nothing.
        use_vmap: ``mask_function`` has parts of the user's.
        config: of the model.
        packing_under_compile: as in :func:`register`.
        kwargs: for ``sdpa_mask``.
    """
    if isinstance(attention_mask, CompactMask):
        return attention_mask
    sequences = None
    # Chunks come with a local_size as windows do; the configuration tells them apart.
    is_chunked = local_size is not None and getattr(config, "attention_chunk_size", None)
    understood = (
        not (use_vmap or is_chunked or isinstance(q_offset, Tensor))
        and q_offset + q_length == kv_offset + kv_length
    )
    if understood and not allow_is_causal_skip:
        # Maybe packed sequences, which come neither with a mask of padding nor with a cache.
        understood = attention_mask is None and q_length == kv_length
        if understood and is_tracing():
            # Blocks that see themselves are a union, and have another name.
            understood = not packing_under_compile and mask_function.__name__ == "and_mask"
        elif understood:
            sequences = _packed_sequences(mask_function)
            understood = sequences is not None
    if not understood:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            config=config,
            **kwargs,
        )
    window = _NO_WINDOW
    if local_size is not None and kv_length > local_size:
        window = (local_size - 1, 0)
    if sequences is not None:
        cu_seqlens = _offsets(sequences)
        return CompactMask(window, cu_seqlens=cu_seqlens, longest=int(cu_seqlens.diff().max()))
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if is_tracing(padding):
            return CompactMask(window, padding=padding)
        is_decreasing = (padding[:, 1:] <= padding[:, :-1]).all()
        is_whole, is_at_the_end = torch.stack([padding.all(), is_decreasing]).tolist()
        if not is_whole:
            if is_at_the_end and q_length == kv_length:
                return CompactMask(window, lengths=padding.sum(-1, dtype=torch.int32))
            return CompactMask(window, padding=padding)
    if window == _NO_WINDOW and q_length in (1, kv_length):
        return None
    return CompactMask(window)


def _packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """[batch, tokens]: which of its row's packed sequences a token is of.

    Out of what transformers' ``create_causal_mask`` and ``create_sliding_window_causal_mask`` build
    for them, ``and_masks(causal or local, packed_sequence_mask_function(...))``. None if it is
    anything else.
    """
    parts = _captured(mask_function, "and_masks", "mask_functions")
    if parts is None or len(parts) != 2:
        return None
    base, packing = parts
    if base is not causal_mask_function:
        local = _captured(base, "and_masks", "mask_functions")
        is_window = local is not None and len(local) == 2 and local[1] is causal_mask_function
        if not is_window or _captured(local[0], "sliding_window_overlay", "sliding_window") is None:
            return None
    return _captured(packing, "packed_sequence_mask_function", "packed_sequence_mask")


def _captured(function: Callable[..., Any], maker: str, variable: str) -> Any:
    """The variable that a function of transformers' ``maker`` has captured, or None."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>"):
        return None
    return inspect.getclosurevars(function).nonlocals.get(variable)


def _offsets(sequences: Tensor) -> Tensor:
    """Where sequences begin in the flattened batch, and its end: int32 [sequences + 1]."""
    begins = F.pad(sequences.diff(dim=-1) != 0, (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel()).int()
