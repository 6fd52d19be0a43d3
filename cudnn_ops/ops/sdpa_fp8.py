"""FP8 attention: public functions, fake and CPU kernels.

The CUDA kernel and the checks are in ``csrc/ops/attention/fp8/``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa_cpu
from cudnn_ops.ops.arguments import (
    bind,
    refuse_lists,
    refuse_one_number,
    refuse_wrong_types,
)
from cudnn_ops.ops.kernels import register
from cudnn_ops.ops.quantize import round_to_fp8
from cudnn_ops.ops.sdpa import empty_like_order

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_sdpa_fp8_op = _ops._sdpa_fp8.default
_sdpa_in_fp8_op = _ops.sdpa_in_fp8.default


class AttentionFp8(NamedTuple):
    """What :func:`sdpa_fp8_with_stats` returns."""

    out: Tensor
    """As :func:`sdpa_fp8` returns it."""
    lse: Tensor
    """[batch, heads, length], float32: the log-sum-exp of the scores, natural logarithm; ``-inf``
    where a query sees no key."""
    amax_s: Tensor
    """float32 [1]: the largest probability, as cuDNN reports it."""
    amax_o: Tensor
    """float32 [1]: the largest magnitude of the output, before it is scaled and rounded; over its
    head's ``descale_v`` where each head has one."""


def sdpa_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    scale_o: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    r"""Attention by cuDNN on query, key and value of 8 bits; forward only.

    .. math::
        s_{ij} &= \mathrm{scale} \cdot \mathrm{descale}_q \, \mathrm{descale}_k \; q_i \cdot k_j \\
        \mathrm{out}_i &= \mathrm{descale}_v \sum_j
            \frac{\exp s_{ij}}{\sum_k \exp s_{ik}} \, v_j

    cuDNN rounds the exponentials, relative to the largest of a row so far, to the inputs' format
    too, times 256. On Hopper it writes an output of 8 bits alone: where ``out_dtype`` is wider, it
    is rounded as ``float8_e4m3fn`` times ``scale_o``, and one more kernel widens it. On Blackwell
    it is written as it is. Needs compute capability 9.0 or newer; the CPU kernel computes in
    float32 and rounds the output alone.

    Args:
        query: [batch, heads, length, head size], ``float8_e4m3fn`` or ``float8_e5m2``
            (:func:`quantize_fp8` makes them). Any strides: a [batch, length, heads, head size]
            tensor seen through ``transpose(1, 2)`` is the fast path. Head sizes are multiples of
            16; cuDNN supports those up to 128, and 192 with values of 128.
        key: [batch, heads_kv, length_kv, head size], in the query's dtype; ``heads`` is a multiple
            of ``heads_kv``, and each key head serves ``heads // heads_kv`` consecutive query heads.
        value: [batch, heads_kv, length_kv, value head size].
        descale_q: float32, one number on the device: what the query is multiplied with.
        descale_k: likewise for the key.
        descale_v: likewise for the value, or [heads_kv], one for each of its heads: cuDNN then
            gives the output over these, and the kernel that widens it applies them (on Blackwell
            another one).
        scale_o: likewise: what the output is multiplied with before it is rounded to 8 bits. None
            stands for ``1 / descale_v``, under which no output is too large, for it is a mean of
            values. Without effect where the output is not rounded. Only with one ``descale_v``.
        is_causal: as in :func:`scaled_dot_product_attention`.
        scale: factor of the scores, above 0; None stands for ``1 / sqrt(head size)``. Another value
            needs no other plan.
        window_size: as in :func:`scaled_dot_product_attention`. On Hopper a left bound and lengths
            do not go together: cuDNN's kernel may hang the GPU.
        bottom_right: as in :func:`scaled_dot_product_attention`. With lengths only on Blackwell.
        seq_lens_q: int32 [batch], the number of queries in each sequence; the rest is padding, for
            which the output is 0. Only the GPU reads it.
        seq_lens_kv: int32 [batch], the number of keys in each sequence. The output is 0 where there
            are none.
        out_dtype: bfloat16, float16, ``float8_e4m3fn`` or ``float8_e5m2``; on a CPU also float32.
            An output of 8 bits is ``scale_o`` times the output: its descale is ``1 / scale_o``, or
            ``descale_v`` of its head.

    Returns:
        [batch, heads, length, value head size], dense, with the query's order of dimensions in
        memory. Zero where a query sees no key.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: an unsupported dtype, or different dtypes; one number for a window, a list for a
            tensor.
        NotImplementedError: cuDNN has no kernel for this on this GPU, or is known to compute it
            wrongly or to hang; the message has the reason. Forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 8, 10, 64, dtype=torch.bfloat16)
        >>> q, descale, _ = cudnn_ops.quantize_fp8(x)
        >>> scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), descale)
        >>> cudnn_ops.sdpa_fp8(q, q, q, **scales, is_causal=True).dtype
        torch.bfloat16
    """
    return _attend(
        "sdpa_fp8",
        query=query,
        key=key,
        value=value,
        descale_q=descale_q,
        descale_k=descale_k,
        descale_v=descale_v,
        out_dtype=out_dtype,
        scale_o=scale_o,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        bottom_right=bottom_right,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
    )[0]


def sdpa_fp8_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    **options: Any,
) -> AttentionFp8:
    """Like :func:`sdpa_fp8`, and returns the log-sum-exp and the largest magnitudes too.

    Args:
        query: as in :func:`sdpa_fp8`, like all arguments below.
        key: as there.
        value: as there.
        descale_q: as there.
        descale_k: as there.
        descale_v: as there.
        options: ``scale_o``, ``is_causal``, ``scale``, ``window_size``, ``bottom_right``,
            ``seq_lens_q``, ``seq_lens_kv`` and ``out_dtype``, by keyword.

    Raises:
        ValueError: as :func:`sdpa_fp8`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> q, descale, _ = cudnn_ops.quantize_fp8(torch.randn(2, 8, 10, 64))
        >>> scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), descale)
        >>> cudnn_ops.sdpa_fp8_with_stats(q, q, q, **scales).lse.shape
        torch.Size([2, 8, 10])
    """
    options.setdefault("out_dtype", torch.bfloat16)
    scales = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
    results = _attend(
        "sdpa_fp8_with_stats",
        query=query,
        key=key,
        value=value,
        **scales,
        **options,
        with_lse=True,
    )
    return AttentionFp8(*results)


def scaled_dot_product_attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    r"""Attention on tensors of 16 bits that is computed in FP8, with gradients in 16 bits.

    The forward is :func:`quantize_fp8` of query, key and value to ``float8_e4m3fn``, and
    :func:`sdpa_fp8` of the three. The backward is that of :func:`scaled_dot_product_attention`, and
    rounding counts as the identity (the straight-through estimator: Bengio et al., "Estimating or
    propagating gradients through stochastic neurons", section 4). With :math:`\hat q, \hat k,
    \hat v` for the rounded tensors, widened:

    .. math::
        P_{ij} &= \exp(\mathrm{scale} \cdot \hat q_i \cdot \hat k_j - \mathrm{lse}_i), \qquad
            \mathrm{dS}_{ij} = P_{ij} (\mathrm{dout}_i \cdot \hat v_j
                - \mathrm{dout}_i \cdot \mathrm{out}_i) \\
        \mathrm{dq} &= \mathrm{scale} \cdot \mathrm{dS} \, \hat k, \qquad
            \mathrm{dk} = \mathrm{scale} \cdot \mathrm{dS}^T \hat q, \qquad
            \mathrm{dv} = P^T \mathrm{dout}

    The gradient is taken at the rounded tensors, because the log-sum-exp and the output that the
    forward saved belong to those. With scores of the tensors as they were, the rows of :math:`P`
    would sum to :math:`\exp(\mathrm{lse}' - \mathrm{lse})` in place of 1, with the log-sum-exp
    :math:`\mathrm{lse}'` of those scores: far from 1 where keys have much in common, and infinite
    with outliers. The scales are powers of two, which makes widening exact, so that the scores are
    the forward's again. The tensors of 8 bits are what is saved for the backward.

    Args:
        query: [batch, heads, length, head size], float16 or bfloat16; on a CPU also float32. Any
            strides. Head sizes are multiples of 16, as :func:`sdpa_fp8` supports them.
        key: [batch, heads_kv, length_kv, head size], in the query's dtype; ``heads`` is a multiple
            of ``heads_kv``.
        value: [batch, heads_kv, length_kv, value head size].
        is_causal: as in :func:`sdpa_fp8`, like all arguments below.
        scale: as there.
        window_size: as there.
        bottom_right: as there.
        seq_lens_q: as there. What lies beyond the lengths takes part in the scales: it must be
            finite, and should not be large.
        seq_lens_kv: as there.
        deterministic: whether gradients are bitwise reproducible; None follows
            ``torch.use_deterministic_algorithms``.

    Returns:
        As :func:`sdpa_fp8`, in the query's dtype. Differentiable once.

    Raises:
        ValueError: as :func:`sdpa_fp8`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> q = torch.randn(2, 8, 10, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> kv = torch.randn(2, 2, 10, 64, dtype=torch.bfloat16)
        >>> out = cudnn_ops.scaled_dot_product_attention_fp8(q, kv, kv, is_causal=True)
        >>> out.sum().backward()
        >>> q.grad.dtype
        torch.bfloat16
    """
    refuse_one_number("scaled_dot_product_attention_fp8", window_size)
    try:
        return _sdpa_in_fp8_op(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            window_size=window_size,
            bottom_right=bottom_right,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
            deterministic=deterministic,
        )
    except RuntimeError:  # the schema's
        refuse_lists("scaled_dot_product_attention_fp8", locals())
        refuse_wrong_types(_sdpa_in_fp8_op, locals(), "scaled_dot_product_attention_fp8")
        raise


def _attend(name: str, **call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_one_number(name, call.get("window_size"))
    try:
        return _sdpa_fp8_op(**call)
    except RuntimeError:  # the schema's
        refuse_lists(name, call)
        refuse_wrong_types(_sdpa_fp8_op, call, name)
        raise


def _empty_results(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = call.query
    sizes = [*query.shape[:3], call.value.shape[3]]
    out = empty_like_order(sizes, query, call.out_dtype)
    lse = query.new_empty(sizes[:3] if call.with_lse else 0, dtype=torch.float32)
    amax, amax_out = (query.new_empty(1, dtype=torch.float32) for _ in range(2))
    return out, lse, amax, amax_out


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._sdpa_fp8_check.default(*args, **kwargs)
    return _empty_results(bind(_sdpa_fp8_op, args, kwargs))


#: Options of attention that FP8 attention does not have.
OTHER_OPTIONS = {
    **dict.fromkeys(("attn_mask", "alibi_slopes", "sinks", "rng_state", "deterministic")),
    "dropout_p": 0.0,
    "softcap": 0.0,
    "enable_gqa": True,
}


def sdpa_fp8_in_torch(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``_sdpa_fp8`` by torch's operators; the lengths are not 0."""
    call = bind(_sdpa_fp8_op, args, kwargs)
    out_dtype, descale_v = call.out_dtype, call.descale_v.reshape(-1, 1, 1)
    has_descales = descale_v.shape[0] > 1
    if has_descales:  # as cuDNN does: of values that have none
        group = call.query.shape[1] // descale_v.shape[0]
        after, descale_v = descale_v.repeat_interleave(group, 0), torch.ones_like(descale_v[:1])
    for name, descale in (("query", call.descale_q), ("key", call.descale_k)):
        setattr(call, name, getattr(call, name).float() * descale.reshape(()))
    call.value = call.value.float() * descale_v
    vars(call).update(OTHER_OPTIONS)
    out, lse = sdpa_cpu.in_torch(call)
    amax, amax_out = sdpa_cpu.largest_probability(call).reshape(1), out.abs().amax().reshape(1)
    if has_descales and out_dtype.itemsize > 1:
        out = out * after
    return in_out_dtype(out, out_dtype, descale_v, call.scale_o), lse, amax, amax_out


def in_out_dtype(
    out: Tensor, out_dtype: torch.dtype, descale_v: Tensor, scale_o: Tensor | None
) -> Tensor:
    """An output as it is returned: where it is of 8 bits, scaled and rounded."""
    if out_dtype.itemsize > 1:
        return out.to(out_dtype)
    scale = descale_v.reciprocal() if scale_o is None else scale_o
    return round_to_fp8(out * scale.reshape(()), out_dtype)


def _cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._sdpa_fp8_check.default(*args, **kwargs)
    call = bind(_sdpa_fp8_op, args, kwargs)
    results = _empty_results(call)
    out, lse, amax, amax_out = results
    if out.numel() == 0 or call.key.shape[2] == 0:
        lse.fill_(-torch.inf)
        return out.zero_(), lse, amax.zero_(), amax_out.zero_()
    computed = sdpa_fp8_in_torch(*args, **kwargs)
    for result, one in zip(results, computed, strict=True):
        if result.numel() > 0:
            result.copy_(one)
    return results


register("_sdpa_fp8", fake=_fake, cpu=_cpu)
