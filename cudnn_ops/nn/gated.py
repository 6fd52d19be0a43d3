"""Gated MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cudnn_ops.ops.gated import geglu, swiglu


class SwiGLU(nn.Module):
    """A gated MLP, ``down(act(gate(x)) * up(x))``, with the product in one kernel.

    Its keys are those of Llama's MLP: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        in_features: of the input and the output.
        hidden_features: between them.
        bias: whether the three projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: another activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the three projections."""
        super().__init__()
        self.activation = _checked(activation)

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(rows, columns, bias=bias, device=device, dtype=dtype)

        self.gate_proj = linear(in_features, hidden_features)
        self.up_proj = linear(in_features, hidden_features)
        self.down_proj = linear(hidden_features, in_features)

    @classmethod
    def of(cls, mlp: nn.Module, activation: str) -> SwiGLU:
        """One with the projections of another module, the modules themselves."""
        gated = cls(1, 1, activation=activation, device="meta")
        for name in PROJECTIONS:
            setattr(gated, name, getattr(mlp, name))
        gated.train(mlp.training)
        return gated

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to the same."""
        product = _GATED[self.activation](self.gate_proj(x), self.up_proj(x))
        return self.down_proj(product)


class PackedSwiGLU(nn.Module):
    """A gated MLP whose gate and up are the halves of one projection, read where they are.

    Its keys are those of Phi-3's MLP, ``gate_up_proj`` and ``down_proj``, unless it is made
    :meth:`of` another module.

    Args:
        in_features: of the input and the output.
        hidden_features: between them.
        bias: whether the two projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: another activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the two projections."""
        super().__init__()
        self.activation = _checked(activation)
        self.names = ("gate_up_proj", "down_proj")
        sizes = ((in_features, 2 * hidden_features), (hidden_features, in_features))
        for name, (rows, columns) in zip(self.names, sizes, strict=True):
            linear = nn.Linear(rows, columns, bias=bias, device=device, dtype=dtype)
            setattr(self, name, linear)

    @classmethod
    def of(cls, mlp: nn.Module, activation: str, names: tuple[str, str]) -> PackedSwiGLU:
        """One with the projections of another module, the modules themselves, by their names."""
        gated = cls(1, 1, activation=activation, device="meta")
        for name in gated.names:
            delattr(gated, name)
        gated.names = names
        for name in names:
            setattr(gated, name, getattr(mlp, name))
        return gated.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to the same."""
        packed, down = (getattr(self, name) for name in self.names)
        gate, up = packed(x).chunk(2, dim=-1)
        return down(_GATED[self.activation](gate, up))


def _checked(name: str) -> str:
    """The name, if there is such a gated activation."""
    if name not in _GATED:
        raise ValueError(f"activation is one of {', '.join(_GATED)}, got {name!r}")
    return name


#: The names of the three modules in a SwiGLU.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
}
