"""Transposed convolutions with an activation and a residual, as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from cudnn_ops.nn.conv import ConvWithActivation
from cudnn_ops.ops.activation import Activation
from cudnn_ops.ops.conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d

if TYPE_CHECKING:
    from typing_extensions import Self


class _ConvTranspose(ConvWithActivation, _ConvTransposeNd):
    """Base of the three modules."""

    @classmethod
    def of(cls, conv: _ConvTransposeNd, activation: Activation = "none") -> Self:
        """Makes one with the geometry and the parameters of torch's.

        Args:
            conv: torch's module of as many dimensions.
            activation: of the new one.
        """
        made = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.output_padding,
            conv.groups,
            conv.bias is not None,
            conv.dilation,
            conv.padding_mode,
            activation=activation,
            device="meta",
        )
        made.weight, made.bias = conv.weight, conv.bias
        return made.train(conv.training)

    def forward(
        self,
        input: Tensor,
        output_size: list[int] | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[N, C, ...] to [N, K, ...], channels last in memory; without N likewise.

        Args:
            input: as in :func:`cudnn_ops.conv_transpose2d`.
            output_size: sizes that the output is to have, in place of ``output_padding``, as in
                torch: with or without batch and channels.
            residual: of the output's shape and dtype, added before the activation.

        Raises:
            ValueError: no output padding gives that size.
        """
        dims = len(self.kernel_size)
        extra = self._output_padding(
            input,
            output_size,
            list(self.stride),
            list(self.padding),  # type: ignore[arg-type]
            list(self.kernel_size),
            dims,
            list(self.dilation),
        )
        return self._convolve(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            extra,
            self.groups,
            self.dilation,
            activation=self.activation,
            residual=residual,
        )


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` on :func:`cudnn_ops.conv_transpose1d`.

    It has the same arguments and ``state_dict`` keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvTranspose1d
        >>> up = ConvTranspose1d(16, 8, 2, stride=2, activation="relu")
        >>> up(torch.randn(2, 16, 8)).shape
        torch.Size([2, 8, 16])
    """

    _convolve = staticmethod(conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` on :func:`cudnn_ops.conv_transpose2d`.

    It has the same arguments and ``state_dict`` keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvTranspose2d
        >>> up = ConvTranspose2d(16, 8, 2, stride=2, activation="relu")
        >>> up(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 8, 16, 16])
    """

    _convolve = staticmethod(conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` on :func:`cudnn_ops.conv_transpose3d`.

    It has the same arguments and ``state_dict`` keys.

    Args:
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import ConvTranspose3d
        >>> up = ConvTranspose3d(16, 8, 2, stride=2, activation="relu")
        >>> up(torch.randn(2, 16, 8, 8, 8)).shape
        torch.Size([2, 8, 16, 16, 16])
    """

    _convolve = staticmethod(conv_transpose3d)
