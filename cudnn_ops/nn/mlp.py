"""Linear layers and what follows them in one call: a layer with its activation, and MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cudnn_ops.nn.hooks import has_hooks, is_plain_linear
from cudnn_ops.ops.activation import Activation, activate, require_activation
from cudnn_ops.ops.linear import linear, mlp

if TYPE_CHECKING:
    from typing_extensions import Self


def is_linear(kind: type[nn.Module]) -> bool:
    """Whether it is torch's linear layer, or the ``Conv1D`` of transformers (GPT-2's)."""
    return kind is nn.Linear or is_transposed(kind)


def is_transposed(kind: type[nn.Module]) -> bool:
    """Whether it is that ``Conv1D``: a linear layer that keeps its weight as [inputs, outputs]."""
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


class _Layers(nn.Module):
    """Linear layers that are the modules of another one, under the names that they have there."""

    def __init__(self, activation: Activation, names: tuple[str, ...]) -> None:
        super().__init__()
        require_activation(self, activation)
        self.activation, self.names = activation, names
        self.kind: type[nn.Module] = nn.Linear
        """Of the layers, as long as nothing was put in their place."""

    @classmethod
    def _of(cls, module: nn.Module, activation: Activation, names: tuple[str, ...]) -> Self:
        """Makes one of the layers of another module, the modules themselves."""
        made = cls.__new__(cls)
        _Layers.__init__(made, activation, names)
        made.kind = type(getattr(module, names[0]))
        for name in names:
            setattr(made, name, getattr(module, name))
        return made.train(module.training)

    def _plain(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Weight and bias of each layer; None if one is another's now, or has hooks."""
        layers = [getattr(self, name) for name in self.names]
        if any(type(layer) is not self.kind or has_hooks(layer) for layer in layers):
            return None
        if self.kind is nn.Linear:
            return [(layer.weight, layer.bias) for layer in layers]
        return [(layer.weight.t(), layer.bias) for layer in layers]

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"activation={self.activation}"


class LinearAct(_Layers):
    """A linear layer and an activation, by :func:`cudnn_ops.linear`.

    Its keys begin with ``dense``, those of the first half of BERT's MLP in transformers. A layer
    that is put in the place of that one (an adapter's, a quantized one), or that has hooks, is
    called as it is.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether the layer has one.
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import LinearAct
        >>> LinearAct(64, 256, activation="relu")(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 256])
    """

    dense: nn.Module

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, ("dense",))
        self.dense = nn.Linear(in_features, out_features, bias, device, dtype)

    @classmethod
    def of(cls, module: nn.Module, activation: Activation, name: str) -> Self:
        """Makes one with the layer of another module, the layer itself, by its name."""
        return cls._of(module, activation, (name,))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        plain = self._plain()
        if plain is None:
            return activate(getattr(self, self.names[0])(x), self.activation)
        ((weight, bias),) = plain
        return linear(x, weight, bias, activation=self.activation)


class MLP(_Layers):
    """Two linear layers around an activation, by :func:`cudnn_ops.mlp`.

    Its keys are ``fc1`` and ``fc2``, those of timm's ``Mlp`` and of CLIP's. A layer that is put in
    the place of one of the two (an adapter's, a quantized one), or that has hooks, is called as it
    is.

    Args:
        in_features: size of the input.
        hidden_features: size between the layers.
        out_features: size of the output; None stands for that of the input.
        bias: whether the layers have one.
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import MLP
        >>> MLP(64, 256, activation="gelu_tanh")(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    fc1: nn.Module
    fc2: nn.Module
    last: str | None = None
    """The name of a module through which the result goes."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        activation: Activation = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, ("fc1", "fc2"))
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out, bias, device, dtype)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        activation: Activation,
        names: tuple[str, str],
        last: str | None = None,
    ) -> Self:
        """Makes one with the two layers of another module, the modules themselves, by name.

        ``last`` is the name of a module of it through which the result goes: dropout.
        """
        made = cls._of(module, activation, names)
        if last is not None:
            made.last = last
            setattr(made, last, getattr(module, last))
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Computes the pair.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added to the result; in 16 bits, where no gradient is
                needed, in the last product.

        Returns:
            [..., out_features].
        """
        plain = self._plain()
        if plain is None:
            first, second = (getattr(self, name) for name in self.names)
            out = second(activate(first(x), self.activation))
        else:
            (w1, b1), (w2, b2) = plain
            if residual is not None and self.last is None and adds_in_product(x, residual):
                hidden = linear(x, w1, b1, activation=self.activation)
                return linear(hidden, w2, b2, residual=residual)
            out = mlp(x, w1, b1, w2, b2, self.activation)
        out = out if self.last is None else getattr(self, self.last)(out)
        return out if residual is None else residual + out


def adds_in_product(x: Tensor, residual: Tensor) -> bool:
    """Whether a residual should be added by the product before it, whose layer's input is ``x``.

    That is in 16 bits, where the product has an epilogue for it. Not under autocast, which leaves a
    float32 residual, and its sum, as they are; and where there are gradients, a norm takes the sum
    that it is of, and a pair of layers has one operator.
    """
    return (
        not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and x.dtype in (torch.float16, torch.bfloat16)
        and residual.dtype == x.dtype
    )


def project(layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
    """What a module's last layer makes of ``x``, with a residual in its product or behind it."""
    if residual is not None and is_plain_linear(layer) and adds_in_product(x, residual):
        assert isinstance(layer, nn.Linear)
        return linear(x, layer.weight, layer.bias, residual=residual)
    out: Tensor = layer(x)
    return out if residual is None else residual + out
