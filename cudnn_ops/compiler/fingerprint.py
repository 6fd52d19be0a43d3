"""A word for a captured graph: graphs that may be rewritten to different ones have different words.

A graph has one if torch's own cache accepts it and its nodes and values say all about it: it has no
submodules, no tensors of its own, no operators of other libraries and no sizes that are symbols.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    check_cacheable,
    should_use_local_autograd_cache,
)
from torch._subclasses.fake_tensor import FakeTensor

from cudnn_ops.compiler.caching import sources
from cudnn_ops.compiler.nodes import line_of
from cudnn_ops.compiler.strides import OUR_NAMESPACES
from cudnn_ops.ops.likeness import Unknown, key_of, tensors_in


def fingerprint(module: fx.GraphModule, swap: Collection[str] | None = None) -> str | None:
    """The word.

    Args:
        module: whose graph it is, as Dynamo captured it.
        swap: the patterns that are swapped without measuring, as in the backend's options.

    Returns:
        it; None for a graph that has none.
    """
    if not should_use_local_autograd_cache() or _has_more_than_nodes(module):
        return None
    values = [node.meta.get("example_value") for node in module.graph.nodes]
    tensors = tensors_in(values)
    try:
        check_cacheable(module)
        facts = (
            *(sources(), torch.__version__, None if swap is None else sorted(swap)),
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            *(torch.get_default_dtype(), _gpus(tensors), key_of(values)),
            [(one.requires_grad, isinstance(one, torch.nn.Parameter)) for one in tensors],
        )
    except (BypassAOTAutogradCache, Unknown):
        return None
    return _word_of(module.graph, facts)


def word_of_rewritten(module: fx.GraphModule, was: str) -> str | None:
    """A word for what a graph with a fingerprint was rewritten to; None where nodes are not all."""
    return None if _has_more_than_nodes(module) else _word_of(module.graph, was)


def _word_of(graph: fx.Graph, facts: object) -> str:
    text = "\n".join([*map(line_of, graph.nodes), repr(facts)])
    return hashlib.sha256(text.encode()).hexdigest()


def _has_more_than_nodes(module: fx.GraphModule) -> bool:
    """Whether nodes do not say all of what it computes, or values not all of its inputs."""
    has_children = next(module.children(), None) is not None  # such as hooks of saved tensors
    return has_children or any(map(_says_too_little, module.graph.nodes))


def _says_too_little(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return not isinstance(node.meta.get("example_value"), FakeTensor)
    if node.op == "output":
        return not isinstance(node.args[0], (tuple, list))
    if node.op in ("get_attr", "call_module"):
        return True
    target: Any = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).split(".")[0] not in OUR_NAMESPACES
    return isinstance(target, torch._ops.HigherOrderOperator)


def _gpus(tensors: list[FakeTensor]) -> list[str]:
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return sorted(f"{device} {torch.cuda.get_device_name(device)}" for device in devices)
