"""Scaled dot-product attention: public functions and fake kernels.

The CUDA kernel, the derivative and the autocast rule are in ``csrc/ops/sdpa*.cpp``, the CPU
kernels in ``ops/sdpa_cpu.py``, which registers both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import bind, refuse_lists, refuse_one_number
from cudnn_ops.ops.call import fast

_ops = torch.ops.cudnn_ops
#: The default, by which a call without options is known.
_ALL_KEYS = (-1, -1)

_sdpa = fast(_ops.sdpa.default)
_sdpa_with_lse = fast(_ops.sdpa_with_lse.default)

#: What attends, with the arguments of ``sdpa_with_lse``, where each rank has a part of the
#: sequence: inside torch's context_parallel.
_split_attention: Callable[..., tuple[Tensor, Tensor]] | None = None


def set_split_attention(attend: Callable[..., tuple[Tensor, Tensor]] | None) -> None:
    """Replaces the operators behind the public functions, for all threads; None ends that."""
    global _split_attention
    _split_attention = attend


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] = _ALL_KEYS,
    bottom_right: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
    rng_state: Tensor | None = None,
) -> Tensor:
    r"""Attention by cuDNN; replaces ``torch.nn.functional.scaled_dot_product_attention`` by name.

    .. math::
        s_{ij} &= \mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j)
                  - \mathrm{slope}_h\, |j - i - \mathrm{shift}| + M_{ij} \\
        \mathrm{out}_i &= \sum_j \mathrm{drop}\Bigl(
            \frac{\exp s_{ij}}{\exp \mathrm{sink}_h + \sum_k \exp s_{ik}}\Bigr) v_j

    (Vaswani et al., "Attention is all you need", equation 1). Terms of options that are not used
    drop out. Differentiable once.

    Args:
        query: [batch, heads, length, head size], float16 or bfloat16; on a CPU also float32 and
            float64. Any strides: a [batch, length, heads, head size] tensor seen through
            ``transpose(1, 2)`` is the fast path; a last stride other than 1 and a head size that is
            not a multiple of 8 require a copy. As in torch's function, batch and heads broadcast,
            and may be absent ([length, head size] at least); of several batch dimensions, ``batch``
            below is the product.
        key: [batch, heads_kv, length_kv, head size], in the query's dtype and on its device.
        value: [batch, heads_kv, length_kv, value head size].
        attn_mask: broadcasts to [batch, heads, length, length_kv]. bool: False hides a key.
            float16, bfloat16 or float32: added to the scores, and differentiable (not with
            ``softcap``, for which cuDNN computes a wrong gradient: NotImplementedError). May be
            combined with ``is_causal`` and ``window_size``.
        dropout_p: probability, in [0, 1), that a weight is dropped; the others are divided by
            ``1 - dropout_p``. Random numbers come from torch's generator of the device; in a CUDA
            graph, each replay draws new ones.
        is_causal: query ``i`` attends to no key after ``i`` (aligned top-left, as in torch; see
            ``bottom_right``).
        scale: factor of the scores; None stands for ``1 / sqrt(head size)``. Another value needs
            no other plan.
        enable_gqa: allows ``heads`` to be a multiple of ``heads_kv``; each key head then serves
            ``heads // heads_kv`` consecutive query heads, and is not expanded.
        window_size: (left, right), how many keys query ``i`` sees before and after key
            ``i + shift``, which it sees too; -1 for all keys on that side. As in FlashAttention.
        bottom_right: aligns the last query with the last key (``shift = length_kv - length``)
            instead of the first with the first (``shift = 0``), for ``is_causal``, ``window_size``
            and ``alibi_slopes``.
        softcap: if above 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2). Another
            value needs no other plan.
        alibi_slopes: [heads], one slope for each head (Press et al., "Train short, test long"). Not
            differentiable.
        sinks: [heads], a learned logit for each head that is part of the softmax's sum and has no
            value (as in gpt-oss). Differentiable.
        seq_lens_q: int32 [batch], the number of queries in each sequence; the rest is padding, for
            which the output is 0. Only the GPU reads it.
        seq_lens_kv: int32 [batch], the number of keys in each sequence.
        deterministic: whether gradients are bitwise reproducible; None follows
            ``torch.use_deterministic_algorithms``.
        rng_state: int64 [2] on the device, seed and offset for ``dropout_p``; None reads them from
            the generator.

    Returns:
        [batch, heads, length, value head size]; dense, with the query's order of dimensions in
        memory, unless the value head size is not a multiple of 8. Zero where a query sees no key.

    Raises:
        ValueError: shapes, devices or options that do not fit; lengths that are negative or exceed
            the tensors (on a GPU checked only with ``CUDNN_OPS_CHECK=1``, which waits for the
            GPU).
        TypeError: an unsupported dtype, or different dtypes; one number for a window,
            a list for a tensor.
        NotImplementedError: cuDNN has no kernel for this on this GPU, or is known to compute it
            wrongly; the message has the reason.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(2, 8, 10, 64)  # batch, heads, length, head size
        >>> kv = torch.randn(2, 2, 10, 64)  # each key head serves four query heads
        >>> out = cudnn_ops.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        >>> out.shape
        torch.Size([2, 8, 10, 64])
    """
    if (
        window_size is _ALL_KEYS
        and not (bottom_right or softcap)
        and _split_attention is None
        and alibi_slopes is sinks is seq_lens_q is seq_lens_kv is deterministic is rng_state is None
    ):  # each keyword argument costs host time
        return _sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    refuse_one_number("scaled_dot_product_attention", window_size)
    split = _split_attention
    attend = _sdpa if split is None else lambda *args, **kw: split(*args, **kw)[0]
    try:
        return attend(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window_size=window_size,
            bottom_right=bottom_right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
            deterministic=deterministic,
            rng_state=rng_state,
        )
    except RuntimeError:  # the schema's
        refuse_lists("scaled_dot_product_attention", locals())
        raise


def scaled_dot_product_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    r"""Like :func:`scaled_dot_product_attention`, and returns the log-sum-exp of the scores too.

    .. math:: \mathrm{lse}_i = \log \Bigl(\exp \mathrm{sink}_h + \sum_j \exp s_{ij}\Bigr)

    Both results are differentiable; a gradient of the log-sum-exp costs one more backward pass,
    for cuDNN's backward does not accept one.

    Args:
        query: as in :func:`scaled_dot_product_attention`, like all arguments below.
        key: as there.
        value: as there.
        attn_mask: as there.
        dropout_p: as there.
        is_causal: as there.
        scale: as there.
        enable_gqa: as there.
        options: ``window_size``, ``bottom_right``, ``softcap``, ``alibi_slopes``, ``sinks``,
            ``seq_lens_q``, ``seq_lens_kv``, ``deterministic`` and ``rng_state``, by keyword.

    Returns:
        The output, and the log-sum-exp: [batch, heads, length], float32 (float64 for float64
        inputs), contiguous, natural logarithm; ``-inf`` where a query sees no key and no sink, and
        in padding. Dropout does not change it.

    Raises:
        ValueError: as :func:`scaled_dot_product_attention`, and so are TypeError and
            NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(2, 8, 10, 64)
        >>> out, lse = cudnn_ops.scaled_dot_product_attention_with_lse(q, q, q, window_size=(4, 0))
        >>> lse.shape, lse.dtype
        (torch.Size([2, 8, 10]), torch.float32)
    """
    refuse_one_number("scaled_dot_product_attention_with_lse", options.get("window_size"))
    attend = _split_attention or _sdpa_with_lse
    try:
        return attend(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            **options,
        )
    except RuntimeError:  # the schema's
        refuse_lists("scaled_dot_product_attention_with_lse", options)
        raise


def _is_known(condition: bool | torch.SymBool) -> bool:
    if isinstance(condition, bool):
        return condition
    # Imported late: it takes 0.3 s, and code with symbolic sizes has imported it already.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def memory_order(like: Tensor) -> list[int]:
    """The order of a result's four dimensions in memory, outermost first; the last stays last.

    The same rule as ``dense_strides_like`` in csrc/ops/sdpa.cpp, for sizes that may be symbolic.
    """

    def lies_inside(a: int, b: int) -> bool:
        strides = like.stride()
        if _is_known(strides[a] == 0):  # broadcast: gives no order, counts as outermost
            return False
        return _is_known(strides[b] == 0) or _is_known(strides[a] < strides[b])

    order = [0, 1, 2]
    for end in (1, 2):  # insertion sort, outermost first, stable
        for i in range(end, 0, -1):
            if lies_inside(order[i - 1], order[i]):
                order[i - 1], order[i] = order[i], order[i - 1]
    return [*order, 3]


def empty_like_order(
    sizes: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """A dense tensor of ``sizes`` whose dimensions lie in memory in the order of ``like``'s.

    It has the dtype of ``like``, or ``dtype``.
    """
    order = memory_order(like)
    inverse = [order.index(dim) for dim in range(4)]
    return like.new_empty([sizes[dim] for dim in order], dtype=dtype).permute(inverse)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the log-sum-exp is computed and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """The results of ``_sdpa_backward``; empty tensors for gradients that are not wanted."""
    return (
        empty_like_order(query.shape, query),
        empty_like_order(key.shape, key),
        empty_like_order(value.shape, value),
        query.new_empty(0) if attn_mask is None else attn_mask.new_empty(attn_mask.shape),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def with_lse_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    # Other calls reach a kernel only where autograd is skipped, as in inference mode.
    if not _ops._sdpa_is_regular.default(query, key, value, kwargs.get("enable_gqa", False)):
        return _ops._sdpa_as_regular.default(query, key, value, *args, **kwargs)
    _ops._sdpa_check.default(query, key, value, *args, **kwargs)
    sizes = [*query.shape[:3], value.shape[3]]
    lse = query.new_empty(sizes[:3], dtype=lse_dtype(query.dtype))
    return empty_like_order(sizes, query), lse


def backward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = bind(_ops._sdpa_backward.default, args, kwargs)
    mask = call.attn_mask if call.grad_mask else None
    return empty_gradients(call.query, call.key, call.value, mask, call.sinks)
