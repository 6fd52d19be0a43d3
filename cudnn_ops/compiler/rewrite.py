"""Puts our operators into a captured graph: matches, checks, decides, replaces.

Patterns know what they look for; what has to hold for every match is in
:mod:`cudnn_ops.compiler.checks`. What depends on strides is settled when a graph has all of its
swaps (:mod:`cudnn_ops.compiler.strides`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from cudnn_ops.compiler import running
from cudnn_ops.compiler.checks import objection, place_of, too_early
from cudnn_ops.compiler.facts import GraphFacts
from cudnn_ops.compiler.identities import identities
from cudnn_ops.compiler.memory_order import add_rows, read_channels_last, skip_copies
from cudnn_ops.compiler.nodes import call_of, value_of, with_source, written_by
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal
from cudnn_ops.compiler.report import Candidate, CompileReport, first_line, warn
from cudnn_ops.compiler.strides import Strides

log = logging.getLogger("cudnn_ops.compiler")

#: Decides about a match: whether it is swapped, why not, and what was measured.
Decide = Callable[[Pattern, Found, Candidate], bool]


@dataclass
class Swaps:
    """What was swapped, in one graph or several.

    Attributes:
        candidates: the matches.
        before: the modules whose graphs were changed, with what these were.
        failures: how often something went wrong that left a part of a graph as it was.
    """

    candidates: list[Candidate] = field(default_factory=list)
    before: list[tuple[fx.GraphModule, fx.Graph]] = field(default_factory=list)
    failures: int = 0

    def add(self, other: Swaps) -> None:
        self.candidates += other.candidates
        self.before += other.before
        self.failures += other.failures

    def undo(self, reason: str) -> None:
        """The graphs are the stock ones again, and nothing was swapped."""
        for module, graph in self.before:
            module.graph = graph
        for candidate in self.candidates:
            candidate.swapped, candidate.reason = False, reason
        self.before.clear()
        self.candidates.clear()


def rewrite(
    module: fx.GraphModule,
    patterns: Sequence[Pattern],
    decide: Decide,
    report: CompileReport,
    is_final: Callable[[], bool] = lambda: True,
) -> Swaps:
    """Swaps what the patterns find in a module's graph and in those of its submodules.

    Args:
        module: to change.
        patterns: what is looked for, in this order.
        decide: what is swapped.
        report: gets all candidates.
        is_final: asked when a graph has its swaps: what is going to be undone is not finished.
    """
    swaps = Swaps()
    for name, child in module.named_children():
        # Higher-order operators call those: checkpointing, control flow.
        if isinstance(child, fx.GraphModule):
            log.debug("%s: a graph within the graph", name)
            swaps.add(rewrite(child, patterns, decide, report, is_final))
    try:
        # A copy in every round: a graph keeps the names of nodes that are gone, and AOTAutograd's
        # cache tells graphs apart by names. A process that measures is to make the names of those
        # that know the times.
        graph, facts = _laid_out(module.graph)
        _leave_out(identities(graph, facts.mutated), graph, facts)
    except Exception as error:  # whatever a graph has in it, the stock one is right
        log.info("a graph is not understood", exc_info=error)
        warn("a graph stays as it is, because it has something unknown in it", error)
        swaps.failures += 1
        return swaps
    for pattern in patterns:
        facts.declined.clear()
        # From the end: of two matches, one within the other, the larger one is first.
        for node in reversed(list(graph.nodes)):
            # The nodes of an earlier match are gone.
            if node in facts.place and node not in facts.declined and _ends(pattern, node):
                _try(graph, facts, pattern, node, decide, report)
    if facts.swapped:
        own = Swaps(facts.swapped)
        if is_final():
            own.before.append((module, module.graph))
            _finish(module, graph, patterns, facts, own)
        swaps.add(own)
    swaps.failures += facts.failures
    return swaps


def _laid_out(stock: fx.Graph) -> tuple[fx.Graph, GraphFacts]:
    """A copy of a graph in which sums have the strides that inductor gives them."""
    graph = _copy_of(stock)
    facts = GraphFacts(graph)
    try:
        if not add_rows(graph, facts.mutated, partial(running.run, facts=facts)):
            return graph, facts
    except Exception as error:  # whatever a graph has in it, it does without
        log.info("sums keep their strides", exc_info=error)
        graph = _copy_of(stock)
    return graph, GraphFacts(graph)


def _leave_out(same: Mapping[fx.Node, fx.Node], graph: fx.Graph, facts: GraphFacts) -> None:
    """Puts other nodes in the place of some."""
    for node, source in same.items():
        node.replace_all_uses_with(source)
        facts.place.pop(node)
        graph.erase_node(node)


def _finish(
    module: fx.GraphModule,
    graph: fx.Graph,
    patterns: Sequence[Pattern],
    facts: GraphFacts,
    swaps: Swaps,
) -> None:
    """Settles strides, then what replacements have in common, and gives the graph to the module.

    Where that fails, all is undone.
    """
    names = {candidate.pattern for candidate in facts.swapped}
    why = "it depends on the strides of what would be swapped"
    run = partial(running.run, facts=facts)
    try:
        has_images = any(pattern.of_images for pattern in patterns if pattern.name in names)
        if has_images:
            facts.stock.update(read_channels_last(graph, run))
        Strides(graph, facts.stock, facts.mutated, run).settle()
        if has_images:
            skip_copies(graph, facts.mutated)
        why = "its swaps cannot be finished"
        for pattern in patterns:
            pattern.finish(graph, facts.mode, facts.mutated)
        graph.lint()
        module.graph = graph
    except Exception as error:  # whatever a graph has in it, the stock one is right
        log.info("a graph stays as it is, because %s", why, exc_info=error)
        warn(f"a graph stays as it is, because {why}", error)
        swaps.undo(f"{why}: {first_line(error)}")
        swaps.failures += 1


def _ends(pattern: Pattern, node: fx.Node) -> bool:
    call = call_of(node)
    return call is not None and call.name in pattern.ends_in


def _try(
    graph: fx.Graph,
    facts: GraphFacts,
    pattern: Pattern,
    node: fx.Node,
    decide: Decide,
    report: CompileReport,
) -> None:
    """A failure inside a pattern costs that pattern's swap and nothing else."""
    tried: list[Candidate] = []
    try:
        for found in pattern.find(node):
            candidate = Candidate.of(pattern.name, node)
            tried.append(candidate)
            candidate.note = found.note
            candidate.reason = objection(found, facts)
            if candidate.reason:
                continue
            if decide(pattern, found, candidate):
                _replace(graph, facts, found)
                candidate.swapped = True
                facts.swapped.append(candidate)
                break
            facts.declined.update(found.nodes)
    except Refusal as refusal:
        _last_of(tried, pattern, node).reason = str(refusal)
    except Exception as error:  # whatever goes wrong in a pattern, the stock graph is right
        log.info("pattern %s failed", pattern.name, exc_info=error)
        warn(f"the pattern {pattern.name} failed, and that part of the graph stays as it is", error)
        _last_of(tried, pattern, node).reason = f"the pattern failed: {first_line(error)}"
        facts.failures += 1
    if tried:
        report.add(_most_telling(tried))


def _last_of(tried: list[Candidate], pattern: Pattern, node: fx.Node) -> Candidate:
    if not tried:
        tried.append(Candidate.of(pattern.name, node))
    return tried[-1]


def _most_telling(tried: list[Candidate]) -> Candidate:
    """Of several readings of one place: the one that was swapped, or at least timed."""
    if tried[-1].swapped:
        return tried[-1]
    return next((each for each in tried if each.ours_ms is not None), tried[-1])


def _replace(graph: fx.Graph, facts: GraphFacts, found: Found) -> None:
    behind = place_of(found, facts)
    assert behind is not None  # or there would have been an objection
    like = behind
    if early := too_early(found, facts):
        behind = early[0]
        for node in early:
            like.prepend(node)
        facts.number(graph)
    last_before = behind.prev
    with graph.inserting_before(behind):
        results = found.traced.copied_into(graph, found.inputs)
    node = last_before.next
    while node is not behind:
        node.meta = {**like.meta, "example_value": node.meta["example_value"]}
        facts.add(node, behind)
        node = node.next
    for output, node in zip(found.outputs, results, strict=True):
        stock = facts.stock.pop(output, value_of(output))
        assert stock is not None
        node.meta = {**output.meta, "example_value": node.meta["example_value"]}
        if stock.requires_grad:
            node.meta["example_value"].requires_grad_()
        facts.stock[node] = stock
        output.replace_all_uses_with(node)
    # In reverse, so that users go first. What something else still reads stays.
    gone = {*found.nodes, *found.unchanged}
    for node in sorted(gone, key=facts.place.__getitem__, reverse=True):
        fills = not set(found.filled).isdisjoint(written_by(node))
        if not node.users and (fills or not node.is_impure()):
            facts.place.pop(node)
            graph.erase_node(node)


def _copy_of(graph: fx.Graph) -> fx.Graph:
    """With the sources of its inputs."""
    copied = copy.deepcopy(graph)
    inputs = (one.find_nodes(op="placeholder") for one in (graph, copied))
    for node, its_copy in zip(*inputs, strict=True):
        with_source(its_copy, node)
    return copied
