"""The gradients of FP8 attention, in FP8: public function, fake and CPU kernels.

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
from cudnn_ops.ops.sdpa import empty_like_order
from cudnn_ops.ops.sdpa_fp8 import OTHER_OPTIONS

_ops = torch.ops.cudnn_ops
_op = _ops._sdpa_fp8_backward.default


class AttentionFp8Gradients(NamedTuple):
    """What :func:`sdpa_fp8_backward` returns."""

    query: Tensor
    """[batch, heads, length, head size]: the gradient of the query times ``descale_q``."""
    key: Tensor
    """[batch, heads_kv, length_kv, head size]: likewise of the key."""
    value: Tensor
    """[batch, heads_kv, length_kv, value head size]: likewise of the value."""
    amax_dp: Tensor
    """float32 [1]: the largest magnitude of what ``scale_dp`` is of, for the scale of a step
    behind this one."""


def sdpa_fp8_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    descale_o: Tensor,
    descale_do: Tensor,
    scale_dp: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    grad_dtype: torch.dtype = torch.bfloat16,
) -> AttentionFp8Gradients:
    r"""The gradients of :func:`sdpa_fp8_with_stats` by cuDNN's FP8 backward, for Blackwell.

    With :math:`\hat q, \hat k, \hat v, \hat o, \hat g` for the tensors of 8 bits times their
    descales, :math:`\hat g` of ``grad_out``:

    .. math::
        P_{ij} &= \exp(\mathrm{scale} \cdot \hat q_i \cdot \hat k_j - \mathrm{lse}_i), \qquad
            \mathrm{dP}_{ij} = \mathrm{scale} \cdot P_{ij} (\hat g_i \cdot \hat v_j
                - \hat g_i \cdot \hat o_i) \\
        \mathrm{dq} &= \mathrm{dP} \, \hat k, \qquad
            \mathrm{dk} = \mathrm{dP}^T \hat q, \qquad
            \mathrm{dv} = P^T \hat g

    cuDNN rounds P times 256 to the query's format before it multiplies, and dP, as it calls it,
    times ``scale_dp`` to that of ``grad_out``. The probabilities are those of the forward, so
    ``lse`` and ``out`` must be its results. The gradients are bitwise reproducible. The CPU kernel
    computes in float32 and rounds the gradients alone.

    Needs a Blackwell (compute capability 10.x). On Hopper cuDNN's backward gives gradients of 8
    bits, has heads of 128 alone, and was measured to be slower than the one in 16 bits:
    :func:`scaled_dot_product_attention_fp8` has that one, and autograd.

    Args:
        grad_out: [batch, heads, length, value head size], ``float8_e4m3fn`` or ``float8_e5m2``
            whatever the query's dtype: the gradient of the output over ``descale_do``. Any strides.
        query: [batch, heads, length, head size], ``float8_e4m3fn`` or ``float8_e5m2``, as in
            :func:`sdpa_fp8`. Head sizes are multiples of 16 up to 128, and 192 with values of 128.
        key: [batch, heads_kv, length_kv, head size], in the query's dtype.
        value: [batch, heads_kv, length_kv, value head size], in the query's dtype.
        out: as ``grad_out``, in the query's dtype: what :func:`sdpa_fp8_with_stats` gave with this
            ``out_dtype``.
        lse: float32 [batch, heads, length]: its log-sum-exp.
        descale_q: float32, one number on the device: what the query is multiplied with.
        descale_k: likewise for the key.
        descale_v: likewise for the value.
        descale_o: likewise for the output: the forward's ``1 / scale_o``, or its ``descale_v``.
        descale_do: likewise for ``grad_out``.
        scale_dp: likewise: what dP is multiplied with before it is rounded to 8 bits; usually the
            largest number of the format (448, or 57344 of E5M2) over ``amax_dp`` of a step before.
        is_causal: as in the forward, like all options below.
        scale: as there.
        window_size: as there. A left bound over more queries than keys is supported with lengths
            alone.
        bottom_right: as there. With lengths cuDNN supports it where the numbers of queries and
            keys in the tensors are multiples of 64.
        seq_lens_q: as there. Gradients of what lies beyond the lengths are 0.
        seq_lens_kv: as there.
        grad_dtype: bfloat16 or float16; on a CPU also float32.

    Returns:
        The gradients, each dense with its tensor's order of dimensions in memory, in
        ``grad_dtype``; and the largest magnitude of dP. Zero where nothing is attended to.

    Raises:
        ValueError: shapes, devices or options that do not fit.
        TypeError: an unsupported dtype; one number for a window, a list for a tensor.
        NotImplementedError: cuDNN has no kernel for this on this GPU; the message has the reason.
            More than 2\ :sup:`31` elements. Forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 8, 10, 64)
        >>> q, descale, _ = cudnn_ops.quantize_fp8(x)
        >>> scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), descale)
        >>> found = cudnn_ops.sdpa_fp8_with_stats(q, q, q, **scales, out_dtype=q.dtype)
        >>> g, descale_do, _ = cudnn_ops.quantize_fp8(x, dtype=torch.float8_e5m2)
        >>> scales |= {"descale_o": descale, "descale_do": descale_do}
        >>> grads = cudnn_ops.sdpa_fp8_backward(
        ...     g, q, q, q, found.out, found.lse, **scales, scale_dp=torch.ones(1)
        ... )
        >>> grads.query.dtype, grads.amax_dp.shape
        (torch.bfloat16, torch.Size([1]))
    """
    refuse_one_number("sdpa_fp8_backward", window_size)
    try:
        grads = _op(
            *(grad_out, query, key, value, out, lse, descale_q, descale_k, descale_v),
            *(descale_o, descale_do, scale_dp, grad_dtype),
            is_causal=is_causal,
            scale=scale,
            window_size=window_size,
            bottom_right=bottom_right,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
        )
    except RuntimeError:  # the schema's
        refuse_lists("sdpa_fp8_backward", locals())
        refuse_wrong_types(_op, locals(), "sdpa_fp8_backward")
        raise
    return AttentionFp8Gradients(*grads)


def _empty_results(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor) -> Tensor:
        return empty_like_order(tensor.shape, tensor, call.grad_dtype)

    amax = call.query.new_empty(1, dtype=torch.float32)
    return like(call.query), like(call.key), like(call.value), amax


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._sdpa_fp8_backward_check.default(*args, **kwargs)
    return _empty_results(bind(_op, args, kwargs))


def _cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _ops._sdpa_fp8_backward_check.default(*args, **kwargs)
    call = bind(_op, args, kwargs)
    results = _empty_results(call)
    if sdpa_cpu.has_no_scores(call):
        for result in results:
            result.zero_()
        return results
    descales = {"query": "q", "key": "k", "value": "v", "out": "o", "grad_out": "do"}
    for name, short in descales.items():
        descale = getattr(call, f"descale_{short}").reshape(())
        setattr(call, name, getattr(call, name).float() * descale)
    vars(call).update(OTHER_OPTIONS)
    grads = sdpa_cpu.gradients(call)
    largest = grads.scores.abs().amax().reshape(1)
    for result, one in zip(results, (*grads[:3], largest), strict=True):
        result.copy_(one)
    return results


register("_sdpa_fp8_backward", fake=_fake, cpu=_cpu)
