"""A gated MLP."""

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
        if activation not in _GATED:
            raise ValueError(f"activation is one of {', '.join(_GATED)}, got {activation!r}")
        self.activation = activation

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


#: The names of the three modules in it.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
}
