"""The operators' forwards in terms of torch's own, for exporting a graph to another runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops import (
    adaptive_norm,
    batch_norm,
    conv,
    group_norm,
    linear,
    norm,
    paged,
    paged_plan,
    sdpa_cpu,
    varlen,
    varlen_fp8,
)
from cudnn_ops.ops.activation import ACTIVATIONS, activate, needs_before
from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.gated import gated_in_torch
from cudnn_ops.ops.max_pool import max_pool_in_torch
from cudnn_ops.ops.moe import (
    grouped_linear_in_torch,
    moe_combine_in_torch,
    moe_permute_in_torch,
)
from cudnn_ops.ops.quantize import dequantize_in_torch, quantize_in_torch
from cudnn_ops.ops.rotary import rotary_in_torch
from cudnn_ops.ops.rotary_fp8 import rotary_fp8_in_torch
from cudnn_ops.ops.rows_fp8 import rows_fp8_in_torch
from cudnn_ops.ops.sdpa import memory_order
from cudnn_ops.ops.sdpa_fp8 import sdpa_fp8_in_torch

_ops = torch.ops.cudnn_ops

_Decompositions = dict[torch._ops.OperatorBase, Callable[..., Any]]


def decompositions() -> _Decompositions:
    """A table of decompositions into torch's own operators, for export.

    A runtime that supports torch's operators but not these (ONNX Runtime, ExecuTorch, TensorRT)
    runs a decomposed program::

        program = torch.export.export(model, args)
        program = program.run_decompositions(cudnn_ops.decompositions())
        torch.onnx.export(program, f="model.onnx", dynamo=True)

    Shapes may be dynamic. Results equal those of the operators up to rounding.
    ``varlen_attention`` computes the scores of all pairs of tokens; packed queries of
    ``paged_attention`` are padded to ``max_seqlen_q``; ``grouped_linear`` computes the product of
    all rows for each group. There are no decompositions of derivatives, of dropout, and of
    operators that write to their arguments (``paged_kv_append_``, ``paged_attention`` with ``out``,
    and ``batch_norm`` in training): ``torch.export`` functionalizes these before a decomposition
    can apply, so write
    ``cache[slots // page_size, slots % page_size] = new`` in a model to be exported.

    Returns:
        A new dictionary from an overload to a function of the same arguments, for
        ``ExportedProgram.run_decompositions`` and ``make_fx``. That of attention raises
        NotImplementedError if dropout is used.

    Example:
        >>> import torch, cudnn_ops
        >>> norm = lambda x: cudnn_ops.rms_norm(x, (64,))
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(norm, cudnn_ops.decompositions())(torch.randn(4, 64)).graph
        >>> any("cudnn_ops" in str(node.target) for node in graph.nodes)
        False
    """
    table: _Decompositions = {
        _ops.sdpa.default: _sdpa,
        _ops.sdpa_with_lse.default: _sdpa_with_lse,
        _ops.varlen_attention.default: lambda *args, **kwargs: _varlen(*args, **kwargs)[0],
        _ops.varlen_attention_with_lse.default: _varlen,
        _ops.paged_attention.default: lambda *args, **kwargs: _paged(*args, **kwargs)[0],
        _ops.paged_attention_with_lse.default: _paged,
        _ops._paged_plan.default: paged_plan.plan_in_torch,
        _ops._norm.default: _norm,
        _ops._group_norm.default: _group_norm,
        _ops._batch_norm_inference.default: _batch_norm_inference,
        _ops._max_pool2d.default: _max_pool,
        _ops._adaptive_norm.default: _adaptive_norm,
        _ops._gated.default: gated_in_torch,
        _ops._rotary.default: rotary_in_torch,
        _ops._rotary_fp8.default: rotary_fp8_in_torch,
        _ops._rows_fp8.default: rows_fp8_in_torch,
        _ops._sdpa_fp8.default: _sdpa_fp8,
        _ops._varlen_fp8.default: _varlen_fp8,
        _ops._quantize_fp8.default: quantize_in_torch,
        _ops._dequantize_fp8.default: dequantize_in_torch,
        _ops._conv.default: _conv,
        _ops._linear.default: _linear,
        _ops._mlp.default: _mlp,
        _ops._moe_permute.default: moe_permute_in_torch,
        _ops._moe_combine.default: moe_combine_in_torch,
        _ops._grouped_linear.default: grouped_linear_in_torch,
    }
    for name in (
        *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"),
        *("group_norm", "add_group_norm", "batch_norm", "instance_norm"),
        "max_pool2d",
        *("adaptive_layer_norm", "gate_add_adaptive_layer_norm"),
        *("adaptive_rms_norm", "gate_add_adaptive_rms_norm"),
        *("swiglu", "geglu", "rotary_embedding", "rotary_embedding_qk"),
        *("conv1d", "conv2d", "conv3d", "_conv1d", "_conv2d", "_conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("_conv_transpose1d", "_conv_transpose2d", "_conv_transpose3d"),
        *("linear", "mlp"),
        *("moe_permute", "moe_combine", "grouped_linear", "sdpa_in_fp8"),
    ):  # each calls one of the above
        packet = getattr(_ops, name)
        overloads = (getattr(packet, overload) for overload in packet.overloads())
        # Not overload.decompose, which would ask the table that it stands in.
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        table |= {overload: partial(overload._op_dk, composite) for overload in overloads}
    return table


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            f"cudnn_ops.decompositions: attention with dropout_p={dropout_p} has none, for no "
            "other runtime draws the same numbers; export the model after model.eval()"
        )


def _in_order_of(out: Tensor, like: Tensor) -> Tensor:
    """With the strides that the operator's result has."""
    order = memory_order(like)
    inverse = [order.index(dim) for dim in range(4)]
    return out.permute(order).contiguous().permute(inverse)


def _is_regular(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether there is nothing to broadcast: other than kernels, any head size will do."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0]
        and key.shape[:-2] == value.shape[:-2]
        and (enable_gqa or query.shape[1] == key.shape[1])
    )


def _sdpa_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops.sdpa.default, args, kwargs)
    _refuse_dropout(call.dropout_p)
    if not _is_regular(call.query, call.key, call.value, call.enable_gqa):
        return _ops._sdpa_as_regular.default(*args, **kwargs)
    out, lse = sdpa_cpu.in_torch(call)
    return _in_order_of(out.to(call.query.dtype), call.query), lse


def _sdpa(*args: Any, **kwargs: Any) -> Tensor:
    given = vars(bind(_ops.sdpa.default, args, kwargs))
    # The arguments that torch's own function has too. Not a mask: not every runtime may give zeros
    # where a query sees no key.
    shared = ("query", "key", "value", "is_causal", "scale", "enable_gqa")
    query, key, value, is_causal, scale, enable_gqa = (given[name] for name in shared)
    defaults = vars(bind(_ops.sdpa.default, (), {}))
    is_plain = all(given[name] == defaults[name] for name in given.keys() - set(shared))
    if not is_plain or not _is_regular(query, key, value, enable_gqa):
        return _sdpa_with_lse(*args, **kwargs)[0]
    # Torch's own operator: many runtimes have a kernel for it.
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return _in_order_of(out, query)


def _sdpa_fp8(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = bind(_ops._sdpa_fp8.default, args, kwargs)
    out, lse, amax, amax_out = sdpa_fp8_in_torch(*args, **kwargs)
    kept = lse if call.with_lse else lse.new_empty(0)
    return _in_order_of(out, call.query), kept, amax, amax_out


def _varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = bind(_ops.varlen_attention_with_lse.default, args, kwargs)
    _refuse_dropout(given.dropout_p)
    call, positions = _all_pairs(given)
    out, lse = sdpa_cpu.attend(call, *positions)
    return out[0].transpose(0, 1).to(given.q.dtype).contiguous(), lse[0]


def _varlen_fp8(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = bind(_ops._varlen_fp8.default, args, kwargs)
    wide = bind(_ops.varlen_attention_with_lse.default, (), varlen_fp8.widened(given))
    call, positions = _all_pairs(wide)
    out, _ = sdpa_cpu.attend(call, *positions)
    amax = sdpa_cpu.largest_probability(call, positions).reshape(1)
    return varlen_fp8.rounded(given, out[0].transpose(0, 1).contiguous(), amax)


def _all_pairs(given: SimpleNamespace) -> tuple[SimpleNamespace, tuple[Tensor, Tensor]]:
    """A packed call as one of ``sdpa`` over all tokens, and the positions of their pairs."""
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (given.q, given.k, given.v)]
    call = bind(_ops.sdpa.default, batched, varlen.dense_options(given))
    queries = varlen.places(given.cu_seqlens_q, given.q.shape[0], given.seqused_q)
    sequence, place, length = (part.unsqueeze(-1) for part in queries)
    sequence_kv, place_kv, length_kv = varlen.places(
        given.cu_seqlens_k, given.k.shape[0], given.seqused_k
    )
    distance = place_kv - place - (length_kv - length if call.bottom_right else 0)
    same = (sequence == sequence_kv) & (place < length) & (place_kv < length_kv)
    return call, (distance, same & sdpa_cpu.is_seen(call, distance))


def _paged(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return paged.paged_in_torch(bind(_ops.paged_attention_with_lse.default, args, kwargs))


def _norm(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = bind(_ops._norm.default, args, {})
    return norm.norm_in_torch(call, torch.promote_types(call.input.dtype, torch.float32))


def _group_norm(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = bind(_ops._group_norm.default, args, {})
    dtype = torch.promote_types(call.input.dtype, torch.float32)
    return group_norm.group_norm_in_torch(call, dtype)


def _batch_norm_inference(*args: Any) -> Tensor:
    call = bind(_ops._batch_norm_inference.default, args, {})
    dtype = torch.promote_types(call.input.dtype, torch.float32)
    return batch_norm.inference_in_torch(call, dtype)


def _max_pool(*args: Any) -> tuple[Tensor, Tensor]:
    return max_pool_in_torch(bind(_ops._max_pool2d.default, args, {}))


def _adaptive_norm(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = bind(_ops._adaptive_norm.default, args, {})
    dtype = torch.promote_types(call.input.dtype, torch.float32)
    return adaptive_norm.adaptive_norm_in_torch(call, dtype)


def _linear(*args: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops._linear.default, args, {})
    return linear.linear_in_torch(call, call.input.dtype)


def _mlp(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = bind(_ops._mlp.default, args, {})
    return linear.mlp_in_torch(call, call.input.dtype)


def _conv(*args: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops._conv.default, args, {})
    name = ACTIVATIONS[call.activation]
    total = conv.before_in_torch(call, call.input.dtype)
    is_row = conv.is_length_last(call.input, call.weight, call.geometry)
    lay_out = torch.Tensor.contiguous if is_row else _channels_last
    with_before = call.with_before and needs_before(name)
    before = lay_out(total) if with_before else call.input.new_empty(0)
    return lay_out(activate(total, name)), before


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3:
        return _channels_last(tensor.unsqueeze(2)).squeeze(2)
    return tensor.contiguous(memory_format=conv.memory_format(tensor.dim()))
