"""vmap rules of attention: samples are more sequences.

``sinks`` and ``alibi_slopes`` have a number for each head: samples with their own are more heads.
Where they cannot be, because lengths or pages differ too, and with dropout, whose numbers follow
from the place in the batch, each sample is a call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops._vmap import Samples, register_composites, register_refusal, register_rule

_ops = torch.ops.cudnn_ops


# Dropout


def _states(samples: Samples, query: Tensor, length: int, length_kv: int) -> Tensor:
    """[V, 2]: where each sample starts to draw."""
    if samples.randomness == "error":
        raise RuntimeError(
            "vmap: called random operation while in randomness error mode. Please either use the "
            "'same' or 'different' randomness flags on vmap or perform the randomness operation "
            "out of vmap"
        )
    draws = 1 if samples.randomness == "same" else samples.size
    states = [_ops._attention_rng_state.default(query, length, length_kv) for _ in range(draws)]
    return torch.stack(states).expand(samples.size, 2)


def _rng_state(samples: Samples) -> Tensor:
    call = samples.call
    return _states(samples, call.query, call.length, call.length_kv)


def _draws(call: SimpleNamespace) -> bool:
    return call.dropout_p > 0 and call.rng_state is None


def _each_with_dropout(samples: Samples, query: Tensor, length: int, length_kv: int) -> Any:
    if samples.call.rng_state is None:
        samples.call.rng_state = _states(samples, query, length, length_kv)
        samples.batched.add("rng_state")
    return samples.each()


# Sinks


def _grad_sinks(samples: Samples, rows: str) -> Tensor:
    """The gradient of the sinks of each sample, whose log-sum-exps have the dimensions ``rows``.

    It is a sum over a sample's queries: the kernels would sum over those of all.
    """
    call = samples.call
    if call.sinks is None:
        return samples.none(call.query if hasattr(call, "query") else call.q)
    lse = samples.full("lse")
    out, grad_out = (samples.full(name).to(lse.dtype) for name in ("out", "grad_out"))
    delta = (out * grad_out).sum(-1)
    if rows == "ht":  # packed: the output is by tokens, the log-sum-exp by heads
        delta = delta.transpose(1, 2)
    sinks = samples.full("sinks").to(lse.dtype)
    if rows == "bhs":
        sinks = sinks.unsqueeze(1)
    terms = (sinks.unsqueeze(-1) - lse).exp() * delta
    terms = terms.masked_fill(lse.isneginf(), 0.0)
    return -terms.sum((1, 3) if rows == "bhs" else 2).to(call.sinks.dtype)


# Attention over batched tensors


def _sdpa(samples: Samples) -> Any:
    call = samples.call
    if call.dropout_p > 0:
        return _each_with_dropout(samples, call.query, call.query.shape[-2], call.key.shape[-2])
    if not samples.has("sinks", "alibi_slopes"):
        return _by_sequences(samples)
    if samples.has("seq_lens_q", "seq_lens_kv"):
        return samples.each()
    return _by_heads(samples)


def _rank(samples: Samples, name: str) -> int:
    """How many dimensions an argument has in each sample."""
    return getattr(samples.call, name).dim() - (name in samples.batched)


def _with_rank(tensor: Tensor, rank: int) -> Tensor:
    """[V, ...] with samples of ``rank`` dimensions."""
    ones = [1] * (rank + 1 - tensor.dim())
    return tensor.reshape(tensor.shape[0], *ones, *tensor.shape[1:])


def _by_sequences(samples: Samples) -> Any:
    """Samples are the first of the dimensions of the batch, which the operator itself folds."""
    call = samples.call
    names = ("query", "key", "value")
    given = max(_rank(samples, name) for name in names)
    rank = max(given, 3)
    changes: dict[str, Any] = {
        name: _with_rank(getattr(call, name), rank) for name in names if samples.has(name)
    }
    if not changes:
        changes["query"] = _with_rank(samples.full("query"), rank)
    if samples.has("attn_mask"):
        changes["attn_mask"] = _with_rank(call.attn_mask, rank)
    for name in ("seq_lens_q", "seq_lens_kv"):
        lengths = samples.full(name)
        changes[name] = None if lengths is None else lengths.flatten()
    results = samples.run(**changes)
    if isinstance(results, Tensor):
        return results.flatten(0, rank - given)
    return tuple(result.flatten(0, rank - given) for result in results)


def _by_heads(samples: Samples) -> Any:
    call = samples.call
    names = ("query", "key", "value")
    given = max(_rank(samples, name) for name in names)
    tensors = [_with_rank(samples.full(name), max(_rank(samples, name), 3)) for name in names]
    heads = max(tensor.shape[-3] for tensor in tensors)
    if not call.enable_gqa:
        tensors = [_with_heads(tensor, heads) for tensor in tensors]
    changes: dict[str, Any] = {
        name: _before_heads(tensor) for name, tensor in zip(names, tensors, strict=True)
    }
    changes |= {name: _flat(samples, name) for name in ("sinks", "alibi_slopes")}
    mask = call.attn_mask
    if mask is not None and (samples.has("attn_mask") or (mask.dim() > 2 and mask.shape[-3] > 1)):
        mask = _with_rank(samples.full("attn_mask"), max(_rank(samples, "attn_mask"), 3))
        changes["attn_mask"] = _before_heads(_with_heads(mask, heads))
    results = samples.run(**changes)
    if isinstance(results, Tensor):
        return _from_heads(samples, results, -3, given)
    out, lse = results
    return _from_heads(samples, out, -3, given), _from_heads(samples, lse, -2, given)


def _with_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


def _before_heads(tensor: Tensor) -> Tensor:
    """[V, ..., H, S, D] as [..., V * H, S, D]."""
    return tensor.movedim(0, -4).flatten(-4, -3)


def _from_heads(samples: Samples, tensor: Tensor, dim: int, rank: int) -> Tensor:
    """The way back, for queries of ``rank`` dimensions, which are without heads if two."""
    heads = tensor.shape[dim] // samples.size
    apart = tensor.unflatten(dim, (samples.size, heads)).movedim(dim - 1, 0)
    return apart.squeeze(dim) if rank == 2 else apart


def _flat(samples: Samples, name: str) -> Tensor | None:
    """[V * H] numbers of heads."""
    value = samples.full(name)
    return None if value is None else value.flatten()


def _sdpa_backward(samples: Samples) -> Any:
    call = samples.call
    if call.dropout_p > 0:
        return samples.each()
    if not samples.has("alibi_slopes"):
        return _backward_along(samples, 0)
    if samples.has("seq_lens_q", "seq_lens_kv"):
        return samples.each()
    return _backward_along(samples, 1)


def _backward_along(samples: Samples, dim: int) -> tuple[Tensor, ...]:
    """With the samples as part of a dimension: 0, sequences, or 1, heads."""
    call = samples.call

    def fold(tensor: Tensor) -> Tensor:
        return tensor.movedim(0, dim).flatten(dim, dim + 1)

    def unfold(tensor: Tensor) -> Tensor:
        apart = (samples.size, tensor.shape[dim] // samples.size)
        return tensor.unflatten(dim, apart).movedim(dim, 0)

    changes: dict[str, Any] = {
        name: fold(samples.full(name))
        for name in ("grad_out", "query", "key", "value", "out", "lse")
    }
    if dim == 0:
        changes |= {name: _flat(samples, name) for name in ("seq_lens_q", "seq_lens_kv")}
    else:
        changes["alibi_slopes"] = _flat(samples, "alibi_slopes")
    mask = _mask_with_all(samples, dim)
    if mask is not None:
        changes["attn_mask"] = fold(mask)
    *grads, grad_mask, _ = samples.run(**changes, sinks=None)
    if call.grad_mask:
        grad_mask = unfold(grad_mask)
        shape = call.attn_mask.shape[samples.has("attn_mask") :]
        sizes = (samples.size, *(1,) * (4 - len(shape)), *shape)
        grad_mask = grad_mask.sum_to_size(sizes).reshape(samples.size, *shape)
    else:
        grad_mask = samples.none(call.query)
    return *map(unfold, grads), grad_mask, _grad_sinks(samples, "bhs")


def _mask_with_all(samples: Samples, dim: int) -> Tensor | None:
    """[V, B, H, Sq, Skv] with all of the dimension that takes up the samples.

    None where the mask is the same along it, and stays as it is.
    """
    call = samples.call
    if call.attn_mask is None:
        return None
    mask = _with_rank(samples.full("attn_mask"), 4)
    if not (samples.has("attn_mask") or call.grad_mask) and mask.shape[dim + 1] == 1:
        return None
    sizes = list(mask.shape)
    sizes[dim + 1] = samples.full("query").shape[dim + 1]
    return mask.expand(sizes)


# Packed and paged attention


def _offsets(samples: Samples, name: str, tokens: int) -> Tensor:
    """The offsets of all samples' sequences, one sample's ``tokens`` behind the other's."""
    offsets = samples.full(name)
    starts = torch.arange(samples.size + 1, dtype=offsets.dtype, device=offsets.device) * tokens
    return torch.cat([(offsets[:, :-1] + starts[:-1, None]).flatten(), starts[-1:]])


def _check_offsets(samples: Samples, check: Any) -> None:
    """Each sample's by itself, where values are checked: among those of all, some go unnoticed."""
    for value in vars(samples.call).values():
        if not isinstance(value, Tensor):
            continue
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.is_cpu
        if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return
    for index in range(samples.size):
        check(**samples.arguments_of(index))


def _varlen(samples: Samples) -> Any:
    call = samples.call
    if call.dropout_p > 0:
        return _each_with_dropout(samples, call.q, call.max_seqlen_q, call.max_seqlen_k)
    return _packed(samples, "q", "k", "v")


def _varlen_backward(samples: Samples) -> Any:
    if samples.call.dropout_p > 0:
        return samples.each()
    grad_sinks = _grad_sinks(samples, "ht")
    samples.drop("sinks")
    *grads, _ = _packed(samples, "grad_out", "q", "k", "v", "out", "lse")
    return *grads, grad_sinks


def _packed(samples: Samples, *names: str) -> Any:
    """With the samples as more sequences, or more heads where they differ in what these have."""
    by_heads = samples.has("sinks", "alibi_slopes")
    of_sequences = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    if by_heads and samples.has(*of_sequences):
        return samples.each()
    if "lse" not in names and _ops._varlen_is_regular.default(*map(samples.full, names)):
        _check_offsets(samples, _ops._varlen_check.default)

    def dim_of(name: str) -> int:
        """Where the samples go: [tokens, heads, size], and the log-sum-exp [heads, tokens]."""
        return int(by_heads != (name == "lse"))

    def unfold(tensor: Tensor, name: str) -> Tensor:
        dim = dim_of(name)
        apart = (samples.size, tensor.shape[dim] // samples.size)
        return tensor.unflatten(dim, apart).movedim(dim, 0)

    changes: dict[str, Any] = {
        name: samples.full(name).movedim(0, dim_of(name)).flatten(dim_of(name), dim_of(name) + 1)
        for name in names
    }
    if by_heads:
        changes |= {name: _flat(samples, name) for name in ("sinks", "alibi_slopes")}
    else:
        changes |= _all_sequences(samples)
    results = samples.run(**changes)
    if isinstance(results, Tensor):
        return unfold(results, "out")
    if "lse" in names:  # a backward: gradients of q, k and v, and none of sinks
        return *(unfold(grad, "q") for grad in results[:-1]), results[-1]
    return unfold(results[0], "out"), unfold(results[1], "lse")


def _all_sequences(samples: Samples) -> dict[str, Any]:
    call = samples.call
    tokens = {name: samples.full(name).shape[1] for name in ("q", "k")}
    offsets = _offsets(samples, "cu_seqlens_q", tokens["q"])
    # One tensor for both tells the kernels of self-attention.
    is_same = call.cu_seqlens_k is call.cu_seqlens_q and tokens["q"] == tokens["k"]
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets if is_same else _offsets(samples, "cu_seqlens_k", tokens["k"]),
        "seqused_q": _flat(samples, "seqused_q"),
        "seqused_k": _flat(samples, "seqused_k"),
    }


def _paged(samples: Samples) -> Any:
    call = samples.call
    for name in ("query", "key_cache", "value_cache"):
        tensor = getattr(call, name)
        if name in samples.batched and tensor.stride(-1) != 1:  # the samples lie innermost
            setattr(call, name, tensor.contiguous())
    # What a plan divides is not what all samples together have: the operator makes another one.
    samples.drop("plan")
    if samples.has("sinks", "descale_k", "descale_v"):
        return samples.each()
    tokens = samples.full("query").shape[1]
    changes: dict[str, Any] = {
        "query": samples.folded("query"),
        "seq_lens_kv": samples.full("seq_lens_kv").flatten(),
    }
    pages = samples.full("page_table")
    if samples.has("key_cache", "value_cache"):
        count = samples.full("key_cache").shape[1]
        first = torch.arange(samples.size, dtype=pages.dtype, device=pages.device) * count
        pages = pages + first[:, None, None]
        changes |= {name: samples.folded(name) for name in ("key_cache", "value_cache")}
    changes["page_table"] = pages.flatten(0, 1)
    is_packed = call.cu_seqlens_q is not None
    if is_packed:
        _check_offsets(samples, _ops._paged_check.default)
        changes["cu_seqlens_q"] = _offsets(samples, "cu_seqlens_q", tokens)
    apart = (samples.size, tokens)
    results = samples.run(**changes)
    if isinstance(results, Tensor):
        return results.unflatten(0, apart)
    out, lse = results
    lse = lse.unflatten(1, apart).movedim(1, 0) if is_packed else lse.unflatten(0, apart)
    return out.unflatten(0, apart), lse


register_rule("_attention_rng_state", _rng_state, draws=lambda _: True)
for _name in ("sdpa", "sdpa_with_lse"):
    register_rule(_name, _sdpa, draws=_draws)
for _name in ("varlen_attention", "varlen_attention_with_lse"):
    register_rule(_name, _varlen, draws=_draws)
for _name in ("paged_attention", "paged_attention_with_lse"):
    register_rule(_name, _paged)
register_rule("_paged_plan", Samples.each)
register_rule("_sdpa_backward", _sdpa_backward)
# Scales, lengths and the largest magnitudes are a sample's own.
register_rule("_sdpa_fp8", Samples.each)
register_rule("_sdpa_fp8_backward", Samples.each)
register_rule("_sdpa_mxfp8", Samples.each)
register_rule("_varlen_fp8", Samples.each)
register_rule("_varlen_backward", _varlen_backward)
register_composites("_varlen_is_regular", "sdpa_in_fp8")
register_refusal(
    "paged_kv_append_",
    "cudnn_ops.paged_kv_append_ is not available under vmap: it writes to its caches in place; "
    "call it outside of vmap, with the tokens of all samples",
)
register_refusal(
    "_paged_attention_out",
    "cudnn_ops.paged_attention with out is not available under vmap: it writes to out in place; "
    "call it without out",
)
