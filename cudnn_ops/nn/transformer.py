"""Transformer blocks: attention, an MLP, their norms and residuals."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from cudnn_ops.nn.attention import Attention
from cudnn_ops.nn.linear import MergedSwiGLU
from cudnn_ops.nn.mlp import MLP, adds_in_product
from cudnn_ops.nn.norm import LayerNorm, RMSNorm
from cudnn_ops.ops.activation import Activation
from cudnn_ops.ops.norm import add_layer_norm, add_rms_norm

NormKind = Literal["layer", "rms"]
Order = Literal["pre", "post", "parallel"]
_NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}
_ORDERS = ("pre", "post", "parallel")


class TransformerBlock(nn.Module):
    r"""A block of a transformer.

    .. math::
        \text{pre:}\quad & y = x + A(N_1(x)), \quad \mathrm{out} = y + M(N_2(y)) \\
        \text{post:}\quad & y = N_1(x + A(x)), \quad \mathrm{out} = N_2(y + M(y)) \\
        \text{parallel:}\quad & \mathrm{out} = x + A(N_1(x)) + M(N_1(x))

    ("Pre" as in Llama, Qwen and vision transformers, "post" as in BERT, "parallel" as in GPT-J and
    Phi.) A residual is added in the pass of the norm behind it; in 16 bits, where no gradient is
    needed, in the product before it. Its keys in a ``state_dict`` are
    ``norm1``, ``attention`` (:class:`Attention`), ``norm2`` and ``mlp`` (:class:`MLP`, or where it
    is gated :class:`MergedSwiGLU`).

    Args:
        dim: size of a token.
        heads: of attention.
        hidden: size inside the MLP.
        norm: ``"layer"`` or ``"rms"``.
        eps: added to the variance in the norms.
        order: ``"pre"``, ``"post"`` or ``"parallel"``.
        gated: whether the MLP multiplies its activated half with the other one, as in Llama.
        activation: the MLP's; None stands for ``"silu"`` where it is gated, else ``"gelu"``.
        mlp_bias: whether the MLP's layers have one.
        device: the parameters' device.
        dtype: the parameters' dtype.
        attention: further arguments of :class:`Attention`, but for ``context_dim``.

    Raises:
        ValueError: sizes that do not fit; an unknown norm, order or activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import TransformerBlock
        >>> llama = TransformerBlock(
        ...     64, heads=8, hidden=192, norm="rms", gated=True, mlp_bias=False,
        ...     kv_heads=2, is_causal=True,
        ... )
        >>> llama(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        norm: NormKind = "layer",
        eps: float = 1e-6,
        order: Order = "pre",
        gated: bool = False,
        activation: Activation | None = None,
        mlp_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        _require("norm", norm, tuple(_NORMS))
        _require("order", order, _ORDERS)
        if "context_dim" in attention:
            raise ValueError(
                "TransformerBlock: context_dim is not accepted; CrossAttentionBlock has a context"
            )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        kind = _NORMS[norm]
        self.order = order
        self.norm1 = kind(dim, eps=eps, **place)
        self.attention = Attention(dim, heads, **attention, **place)
        self.norm2 = None if order == "parallel" else kind(dim, eps=eps, **place)
        self.mlp = _mlp(dim, hidden, gated, activation, mlp_bias, device, dtype)

    def forward(self, x: Tensor, **attention: Any) -> Tensor:
        """[B, S, dim] to the same; with further arguments of :meth:`Attention.forward`."""
        is_own = type(self.attention) is Attention and type(self.mlp) in (MLP, MergedSwiGLU)
        if is_own and adds_in_product(x, x):
            return self._with_sums_in_products(x, **attention)
        if self.norm2 is None:
            normed = self.norm1(x)
            return x + self.attention(normed, **attention) + self.mlp(normed)
        if self.order == "post":
            x, _ = add_norm(self.norm1, self.attention(x, **attention), x)
            return add_norm(self.norm2, self.mlp(x), x)[0]
        normed, x = add_norm(self.norm2, self.attention(self.norm1(x), **attention), x)
        return x + self.mlp(normed)

    def _with_sums_in_products(self, x: Tensor, **attention: Any) -> Tensor:
        """As :meth:`forward`; a product reads a residual once, where a norm writes the sum too."""
        out: Tensor
        if self.order == "post" and self.norm2 is not None:
            x = self.norm1(self.attention(x, residual=x, **attention))
            out = self.norm2(self.mlp(x, residual=x))
            return out
        normed = self.norm1(x)
        x = self.attention(normed, residual=x, **attention)
        out = self.mlp(normed if self.norm2 is None else self.norm2(x), residual=x)
        return out

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"order={self.order}"


class CrossAttentionBlock(nn.Module):
    r"""A block that lets tokens attend to those of another model, such as an image's.

    .. math::
        y = x + \tanh(g_a)\, A(N_1(x), c), \quad \mathrm{out} = y + \tanh(g_m)\, M(N_2(y))

    (Alayrac et al., "Flamingo"; Llama 3.2's vision models.) Gates are learned and start at 0, so
    that a block that is put into a trained model changes nothing at first.

    Args:
        dim: size of a token.
        context_dim: size of a token of the context.
        heads: of attention.
        hidden: size inside the MLP, which is gated.
        eps: added to the variance in the norms, which are RMS norms.
        activation: the MLP's.
        mlp_bias: whether the MLP's layers have one.
        device: the parameters' device.
        dtype: the parameters' dtype.
        attention: further arguments of :class:`Attention`.

    Raises:
        ValueError: sizes that do not fit; an unknown activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import CrossAttentionBlock
        >>> block = CrossAttentionBlock(64, 32, heads=8, hidden=192, qk_norm="rms")
        >>> text, image = torch.randn(2, 10, 64), torch.randn(2, 49, 32)
        >>> torch.equal(block(text, image), text)  # both gates are still 0
        True
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        heads: int,
        hidden: int,
        *,
        eps: float = 1e-6,
        activation: Activation = "silu",
        mlp_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1, self.norm2 = (RMSNorm(dim, eps=eps, **place) for _ in range(2))
        self.attention = Attention(dim, heads, context_dim=context_dim, **attention, **place)
        self.mlp = _mlp(dim, hidden, True, activation, mlp_bias, device, dtype)
        self.attention_gate, self.mlp_gate = (
            nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for _ in range(2)
        )

    def forward(self, x: Tensor, context: Tensor, **attention: Any) -> Tensor:
        """Lets tokens attend to a context.

        Args:
            x: [B, S, dim].
            context: [B, T, context_dim].
            attention: further arguments of :meth:`Attention.forward`.

        Returns:
            [B, S, dim].
        """
        seen = self.attention(self.norm1(x), context, **attention)
        normed, x = add_norm(self.norm2, self.attention_gate.tanh() * seen, x)
        return x + self.mlp_gate.tanh() * self.mlp(normed)


def add_norm(norm: nn.Module, update: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum, in one pass where the norm is one of this package's."""
    if type(norm) is RMSNorm:
        return add_rms_norm(
            update,
            residual,
            norm.normalized_shape,
            norm.weight,
            norm.eps,
            zero_centered=norm.zero_centered,
        )
    if type(norm) is LayerNorm:
        return add_layer_norm(
            update, residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps
        )
    total = update + residual
    return norm(total), total


def _mlp(
    dim: int,
    hidden: int,
    gated: bool,
    activation: Activation | None,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    if gated:
        chosen: Activation = "silu" if activation is None else activation
        return MergedSwiGLU(dim, hidden, bias, activation=chosen, device=device, dtype=dtype)
    chosen = "gelu" if activation is None else activation
    return MLP(dim, hidden, bias=bias, activation=chosen, device=device, dtype=dtype)


def _require(name: str, given: str, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        words = ", ".join(map(repr, accepted))
        raise ValueError(f"TransformerBlock: {name} must be one of {words}; got {given!r}")
