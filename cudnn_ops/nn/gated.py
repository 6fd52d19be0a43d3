"""Gated MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cudnn_ops.nn.hooks import is_plain_linear
from cudnn_ops.ops.activation import Activation, require_activation
from cudnn_ops.ops.gated import GATED
from cudnn_ops.ops.linear import mlp

if TYPE_CHECKING:
    from typing_extensions import Self

#: The names of the three projections of a SwiGLU.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class _GatedMLP(nn.Module):
    """Linear layers around a gated activation."""

    names: tuple[str, ...]
    """Of the linear layers: of gate and up, or of one for both; and of the last."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: Activation = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_activation(self, activation, GATED)
        self.activation = activation
        *into, out = self.names
        rows = 2 * hidden_features // len(into)
        for name in into:
            setattr(self, name, nn.Linear(in_features, rows, bias, device, dtype))
        setattr(self, out, nn.Linear(hidden_features, in_features, bias, device, dtype))

    @classmethod
    def of(cls, module: nn.Module, activation: Activation, names: tuple[str, ...]) -> Self:
        """Makes one with the projections of another module, the modules themselves, by name."""
        gated = cls(1, 1, activation=activation, device="meta")
        for name in gated.names:
            delattr(gated, name)
        gated.names = names
        for name in names:
            setattr(gated, name, getattr(module, name))
        return gated.train(module.training)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return GATED[self.activation](gate, up)


class SwiGLU(_GatedMLP):
    """A gated MLP, ``down(act(gate(x)) * up(x))``, with the product in one kernel.

    Its keys are those of Llama's MLP: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        in_features: size of the input and the output.
        hidden_features: size between them.
        bias: whether the projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import SwiGLU
        >>> mlp = SwiGLU(64, 192)
        >>> mlp(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    names = PROJECTIONS

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to the same."""
        return self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))


class PackedSwiGLU(_GatedMLP):
    """A gated MLP whose gate and up are the halves of one projection, read where they are.

    Its keys are those of Phi-3's MLP, ``gate_up_proj`` and ``down_proj``, unless it is made
    :meth:`of` another module.

    Args:
        in_features: size of the input and the output.
        hidden_features: size between them.
        bias: whether the projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import PackedSwiGLU
        >>> mlp = PackedSwiGLU(64, 192, activation="gelu_tanh")
        >>> mlp(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    names = ("gate_up_proj", "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to the same."""
        packed, down = (getattr(self, name) for name in self.names)
        if is_plain_linear(packed) and is_plain_linear(down):
            weights = (packed.weight, packed.bias, down.weight, down.bias)
            return mlp(x, *weights, self.activation, gated=True)
        gate, up = packed(x).chunk(2, dim=-1)
        return down(self._gate(gate, up))
