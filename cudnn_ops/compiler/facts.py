"""What has to be known of a graph that is rewritten: looked up once, and kept up."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from cudnn_ops.compiler.nodes import changes_mode, memory_of_result, mutated
from cudnn_ops.compiler.report import Candidate


class GraphFacts:
    """What checks need to know of a graph, looked up once for every graph."""

    def __init__(self, graph: fx.Graph):
        self.place: dict[fx.Node, int] = {}
        self.number(graph)
        # What is erased stays in here; places tell.
        self._having: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            self._note_memory(node)
        self.mode: dict[fx.Node, tuple[fx.Node, ...]] = {}
        modes: list[fx.Node] = []
        for node in graph.nodes:
            if changes_mode(node):
                modes.append(node)
            self.mode[node] = tuple(modes)
        self.mutated = mutated(graph)
        # What the pattern at hand could replace and was not to: its parts are none of their own.
        self.declined: set[fx.Node] = set()
        #: Of our results, what the stock graph gives in their place.
        self.stock: dict[fx.Node, Tensor] = {}
        #: What the nodes of a replacement give, by what it computes of which tensors.
        self.replacements: dict[object, Any] = {}
        self.swapped: list[Candidate] = []
        #: How many patterns failed.
        self.failures = 0

    def number(self, graph: fx.Graph) -> None:
        """Notes the places of nodes, after some were moved."""
        self.place.update((node, place) for place, node in enumerate(graph.nodes))

    def add(self, node: fx.Node, like: fx.Node) -> None:
        """Notes a new node, which has its value, in the place of another one."""
        self.place[node] = self.place[like]
        self.mode[node] = self.mode[like]
        self._note_memory(node)

    def sharing(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose results are in the memory of this one's."""
        having = (self._having.get(memory, ()) for memory in memory_of_result(node))
        return {one for nodes in having for one in nodes if one in self.place}

    def _note_memory(self, node: fx.Node) -> None:
        for memory in memory_of_result(node):
            self._having.setdefault(memory, []).append(node)
