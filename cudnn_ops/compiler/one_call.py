"""A rewritten graph as a graph of one call, by whose word torch finds what it was compiled to.

AOTAutograd looks up what it is given by all of its nodes, before it traces them. Of a graph that
calls :func:`computed` with a word that is one of a kind, it sees the word. So a process that knows
the word from an earlier one does not have to rewrite a graph to find what inductor made of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config
from torch._inductor.compile_fx import run_pre_grad_passes

from cudnn_ops.compiler.nodes import with_source

#: The graphs that can be traced now, by their words.
_at_hand: dict[str, fx.GraphModule] = {}


class NotAtHand(Exception):
    """Raised where a graph would be traced that nobody has rewritten in this process."""


def computed(word: str, *inputs: Any) -> Any:
    """What the graph of this word gives, for AOTAutograd to trace."""
    if word not in _at_hand:
        raise NotAtHand(word)
    return fx.Interpreter(_at_hand[word]).run(*inputs)


@contextmanager
def at_hand(
    word: str, module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Iterator[None]:
    """Inside, the graph of a word can be traced.

    Inductor's passes on what Dynamo captured have been over it, with these patches of its options.
    """
    with config.patch(dict(patches)), enable_python_dispatcher():
        _at_hand[word] = run_pre_grad_passes(module, inputs)
    try:
        yield
    finally:
        del _at_hand[word]


def one_call(module: fx.GraphModule, word: str) -> fx.GraphModule:
    """A module with the inputs and the results of another one, whose word this is."""
    graph = fx.Graph()
    inputs = [
        with_source(graph.node_copy(node), node)
        for node in module.graph.find_nodes(op="placeholder")
    ]
    call = graph.call_function(computed, (word, *inputs))
    results = cast(Sequence[Any], module.graph.output_node().args[0])
    each = (graph.call_function(operator.getitem, (call, i)) for i in range(len(results)))
    graph.output(tuple(each))
    calling = fx.GraphModule({}, graph)
    calling.meta.update(module.meta)
    return calling
