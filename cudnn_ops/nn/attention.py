"""Attention as a module: projections, QK-norm, rotary embedding, a cache, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cudnn_ops.nn.linear import FusedQKV, MergedLinear
from cudnn_ops.nn.mlp import project
from cudnn_ops.nn.norm import LayerNorm, RMSNorm
from cudnn_ops.ops.rotary import rotary_embedding_qk
from cudnn_ops.ops.sdpa import scaled_dot_product_attention

QKNorm = Literal["none", "rms", "layer"]
_QK_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


class Cache(Protocol):
    """What keeps the keys and values of earlier tokens, such as :class:`cudnn_ops.KVCache`."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds new ones, [B, kv_heads, tokens, head_dim].

        Returns:
            All of the layer's keys and values, and how many of them each sequence has, int32 [B].
        """
        ...


class Attention(nn.Module):
    """Attention of tokens to each other, or to those of a context.

    Queries, keys and values of one input are one product (:class:`FusedQKV`); those of a context
    are one product of it. Its keys in a ``state_dict`` are ``qkv.q_proj``, ``qkv.k_proj`` and
    ``qkv.v_proj`` (of a context ``q_proj``, ``kv.k_proj`` and ``kv.v_proj``), ``o_proj``,
    ``q_norm``, ``k_norm`` and ``sinks``.

    Args:
        dim: size of a token.
        heads: of the queries.
        kv_heads: of keys and values; None stands for as many.
        head_dim: size of a head; None stands for ``dim / heads``.
        bias: whether the projections into heads have one.
        out_bias: whether the last projection has one; None stands for ``bias``.
        context_dim: size of a context's tokens; makes it attend to a context.
        qk_norm: ``"rms"`` or ``"layer"`` norms each head's queries and keys, before the rotary
            embedding; ``"none"`` does not.
        qk_norm_eps: added to the variance there.
        is_causal: whether a token attends to none behind it.
        window_size: (left, right), how many tokens it sees before and after itself; -1 for all.
        sinks: whether each head has a learned logit that takes part in the softmax, as in gpt-oss.
        dropout: probability, while training, that a weight is dropped.
        rotary_interleaved: whether the rotary embedding's pairs are neighbours, as in
            :func:`cudnn_ops.rotary_embedding`.
        rotary_dim: how much of a head turns there; None: all of it.
        rotary_sections: how many pairs belong to each axis there; None: there are no axes.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: sizes that do not fit; an unknown ``qk_norm``.

    Example:
        >>> import torch, cudnn_ops
        >>> from cudnn_ops.nn import Attention
        >>> attention = Attention(64, heads=8, kv_heads=2, is_causal=True, qk_norm="rms")
        >>> attention(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
        >>> of_image = Attention(64, heads=8, context_dim=32)
        >>> of_image(torch.randn(2, 10, 64), torch.randn(2, 7, 32)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        out_bias: bool | None = None,
        context_dim: int | None = None,
        qk_norm: QKNorm = "none",
        qk_norm_eps: float = 1e-6,
        is_causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sinks: bool = False,
        dropout: float = 0.0,
        rotary_interleaved: bool = False,
        rotary_dim: int | None = None,
        rotary_sections: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"Attention: heads, {heads}, is no multiple of kv_heads, {kv_heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(
                    f"Attention: dim, {dim}, is no multiple of heads, {heads}; head_dim says how "
                    "large a head is"
                )
            head_dim = dim // heads
        if qk_norm != "none" and qk_norm not in _QK_NORMS:
            names = ", ".join(map(repr, ("none", *_QK_NORMS)))
            raise ValueError(f"Attention: qk_norm must be one of {names}; got {qk_norm!r}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.head_dim = heads, head_dim
        inner = heads * head_dim
        if context_dim is None:
            self.qkv = FusedQKV(dim, heads, kv_heads, head_dim, bias, **place)
        else:
            self.q_proj = nn.Linear(dim, inner, bias, device, dtype)
            outputs = dict.fromkeys(("k_proj", "v_proj"), kv_heads * head_dim)
            self.kv = MergedLinear(context_dim, outputs, bias, **place)
        self.has_context = context_dim is not None
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = nn.Linear(inner, dim, out_bias, device, dtype)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm != "none":
            kind = _QK_NORMS[qk_norm]
            self.q_norm, self.k_norm = (kind(head_dim, eps=qk_norm_eps, **place) for _ in "qk")
        self.sinks = nn.Parameter(torch.zeros(heads, **place)) if sinks else None
        self.is_causal, self.window_size, self.dropout = is_causal, window_size, dropout
        self.rotary_interleaved, self.rotary_dim = rotary_interleaved, rotary_dim
        self.rotary_sections = None if rotary_sections is None else tuple(rotary_sections)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        positions: Tensor | None = None,
        attn_mask: Tensor | None = None,
        seq_lens_kv: Tensor | None = None,
        cache: Cache | None = None,
        layer: int = 0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            x: [B, S, dim].
            context: [B, T, context_dim], where the module has a context.
            cos: [B or 1, S, head_dim], for the rotary embedding of queries and keys; with
                ``rotary_dim``, ``rotary_sections`` or ``positions``, as
                :func:`cudnn_ops.rotary_embedding` describes.
            sin: likewise.
            positions: the rows of ``cos`` and ``sin`` that tokens take, as there.
            attn_mask: broadcasts to [B, heads, S, keys], as in
                :func:`cudnn_ops.scaled_dot_product_attention`.
            seq_lens_kv: int32 [B], how many keys each sequence has; not with a cache, which knows.
            cache: keeps keys and values of earlier tokens; the tokens of ``x`` come behind them.
            layer: this module's, in the cache.
            residual: [B, S, dim], added to the result; in 16 bits, where no gradient is needed, in
                the last product.

        Returns:
            [B, S, dim].

        Raises:
            ValueError: a context that is missing, or that the module does not have; a cache or a
                rotary embedding with a context; ``cos`` without ``sin``, ``positions`` without
                either; ``seq_lens_kv`` with a cache.
        """
        self._check(context, cos, sin, positions, seq_lens_kv, cache)
        query, key, value = self._heads(x, context, cos, sin, positions)
        if cache is not None:
            key, value, seq_lens_kv = cache.update(layer, key, value)
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            self.dropout if self.training else 0.0,
            # One token is the last, and sees all that the lengths leave.
            self.is_causal and (cache is None or x.shape[1] > 1),
            enable_gqa=True,
            window_size=self.window_size,
            bottom_right=cache is not None,
            sinks=self.sinks,
            seq_lens_kv=seq_lens_kv,
        )
        return project(self.o_proj, out.transpose(1, 2).flatten(2), residual)

    def _check(
        self,
        context: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
        seq_lens_kv: Tensor | None,
        cache: Cache | None,
    ) -> None:
        if (context is not None) != self.has_context:
            raise ValueError(
                "Attention: context must be given, for the module has a context_dim"
                if self.has_context
                else "Attention: context must be None, for the module has no context_dim"
            )
        if (cos is None) != (sin is None):
            raise ValueError("Attention: cos and sin must be given together")
        if positions is not None and cos is None:
            raise ValueError(
                "Attention: positions must be given with cos and sin, whose rows they are"
            )
        if self.has_context and (cos is not None or cache is not None):
            raise ValueError("Attention: with a context there is no rotary embedding and no cache")
        if cache is not None and seq_lens_kv is not None:
            raise ValueError("Attention: seq_lens_kv must be None with a cache, which has its own")

    def _heads(
        self,
        x: Tensor,
        context: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, heads, tokens, head_dim]."""
        rotary: dict[str, Any] = {
            "interleaved": self.rotary_interleaved,
            "rotary_dim": self.rotary_dim,
            "positions": positions,
            "sections": self.rotary_sections,
        }
        if context is not None:
            query = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            key, value = (
                part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.kv(context)
            )
        elif self.q_norm is None:
            return self.qkv(x, cos, sin, **rotary)
        else:
            query, key, value = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            # As tokens lie in memory, in which order gradients go back, too.
            query, key = (
                norm(each.transpose(1, 2)).transpose(1, 2)
                for norm, each in ((self.q_norm, query), (self.k_norm, key))
            )
        if cos is not None and sin is not None:
            query, key = rotary_embedding_qk(query, key, cos, sin, **rotary)
        return query, key, value

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        options = [f"heads={self.heads}", f"head_dim={self.head_dim}"]
        options += ["is_causal=True"] if self.is_causal else []
        options += [f"window_size={self.window_size}"] if self.window_size != (-1, -1) else []
        return ", ".join(options)
