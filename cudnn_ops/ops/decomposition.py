"""The operators' forwards in terms of torch's own, for exporting a graph to another runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops.activation import ACTIVATIONS, Activation, activate, needs_before
from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.sdpa import lse_dtype, memory_order

_ops = torch.ops.cudnn_ops

_Decompositions = dict[torch._ops.OperatorBase, Callable[..., Any]]


def decompositions() -> _Decompositions:
    """A table of decompositions into torch's own operators, for export.

    A runtime that supports torch's operators but not these (ONNX Runtime, ExecuTorch, TensorRT)
    runs a decomposed program::

        program = torch.export.export(model, args)
        program = program.run_decompositions(cudnn_ops.decompositions())
        torch.onnx.export(program, f="model.onnx", dynamo=True)

    Shapes may be dynamic. Results equal those of the operators up to rounding. Packed attention
    computes the scores of all pairs of tokens. There are no decompositions of derivatives, of
    dropout, and of operators that write to their arguments (``paged_kv_append_``, and
    ``paged_attention`` with ``out``): ``torch.export`` functionalizes these before a decomposition
    can apply, so write ``cache[slots // page_size, slots % page_size] = new`` in a model to be
    exported.

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
        _ops._norm.default: _norm,
        _ops._gated.default: _gated,
        _ops._rotary.default: _rotary,
        _ops._conv.default: _conv,
    }
    for name in (
        *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"),
        *("swiglu", "geglu", "rotary_embedding"),
        *("conv1d", "conv2d", "conv3d", "_conv1d", "_conv2d", "_conv3d"),
    ):  # each calls one of the above
        packet = getattr(_ops, name)
        overloads = (getattr(packet, overload) for overload in packet.overloads())
        # Not overload.decompose, which would ask the table that it stands in.
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        table |= {overload: partial(overload._op_dk, composite) for overload in overloads}
    return table


def _scores(
    query: Tensor,
    key: Tensor,
    distance: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """[B, Hkv, group, Sq, Skv]: heads that share a key head side by side."""
    dtype = lse_dtype(query.dtype)
    grouped = query.to(dtype).unflatten(1, (key.shape[1], -1))
    factor = query.shape[3] ** -0.5 if scale is None else scale
    scores = grouped @ key.to(dtype).unsqueeze(2).transpose(-1, -2) * factor
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).view(key.shape[1], -1, 1, 1)
        scores = scores - slopes * distance.abs().unsqueeze(-3)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + _by_group(attn_mask, key.shape[1]).to(dtype)
    return scores


def _by_group(mask: Tensor, heads_kv: int) -> Tensor:
    """Reshapes a mask for [B, Hq, Sq, Skv] so that it broadcasts to [B, Hkv, group, Sq, Skv]."""
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return mask.unsqueeze(-3) if mask.dim() >= 3 else mask
    return mask.unflatten(-3, (heads_kv, -1))


def _sees(distance: Tensor, is_causal: bool, window_size: Sequence[int]) -> Tensor:
    """Whether a key at this distance after the query's own is visible."""
    left, right = window_size
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance >= -left)
    if is_causal or right >= 0:
        visible = visible & (distance <= (0 if is_causal else right))
    return visible


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    visible: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[B, Hq, Sq, Dv] and the log-sum-exp [B, Hq, Sq], both in the type of the latter.

    ``distance`` and ``visible`` broadcast to [B, 1, Sq, Skv].
    """
    scores = _scores(query, key, distance, attn_mask, scale, softcap, alibi_slopes)
    visible = visible.unsqueeze(-3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & _by_group(attn_mask, key.shape[1])
    scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(key.shape[1], -1, 1, 1)
        peak = torch.maximum(peak, logits)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(logits - peak)
    out = weights @ value.to(scores.dtype).unsqueeze(2)
    out = out / total.masked_fill(total == 0, 1.0)
    lse = torch.log(total) + peak
    return out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            f"cudnn_ops.decompositions: attention with dropout_p={dropout_p} has none, for no "
            "other runtime draws the same numbers; export the model after model.eval()"
        )


class _Regular(NamedTuple):
    """The tensors of a call with one dimension of batch and the heads that they broadcast to."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    lead: tuple[int, ...]
    """The dimensions before the queries in the result."""

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
    ) -> _Regular:
        rank = max(query.dim(), key.dim(), value.dim())
        is_alike = (
            rank == 4 and query.shape[:-3] == key.shape[:-3] and key.shape[:-2] == value.shape[:-2]
        )
        if is_alike and (enable_gqa or query.shape[1] == key.shape[1]):
            return cls(query, key, value, mask, tuple(query.shape[:2]))
        missing = (None,) * max(0, 4 - rank)

        def padded(tensor: Tensor) -> Tensor:
            return tensor[(None,) * (rank - tensor.dim())][missing]

        q, k, v = padded(query), padded(key), padded(value)
        if enable_gqa:
            heads = q.shape[-3]
            k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (t.expand(*lead, *t.shape[-2:]).flatten(0, -4) for t in (q, k, v))
        if mask is not None and mask.dim() > 3:
            mask = padded(mask)
            mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
        return cls(q, k, v, mask, tuple(lead[len(missing) :]))

    def result(self, rows: Tensor) -> Tensor:
        """[batch, heads, length, ...] in the shape that the caller expects."""
        if len(self.lead) == 2:
            return rows
        return rows.reshape(*self.lead, *rows.shape[2:])


def _in_order_of(out: Tensor, like: Tensor) -> Tensor:
    """With the strides that the operator's result has."""
    order = memory_order(like)
    inverse = [order.index(dim) for dim in range(4)]
    return out.permute(order).contiguous().permute(inverse)


def _sdpa_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = bind(_ops.sdpa_with_lse.default, args, kwargs)
    _refuse_dropout(given.dropout_p)
    call = _Regular.of(given.query, given.key, given.value, given.attn_mask, given.enable_gqa)
    query, key = call.query, call.key

    def of_each(lengths: Tensor | None, size: int) -> Tensor | int:
        return size if lengths is None else lengths.long().view(-1, 1, 1, 1)

    rows = torch.arange(query.shape[2], device=query.device).unsqueeze(-1)
    columns = torch.arange(key.shape[2], device=query.device)
    lengths = of_each(given.seq_lens_q, query.shape[2])
    lengths_kv = of_each(given.seq_lens_kv, key.shape[2])
    distance = columns - rows - (lengths_kv - lengths if given.bottom_right else 0)
    visible = _sees(distance, given.is_causal, given.window_size)
    if given.seq_lens_q is not None:
        visible = visible & (rows < lengths)
    if given.seq_lens_kv is not None:
        visible = visible & (columns < lengths_kv)
    out, lse = _attend(
        query,
        key,
        call.value,
        distance,
        visible,
        attn_mask=call.attn_mask,
        scale=given.scale,
        softcap=given.softcap,
        alibi_slopes=given.alibi_slopes,
        sinks=given.sinks,
    )
    if given.sinks is not None and given.seq_lens_q is not None:
        # Padding has nothing, not even the sink.
        lse = lse.masked_fill((rows >= lengths).squeeze(-1), -torch.inf)
    return call.result(_in_order_of(out.to(query.dtype), query)), call.result(lse)


def _sdpa(*args: Any, **kwargs: Any) -> Tensor:
    given = vars(bind(_ops.sdpa.default, args, kwargs))
    # The arguments that torch's own function has too. Not a mask: not every runtime may give zeros
    # where a query sees no key.
    shared = ("query", "key", "value", "is_causal", "scale", "enable_gqa")
    query, key, value, is_causal, scale, enable_gqa = (given[name] for name in shared)
    defaults = vars(bind(_ops.sdpa.default, (), {}))
    if any(given[name] != defaults[name] for name in given.keys() - set(shared)):
        return _sdpa_with_lse(**given)[0]
    # Torch's own operator: many runtimes have a kernel for it.
    call = _Regular.of(query, key, value, None, enable_gqa)
    out = F.scaled_dot_product_attention(
        *call[:3], is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return call.result(_in_order_of(out, call.query))


def _places(offsets: Tensor, tokens: int, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each token: its sequence, its place in it, and the sequence's length."""
    index = torch.arange(tokens, device=offsets.device)
    offsets = offsets.long()
    # Past the last offset there is no sequence: the last one stands for it, and is shorter.
    sequence = (index.unsqueeze(-1) >= offsets[1:-1]).sum(-1)
    lengths = offsets[1:] - offsets[:-1] if used is None else used.long()
    return sequence, index - offsets[sequence], lengths[sequence]


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: tuple[Tensor, Tensor, Tensor],
    of_keys: tuple[Tensor, Tensor, Tensor],
    *,
    is_causal: bool,
    window_size: Sequence[int],
    bottom_right: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[tokens, H, D] of all, each sequence by itself; the log-sum-exp is [H, tokens]."""
    sequence, place, length = (part.unsqueeze(-1) for part in of_queries)
    sequence_kv, place_kv, length_kv = of_keys
    same = sequence == sequence_kv
    distance = place_kv - place
    if bottom_right:
        distance = distance - (length_kv - length)
    visible = same & (place < length) & (place_kv < length_kv)
    visible = visible & _sees(distance, is_causal, window_size)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    out, lse = _attend(q, k, v, distance[None, None], visible[None, None], **options)
    return out[0].transpose(0, 1).to(query.dtype).contiguous(), lse[0]


def _varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops.varlen_attention_with_lse.default, args, kwargs)
    _refuse_dropout(call.dropout_p)
    return _packed(
        call.q,
        call.k,
        call.v,
        _places(call.cu_seqlens_q, call.q.shape[0], call.seqused_q),
        _places(call.cu_seqlens_k, call.k.shape[0], call.seqused_k),
        is_causal=call.causal,
        window_size=call.window_size,
        bottom_right=call.bottom_right,
        scale=call.softmax_scale,
        softcap=call.softcap,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
    )


def _paged(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops.paged_attention_with_lse.default, args, kwargs)
    query = call.query
    batch, width = call.page_table.shape
    page_size = call.key_cache.shape[2 if call.head_major else 1]
    lengths = call.seq_lens_kv.long()
    place = torch.arange(width * page_size, device=query.device)
    there = place < lengths.unsqueeze(-1)  # [B, slots]
    # Entries beyond a length are not followed, and values there not read: they may be NaN.
    first = torch.arange(width, device=query.device) * page_size
    pages = call.page_table.long().masked_fill(first >= lengths.unsqueeze(-1), 0)

    def gathered(cache: Tensor) -> Tensor:
        """[B, slots, heads, head size]."""
        by_token = cache.transpose(1, 2) if call.head_major else cache
        return by_token[pages].flatten(1, 2).masked_fill(~there[:, :, None, None], 0.0)

    key, value = gathered(call.key_cache), gathered(call.value_cache)
    names = ("is_causal", "scale", "softcap", "window_size", "bottom_right", "sinks")
    shared: dict[str, Any] = {name: getattr(call, name) for name in names}
    if call.cu_seqlens_q is None:
        out, lse = _sdpa_with_lse(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            enable_gqa=True,
            seq_lens_kv=lengths,
            **shared,
        )
        return out.transpose(1, 2).contiguous(), lse
    sequence = torch.arange(batch, device=query.device).unsqueeze(-1).expand(there.shape)
    of_keys = (sequence, place.expand(there.shape), lengths.unsqueeze(-1).expand(there.shape))
    return _packed(
        query,
        key.flatten(0, 1),
        value.flatten(0, 1),
        _places(call.cu_seqlens_q, query.shape[0], None),
        tuple(part.flatten() for part in of_keys),  # type: ignore[arg-type]
        **shared,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    with_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = input if residual is None else input + residual
    total = input.new_empty(0) if residual is None else x
    wide = _wide(x)
    factor = None if weight is None else weight.to(wide.dtype)
    if factor is not None and zero_centered:
        factor = factor + 1
    dims = tuple(range(-len(normalized_shape), 0))
    if is_layer:
        term = None if bias is None else bias.to(wide.dtype)
        out, mean, rstd = torch.native_layer_norm(wide, normalized_shape, factor, term, eps)
    else:
        mean, rstd = wide, torch.rsqrt((wide * wide).mean(dims, keepdim=True) + eps)
        out = wide * rstd if factor is None else wide * rstd * factor
    none = wide.new_empty(0)
    return (
        out.to(input.dtype).contiguous(),
        total,
        mean.flatten() if with_stats and is_layer else none,
        rstd.flatten() if with_stats else none,
    )


def _gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    names: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    return (activate(_wide(gate), names[activation]) * _wide(up)).to(gate.dtype).contiguous()


def _rotary(input: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    x, c, s = _wide(input), _wide(cos).unsqueeze(1), _wide(sin).unsqueeze(1)
    first, second = x.chunk(2, -1)
    if is_backward:
        of_first, of_second = (x * s).chunk(2, -1)
        turned = torch.cat([of_second, -of_first], -1)
    else:
        turned = torch.cat([-second, first], -1) * s
    out = (x * c + turned).to(input.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Sequence[int],
    activation: int,
    with_before: bool,
) -> tuple[Tensor, Tensor]:
    dims = len(geometry) // 4
    stride, before, behind, dilation = (geometry[i * dims : (i + 1) * dims] for i in range(4))
    x, padding = input, before
    if list(before) != list(behind):  # F.pad begins with the last dimension
        pairs = zip(reversed(before), reversed(behind), strict=True)
        x, padding = F.pad(input, [number for pair in pairs for number in pair]), [0] * dims
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    total = convolve(x, weight, bias, stride, padding, dilation, geometry[-1])
    if residual is not None:
        total = total + residual
    name = ACTIVATIONS[activation]
    out = _channels_last(activate(total, name))
    with_before = with_before and needs_before(name)
    return out, _channels_last(total) if with_before else input.new_empty(0)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3:
        return _channels_last(tensor.unsqueeze(2)).squeeze(2)
    last = torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last
    return tensor.contiguous(memory_format=last)
