"""Runs nodes of a graph on the tensors without memory that stand for their results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from cudnn_ops.compiler.facts import GraphFacts
from cudnn_ops.compiler.nodes import call_of, has_static_sizes, value_of
from cudnn_ops.compiler.pattern import Found, Traced
from cudnn_ops.ops.likeness import Unknown, described, key_of, kind_of, made, tensors_in


def run(node: fx.Node, facts: GraphFacts) -> Any:
    """What a node gives for the values of those that it reads."""
    if (value := _like_its_image(node)) is not None:
        return value
    args, kwargs = _arguments(node)
    with _without_memory(args), _autocast(facts.mode.get(node, ())):
        return _called(node, args, kwargs)


#: Calls whose result has the strides of the image that they read; torch takes long to say so.
_KEEP_ORDER = {
    *("batch_norm", "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu"),
    *("sigmoid", "dropout"),
}
_IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}


def _like_its_image(node: fx.Node) -> FakeTensor | None:
    """What a call gives that keeps a channels-last image's size, dtype and strides; else None."""
    call = call_of(node)
    if call is None or call.name not in _KEEP_ORDER or call.in_place:
        return None
    image, was = value_of(call["input"]), value_of(node)
    if not isinstance(image, FakeTensor) or was is None or image.dim() not in _IMAGES:
        return None
    if image.dtype != was.dtype or not has_static_sizes(image) or image.shape != was.shape:
        return None
    if image.storage_offset() or not image.is_contiguous(memory_format=_IMAGES[image.dim()]):
        return None
    like: FakeTensor = made(described(image, []), [image])
    return like


def run_replacement(found: Found, facts: GraphFacts) -> list[Any]:
    """The results of what is traced of a match, whose nodes get their values.

    Of layers that are alike the first one's is run.
    """
    traced, given = found.traced, [one.meta.get("example_value") for one in found.inputs]
    for node, value in zip(traced.inputs, given, strict=True):
        node.meta["example_value"] = value
    mode, nodes = facts.mode[found.outputs[-1]], traced.nodes
    try:
        key = mode, key_of(given), _computation(traced)
    except Unknown:
        key = None
    if key in facts.replacements and tensors_in(given):
        values = made(facts.replacements[key], tensors_in(given))
        for node, value in zip(nodes, values, strict=True):
            node.meta["example_value"] = value
    else:
        with _without_memory(given), _autocast(mode):
            for node in nodes:
                node.meta["example_value"] = _called(node, *_arguments(node))
        with contextlib.suppress(Unknown):
            values = [node.meta["example_value"] for node in nodes]
            if key is not None:
                facts.replacements[key] = described(values, tensors_in(given))
    return [node.meta["example_value"] for node in traced.results]


def _computation(traced: Traced) -> object:
    """What it computes, to look it up.

    Raises:
        Unknown: of something that is neither a node nor plain.
    """
    numbers = {node: ("node", number) for number, node in enumerate(traced.graph.nodes)}
    return tuple(
        (node.op, node.target, kind_of(map_arg([node.args, *node.kwargs.items()], numbers.get)))
        for node in traced.nodes
    )


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    given = (node.args, node.kwargs)
    return cast(Any, map_arg(given, lambda one: one.meta["example_value"]))


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
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
