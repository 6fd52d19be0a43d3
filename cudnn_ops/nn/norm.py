"""Torch's norms on this package's operators."""

from __future__ import annotations

from typing import get_args

from torch import Tensor, nn

from cudnn_ops.ops.activation import require_activation
from cudnn_ops.ops.group_norm import NormActivation, group_norm
from cudnn_ops.ops.norm import layer_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` on :func:`cudnn_ops.rms_norm`; the same arguments and state_dict keys.

    Args:
        zero_centered: multiplies by ``1 + weight``, as in Gemma; weights are then initialized to 0.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import RMSNorm
        >>> RMSNorm(64, eps=1e-6, zero_centered=True)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, *args: object, zero_centered: bool = False, **kwargs: object) -> None:
        """Accepts the arguments of ``torch.nn.RMSNorm``, and ``zero_centered``."""
        self.zero_centered = zero_centered
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Initializes the weight so that the factor is 1."""
        super().reset_parameters()
        if self.zero_centered and self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., normalized_shape] to the same."""
        return rms_norm(
            x, self.normalized_shape, self.weight, self.eps, zero_centered=self.zero_centered
        )


class UnitRMSNorm(nn.Module):
    """An RMS norm of the last dimension, of any size, without a weight (Llama 4's queries).

    Args:
        eps: added to the mean of the squares.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import UnitRMSNorm
        >>> UnitRMSNorm(1e-6)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return rms_norm(x, x.shape[-1:], None, self.eps)

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`cudnn_ops.layer_norm`; the same arguments and keys.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import LayerNorm
        >>> LayerNorm(64)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., normalized_shape] to the same."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on :func:`cudnn_ops.group_norm`; the same arguments and keys.

    Args:
        activation: ``"silu"`` or ``"none"``, of the norm.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import GroupNorm
        >>> GroupNorm(32, 64, activation="silu")(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(
        self, *args: object, activation: NormActivation = "none", **kwargs: object
    ) -> None:
        """Accepts the arguments of ``torch.nn.GroupNorm``, and ``activation``."""
        require_activation(self, activation, get_args(NormActivation))
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.activation: NormActivation = activation

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] to the same."""
        return group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        ending = "" if self.activation == "none" else f", activation={self.activation}"
        return super().extra_repr() + ending
