"""One sentence for an argument of a wrong type, where the dispatcher prints a schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def _is_integers(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(number, int | torch.SymInt) for number in value)
    )


#: By the schema's name of a type: whether a value is of it, and what it is called.
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "Tensor": (lambda value: isinstance(value, Tensor), "a tensor"),
    "List[int]": (_is_integers, "a sequence of integers, such as (64,)"),
    "float": (lambda value: isinstance(value, Real | torch.SymFloat), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
}


def refuse_wrong_types(op: Any, *values: object) -> None:
    """Raises TypeError for the first argument of a type that its operator does not take.

    Called where the operator has raised, so that a call that is right pays nothing.

    Args:
        op: an overload of an operator.
        values: its arguments, in the order of its schema.
    """
    for argument, value in zip(op._schema.arguments, values, strict=True):
        kind = str(argument.type)
        required = kind.removeprefix("Optional[").removesuffix("]") if "Opt" in kind else kind
        is_right, words = _TYPES[required]
        if is_right(value) or (value is None and kind != required):
            continue
        otherwise = "" if kind == required else " or None"
        got = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        raise TypeError(
            f"cudnn_ops.{op._schema.name.split('::')[1]}: {argument.name} must be "
            f"{words}{otherwise}, got {got}"
        ) from None
