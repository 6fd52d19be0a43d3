"""Puts our operators into a captured graph: matches, checks, decides, replaces.

Patterns know what they look for. What has to hold for every match is checked here: that nothing
else uses what goes away, that nothing writes to what is read, that gradients and autocast are on
for all of it or for none, and that the result has the shape, dtype and device that it had. What
depends on strides is settled when a graph has all of its swaps (:mod:`cudnn_ops.compiler.strides`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from cudnn_ops.compiler.identities import identities
from cudnn_ops.compiler.memory_order import read_channels_last, skip_copies
from cudnn_ops.compiler.nodes import (
    call_of,
    changes_mode,
    memory_of,
    mutated,
    value_of,
    written_by,
)
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal
from cudnn_ops.compiler.report import Candidate, CompileReport, first_line, warn
from cudnn_ops.compiler.strides import Strides

log = logging.getLogger("cudnn_ops.compiler")

#: Decides about a match: whether it is swapped, why not, and what was measured.
Decide = Callable[[Pattern, Found, Candidate], bool]


class GraphFacts:
    """What checks need to know of a graph, looked up once for every graph."""

    def __init__(self, graph: fx.Graph):
        self.place: dict[fx.Node, int] = {}
        self.number(graph)
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
        #: The graph as it was, from the first swap on.
        self.before: fx.Graph | None = None
        self.swapped: list[Candidate] = []

    def number(self, graph: fx.Graph) -> None:
        """Notes the places of nodes, after some were moved."""
        self.place.update((node, place) for place, node in enumerate(graph.nodes))

    def add(self, node: fx.Node, like: fx.Node) -> None:
        self.place[node] = self.place[like]
        self.mode[node] = self.mode[like]


@dataclass
class Swaps:
    """What was swapped, in one graph or several.

    Attributes:
        candidates: the matches.
        before: the modules whose graphs were changed, with what these were.
    """

    candidates: list[Candidate] = field(default_factory=list)
    before: list[tuple[fx.GraphModule, fx.Graph]] = field(default_factory=list)

    def add(self, other: Swaps) -> None:
        self.candidates += other.candidates
        self.before += other.before

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
    graph = module.graph
    try:
        facts = GraphFacts(graph)
        same = identities(graph, facts.mutated)
    except Exception as error:  # whatever a graph has in it, the stock one is right
        log.info("a graph is not understood", exc_info=error)
        warn("a graph stays as it is, because it has something unknown in it", error)
        return swaps
    if same:
        _leave_out(same, graph, facts)
    for pattern in patterns:
        facts.declined.clear()
        # From the end: of two matches, one within the other, the larger one is first.
        for node in reversed(list(graph.nodes)):
            # The nodes of an earlier match are gone.
            if node in facts.place and node not in facts.declined and _ends(pattern, node):
                _try(graph, facts, pattern, node, decide, report)
    if facts.swapped:
        assert facts.before is not None
        own = Swaps(facts.swapped, [(module, facts.before)])
        if is_final():
            _finish(module, patterns, facts, own)
        swaps.add(own)
    elif facts.before is not None:
        module.graph = facts.before
    return swaps


def _leave_out(same: Mapping[fx.Node, fx.Node], graph: fx.Graph, facts: GraphFacts) -> None:
    """Puts other nodes in the place of some; a graph with nothing to swap gets them back."""
    facts.before = _copy_of(graph)
    for node, source in same.items():
        node.replace_all_uses_with(source)
        facts.place.pop(node)
        graph.erase_node(node)


def _finish(
    module: fx.GraphModule, patterns: Sequence[Pattern], facts: GraphFacts, swaps: Swaps
) -> None:
    """Settles strides, then what replacements have in common; where that fails, all is undone."""
    names = {candidate.pattern for candidate in facts.swapped}
    why = "it depends on the strides of what would be swapped"

    def run(node: fx.Node) -> Any:
        return _run(node, facts)

    try:
        has_images = any(pattern.of_images for pattern in patterns if pattern.name in names)
        if has_images:
            facts.stock.update(read_channels_last(module.graph, run))
        Strides(module.graph, facts.stock, facts.mutated, run).settle()
        if has_images:
            skip_copies(module.graph, facts.mutated)
        why = "its swaps cannot be finished"
        for pattern in patterns:
            pattern.finish(module.graph, facts.mode, facts.mutated)
        module.graph.lint()
        module.recompile()
    except Exception as error:  # whatever a graph has in it, the stock one is right
        log.info("a graph stays as it is, because %s", why, exc_info=error)
        warn(f"a graph stays as it is, because {why}", error)
        swaps.undo(f"{why}: {first_line(error)}")


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


def objection(found: Found, facts: GraphFacts) -> str:
    """Why a match must not be replaced, whatever is faster; empty where it may be."""
    inside = set(found.nodes)
    for node in found.nodes:
        if node not in found.outputs and any(user not in inside for user in node.users):
            return f"{node.name}, an intermediate result, is used elsewhere"
    computed = [node for node in found.nodes if not _is_constant(node)]
    if len({facts.mode[node] for node in computed}) > 1:
        return "gradients or autocast are switched on or off within it"
    own = {node for node in found.written if _is_read_within(node, inside, facts)}
    read = facts.mutated.intersection((*found.inputs, *found.unchanged)) - own
    is_input_changed = not all(_is_changed_before(node, found, facts) for node in read)
    changed = facts.mutated & inside
    changed -= _filled_within(found, facts)
    if is_input_changed or not all(_is_changed_within(node, inside, facts) for node in changed):
        return "a tensor that it reads is changed in place"
    if _too_early(found, facts) is None:
        return "an input is computed only after a result is used"
    try:
        with _unlogged():
            results = fake_results(found, facts)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return f"the operator does not support it: {first_line(error)}"
    for output, result in zip(found.outputs, results, strict=True):
        if difference := _difference(value_of(output), result):
            return difference
    return ""


def _place_of(found: Found, facts: GraphFacts) -> fx.Node | None:
    """The node before which the replacement is put: among the match's own, behind all inputs.

    None where there is none: what was put in another match's place has one place.
    """
    last = max((facts.place[node] for node in found.inputs), default=-1)
    least = max(last + 1, min(facts.place[node] for node in found.outputs))
    computed = (node for node in found.nodes if not _is_constant(node))
    after = (node for node in computed if facts.place[node] >= least)
    return min(after, key=facts.place.__getitem__, default=None)


#: What can as well be computed later: no products, whose results would be kept for longer.
_MOVES = {
    *("transpose", "unsqueeze", "getitem", "narrow", "split", "chunk", "unbind", "expand"),
    *("reshape", "permute", "flatten", "unflatten", "contiguous", "cat", "cast", "mul"),
}


def _too_early(found: Found, facts: GraphFacts) -> list[fx.Node] | None:
    """What reads a result before all inputs are computed; None where it cannot be moved."""
    place, inside = facts.place, set(found.nodes)
    behind = _place_of(found, facts)
    if behind is None:
        return None
    early: set[fx.Node] = set()
    waiting = list(found.outputs)
    while waiting:
        users = set(waiting.pop().users).difference(inside)
        waiting += (user for user in users - early if place[user] < place[behind])
        early.update(user for user in users if place[user] < place[behind])
    for node in early:
        call = call_of(node)
        if call is None or call.name not in _MOVES or call.in_place or node in facts.mutated:
            return None
        is_read_by_it = node in found.inputs or not inside.isdisjoint(node.users)
        if is_read_by_it or facts.mode[node] != facts.mode[behind]:
            return None
    return sorted(early, key=place.__getitem__)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Torch logs what an operator refuses before it raises; here a refusal is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _is_changed_within(node: fx.Node, inside: set[fx.Node], facts: GraphFacts) -> bool:
    """Whether the match has all writes to its memory, and all that this was before the last one.

    As in ``x *= sigmoid(x)`` of a result. What was overwritten must not be read afterwards.
    """
    memory = memory_of(node.meta.get("example_value"))
    sharing = {one for one in facts.place if memory & memory_of(one.meta.get("example_value"))}
    for writer in facts.place:
        if sharing.isdisjoint(written_by(writer)):
            continue
        last = facts.place[writer]
        before = [one for one in sharing if facts.place[one] < last]
        users = (user for one in before for user in one.users)
        if not inside.issuperset((writer, *before)) or any(facts.place[u] > last for u in users):
            return False
    return True


def _filled_within(found: Found, facts: GraphFacts) -> set[fx.Node]:
    """The tensors that the match fills, and views of them, where all writes to them are its own.

    Nothing but the match and views of its results reads them: they are its intermediate results.
    """
    inside = set(found.nodes)
    filled: set[fx.Node] = set()
    for node in found.filled:
        memory = memory_of(node.meta.get("example_value"))
        sharing = {one for one in facts.place if memory & memory_of(one.meta.get("example_value"))}
        writers = {one for one in facts.place if not sharing.isdisjoint(written_by(one))}
        if inside.issuperset(writers):
            filled |= sharing
    return filled


def _is_changed_before(node: fx.Node, found: Found, facts: GraphFacts) -> bool:
    """Whether all writes to its memory come before the match, which reads what they leave.

    Models fill keys part by part. What the match does not read itself may have been read earlier.
    """
    if node in found.unchanged or node.users.keys().isdisjoint(found.nodes):
        return False
    begin = min(facts.place[one] for one in found.nodes if not _is_constant(one))
    memory = memory_of(node.meta.get("example_value"))
    sharing = {one for one in facts.place if memory & memory_of(one.meta.get("example_value"))}
    return all(
        place < begin or sharing.isdisjoint(written_by(writer))
        for writer, place in facts.place.items()
    )


def _is_read_within(node: fx.Node, inside: set[fx.Node], facts: GraphFacts) -> bool:
    """Whether nothing else in the graph reads that memory, or writes to it."""
    memory = memory_of(node.meta.get("example_value"))
    sharing = (one for one in facts.place if memory & memory_of(one.meta.get("example_value")))
    return all(inside.issuperset(one.users) for one in sharing)


def _is_constant(node: fx.Node) -> bool:
    """Whether it reads no tensor: gradients and autocast do not concern it."""
    return not node.all_input_nodes


def _difference(expected: Tensor | None, result: Tensor) -> str:
    if expected is None:
        return "the result is no tensor"
    for what in ("dtype", "device", "shape"):
        was, would_be = getattr(expected, what), getattr(result, what)
        if was != would_be:
            return f"the result's {what} would be {would_be} in place of {was}"
    return ""


def fake_results(found: Found, facts: GraphFacts) -> tuple[Tensor, ...]:
    """What the replacement gives for the tensors without memory that stand for the inputs."""
    inputs = [value_of(node) for node in found.inputs]
    with _without_memory(inputs), _autocast(facts.mode[found.outputs[-1]]):
        return found.built(*inputs)


def _run(node: fx.Node, facts: GraphFacts) -> Any:
    """What a node gives for the values without memory of those that it reads."""
    given = (node.args, node.kwargs)
    args, kwargs = cast(Any, map_arg(given, lambda one: one.meta["example_value"]))
    with _without_memory(args), _autocast(facts.mode.get(node, ())):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


@contextlib.contextmanager
def _without_memory(inputs: Any) -> Iterator[None]:
    mode = next((x.fake_mode for x in tree_leaves(inputs) if isinstance(x, FakeTensor)), None)
    assert isinstance(mode, FakeTensorMode), "a graph without fake tensors"
    # As Dynamo does: without it torch's composite functions refuse sizes that are symbols.
    with mode, torch.no_grad(), enable_python_dispatcher():
        yield


@contextlib.contextmanager
def _autocast(modes: Sequence[fx.Node]) -> Iterator[None]:
    """The autocast that these nodes have entered and not left."""
    entered = [node for node in modes if node.target is torch.amp.autocast_mode._enter_autocast]
    left = {node.args[0] for node in modes if node.target is torch.amp.autocast_mode._exit_autocast}
    with contextlib.ExitStack() as stack:
        for node in entered:
            if node not in left:
                device, dtype, enabled, cache = cast(tuple[Any, ...], node.args)
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
                )
        yield


def _replace(graph: fx.Graph, facts: GraphFacts, found: Found) -> None:
    if facts.before is None:
        facts.before = _copy_of(graph)
    behind = _place_of(found, facts)
    assert behind is not None  # or there would have been an objection
    like = behind
    if early := _too_early(found, facts):
        behind = early[0]
        for node in early:
            like.prepend(node)
        facts.number(graph)
    last_before = behind.prev
    with graph.inserting_before(behind):
        tracer = fx.proxy.GraphAppendingTracer(graph)
        results = found.built(*(fx.Proxy(node, tracer) for node in found.inputs))
    node = last_before.next
    while node is not behind:
        facts.add(node, behind)
        node.meta = {**like.meta, "example_value": _run(node, facts)}
        node = node.next
    for output, result in zip(found.outputs, results, strict=True):
        node, stock = result.node, facts.stock.pop(output, value_of(output))
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
    """With the sources of its inputs, without which AOTAutograd refuses a graph of Dynamo's."""
    copied = copy.deepcopy(graph)
    inputs = (one.find_nodes(op="placeholder") for one in (graph, copied))
    for node, its_copy in zip(*inputs, strict=True):
        if hasattr(node, "_dynamo_source"):
            its_copy._dynamo_source = node._dynamo_source
    return copied
