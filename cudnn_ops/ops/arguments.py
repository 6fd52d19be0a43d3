"""Arguments of operators: bound by the schema, or refused in one sentence.

The dispatcher itself would print the whole schema, or misread what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def bind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a call by name; those left out have the schema's defaults.

    Args:
        op: an overload of an operator.
        args: its positional arguments.
        kwargs: the others.
    """
    arguments = op._schema.arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    named |= zip((a.name for a in arguments), args, strict=False)
    return SimpleNamespace(**{**named, **kwargs})


#: Tensors of attention that people hand over as a list, and the dtype to make them of.
_LISTS = {
    **dict.fromkeys(("seq_lens_q", "seq_lens_kv", "seqused_q", "seqused_k"), "int32"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_table"), "int32"),
    **dict.fromkeys(("alibi_slopes", "sinks", "descale_k", "descale_v"), "float32"),
    "rng_state": "int64",
}


def refuse_one_number(op: str, window_size: object) -> None:
    """Raises TypeError for a window that is one number: the dispatcher takes it for both sides."""
    if isinstance(window_size, int):
        raise TypeError(
            f"cudnn_ops.{op}: window_size must be (left, right), got {window_size}: "
            f"({window_size}, 0) shows a query that many keys before its own, ({window_size}, "
            f"{window_size}) as many after it too, and -1 stands for all"
        )


def refuse_lists(op: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that must be a tensor and is none.

    Called where the operator has raised, so that a correct call pays nothing.

    Args:
        op: the public function's name.
        arguments: those of the call, by name; others than tensors may be among them.
    """
    for name, dtype in _LISTS.items():
        given = arguments.get(name)
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(
                f"cudnn_ops.{op}: {name} must be a tensor on the device of the query, got a "
                f"{type(given).__name__}: torch.tensor(..., dtype=torch.{dtype}, "
                "device=query.device)"
            ) from None


def _is_integers(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(number, int | torch.SymInt) for number in value)
    )


#: For each type in a schema: whether a value is of it, and what it is called.
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "Tensor": (lambda value: isinstance(value, Tensor), "a tensor"),
    "List[int]": (_is_integers, "a sequence of integers, such as (64,)"),
    "int": (lambda value: isinstance(value, int | torch.SymInt), "a whole number"),
    "ScalarType": (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    "float": (lambda value: isinstance(value, Real | torch.SymFloat), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
}


def refuse_wrong_types(
    op: Any,
    arguments: Mapping[str, Any],
    function: str | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raises TypeError for the first argument of a type that its operator does not accept.

    Called where the operator has raised, so that a correct call pays nothing.

    Args:
        op: an overload of an operator.
        arguments: those of the call, by the names of its schema; what is left out has its default.
        function: the public function's name; None stands for the operator's.
        names: of arguments that the function calls otherwise.
    """
    function = function or op._schema.name.split("::")[1].removeprefix("_")
    for argument in op._schema.arguments:
        if argument.name not in arguments:
            continue
        value = arguments[argument.name]
        # A dtype is an integer in the other.
        is_dtype = str(argument.real_type) == "ScalarType"
        kind = "ScalarType" if is_dtype else str(argument.type)
        required = kind.removeprefix("Optional[").removesuffix("]") if "Opt" in kind else kind
        is_right, words = _TYPES[required]
        if is_right(value) or (value is None and kind != required):
            continue
        otherwise = "" if kind == required else " or None"
        got = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        name = (names or {}).get(argument.name, argument.name)
        raise TypeError(
            f"cudnn_ops.{function}: {name} must be {words}{otherwise}, got {got}"
        ) from None
