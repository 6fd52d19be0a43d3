"""Batch norms in evaluation, folded into the convolutions before them, many at a time.

A network has dozens of them, and folding one takes two kernels of inductor's, which run for about
as long as they take to launch. What is folded from parameters alone waits for nothing: on a GPU one
kernel computes all weights and biases of convolutions that follow each other. With gradients, and
on a CPU, torch's functions of lists become one kernel for all weights and one for all biases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cudnn_ops.compiler.nodes import has_static_sizes, value_of
from cudnn_ops.ops._batch_norm_fold import (
    ConvNorm,
    fold_batch_norms,
    for_each_output,
    in_format,
)

#: What is folded early is in memory for longer, beside the model's largest images: it is so small
#: a share of the largest one, within bounds. ResNet-50's 16 MB at batch 128 were 4 % of its peak.
SHARE = 1 / 50
LEAST_BYTES, MOST_BYTES = 4 << 20, 16 << 20


def folded(*norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias with the norm in them, from the fields of a :class:`ConvNorm`."""
    one = ConvNorm(*norm)
    if _have_a_kernel([one]):
        weight, bias = fold_batch_norms([one])
        return weight, bias
    scale, shift = one.scale_and_shift()
    if one.norm_bias is not None:
        shift = shift + one.norm_bias
    weight = in_format(one.weight) * for_each_output(scale, one.weight)
    return weight.to(one.weight.dtype), shift.to(one.weight.dtype)


def folded_together(norms: Sequence[Sequence[Any]]) -> tuple[Tensor, ...]:
    """The weights of all, then their biases."""
    given = [ConvNorm(*norm) for norm in norms]
    if _have_a_kernel(given):
        return tuple(fold_batch_norms(given))
    weights, scales, shifts = [], [], []
    for one in given:
        scale, shift = one.scale_and_shift()
        weights.append(in_format(one.weight))
        scales.append(for_each_output(scale, one.weight))
        shifts.append(shift)
    norm_biases: list[Any] = [one.norm_bias for one in given]  # none is None: `is_early`
    biases = torch._foreach_add(shifts, norm_biases)
    return (*torch._foreach_mul(weights, scales), *biases)


def _have_a_kernel(norms: Sequence[ConvNorm]) -> bool:
    """Whether ours folds them: of plain tensors of a GPU, of one dtype, without gradients."""
    tensors = [field for norm in norms for field in norm if isinstance(field, Tensor)]
    return (
        all(tensor.is_cuda and not is_traceable_wrapper_subclass(tensor) for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and tensors[0].dtype != torch.float64
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


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
    most = _most_bytes(graph)
    group: list[fx.Node] = []
    size, kind = 0, None
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not folded:
            continue
        if not is_early(node.args, mutated):
            continue
        weight = value_of(node.args[0])
        assert weight is not None
        of_node = mode[node], weight.dtype, weight.device
        if group and (of_node != kind or size + weight.nbytes > most):
            yield group
            group, size = [], 0
        group.append(node)
        size, kind = size + weight.nbytes, of_node
    if group:
        yield group


def _most_bytes(graph: fx.Graph) -> float:
    """How many bytes of weights are folded at once."""
    values = [value_of(node) for node in graph.nodes if node.op.startswith("call")]
    sizes = [x.nbytes for x in values if x is not None and has_static_sizes(x)]
    return min(max(SHARE * max(sizes, default=0), LEAST_BYTES), MOST_BYTES)


def is_early(norm: Sequence[Any], mutated: Collection[fx.Node] = ()) -> bool:
    """Whether a norm's fields are parameters alone, plain ones of one dtype, which nothing changes.

    What is folded from such, is folded for all convolutions at once.
    """
    read = [field for field in norm if isinstance(field, fx.Node)]
    values = [value for one in read if (value := value_of(one)) is not None]
    are_plain = not any(is_traceable_wrapper_subclass(value) for value in values)  # or sharded
    are_given = all(one.op in ("placeholder", "get_attr") and one not in mutated for one in read)
    has_bias = norm[ConvNorm._fields.index("norm_bias")] is not None
    return are_plain and are_given and has_bias and len({value.dtype for value in values}) == 1
