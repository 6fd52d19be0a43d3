"""Which arguments a question about a plan takes: those of the operator's public function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cudnn_ops.ops.conv import conv1d, conv2d, conv3d
from cudnn_ops.ops.norm import layer_norm, rms_norm
from cudnn_ops.ops.paged import paged_attention
from cudnn_ops.ops.sdpa import scaled_dot_product_attention


class _Operator(NamedTuple):
    function: Callable[..., Any]
    operands: tuple[str, ...]
    """Those of its arguments that a question calls q, k and v."""
    without_effect: tuple[str, ...] = ()
    """One plan serves whatever they are."""
    questions: tuple[str, ...] = ()
    """What can be asked beside its arguments."""


_CONV = (("input", "weight"), (), ("with_before",))
_NORM = (("input",), ("eps",), ("with_stats",))
_OPERATORS = {
    "sdpa": _Operator(
        scaled_dot_product_attention,
        ("query", "key", "value"),
        ("scale", "enable_gqa", "rng_state"),
        ("grad_mask",),
    ),
    "paged_attention": _Operator(
        paged_attention,
        ("query", "key_cache", "value_cache"),
        ("scale", "seq_lens_kv", "out"),
    ),
    "rms_norm": _Operator(rms_norm, *_NORM),
    "layer_norm": _Operator(layer_norm, *_NORM),
    "conv1d": _Operator(conv1d, *_CONV),
    "conv2d": _Operator(conv2d, *_CONV),
    "conv3d": _Operator(conv3d, *_CONV),
}


def _operator(op: str) -> _Operator:
    return _OPERATORS[op.removesuffix("_backward")]


def take_operands(op: str, given: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """q, k and v, where some of them stand among the options under the operator's own names."""
    result = list(given)
    for index, name in enumerate(_operator(op).operands):
        if name not in options:
            continue
        if result[index] is not None:
            raise TypeError(f"explain got {name} twice: it is {'qkv'[index]} of {op}")
        result[index] = options.pop(name)
    return result


def with_effect(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a plan depends on.

    Raises:
        TypeError: one that the operator does not take; the message has those that it takes.
    """
    operator = _operator(op)
    names = [*inspect.signature(operator.function).parameters, *operator.questions]
    accepted = [name for name in names if name not in operator.operands]
    for name in options:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise TypeError(f"{op} has no argument {name}{hint} It takes {', '.join(accepted)}")
    return {name: value for name, value in options.items() if name not in operator.without_effect}
