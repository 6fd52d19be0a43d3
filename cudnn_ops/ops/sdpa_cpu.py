"""Attention on a CPU: the formulas of ``ops/sdpa.py`` written out, forward and backward.

For tests, for small models and as a statement of what the CUDA kernel computes; all scores of a
call are in memory at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops import sdpa
from cudnn_ops.ops.arguments import bind

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, and the steps of its computation in the accumulation type."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window_size: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seq_lens_q: Tensor | None = None
    seq_lens_kv: Tensor | None = None
    deterministic: bool | None = None
    rng_state: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return sdpa.lse_dtype(self.query.dtype)

    @property
    def factor(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[3]) if self.scale is None else self.scale

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores at all."""
        return self.query.shape[:3].numel() == 0 or self.key.shape[2] == 0

    def by_key_head(self, tensor: Tensor) -> Tensor:
        """[B, Hq, Sq, *] as [B, Hkv, group * Sq, *].

        Heads that share a key head are rows of one product, and the keys are not expanded.
        """
        sizes = (self.query.shape[0], self.key.shape[1], -1, tensor.shape[-1])
        return tensor.to(self.dtype).reshape(sizes)

    def by_query_head(self, tensor: Tensor) -> Tensor:
        """The way back."""
        return tensor.reshape(*self.query.shape[:3], tensor.shape[-1])

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of the queries and keys of each sequence, [B, 1, 1, 1]."""
        batch = self.query.shape[0]

        def of(lengths: Tensor | None, size: int) -> Tensor:
            lengths = torch.full((batch,), size) if lengths is None else lengths.long()
            return lengths.view(batch, 1, 1, 1)

        return of(self.seq_lens_q, self.query.shape[2]), of(self.seq_lens_kv, self.key.shape[2])

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """[B, Hq, Sq, Skv], masked; and the derivative of the cap, where there is one."""
        keys = self.key.to(self.dtype).transpose(-1, -2)
        scores = self.by_query_head(self.by_key_head(self.query) @ keys).mul_(self.factor)
        slope = None
        if self.softcap > 0:
            tanh = scores.div_(self.softcap).tanh_()
            slope = 1 - tanh.square()
            scores = tanh.mul_(self.softcap)
        lengths, lengths_kv = self.lengths()
        rows = torch.arange(scores.shape[2]).view(1, 1, -1, 1)
        columns = torch.arange(scores.shape[3])
        distance = columns - rows - (lengths_kv - lengths if self.bottom_right else 0)
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes.to(self.dtype).view(-1, 1, 1) * distance.abs()
        visible = (rows < lengths) & (columns < lengths_kv)
        left, right = self.window_size
        if left >= 0:
            visible = visible & (distance >= -left)
        if right >= 0 or self.is_causal:
            visible = visible & (distance <= (0 if self.is_causal else right))
        if self.attn_mask is not None:
            if self.attn_mask.dtype == torch.bool:
                visible = visible & self.attn_mask
            else:
                scores = scores + self.attn_mask.to(self.dtype)
        return scores.masked_fill(~visible, -math.inf), slope

    def kept(self) -> Tensor | None:
        """What dropout multiplies the probabilities with."""
        if self.dropout_p == 0:
            return None
        state = self.rng_state
        if state is None:
            state = _ops._attention_rng_state.default(
                self.query, self.query.shape[2], self.key.shape[2]
            )
        generator = torch.Generator().manual_seed(int(state[0]) + int(state[1]))
        shape = (*self.query.shape[:3], self.key.shape[2])
        kept = torch.rand(shape, generator=generator) >= self.dropout_p
        return kept.to(self.dtype).div_(1 - self.dropout_p)


def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if not sdpa.is_regular(*args[:3], **kwargs):
        return _ops._sdpa_as_regular.default(*args, **kwargs)
    _ops._sdpa_check.default(*args, **kwargs)
    call = _Call(*args, **kwargs)
    query = call.query
    out = sdpa.empty_like_order([*query.shape[:3], call.value.shape[3]], query)
    lse = query.new_empty(query.shape[:3], dtype=call.dtype)
    if call.is_empty:
        lse.fill_(-math.inf)
        if call.sinks is not None:
            lse.copy_(call.sinks.view(-1, 1))
        return out.zero_(), lse
    scores, _ = call.scores()
    probabilities, _, total = _softmax(scores, call.sinks)
    if call.sinks is not None:
        beyond = torch.arange(query.shape[2]) >= call.lengths()[0].squeeze(-1)
        total = total.masked_fill(beyond, -math.inf)
    kept = call.kept()
    if kept is not None:
        probabilities = probabilities * kept
    values = call.value.to(call.dtype)
    out.copy_(call.by_query_head(call.by_key_head(probabilities) @ values))
    return out, lse.copy_(total)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The probabilities of the keys, that of the sink, [..., Sq], and the log-sum-exp.

    All relative to the row's maximum: the log-sum-exp of large scores is rounded too far for
    ``exp(score - lse)``. Zero, and ``-inf``, in rows that attend to nothing.
    """
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(-1, 1, 1)
        peak = peak.maximum(sinks)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = (scores - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    of_sink = None if sinks is None else (sinks - peak).exp_()
    if of_sink is not None:
        total = total + of_sink
    lse = (total.log() + peak).squeeze(-1)
    total = total.masked_fill(total == 0, 1.0)
    if of_sink is not None:
        of_sink = of_sink.div_(total).squeeze(-1)
    return weights.div_(total), of_sink, lse


def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Equations 1 to 5 of Dao et al., "FlashAttention", appendix B.2, without the tiles."""
    given = vars(bind(_ops._sdpa_backward.default, args, kwargs))
    grad_out, out, lse, grad_mask = (
        given.pop(name) for name in ("grad_out", "out", "lse", "grad_mask")
    )
    call = _Call(**given, enable_gqa=True)
    query, key, value = call.query, call.key, call.value
    attn_mask, sinks = call.attn_mask, call.sinks
    grads = sdpa.empty_gradients(query, key, value, attn_mask if grad_mask else None, sinks)
    grad_query, grad_key, grad_value, grad_of_mask, grad_of_sinks = grads
    if call.is_empty:
        return tuple(grad.zero_() for grad in grads)
    dtype = call.dtype
    scores, slope = call.scores()
    probabilities, of_sink, own_lse = _softmax(scores, sinks)
    # Their sum where `lse` is over more than is given here: sinks, say, that want no gradient.
    share = (own_lse - lse).masked_fill(lse.isneginf(), -math.inf).exp_()
    probabilities = probabilities.mul_(share.unsqueeze(-1))
    grad_rows = call.by_key_head(grad_out)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    kept = call.kept()
    weights = probabilities if kept is None else probabilities * kept
    grad_value.copy_(call.by_key_head(weights).transpose(-1, -2) @ grad_rows)
    grad_weights = call.by_query_head(grad_rows @ value.to(dtype).transpose(-1, -2))
    if kept is not None:
        grad_weights = grad_weights * kept
    grad_scores = probabilities * (grad_weights - delta)
    if attn_mask is not None and grad_mask:
        grad_of_mask.copy_(grad_scores.sum_to_size(_four(attn_mask)).view(attn_mask.shape))
    if of_sink is not None:
        grad_of_sinks.copy_(-(of_sink * share * delta.squeeze(-1)).sum((0, 2)))
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_scores = call.by_key_head(grad_scores.mul_(call.factor))
    grad_key.copy_(grad_scores.transpose(-1, -2) @ call.by_key_head(query))
    grad_query.copy_(call.by_query_head(grad_scores @ key.to(dtype)))
    return grads


def _four(mask: Tensor) -> list[int]:
    return [1] * (4 - mask.dim()) + list(mask.shape)


def rng_state(query: Tensor, length: int, length_kv: int) -> Tensor:
    seed = torch.randint(2**62, (1,))
    return torch.cat([seed, torch.zeros_like(seed)])


torch.library.impl("cudnn_ops::sdpa", "CPU", lambda *args, **kwargs: forward(*args, **kwargs)[0])
torch.library.impl("cudnn_ops::sdpa_with_lse", "CPU", forward)
torch.library.impl("cudnn_ops::_sdpa_backward", "CPU", backward)
torch.library.impl("cudnn_ops::_attention_rng_state", "CPU", rng_state)
