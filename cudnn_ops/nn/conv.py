"""Convolutions with an activation and a residual, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_weights

from cudnn_ops.ops.activation import Activation, require_activation
from cudnn_ops.ops.conv import conv1d, conv2d, conv3d

if TYPE_CHECKING:
    from typing_extensions import Self


class ConvWithActivation(_ConvNd):
    """What the modules here and the transposed ones share; each is also one of torch's."""

    _convolve: Callable[..., Tensor]
    activation: Activation

    def __init__(self, *args: object, activation: Activation = "none", **kwargs: object) -> None:
        require_activation(self, activation)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.activation = activation

    def extra_repr(self) -> str:
        """Torch's, and the activation."""
        return f"{super().extra_repr()}, activation={self.activation}"


class _ConvAct(ConvWithActivation):
    """Base of the three modules."""

    @classmethod
    def of(
        cls, conv: _ConvNd, activation: Activation, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> Self:
        """Makes one with the geometry of another convolution and the given parameters."""
        made = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            bias is not None,
            conv.padding_mode,
            activation=activation,
            device="meta",
        )
        made.weight, made.bias = weight, bias
        return made.train(conv.training)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """[N, C, ...] to [N, K, ...], channels last in memory; without N likewise.

        Args:
            input: as in :func:`cudnn_ops.conv2d`; a ``padding_mode`` other than zeros is applied
                first, in a copy, as in torch.
            residual: of the output's shape and dtype, added before the activation.
        """
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = (0,) * len(self.stride)
        return self._convolve(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            activation=self.activation,
            residual=residual,
        )


class ConvAct1d(_ConvAct, nn.Conv1d):
    """``torch.nn.Conv1d`` on :func:`cudnn_ops.conv1d`; the same arguments and state_dict keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvAct1d
        >>> conv = ConvAct1d(8, 16, 3, padding=1, activation="relu")
        >>> conv(torch.randn(2, 8, 100)).shape
        torch.Size([2, 16, 100])
    """

    _convolve = staticmethod(conv1d)


class ConvAct2d(_ConvAct, nn.Conv2d):
    """``torch.nn.Conv2d`` on :func:`cudnn_ops.conv2d`; the same arguments and state_dict keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvAct2d
        >>> conv = ConvAct2d(8, 16, 3, padding=1, activation="relu")
        >>> conv(torch.randn(2, 8, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """

    _convolve = staticmethod(conv2d)


class ConvAct3d(_ConvAct, nn.Conv3d):
    """``torch.nn.Conv3d`` on :func:`cudnn_ops.conv3d`; the same arguments and state_dict keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvAct3d
        >>> conv = ConvAct3d(8, 16, 3, padding=1, activation="relu")
        >>> conv(torch.randn(2, 8, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    _convolve = staticmethod(conv3d)


def folded(conv: _ConvNd, norm: nn.Module | None) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias of a convolution with the eval-mode or frozen batch norm after it folded in.

    Without a norm they are the convolution's own; with one, new ones, computed in float64.
    """
    if norm is None:
        weight, bias = conv._parameters["weight"], conv._parameters["bias"]
        assert weight is not None
        return weight, bias
    names = ("running_mean", "running_var", "eps", "weight", "bias")
    parts: list[Any] = [conv.weight, conv.bias, *(getattr(norm, name) for name in names)]
    parts = [part.detach().double() if isinstance(part, Tensor) else part for part in parts]
    kernel, shift = (
        nn.Parameter(fused.to(conv.weight.dtype), requires_grad=conv.weight.requires_grad)
        for fused in fuse_conv_bn_weights(*parts)
    )
    return kernel, shift
