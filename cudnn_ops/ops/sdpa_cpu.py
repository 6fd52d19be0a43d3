"""Attention written out in torch's operators: the CPU kernels, and what decompositions share.

For tests, for small models, for export, and as a statement of what the CUDA kernel computes; all
scores of a call are in memory at once. Only the CPU kernels themselves write in place or look at
sizes: what a decomposition calls must be traceable for any size.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa
from cudnn_ops.ops.arguments import bind
from cudnn_ops.ops.kernels import register, register_with_lse

_ops = torch.ops.cudnn_ops


def _by_key_head(call: SimpleNamespace, tensor: Tensor) -> Tensor:
    """[B, Hq, Sq, *] as [B, Hkv, group * Sq, *], in the accumulation type.

    Heads that share a key head are rows of one product, and the keys are not expanded.
    """
    sizes = (call.query.shape[0], call.key.shape[1], -1, tensor.shape[-1])
    return tensor.to(sdpa.lse_dtype(call.query.dtype)).reshape(sizes)


def _by_query_head(call: SimpleNamespace, tensor: Tensor) -> Tensor:
    """The way back."""
    return tensor.reshape(*call.query.shape[:3], tensor.shape[-1])


def _factor(call: SimpleNamespace) -> float:
    return call.query.shape[3] ** -0.5 if call.scale is None else call.scale


def is_seen(call: SimpleNamespace, distance: Tensor) -> Tensor:
    """Whether a key at this distance after the query's own is visible."""
    left, right = call.window_size
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance >= -left)
    if call.is_causal or right >= 0:
        visible = visible & (distance <= (0 if call.is_causal else right))
    return visible


def _scores(
    call: SimpleNamespace, distance: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor | None]:
    """[B, Hq, Sq, Skv], masked; and the tanh of the cap, where there is one."""
    dtype = sdpa.lse_dtype(call.query.dtype)
    factor = _factor(call) / call.softcap if call.softcap > 0 else _factor(call)
    rows = _by_key_head(call, call.query) * factor
    scores = _by_query_head(call, rows @ call.key.to(dtype).transpose(-1, -2))
    tanh = None
    if call.softcap > 0:
        tanh = scores.tanh()
        scores = tanh * call.softcap
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.to(dtype).view(-1, 1, 1) * distance.abs()
    if call.attn_mask is not None:
        if call.attn_mask.dtype == torch.bool:
            visible = visible & call.attn_mask
        else:
            scores = scores + call.attn_mask.to(dtype)
    return scores.masked_fill(~visible, -math.inf), tanh


def _exponentials(
    weights: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Of the scores, and of the sink's [..., Sq, 1]; their sum; and the log-sum-exp, [..., Sq].

    All relative to the row's maximum: the log-sum-exp of large scores is rounded too far for
    ``exp(score - lse)``. Zero, a sum of 1, and ``-inf``, in rows that attend to nothing.
    """
    peak = weights.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(weights.dtype).view(-1, 1, 1)
        peak = peak.maximum(sinks)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    weights = weights - peak  # under one name: the scores are gone before their exponentials come
    weights = weights.exp()
    total = weights.sum(-1, keepdim=True)
    of_sink = None if sinks is None else (sinks - peak).exp()
    if of_sink is not None:
        total = total + of_sink
    lse = (total.log() + peak).squeeze(-1)
    return weights, of_sink, total.masked_fill(total == 0, 1.0), lse


def attend(call: SimpleNamespace, distance: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """[B, Hq, Sq, Dv] and the log-sum-exp [B, Hq, Sq], both in the type of the latter.

    Args:
        call: arguments of ``sdpa``, by name.
        distance: of each key after the query's own; broadcasts to [B, 1, Sq, Skv].
        visible: likewise, whether a query sees a key, where no mask hides it.
    """
    weights, _, total, lse = _exponentials(_scores(call, distance, visible)[0], call.sinks)
    kept = _kept(call)
    if kept is not None:
        weights = weights * kept
    out = _by_key_head(call, weights) @ call.value.to(weights.dtype)
    return _by_query_head(call, out) / total, lse


def _positions(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The distances and what is visible, as in :func:`attend`."""

    def of_each(lengths: Tensor | None, size: int) -> Tensor | int:
        return size if lengths is None else lengths.long().view(-1, 1, 1, 1)

    rows = torch.arange(call.query.shape[2], device=call.query.device).unsqueeze(-1)
    columns = torch.arange(call.key.shape[2], device=call.query.device)
    lengths = of_each(call.seq_lens_q, call.query.shape[2])
    lengths_kv = of_each(call.seq_lens_kv, call.key.shape[2])
    distance = columns - rows - (lengths_kv - lengths if call.bottom_right else 0)
    visible = is_seen(call, distance)
    if call.seq_lens_q is not None:
        visible = visible & (rows < lengths)
    if call.seq_lens_kv is not None:
        visible = visible & (columns < lengths_kv)
    return distance, visible


def in_torch(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """:func:`attend` for the arguments of ``sdpa``, of any lengths but none."""
    out, lse = attend(call, *_positions(call))
    if call.sinks is not None and call.seq_lens_q is not None:
        # Padding has nothing, not even the sink.
        rows = torch.arange(lse.shape[2], device=lse.device)
        lse = lse.masked_fill(rows >= call.seq_lens_q.view(-1, 1, 1), -math.inf)
    return out, lse


def largest_probability(
    call: SimpleNamespace, positions: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Of all that a key has for a query, without dropout; ``positions`` as :func:`attend` has."""
    scores, _ = _scores(call, *(_positions(call) if positions is None else positions))
    weights, _, total, _ = _exponentials(scores, call.sinks)
    return (weights / total).amax()


def _kept(call: SimpleNamespace) -> Tensor | None:
    """What dropout multiplies the probabilities with."""
    if call.dropout_p == 0:
        return None
    query, length_kv = call.query, call.key.shape[2]
    state = call.rng_state
    if state is None:
        state = _ops._attention_rng_state.default(query, query.shape[2], length_kv)
    generator = torch.Generator().manual_seed(int(state[0]) + int(state[1]))
    kept = torch.rand((*query.shape[:3], length_kv), generator=generator) >= call.dropout_p
    return kept.to(sdpa.lse_dtype(query.dtype)).div_(1 - call.dropout_p)


def has_no_scores(call: SimpleNamespace) -> bool:
    """Whether there is no query, or no key."""
    return call.query.shape[:3].numel() == 0 or call.key.shape[2] == 0


def without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fills results of queries that see nothing; the log-sum-exp is [..., heads, queries]."""
    lse.fill_(-math.inf)
    return out.zero_(), lse if sinks is None else lse.copy_(sinks.view(-1, 1))


def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = bind(_ops.sdpa.default, args, kwargs)
    query = call.query
    if not _ops._sdpa_is_regular.default(query, call.key, call.value, call.enable_gqa):
        return _ops._sdpa_as_regular.default(*args, **kwargs)
    _ops._sdpa_check.default(*args, **kwargs)
    out = sdpa.empty_like_order([*query.shape[:3], call.value.shape[3]], query)
    lse = query.new_empty(query.shape[:3], dtype=sdpa.lse_dtype(query.dtype))
    if has_no_scores(call):
        return without_keys(out, lse, call.sinks)
    wide, total = in_torch(call)
    return out.copy_(wide), lse.copy_(total)


class Gradients(NamedTuple):
    """What :func:`gradients` returns, in the accumulation type."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    """[B, Hq, Sq, Skv], of the products of queries and keys, before they are scaled."""
    mask: Tensor
    """Likewise, of the scores to which the mask is added."""
    sinks: Tensor | None


def gradients(call: SimpleNamespace) -> Gradients:
    """Equations 1 to 5 of Dao et al., "FlashAttention", appendix B.2, without the tiles.

    Args:
        call: arguments of ``_sdpa_backward``, by name; there are queries and keys.
    """
    dtype = sdpa.lse_dtype(call.query.dtype)
    scores, tanh = _scores(call, *_positions(call))
    probabilities, of_sink, total, own_lse = _exponentials(scores, call.sinks)
    # Their sum where `lse` is over more than is given here: sinks, say, that want no gradient.
    share = (own_lse - call.lse).masked_fill(call.lse.isneginf(), -math.inf).exp_()
    share = share.unsqueeze(-1).div_(total)
    probabilities = probabilities.mul_(share)
    grad_rows = _by_key_head(call, call.grad_out)
    delta = (call.grad_out.to(dtype) * call.out.to(dtype)).sum(-1, keepdim=True)
    kept = _kept(call)
    weights = probabilities if kept is None else probabilities * kept
    of_value = _by_key_head(call, weights).transpose(-1, -2) @ grad_rows
    grad_weights = _by_query_head(call, grad_rows @ call.value.to(dtype).transpose(-1, -2))
    if kept is not None:
        grad_weights = grad_weights * kept
    of_mask = probabilities * (grad_weights - delta)
    of_sinks = None if of_sink is None else -(of_sink * share * delta).sum((0, 2, 3))
    of_scores = of_mask if tanh is None else of_mask * (1 - tanh.square())
    of_scores = of_scores * _factor(call)
    rows = _by_key_head(call, of_scores)
    of_key = rows.transpose(-1, -2) @ _by_key_head(call, call.query)
    of_query = _by_query_head(call, rows @ call.key.to(dtype))
    return Gradients(of_query, of_key, of_value, of_scores, of_mask, of_sinks)


def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = bind(_ops._sdpa_backward.default, args, kwargs)
    wanted_mask = call.attn_mask if call.grad_mask else None
    grads = sdpa.empty_gradients(call.query, call.key, call.value, wanted_mask, call.sinks)
    if has_no_scores(call):
        return tuple(grad.zero_() for grad in grads)
    computed = gradients(call)
    for grad, one in zip(grads, computed[:3], strict=False):
        grad.copy_(one)
    if wanted_mask is not None:
        sizes = [1] * (4 - wanted_mask.dim()) + list(wanted_mask.shape)
        grads[3].copy_(computed.mask.sum_to_size(sizes).view(wanted_mask.shape))
    if computed.sinks is not None:
        grads[4].copy_(computed.sinks)
    return grads


def _rng_state(query: Tensor, length: int, length_kv: int) -> Tensor:
    seed = torch.randint(2**62, (1,))
    return torch.cat([seed, torch.zeros_like(seed)])


def _rng_state_fake(query: Tensor, length: int, length_kv: int) -> Tensor:
    return query.new_empty(2, dtype=torch.int64)


register_with_lse("sdpa", fake=sdpa.with_lse_fake, cpu=forward)
register("_sdpa_backward", fake=sdpa.backward_fake, cpu=backward)
register("_attention_rng_state", fake=_rng_state_fake, cpu=_rng_state)
