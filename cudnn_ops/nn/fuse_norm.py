"""Batch norms with the sum and the ReLU behind them, in training: a pass over a torch.fx graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.batchnorm import _BatchNorm

from cudnn_ops.nn.batch_norm import BatchNormAct
from cudnn_ops.nn.chains import ChainFinder
from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.nn.norm_like import norm_counterpart
from cudnn_ops.nn.recognize import is_frozen_norm
from cudnn_ops.ops.activation import Activation
from cudnn_ops.ops.batch_norm import BatchNormActivation


@dataclass(frozen=True)
class FusedNorm:
    """One batch norm that :func:`fuse_bn_act_` puts in place of another."""

    name: str
    """Its name in the model: ``"layer1.0.bn3"``."""
    residual: bool
    """Whether another value is added before the activation."""
    activation: BatchNormActivation
    new: str
    """The name of its new type: ``"BatchNorm2d"``."""

    def __str__(self) -> str:
        parts = ["residual"] * self.residual
        parts += [self.activation] * (self.activation != "none")
        return f"{' + '.join([self.name, *parts])} -> {self.new}"


def fuse_bn_act_(
    model: nn.Module, example: Tensor | Sequence[object] | None = None, *, dry_run: bool = False
) -> fx.GraphModule:
    """Fuses batch norms with the sum and the ReLU that follow them, for training, by torch.fx.

    Each batch norm of torch's, and each subclass that computes the same with a ReLU behind it or
    nothing (timm's), becomes a :class:`BatchNorm2d` (or 1d, 3d, :class:`SyncBatchNorm`) with the
    same parameters and statistics. With it are computed those of these that follow it: the sum with
    another value of the same shape, and a ReLU, as modules, functions or methods, in place or not.
    Not fused are values with several users, modules with hooks, and batch norms that are called
    more than once. In a sum of two batch norms, the one that is computed last has the other as its
    residual. ``clamp(min=0)`` becomes a ReLU, whose gradient at 0 is 0; a clamp's is 1.

    ``model`` itself still computes the same. The two share all parameters and statistics under the
    same names: an optimizer and a checkpoint of one serve the other. The model is traced in the
    mode in which it is, and functions that ask for it (``F.dropout``) stay in that; modules follow
    ``train()`` and ``eval()``. Modules that ``forward`` does not use are not in the result.

    Args:
        model: a model that ``torch.fx.symbolic_trace`` supports.
        example: the model's input, or a sequence of its inputs, run once in eval mode to learn
            shapes and dtypes: sums that broadcast or promote are then not fused. Without it, both
            terms of a sum are assumed to have the same shape and dtype, unless one is a parameter
            or a buffer; if they do not, the fused model raises ValueError.
        dry_run: print what would be fused, and fuse nothing.

    Returns:
        The fused model. ``meta["fused_norms"]`` is a list of :class:`FusedNorm`. With ``dry_run``,
        the traced model with the same list.

    Raises:
        torch.fx.proxy.TraceError: ``forward`` depends on values and cannot be traced.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import fuse_bn_act_
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        >>> fused = fuse_bn_act_(torch.nn.Sequential(*layers))
        >>> fused.get_submodule("1").activation
        'relu'
    """
    made = _counterparts(model)
    graph = _Tracer().trace(model)
    fused = fx.GraphModule(model, graph, type(model).__name__).train(model.training)
    if example is not None:
        _learn_shapes(fused, (example,) if isinstance(example, Tensor) else tuple(example))
    chains = {str(chain.head.target): chain for chain in _Finder(fused, made, example).chains()}
    names = dict.fromkeys(
        str(node.target)
        for node in graph.nodes
        if node.op == "call_module" and fused.get_submodule(str(node.target)) in made
    )
    fused.meta["fused_norms"] = []
    for name in names:
        new = made[fused.get_submodule(name)]
        chain = chains.get(name)
        if chain is not None and not dry_run:
            chain.put_into(graph)
        activation = new.activation
        if chain is not None and chain.activation == "relu":
            activation = "relu"
        has_residual = chain is not None and chain.add is not None
        kind = type(new).__name__
        fused.meta["fused_norms"].append(FusedNorm(name, has_residual, activation, kind))
        if not dry_run:
            new.activation = activation
            fused.add_submodule(name, new)
    if dry_run:
        for line in fused.meta["fused_norms"]:
            print(line)
        return fused
    fused.delete_all_unused_submodules()
    graph.lint()
    fused.recompile()
    return fused


def _counterparts(model: nn.Module) -> dict[nn.Module, BatchNormAct]:
    """Ours of each batch norm. One that is ours already is made once more: ``model`` keeps its."""
    made: dict[nn.Module, BatchNormAct] = {}
    for module in model.modules():
        if not isinstance(module, _BatchNorm) or has_hooks(module):
            continue
        new: nn.Module | None
        if isinstance(module, BatchNormAct):
            new = type(module).of(module, module.activation)
        else:
            new = norm_counterpart(module)
        if new is not None:
            assert isinstance(new, BatchNormAct)
            made[module] = new
    return made


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Of a batch norm a trace would have the mode in which it is now.
        is_known = isinstance(m, _BatchNorm) or is_frozen_norm(m)
        ours = type(m).__module__.startswith("cudnn_ops.nn.")
        return ours or is_known or super().is_leaf_module(m, module_qualified_name)


def depends_on_mode(model: nn.Module) -> bool:
    """Whether more than modules asks for the mode: the result of ``fuse_bn_act_`` would not follow.

    Raises:
        torch.fx.proxy.TraceError: ``forward`` depends on values and cannot be traced.
    """
    traces = []
    for training in (True, False):
        with _in_mode(model, training):
            traces.append(str(_Tracer().trace(model)))
    return traces[0] != traces[1]


def _learn_shapes(fused: fx.GraphModule, inputs: tuple[object, ...]) -> None:
    """In eval mode: in training mode statistics would change."""
    with _in_mode(fused, False), torch.no_grad():
        ShapeProp(fused).propagate(*inputs)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside it all modules train, or none does; then each is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Finder(ChainFinder):
    """Chains of batch norms."""

    def __init__(
        self, model: fx.GraphModule, made: Mapping[nn.Module, BatchNormAct], example: object
    ) -> None:
        super().__init__(model, shapes_known=example is not None)
        self.made = made

    def is_head(self, node: fx.Node) -> bool:
        new = self.made.get(self.module(node))  # type: ignore[arg-type]
        return new is not None and new.activation == "none" and self.is_called_alone(node)

    def is_activation(self, activation: Activation) -> bool:
        return activation == "relu"
