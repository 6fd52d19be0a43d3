"""Chains in a torch.fx graph: a call, with the sum and the activation that follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.nn.recognize import (
    activation_of,
    is_add,
    is_frozen_norm,
    is_other_activation,
    name_of,
    passes_on,
)
from cudnn_ops.ops.activation import Activation


@dataclass(frozen=True)
class UnfusedActivation:
    """An activation after a convolution that is not fused."""

    conv: str
    """The convolution: ``"layer1.0.conv3"``."""
    activation: str
    """The activation as torch prints it: ``"LeakyReLU(negative_slope=0.2)"``."""

    def __str__(self) -> str:
        return f"{self.conv}: {self.activation} cannot be fused"


@dataclass
class Chain:
    """A head, and what of its followers is to be computed with it."""

    head: fx.Node
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
        return (self.behind or self.nodes or [self.head])[-1]

    def take(self, node: fx.Node) -> None:
        self.nodes += [*self.behind, node]
        self.behind.clear()

    def put_into(self, graph: fx.Graph) -> None:
        """Makes it one call of the head's module, with the residual as its second argument."""
        arguments = self.head.args
        if self.add is not None:
            arguments += (self.add.args[self.residual],)
        last = self.nodes[-1]
        with graph.inserting_before(last):
            call = graph.call_module(str(self.head.target), arguments)
        last.replace_all_uses_with(call)
        for node in (*reversed(self.nodes), self.head):
            graph.erase_node(node)


class ChainFinder:
    """What can be computed together in a graph; changes nothing. A subclass says what heads are."""

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

    def chains(self) -> Iterator[Chain]:
        """In the order of the graph."""
        ends: dict[fx.Node, Chain] = {}
        for node in self.nodes:
            if self.is_head(node):
                chain = Chain(node)
                self.begin(chain)
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

    def follower(self, chain: Chain) -> fx.Node | None:
        """What uses what a chain computes, alone, if the chain may be computed as late as there.

        What hands the value on is put behind the chain.
        """
        while len(chain.last.users) == 1:
            (user,) = chain.last.users
            between = self.nodes[self.position[chain.head] + 1 : self.position[user]]
            own = (*chain.nodes, *chain.behind)
            # The head moves past them, and they might write to its input.
            if any(self.writes(node) for node in between if node not in own):
                return None
            if not passes_on(user, self.module(user), chain.last):
                return user
            chain.behind.append(user)
        return None

    def is_head(self, node: fx.Node) -> bool:
        """Whether a chain may begin there."""
        raise NotImplementedError

    def begin(self, chain: Chain) -> None:
        """Gives a new chain what comes before sums and activations, and passes what hands it on."""
        self.follower(chain)

    def is_activation(self, activation: Activation) -> bool:
        """Whether a chain may end in it."""
        return True

    def is_called_alone(self, node: fx.Node) -> bool:
        """Whether nothing else calls or reads the module of a node, which has one argument."""
        module = self.module(node)
        return (
            module is not None
            and len(node.args) == 1
            and not node.kwargs
            and self.calls[id(module)] == 1
            and str(node.target) not in self.read
            and not has_hooks(module)
        )

    def give_sum(self, node: fx.Node, ends: dict[fx.Node, Chain]) -> None:
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

    def give_activation(self, node: fx.Node, chain: Chain) -> None:
        """Gives a chain the activation that follows it, or says that it cannot have it."""
        module = self.module(node)
        activation = activation_of(node, module, chain.last)
        if activation is not None and self.is_activation(activation):
            chain.activation = activation
            chain.take(node)
        elif is_other_activation(node, module):
            words = repr(module) if module is not None else _call_in_words(node)
            self.unfused.append(UnfusedActivation(str(chain.head.target), words))

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
