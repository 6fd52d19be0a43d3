"""Folding what follows a convolution into it: a pass over a model's torch.fx graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.conv import _ConvAct, folded
from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.nn.recognize import (
    activation_of,
    counterpart,
    is_add,
    is_frozen_norm,
    is_norm,
    is_other_activation,
    name_of,
    passes_on,
)
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


@dataclass(frozen=True)
class UnfusedActivation:
    """An activation after a convolution that is not fused."""

    conv: str
    """The convolution: ``"layer1.0.conv3"``."""
    activation: str
    """The activation as torch prints it: ``"LeakyReLU(negative_slope=0.2)"``."""

    def __str__(self) -> str:
        return f"{self.conv}: {self.activation} cannot be fused"


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
    convolutions, the one that is computed last has the other as its residual.

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
    fused.meta["fused_convs"] = [chain.summary(fused) for chain in chains]
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


@dataclass
class _Chain:
    conv: fx.Node
    norm: fx.Node | None = None
    add: fx.Node | None = None
    #: Which of the sum's terms is not of this chain. The node itself may still be replaced.
    residual: int = 0
    activation: Activation = "none"
    #: All that is folded, in order, and what hands on the last value: gone if more is folded.
    nodes: list[fx.Node] = field(default_factory=list)
    behind: list[fx.Node] = field(default_factory=list)

    @property
    def last(self) -> fx.Node:
        return (self.behind or self.nodes or [self.conv])[-1]

    def take(self, node: fx.Node) -> None:
        self.nodes += [*self.behind, node]
        self.behind.clear()

    def summary(self, model: fx.GraphModule) -> FusedConv:
        new = counterpart(model.get_submodule(str(self.conv.target)))
        assert new is not None
        norm = None if self.norm is None else str(self.norm.target)
        name = str(self.conv.target)
        return FusedConv(name, norm, self.add is not None, self.activation, new.__name__)


class _Finder:
    """What can be folded in a graph; changes nothing."""

    def __init__(self, model: fx.GraphModule, shapes_known: bool) -> None:
        self.model = model
        self.shapes_known = shapes_known
        self.nodes = list(model.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.calls = Counter(id(self.module(node)) for node in self.nodes)
        attributes = (str(node.target) for node in self.nodes if node.op == "get_attr")
        #: Modules whose parameters something reads by itself.
        self.read = {name.rpartition(".")[0] for name in attributes}
        #: What chains() has met.
        self.unfused: list[UnfusedActivation] = []

    def chains(self) -> Iterator[_Chain]:
        """In the order of the graph."""
        ends: dict[fx.Node, _Chain] = {}
        for node in self.nodes:
            if self.is_conv(node):
                chain = _Chain(node)
                user = self.follower(chain)
                if user is not None and self.is_norm_of(user, chain):
                    chain.norm = user
                    chain.take(user)
                    self.follower(chain)  # past what hands it on
                ends[chain.last] = chain
        for node in self.nodes:
            self.give_sum(node, ends)
        for chain in ends.values():
            user = self.follower(chain)
            if user is not None:
                self.give_activation(user, chain)
            if chain.nodes:
                yield chain

    def module(self, node: fx.Node) -> nn.Module | None:
        if node.op != "call_module":
            return None
        return self.model.get_submodule(str(node.target))

    def follower(self, chain: _Chain) -> fx.Node | None:
        """What uses what a chain computes, alone, if the chain may be computed as late as there.

        What hands the value on is put behind the chain.
        """
        while len(chain.last.users) == 1:
            (user,) = chain.last.users
            between = self.nodes[self.position[chain.conv] + 1 : self.position[user]]
            own = (*chain.nodes, *chain.behind)
            # The convolution moves past them, and they might write to its input.
            if any(self.writes(node) for node in between if node not in own):
                return None
            if not passes_on(user, self.module(user), chain.last):
                return user
            chain.behind.append(user)
        return None

    def is_conv(self, node: fx.Node) -> bool:
        conv = self.module(node)
        return (
            counterpart(conv) is not None
            and isinstance(conv, _ConvNd)
            and conv.weight.dtype.is_floating_point
            and (not isinstance(conv, _ConvAct) or conv.activation == "none")
            and len(node.args) == 1
            and not node.kwargs
            and self.calls[id(conv)] == 1
            and str(node.target) not in self.read
            and not has_hooks(conv)
        )

    def is_norm_of(self, node: fx.Node, chain: _Chain) -> bool:
        conv = self.module(chain.conv)
        assert isinstance(conv, _ConvNd)
        return node.args == (chain.last,) and is_norm(self.module(node), conv.out_channels)

    def give_sum(self, node: fx.Node, ends: dict[fx.Node, _Chain]) -> None:
        """Gives a sum to the chain that computes one of its terms, the last one if both do."""
        if not is_add(node):
            return
        terms = [term for term in node.args if isinstance(term, fx.Node)]
        alpha_only = not node.kwargs or dict(node.kwargs) == {"alpha": 1}
        if len(node.args) != 2 or len(set(terms)) != 2 or not alpha_only:
            return
        chains = [ends[t] for t in terms if t in ends and self.follower(ends[t]) is node]
        if self.in_place(node) and terms[0] not in (chain.last for chain in chains):
            return  # what is written to may be used elsewhere
        for chain in sorted(chains, key=lambda chain: -self.position[chain.last]):
            other = 1 - terms.index(chain.last)
            if self.alike(chain.last, terms[other]):
                chain.add, chain.residual = node, other
                chain.take(node)
                return

    def alike(self, term: fx.Node, residual: fx.Node) -> bool:
        if not self.shapes_known:
            return residual.op != "get_attr"  # which has no batch
        of_term, of_residual = (node.meta.get("tensor_meta") for node in (term, residual))
        return (
            isinstance(of_term, TensorMetadata)
            and isinstance(of_residual, TensorMetadata)
            and of_term.shape == of_residual.shape
            and of_term.dtype == of_residual.dtype
        )

    def give_activation(self, node: fx.Node, chain: _Chain) -> None:
        """Gives a chain the activation that follows it, or says that it cannot have it."""
        module = self.module(node)
        activation = activation_of(node, module, chain.last)
        if activation is not None:
            chain.activation = activation
            chain.take(node)
        elif is_other_activation(node, module):
            words = repr(module) if module is not None else _call_in_words(node)
            self.unfused.append(UnfusedActivation(str(chain.conv.target), words))

    def in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self.module(node), "inplace", False))
        if node.op not in ("call_function", "call_method"):
            return False
        if node.kwargs.get("inplace") or "out" in node.kwargs:
            return True
        name = name_of(node).partition(".")[0]  # an overload's
        return name.endswith("_") and not name.endswith("__")

    def writes(self, node: fx.Node) -> bool:
        """Whether it changes a value that something else might read."""
        if not self.in_place(node):
            return False
        target = node.args[0] if node.args else None
        fresh = isinstance(target, fx.Node) and self.makes_new(target) and len(target.users) == 1
        return not fresh

    def makes_new(self, node: fx.Node) -> bool:
        module = self.module(node)
        is_frozen = module is not None and is_frozen_norm(module)
        return is_frozen or isinstance(module, (_ConvNd, _BatchNorm))


def _call_in_words(node: fx.Node) -> str:
    arguments = [str(value) for value in node.args[1:]]
    arguments += [f"{name}={value}" for name, value in node.kwargs.items()]
    return f"{name_of(node)}({', '.join(arguments)})"


def _rewrite(model: fx.GraphModule, chain: _Chain) -> None:
    name = str(chain.conv.target)
    conv = model.get_submodule(name)
    assert isinstance(conv, _ConvNd)
    norm = None if chain.norm is None else model.get_submodule(str(chain.norm.target))
    kind = counterpart(conv)
    assert kind is not None
    new = kind.of(conv, chain.activation, *folded(conv, norm))
    model.add_submodule(name, new)
    arguments = chain.conv.args
    if chain.add is not None:
        arguments += (chain.add.args[chain.residual],)
    last = chain.nodes[-1]
    with model.graph.inserting_before(last):
        call = model.graph.call_module(name, arguments)
    last.replace_all_uses_with(call)
    for node in (*reversed(chain.nodes), chain.conv):
        model.graph.erase_node(node)
