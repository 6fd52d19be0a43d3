"""Folding what follows a convolution into it: a pass over a model's torch.fx graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.chains import Chain, ChainFinder
from cudnn_ops.nn.conv import _ConvAct, folded
from cudnn_ops.nn.recognize import counterpart, is_frozen_norm, is_norm
from cudnn_ops.ops.activation import Activation


@dataclass(frozen=True)
class FusedConv:
    """One convolution that :func:`fuse_conv_bn_act_` creates from several modules."""

    name: str
    """Its name in the model: ``"layer1.0.conv3"``."""
    norm: str | None
    """The name of the folded batch norm, if any."""
    residual: bool
    """Whether another value is added before the activation."""
    activation: Activation
    new: str
    """The name of its new type: ``"ConvAct2d"``."""

    def __str__(self) -> str:
        parts = [self.norm] if self.norm else []
        parts += ["residual"] * self.residual
        parts += [self.activation] * (self.activation != "none")
        return f"{self.name} + {' + '.join(parts)} -> {self.new}"


def fuse_conv_bn_act_(
    model: nn.Module, example: Tensor | Sequence[object] | None = None, *, dry_run: bool = False
) -> fx.GraphModule:
    """Fuses convolutions with what follows them into single calls, by torch.fx.

    A ``torch.nn.Conv1d``, ``Conv2d`` or ``Conv3d``, or a subclass that computes the same, is fused
    with any of these that follow it: an eval-mode or frozen batch norm, the sum with another value
    of the same shape, and one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`, as modules,
    functions or methods, in place or not. Modules that are identities in eval mode, such as
    dropout, may come in between. Each result is a :class:`ConvAct2d` (or 1d, 3d) under the
    convolution's name. Not fused are values with several users, modules with hooks, convolutions
    that are called more than once, and those that nothing of this follows. In a sum of two
    convolutions, the one that is computed last has the other as its residual. ``clamp(min=0)`` and
    ``clamp(0, 6)`` become ReLU and ReLU6, whose gradients at the limits are 0; a clamp's are 1.

    The result is for inference, and for training with fixed statistics. ``model`` itself still
    computes the same. The two share all modules and parameters except those of convolutions with a
    folded batch norm, which are new: an optimizer or a checkpoint of ``model`` does not have them.
    Such a convolution has a bias, the batch norm and its keys are gone, and all other keys of the
    state_dict stay. Modules that ``forward`` does not use are not in the result.

    Args:
        model: a model that ``torch.fx.symbolic_trace`` supports.
        example: the model's input, or a sequence of its inputs, run once to learn shapes and
            dtypes: sums that broadcast or promote are then not fused. Without it, both terms of a
            sum are assumed to have the same shape and dtype, unless one is a parameter or a buffer;
            if they do not, the fused model raises ValueError.
        dry_run: print what would be fused, and fuse nothing.

    Returns:
        The fused model. ``meta["fused_convs"]`` is a list of :class:`FusedConv`, and
        ``meta["unfused_activations"]`` a list of :class:`UnfusedActivation`: unsupported
        activations, slopes and bounds after a convolution. With ``dry_run``, the traced model with
        the same lists.

    Raises:
        ValueError: a batch norm is in training mode.
        torch.fx.proxy.TraceError: ``forward`` depends on values and cannot be traced.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import fuse_conv_bn_act_
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        >>> model = torch.nn.Sequential(*layers).eval()
        >>> fused = fuse_conv_bn_act_(model)
        >>> fused.get_submodule("0").activation
        'relu'
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"the batch norm {name!r} is in training mode and cannot be folded; "
                "call model.eval() first"
            )
    graph = _Tracer().trace(model)
    fused = fx.GraphModule(model, graph, type(model).__name__)
    if example is not None:
        inputs = (example,) if isinstance(example, Tensor) else tuple(example)
        with torch.no_grad():
            ShapeProp(fused).propagate(*inputs)
    finder = _Finder(fused, shapes_known=example is not None)
    chains = list(finder.chains())
    fused.meta["fused_convs"] = [_summary(fused, chain) for chain in chains]
    fused.meta["unfused_activations"] = finder.unfused
    if dry_run:
        for line in (*fused.meta["fused_convs"], *finder.unfused):
            print(line)
        return fused
    for chain in chains:
        _rewrite(fused, chain)
    fused.delete_all_unused_submodules()
    graph.lint()
    fused.recompile()
    return fused


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = type(m).__module__.startswith("cudnn_ops.nn.")
        foreign = counterpart(m) is not None or is_frozen_norm(m)
        return ours or foreign or super().is_leaf_module(m, module_qualified_name)


class _Finder(ChainFinder):
    """Chains of convolutions, with their batch norms."""

    def is_head(self, node: fx.Node) -> bool:
        conv = self.module(node)
        return (
            counterpart(conv) is not None
            and isinstance(conv, _ConvNd)
            and conv.weight.dtype.is_floating_point
            and (not isinstance(conv, _ConvAct) or conv.activation == "none")
            and self.is_called_alone(node)
        )

    def begin(self, chain: Chain) -> None:
        user = self.follower(chain)
        if user is not None and self.is_norm_of(user, chain):
            chain.norm = user
            chain.take(user)
            self.follower(chain)  # past what hands it on

    def is_norm_of(self, node: fx.Node, chain: Chain) -> bool:
        conv = self.module(chain.head)
        assert isinstance(conv, _ConvNd)
        return node.args == (chain.last,) and is_norm(self.module(node), conv.out_channels)


def _summary(model: fx.GraphModule, chain: Chain) -> FusedConv:
    new = counterpart(model.get_submodule(str(chain.head.target)))
    assert new is not None
    norm = None if chain.norm is None else str(chain.norm.target)
    name = str(chain.head.target)
    return FusedConv(name, norm, chain.add is not None, chain.activation, new.__name__)


def _rewrite(model: fx.GraphModule, chain: Chain) -> None:
    name = str(chain.head.target)
    conv = model.get_submodule(name)
    assert isinstance(conv, _ConvNd)
    norm = None if chain.norm is None else model.get_submodule(str(chain.norm.target))
    kind = counterpart(conv)
    assert kind is not None
    new = kind.of(conv, chain.activation, *folded(conv, norm))
    model.add_submodule(name, new)
    chain.put_into(model.graph)
