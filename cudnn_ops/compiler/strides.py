"""Strides in a rewritten graph: what was written for the stock ones gets them.

Ours may differ: convolutions give channels-last results whatever they are of. Nearly all of torch
computes the same of them, in the layout that it is given. What does not, such as ``view`` of
dimensions that are no longer beside each other, and what leaves the graph, gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols, statically_known_true
from torch.utils._pytree import tree_leaves

from cudnn_ops.compiler.nodes import memory_of, written_by

#: Computations that give something else for other strides.
_READ_STRIDES: set[object] = {
    *(torch.as_strided, torch.as_strided_copy, "as_strided", "as_strided_", "stride", "set_"),
}
#: Of operators that are known here.
OUR_NAMESPACES = ("aten", "prims", "cudnn_ops")


class Unsettled(Exception):
    """A node needs the stock strides and there is no way to give them to it."""


class Strides:
    """Follows our results through a graph as far as their strides differ from the stock ones."""

    def __init__(
        self,
        graph: fx.Graph,
        stock: Mapping[fx.Node, Tensor],
        mutated: Collection[fx.Node],
        run: Callable[[fx.Node], Any],
    ) -> None:
        """What it works on.

        Args:
            graph: one that was rewritten.
            stock: of our results, what the stock graph gives in their place.
            mutated: nodes whose memory is written to.
            run: what a node gives for the values, without memory, of the nodes that it reads.
        """
        self._graph, self._of_ours, self._mutated, self._run = graph, stock, mutated, run
        #: The nodes whose strides have changed, with what they were in the stock graph.
        self._changed: dict[fx.Node, Any] = {}
        self._restored: dict[fx.Node, fx.Node] = {}

    def settle(self) -> int:
        """Puts copies where stock strides are needed.

        Returns:
            how many nodes were put in.

        Raises:
            Unsettled: that is not possible.
        """
        before = len(self._graph.nodes)
        for node in list(self._graph.nodes):
            sources = [one for one in node.all_input_nodes if one in self._changed]
            stock = self._of_ours.get(node, node.meta.get("example_value"))
            if sources and not self._accepts(node, stock):
                for one in sources:
                    node.replace_input_with(one, self._restore(one))
            if node.op != "output" and not same_strides(stock, node.meta.get("example_value")):
                self._changed[node] = stock
        return len(self._graph.nodes) - before

    def _accepts(self, node: fx.Node, stock: Any) -> bool:
        """Whether it computes the same of tensors with our strides; then it has its new value."""
        if node.op == "output" or _reads_strides(node):
            return False
        tensors = [leaf for leaf in tree_leaves(stock) if isinstance(leaf, Tensor)]
        if not tensors:
            return True
        if any(has_free_unbacked_symbols(one) for one in tensors):
            return False  # it would be of another size, as far as can be known
        try:
            value = self._run(node)
        except Exception:  # whatever it was written for, it was not these strides
            return False
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if len(leaves) != len(tensors) or not all(map(_same_kind, leaves, tensors)):
            return False
        for leaf, tensor in zip(leaves, tensors, strict=True):
            if tensor.requires_grad:
                leaf.requires_grad_()
        node.meta["example_value"] = value
        return True

    def _restore(self, node: fx.Node) -> fx.Node:
        """A node with the same numbers and the stock strides."""
        if node not in self._restored:
            if node in self._mutated:
                raise Unsettled(f"{node.name} is changed in place")
            # Of a view, the tensor is copied that it is of: other views may be of it.
            restored = self._same_of_restored if self._is_view(node) else self._copy
            self._restored[node] = restored(node)
        return self._restored[node]

    def _is_view(self, node: fx.Node) -> bool:
        if written_by(node) or node in self._of_ours:
            return False
        memory = memory_of(self._changed[node])
        for one in node.all_input_nodes:
            stock = self._changed.get(one)
            if stock is not None and memory & memory_of(stock):
                return isinstance(stock, Tensor) or self._is_view(one)
        return False

    def _same_of_restored(self, node: fx.Node) -> fx.Node:
        sources = {
            one: self._restore(one) if one in self._changed else one for one in node.all_input_nodes
        }
        with self._graph.inserting_after(node):
            copy = self._graph.node_copy(node, sources.__getitem__)
        copy.meta["example_value"] = self._changed[node]
        return copy

    def _copy(self, node: fx.Node) -> fx.Node:
        stock = self._changed[node]
        if not isinstance(stock, Tensor):
            raise Unsettled(f"{node.name} has several results")
        order = sorted(range(stock.dim()), key=lambda dim: -_size_hint(stock.stride(dim)))
        inverse = [order.index(dim) for dim in range(stock.dim())]
        last = node
        for method, args in (("permute", order), ("contiguous", []), ("permute", inverse)):
            if args != list(range(stock.dim())):
                with self._graph.inserting_after(last):
                    last = self._graph.call_method(method, (last, *args))
                last.meta = dict(node.meta)
                last.meta["example_value"] = value = self._run(last)
                if stock.requires_grad:
                    value.requires_grad_()
        if not same_strides(stock, last.meta["example_value"]):
            raise Unsettled(f"{node.name} has strides that no copy has")
        return last


def _reads_strides(node: fx.Node) -> bool:
    """Whether it may look at strides, as far as is known."""
    if node.op == "call_module" or node.target in _READ_STRIDES:
        return True
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(node.target)
        return name.split(".")[0] not in OUR_NAMESPACES or "as_strided" in name
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def same_strides(first: Any, second: Any) -> bool:
    """Of tensors, or of several of them; those of dimensions of size 1 do not count."""
    if first is second:
        return True
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        leaves = [[x for x in tree_leaves(one) if isinstance(x, Tensor)] for one in (first, second)]
        return len(leaves[0]) != len(leaves[1]) or all(map(same_strides, *leaves))
    if first.layout != torch.strided or second.layout != torch.strided:
        return True
    if first.dim() != second.dim() or any(statically_known_true(n == 0) for n in first.shape):
        return True
    return all(
        statically_known_true(one == other) or statically_known_true(size == 1)
        for size, one, other in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


def _same_kind(first: Tensor, second: Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.dim() == second.dim()
        and all(
            statically_known_true(a == b) for a, b in zip(first.shape, second.shape, strict=True)
        )
    )


def _size_hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
