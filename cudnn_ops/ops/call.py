"""How operators are called past torch.ops, where that makes no difference.

Public functions call them so, and the code that inductor generates.

Torch.ops needs one to three microseconds of host time to parse a call, more than a kernel's launch
takes. ``_fast.abi3.so`` (``csrc/python``) does without where arguments are plain and nothing else
wants to see the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_fast: ModuleType | None
try:
    from cudnn_ops import _fast
except ImportError:  # a Python without the limited API, or the package was built without it
    _fast = None

#: Whether it could be loaded.
IS_FAST = _fast is not None

#: The functions that stand for an overload of an operator.
_FAST: dict[Callable[..., Any], torch._ops.OpOverload] = {}


def fast(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calls an overload with the least host time: a function of its own, or the overload.

    Calls, results and errors are the same.

    Args:
        op: an overload that ``kOperators`` in ``csrc/python/fast.cpp`` has.
    """
    if _fast is None:
        return op
    schema = op._schema
    call = _fast.callable(schema.name.removeprefix("cudnn_ops::"), schema.overload_name, op)
    _FAST[call] = op
    return call


@functools.cache
def graph_call(name: str, overload_name: str, is_first_read: bool = False) -> Callable[..., Any]:
    """What calls an overload with the least host time, for generated code, which has the names.

    It is the overload itself where there is nothing faster: the code may be of another process,
    in which there was.

    Args:
        name: of the operator, without its namespace.
        overload_name: empty where the operator has one overload.
        is_first_read: of several results nobody reads those behind the first, and they may be
            missing in the tuple.
    """
    op = getattr(getattr(torch.ops.cudnn_ops, name), overload_name or "default")
    if _fast is None:
        return op
    try:
        return _fast.callable(name, overload_name, op, is_first_read)
    except LookupError:
        return op


def has_graph_call(op: torch._ops.OpOverload) -> bool:
    """Whether there is something faster than the overload for generated code."""
    schema = op._schema
    name = schema.name.removeprefix("cudnn_ops::")
    return graph_call(name, schema.overload_name) is not op


def show_to_dynamo(dynamo: ModuleType) -> None:
    """Has the compiler trace the overloads in place of the functions, which it cannot look into."""
    for call, op in _FAST.items():
        _show(call, op)


def _show(call: Callable[..., Any], op: torch._ops.OpOverload) -> None:
    @torch.compiler.substitute_in_graph(call, skip_signature_check=True)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)
