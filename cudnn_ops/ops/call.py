"""How public functions call their operators: past torch.ops, where that makes no difference.

Torch.ops needs one to three microseconds of host time to parse a call, more than a kernel's launch
takes. ``_fast.abi3.so`` (``csrc/python``) does without where arguments are plain and nothing else
wants to see the call.
"""

from __future__ import annotations

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


def show_to_dynamo(dynamo: ModuleType) -> None:
    """Has the compiler trace the overloads in place of the functions, which it cannot look into."""
    for call, op in _FAST.items():
        _show(call, op)


def _show(call: Callable[..., Any], op: torch._ops.OpOverload) -> None:
    @torch.compiler.substitute_in_graph(call, skip_signature_check=True)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)
