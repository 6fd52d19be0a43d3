"""Whether a match may be replaced, whatever is faster: what has to hold for those of all patterns.

Nothing else uses what goes away, nothing writes to what is read, gradients and autocast are on for
all of it or for none, and the result has the shape, dtype and device that it had.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import Tensor, fx

from cudnn_ops.compiler.facts import GraphFacts
from cudnn_ops.compiler.nodes import call_of, value_of, written_by
from cudnn_ops.compiler.pattern import Found
from cudnn_ops.compiler.report import first_line
from cudnn_ops.compiler.running import run_replacement


def objection(found: Found, facts: GraphFacts) -> str:
    """Why a match must not be replaced, whatever is faster; empty where it may be.

    Then the nodes of what is traced for it have their values.
    """
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
    if too_early(found, facts) is None:
        return "an input is computed only after a result is used"
    try:
        with _unlogged():
            results = run_replacement(found, facts)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return f"the operator does not support it: {first_line(error)}"
    for output, result in zip(found.outputs, results, strict=True):
        if difference := _difference(value_of(output), result):
            return difference
    return ""


def place_of(found: Found, facts: GraphFacts) -> fx.Node | None:
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


def too_early(found: Found, facts: GraphFacts) -> list[fx.Node] | None:
    """What reads a result before all inputs are computed; None where it cannot be moved."""
    place, inside = facts.place, set(found.nodes)
    behind = place_of(found, facts)
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


def _is_changed_within(node: fx.Node, inside: set[fx.Node], facts: GraphFacts) -> bool:
    """Whether the match has all writes to its memory, and all that this was before the last one.

    As in ``x *= sigmoid(x)`` of a result. What was overwritten must not be read afterwards.
    """
    sharing = facts.sharing(node)
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
        sharing = facts.sharing(node)
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
    sharing = facts.sharing(node)
    return all(
        place < begin or sharing.isdisjoint(written_by(writer))
        for writer, place in facts.place.items()
    )


def _is_read_within(node: fx.Node, inside: set[fx.Node], facts: GraphFacts) -> bool:
    """Whether nothing else in the graph reads that memory, or writes to it."""
    sharing = facts.sharing(node)
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


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Torch logs what an operator refuses before it raises; here a refusal is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
