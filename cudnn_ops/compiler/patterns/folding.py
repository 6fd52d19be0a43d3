"""Batch norms in evaluation, folded into the convolutions before them, many at a time.

A network has dozens of them, and folding one takes two kernels, which run for about as long as they
take to launch. What is folded from parameters alone waits for nothing: for convolutions that follow
each other, one kernel computes all weights and one all biases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cudnn_ops.compiler.nodes import value_of

#: What is folded early is in memory for longer: so much of a model's does not show.
MOST_BYTES = 2 << 20


class Norm(NamedTuple):
    """A convolution's parameters, and those of the batch norm behind it."""

    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    norm_weight: Any
    norm_bias: Any
    eps: float
    memory_format: torch.memory_format


def folded(*norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias with the norm in them, from the fields of a :class:`Norm`."""
    one = Norm(*norm)
    weight, (scale, shift) = _laid_out(one), _scale_and_shift(one)
    if one.norm_bias is not None:
        shift = shift + one.norm_bias
    folded_weight = weight * _for_each_output(scale, weight)
    return folded_weight.to(weight.dtype), shift.to(weight.dtype)


def folded_together(norms: Sequence[Sequence[Any]]) -> tuple[Tensor, ...]:
    """The weights of all, then their biases: torch's functions of lists become one kernel each."""
    given = [Norm(*norm) for norm in norms]
    weights, scales, shifts = [], [], []
    for one in given:
        weight, (scale, shift) = _laid_out(one), _scale_and_shift(one)
        weights.append(weight)
        scales.append(_for_each_output(scale, weight))
        shifts.append(shift)
    biases = torch._foreach_add(shifts, [one.norm_bias for one in given])
    return (*torch._foreach_mul(weights, scales), *biases)


def fold_together(
    graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
) -> None:
    """What a graph folds, it folds at once, as far as it can.

    Args:
        graph: to change.
        mode: what switches gradients and autocast before a node.
        mutated: nodes whose memory is written to.
    """
    for nodes in list(_groups(graph, mode, mutated)):
        if len(nodes) == 1:
            continue
        with graph.inserting_before(nodes[0]):
            at_once = graph.call_function(folded_together, ([node.args for node in nodes],))
        values = list(zip(*(node.meta["example_value"] for node in nodes), strict=True))
        at_once.meta = {**nodes[0].meta, "example_value": (*values[0], *values[1])}
        for place, node in enumerate(nodes):
            for part in list(node.users):
                part.args = (at_once, place + len(nodes) * int(str(part.args[1])))
            graph.erase_node(node)


def _groups(
    graph: fx.Graph, mode: Mapping[fx.Node, object], mutated: Collection[fx.Node]
) -> Iterator[list[fx.Node]]:
    """Nodes behind each other that can be one: as many as fit."""
    group: list[fx.Node] = []
    size, kind = 0, None
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not folded or not _is_early(node, mutated):
            continue
        weight = value_of(node.args[0])
        assert weight is not None
        of_node = mode[node], weight.dtype, weight.device
        if group and (of_node != kind or size + weight.nbytes > MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(node)
        size, kind = size + weight.nbytes, of_node
    if group:
        yield group


def _is_early(node: fx.Node, mutated: Collection[fx.Node]) -> bool:
    """Whether it reads parameters alone, plain ones of one dtype, which nothing changes."""
    read = node.all_input_nodes
    values = [value for one in read if (value := value_of(one)) is not None]
    are_plain = not any(is_traceable_wrapper_subclass(value) for value in values)  # or sharded
    are_given = all(one.op in ("placeholder", "get_attr") and one not in mutated for one in read)
    has_bias = node.args[Norm._fields.index("norm_bias")] is not None
    return are_plain and are_given and has_bias and len({value.dtype for value in values}) == 1


def _laid_out(norm: Norm) -> Any:
    return norm.weight.contiguous(memory_format=norm.memory_format)


def _scale_and_shift(norm: Norm) -> tuple[Any, Any]:
    """What the norm multiplies by, and what is added then but for its bias."""
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.norm_weight is not None:
        scale = scale * norm.norm_weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else norm.bias * scale + shift


def _for_each_output(scale: Any, weight: Any) -> Any:
    return scale.reshape(-1, *(1 for _ in weight.shape[1:]))
