"""Attention over packed sequences: public functions, fake and CPU kernels, FLOP formulas.

The CUDA kernel, the derivative and the autocast rule are in ``csrc/ops/varlen*.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa_cpu
from cudnn_ops.ops.arguments import bind, refuse_lists, refuse_one_number
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register, register_with_lse
from cudnn_ops.ops.sdpa import lse_dtype

_ops = torch.ops.cudnn_ops
_varlen_attention = fast(_ops.varlen_attention.default)
_varlen_attention_with_lse = fast(_ops.varlen_attention_with_lse.default)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    bottom_right: bool = True,
    deterministic: bool | None = None,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Attention over packed sequences of different lengths, with FlashAttention's arguments.

    The formula is that of :func:`cudnn_ops.scaled_dot_product_attention`, applied to each sequence
    separately. The host reads no tensor on the device. One plan serves every number of sequences
    and every length up to those that it was declared for, which are ``max_seqlen_q``,
    ``max_seqlen_k`` and the number of sequences, rounded up. Differentiable once.

    Args:
        q: [tokens, heads, head size], float16 or bfloat16; on a CPU also float32 and float64. A
            last stride other than 1 and a head size that is not a multiple of 8 require a copy.
        k: [tokens_kv, heads_kv, head size]; ``heads`` must be a multiple of ``heads_kv``.
        v: [tokens_kv, heads_kv, value head size].
        cu_seqlens_q: int32 or int64 [sequences + 1], the offset of each sequence in ``q``: from 0
            to the number of tokens, not decreasing. A sequence may be empty.
        cu_seqlens_k: likewise for ``k`` and ``v``. Pass the same tensor as ``cu_seqlens_q`` for
            self-attention: the backward is then up to twice as fast under a causal mask.
        max_seqlen_q: at least the length of the longest sequence of queries, in tokens; with
            ``seqused_q``, at least the largest number of used tokens.
        max_seqlen_k: likewise for the keys.
        dropout_p: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        softmax_scale: factor of the scores; None stands for ``1 / sqrt(head size)``.
        causal: no query attends to a key after its own, as aligned by ``bottom_right``.
        window_size: (left, right), how many keys a query sees on each side of its own; -1 for all
            keys on that side.
        softcap: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        alibi_slopes: as there. Not supported with ``bottom_right`` if queries and keys differ in
            number: cuDNN computes it wrongly (NotImplementedError).
        sinks: as there.
        seqused_q: int32 [sequences], how many of each sequence's first queries are used; the others
            are not read, and their output is 0.
        seqused_k: likewise for the keys.
        bottom_right: aligns the last query with the last key, as in FlashAttention; False: the
            first with the first.
        deterministic: as there.
        rng_state: as there.

    Returns:
        [tokens, heads, value head size], contiguous unless the value head size is not a multiple of
        8; zero where a query sees no key.

    Raises:
        ValueError: shapes, devices or options that do not fit; offsets that do not start at 0, do
            not end at the number of tokens, decrease, or make a sequence longer than the maximum.
            On a GPU offsets are checked only with ``CUDNN_OPS_CHECK=1``, which waits for the GPU;
            without it, wrong offsets give wrong results or an illegal memory access.
        TypeError: an unsupported dtype, or different dtypes; one number for a window,
            a list for a tensor.
        NotImplementedError: cuDNN has no kernel for this on this GPU; the message has its reason.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(7, 8, 64)  # sequences of 3 and 4 tokens
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> cudnn_ops.varlen_attention(q, q, q, starts, starts, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    refuse_one_number("varlen_attention", window_size)
    try:
        return _varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            bottom_right=bottom_right,
            deterministic=deterministic,
            rng_state=rng_state,
        )
    except RuntimeError:  # the schema's
        refuse_lists("varlen_attention", locals())
        raise


def varlen_attention_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Like :func:`varlen_attention`, and returns the log-sum-exp of the scores too.

    Args:
        args: ``q``, ``k``, ``v``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_seqlen_q``,
            ``max_seqlen_k``, ``dropout_p``, ``softmax_scale`` and ``causal``, as in
            :func:`varlen_attention`.
        kwargs: ``window_size``, ``softcap``, ``alibi_slopes``, ``sinks``, ``seqused_q``,
            ``seqused_k``, ``bottom_right``, ``deterministic`` and ``rng_state``, as there.

    Returns:
        The output, and the log-sum-exp: [heads, tokens], float32 (float64 for float64 inputs),
        natural logarithm, as in FlashAttention; where a query sees no key, the sink or ``-inf``.

    Raises:
        ValueError: as :func:`varlen_attention`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(7, 8, 64)
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out, lse = cudnn_ops.varlen_attention_with_lse(q, q, q, starts, starts, 4, 4)
        >>> lse.shape
        torch.Size([8, 7])
    """
    refuse_one_number("varlen_attention_with_lse", kwargs.get("window_size"))
    try:
        return _varlen_attention_with_lse(*args, **kwargs)
    except RuntimeError:  # the schema's
        given = bind(_ops.varlen_attention_with_lse.default, args, kwargs)
        refuse_lists("varlen_attention_with_lse", vars(given))
        raise


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype(q.dtype))


def _with_lse_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any):
    if not _ops._varlen_is_regular.default(q, k, v):
        return _ops._varlen_as_regular.default(q, k, v, *args, **kwargs)
    _ops._varlen_check.default(q, k, v, *args, **kwargs)
    return _empty(q, v)


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _backward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = bind(_ops._varlen_backward.default, args, kwargs)
    return _empty_gradients(call.q, call.k, call.v, call.sinks)


def dense_options(call: SimpleNamespace) -> dict[str, Any]:
    """The options of a call, by the names that they have in dense attention."""
    names = ("dropout_p", "window_size", "bottom_right", "softcap", "alibi_slopes", "sinks")
    options = {name: getattr(call, name) for name in names}
    return options | {"is_causal": call.causal, "scale": call.softmax_scale}


def places(offsets: Tensor, tokens: int, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each token: its sequence, its place in it, and the sequence's length."""
    index = torch.arange(tokens, device=offsets.device)
    offsets = offsets.long()
    # Past the last offset there is no sequence: the last one stands for it, and is shorter.
    sequence = (index.unsqueeze(-1) >= offsets[1:-1]).sum(-1)
    lengths = offsets[1:] - offsets[:-1] if used is None else used.long()
    return sequence, index - offsets[sequence], lengths[sequence]


def sequences_of(call: SimpleNamespace) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Each sequence's tokens among the queries and keys, and its own call's options."""
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()

    def tokens(index: int, starts: list[int], used: Tensor | None) -> slice:
        end = starts[index + 1] if used is None else starts[index] + int(used[index])
        return slice(starts[index], end)

    for index in range(len(starts_q) - 1):
        options = dense_options(call)
        if call.rng_state is not None:  # other numbers for each sequence
            options["rng_state"] = call.rng_state + torch.tensor([0, index])
        queries = tokens(index, starts_q, call.seqused_q)
        yield queries, tokens(index, starts_k, call.seqused_k), options


def batched(packed: Tensor, tokens: slice) -> Tensor:
    """[tokens, H, D] of one sequence as [1, H, S, D]."""
    return packed[tokens].transpose(0, 1).unsqueeze(0)


def _with_lse_cpu(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any):
    if not _ops._varlen_is_regular.default(q, k, v):
        return _ops._varlen_as_regular.default(q, k, v, *args, **kwargs)
    _ops._varlen_check.default(q, k, v, *args, **kwargs)
    call = bind(_ops.varlen_attention_with_lse.default, (q, k, v, *args), kwargs)
    if call.dropout_p > 0 and call.rng_state is None:
        call.rng_state = _ops._attention_rng_state.default(q, call.max_seqlen_q, call.max_seqlen_k)
    out, lse = sdpa_cpu.without_keys(*_empty(q, v), call.sinks)
    for queries, keys, options in sequences_of(call):
        if queries.start == queries.stop:
            continue
        one = (batched(q, queries), batched(k, keys), batched(v, keys))
        out_one, lse_one = sdpa_cpu.forward(*one, enable_gqa=True, **options)
        out[queries] = out_one[0].transpose(0, 1)
        lse[:, queries] = lse_one[0]
    return out, lse


def _backward_cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = bind(_ops._varlen_backward.default, args, kwargs)
    grads = _empty_gradients(call.q, call.k, call.v, call.sinks)
    grad_q, grad_k, grad_v, grad_sinks = (grad.zero_() for grad in grads)
    for queries, keys, options in sequences_of(call):
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        of_one = sdpa_cpu.backward(
            batched(call.grad_out, queries),
            batched(call.q, queries),
            batched(call.k, keys),
            batched(call.v, keys),
            batched(call.out, queries),
            call.lse[:, queries].unsqueeze(0),
            **options,
        )
        grad_q[queries] = of_one[0][0].transpose(0, 1)
        grad_k[keys] = of_one[1][0].transpose(0, 1)
        grad_v[keys] = of_one[2][0].transpose(0, 1)
        if call.sinks is not None:
            grad_sinks += of_one[4]
    return grads


register_with_lse("varlen_attention", fake=_with_lse_fake, cpu=_with_lse_cpu)
register("_varlen_backward", fake=_backward_fake, cpu=_backward_cpu)
