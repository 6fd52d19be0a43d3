"""What a backward computes again for our convolutions, which autograd would keep from the forward.

Inductor makes copies of weights, too, and keeps none. They matter where images are few or small: of
DLA-34 with 8 images a step they would be 17 % of all that is kept.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from cudnn_ops.compiler.memory_order import OUR_CONVOLUTIONS
from cudnn_ops.compiler.nodes import call_of, has_static_sizes, value_of
from cudnn_ops.compiler.patterns.dense_groups import dense
from cudnn_ops.compiler.patterns.space_to_depth import image_squares
from cudnn_ops.ops.arguments import bind

#: Of what convolutions give, what copies of their weights may take; less is not copied twice.
_KEPT_COPIES = 0.02


def compute_again(graph: fx.Graph) -> None:
    """Marks what is recomputed: squares of images, and copies of weights where these are many."""
    for node in graph.find_nodes(op="call_function", target=image_squares):
        # The image is smaller, and usually an input, which is in memory anyway.
        for one in (node, *filter(_is_conversion, node.users)):
            _mark(one)
    convs = [node for node in graph.nodes if node.target in OUR_CONVOLUTIONS and _is_learned(node)]
    weights = [bind(node.target, node.args, node.kwargs).weight for node in convs]
    copies = dict.fromkeys(filter(_is_copy, weights))
    if sum(map(_bytes_of, copies)) > _KEPT_COPIES * sum(map(_bytes_of, convs)):
        for copy in copies:
            for one in (copy, *(one for one in copy.all_input_nodes if one.target is dense)):
                _mark(one)


def _mark(node: fx.Node) -> None:
    """The partitioner of a training graph reads it, as it does in checkpointed modules."""
    node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def _is_learned(conv: fx.Node) -> bool:
    """Whether there is a backward, which reads the weight."""
    value = value_of(conv)
    return value is not None and value.requires_grad


def _is_copy(weight: fx.Node) -> bool:
    """Whether it is another tensor than the model's, with channels last."""
    call = call_of(weight)
    if call is None or call.name != "contiguous":
        return False
    source = value_of(call["input"])
    return source is not None and not source.is_contiguous(memory_format=call["memory_format"])


def _is_conversion(node: fx.Node) -> bool:
    call = call_of(node)
    return call is not None and call.name == "contiguous"


def _bytes_of(node: fx.Node) -> int:
    value = value_of(node)
    return value.nbytes if value is not None and has_static_sizes(value) else 0
