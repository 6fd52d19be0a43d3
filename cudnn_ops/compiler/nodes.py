"""What the nodes of a captured graph compute, whatever they were spelled as.

Dynamo keeps the user's spelling: ``x * y``, ``torch.mul(x, y)`` and ``x.mul(y)`` are three kinds of
nodes. :func:`call_of` gives all of them one name and the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx.node import _get_qualified_name
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cudnn_ops.compiler.operations import (
    IN_PLACE,
    OPERATIONS,
    OTHER_NAMES,
    RENAMED,
    REQUIRED,
    WITH_SIZES,
)


@dataclass(frozen=True)
class Call:
    """One computation: its name in :data:`OPERATIONS`, and every argument of it by name."""

    name: str
    arguments: dict[str, Any]
    in_place: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_CASTS["double"] = torch.float64
_FLOATING = set(_CASTS.values())


def _by_spelling() -> dict[object, str]:
    found: dict[object, str] = {}
    for name, operation in OPERATIONS.items():
        for spelling in operation.spellings:
            found.setdefault(spelling, name)
    return found


_NAMES = _by_spelling()


def call_of(node: fx.Node) -> Call | None:
    """What it computes; None where that is none of :data:`OPERATIONS`.

    Of further names are ``cast`` (``input`` and ``dtype``), ``reshape``, ``expand`` and ``permute``
    (``input`` and ``sizes``), and ``einsum`` of two tensors (``equation``, ``input`` and
    ``other``).
    """
    # Kept with the node, since every pattern asks for it. Changed arguments are another tuple.
    kept = vars(node).get(_KEPT)
    value = node.meta.get("example_value")
    if kept is not None:
        target, args, kwargs, same, call = kept
        if target is node.target and args is node.args and kwargs is node.kwargs and same is value:
            return call
    call = _call_of(node)
    vars(node)[_KEPT] = node.target, node.args, node.kwargs, value, call
    return call


_KEPT = "_cudnn_ops_call"


def _call_of(node: fx.Node) -> Call | None:
    spelling: Any = node.target
    if node.op == "call_method":
        spelling = f".{node.target}"
    elif node.op != "call_function":
        return None
    if spelling in WITH_SIZES:
        return _call_with_sizes(WITH_SIZES[spelling], node)
    if spelling is torch.functional.einsum:
        return _einsum_of(node)
    if (cast := _cast_of(node)) is not None:
        return cast
    in_place = spelling in IN_PLACE
    name = IN_PLACE.get(spelling) or _NAMES.get(spelling)
    if name is None and isinstance(spelling, str) and spelling.endswith("_"):
        name = _NAMES.get(spelling[:-1])  # x.mul_(y)
        in_place = name is not None
    if name is None:
        return None
    arguments = _bind(name, node)
    if arguments is None:
        return None
    return Call(name, arguments, in_place or arguments.pop("inplace", False))


def _bind(name: str, node: fx.Node) -> dict[str, Any] | None:
    parameters = OPERATIONS[name].parameters
    if len(node.args) > len(parameters):
        return None
    found = dict(zip(parameters, node.args, strict=False))
    for key, value in node.kwargs.items():
        key = OTHER_NAMES.get(name, {}).get(key, RENAMED.get(key, key))
        if key not in parameters or key in found:
            return None
        found[key] = value
    for key, default in parameters.items():
        if key not in found:
            if default is REQUIRED:
                return None
            found[key] = default
    # In their order: expressions have the first ones without names.
    return {key: found[key] for key in parameters}


def _call_with_sizes(name: str, node: fx.Node) -> Call | None:
    first, *sizes = node.args or (None,)
    if first is None or node.kwargs:
        return None
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    # view(dtype) is another function.
    if any(isinstance(size, torch.dtype) for size in sizes):
        return None
    return Call(name, {"input": first, "sizes": tuple(sizes)})


def _einsum_of(node: fx.Node) -> Call | None:
    """Of two tensors: ``einsum(equation, x, y)`` or ``einsum(equation, (x, y))``."""
    equation, *operands = node.args or (None,)
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    return Call("einsum", {"equation": equation, "input": operands[0], "other": operands[1]})


def _cast_of(node: fx.Node) -> Call | None:
    """A change of precision or of nothing; None for other devices and other kinds of numbers."""
    if node.op != "call_method" or not isinstance(node.target, str):
        return None
    value, source = value_of(node), value_of(node.args[0]) if node.args else None
    if value is None or source is None:
        return None
    if node.target not in (*_CASTS, "to", "type", "type_as") or value.device != source.device:
        return None
    if node.kwargs.keys() & {"memory_format"}:
        return None
    if value.dtype not in _FLOATING or source.dtype not in _FLOATING:
        return None  # that rounds to what a computation may be about: integers, 8 bits
    return Call("cast", {"input": node.args[0], "dtype": value.dtype})


def value_of(node: Any) -> Tensor | None:
    """The tensor without memory that stands for a node's result; None where it is no tensor.

    What a transform of torch.func wraps, such as one sample of many, is none either: patterns see
    nothing of what computes it.
    """
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and not is_functorch_wrapped_tensor(value) else None


def has_static_sizes(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def number_of(value: Any) -> int | float | None:
    """The number that an argument is; None where it is something else.

    A float that Dynamo made an input of the graph becomes a constant again, by a guard.
    """
    if isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.SymFloat):
        return float(value.meta["example_value"])
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_plain else None


def memory_of(value: Any) -> set[int]:
    """What stands for the memory of a node's result, to tell views of the same."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            return set().union(*(memory_of(getattr(value, name)) for name in names))
        if is_functorch_wrapped_tensor(value):
            return memory_of(get_unwrapped(value))
        return {value.untyped_storage()._cdata} if value.layout == torch.strided else {id(value)}
    leaves = tree_leaves(value)
    return set().union(*(memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))


def memory_of_result(node: fx.Node) -> set[int]:
    """What stands for the memory of what a node gives."""
    return memory_of(node.meta.get("example_value"))


def memory_given_to(graph: fx.Graph) -> set[int]:
    """The memory of a graph's inputs and of its module's tensors, which is not its own."""
    given = (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
    # Kept, since it is asked for each input of each match. Such nodes are added, never changed.
    count, found = _given.get(graph, (0, set[int]()))
    if count != len(given):
        found = set[int]().union(*map(memory_of_result, given))
        _given[graph] = len(given), found
    return found


_given: WeakKeyDictionary[fx.Graph, tuple[int, set[int]]] = WeakKeyDictionary()


def is_same(first: Any, second: Any) -> bool:
    """Whether two nodes are one, or one view of the same, such as a slice that was taken twice."""
    if first is second:
        return True
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(is_same, first, second))
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return type(first) is type(second) and bool(first == second)
    one, other = call_of(first), call_of(second)
    if one is None or other is None or one.name != other.name or one.in_place or other.in_place:
        return False
    # Of copies, one may have been made before a change and the other one after it.
    if not memory_of_result(first) & memory_of_result(second):
        return False
    return all(is_same(one[key], other[key]) for key in one.arguments)


def mutated(graph: fx.Graph) -> set[fx.Node]:
    """Every node whose memory some node writes to, with those that share that memory.

    A result that nothing but the writer reads is not among them: that is a computation like any
    other, in memory of its own.
    """
    found: set[fx.Node] = set()
    having: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for memory in memory_of_result(node):
            having.setdefault(memory, []).append(node)
        for one in written_by(node):
            if not is_own(one, node):
                found.add(one)
    for memory in set().union(*map(memory_of_result, found)):
        found.update(having[memory])
    return found


#: Python's names for ``x += y`` and the like.
_AUGMENTED = {
    *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
}


def target_name(node: fx.Node) -> str:
    """The name of the function or method that it calls; empty where that has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def line_of(node: fx.Node) -> str:
    """What a node computes, the same in all processes; torch takes longer to write Python."""
    target = node.target if isinstance(node.target, str) else _qualified_name(node.target)
    return f"{node.name} = {node.op} {target} {node.args} {dict(node.kwargs)}"


_qualified_name = functools.cache(_get_qualified_name)


def with_source(copied: fx.Node, node: fx.Node) -> fx.Node:
    """A copy of a graph's input that has its source, without which AOTAutograd refuses a graph."""
    if hasattr(node, "_dynamo_source"):
        copied._dynamo_source = node._dynamo_source
    return copied


def writes_by_name(node: fx.Node) -> bool:
    """Whether what it calls is named like something that writes to its first argument."""
    name = target_name(node)
    if name.strip("_") in _AUGMENTED:
        return True
    is_python_s = getattr(node.target, "__module__", "") == "_operator"  # and_
    return name.endswith("_") and not name.endswith("__") and not is_python_s


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes to."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return [out]
    if (call := call_of(node)) is not None:
        names = ["input"] if call.in_place else []
        if call.name == "batch_norm" and call["training"] is not False:
            names = ["running_mean", "running_var"]
        return [call[name] for name in names if isinstance(call[name], fx.Node)]
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
        written = [given.get(a.name) for a in arguments if a.is_write]
        return [one for one in written if isinstance(one, fx.Node)]
    if isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in target_name(node):
        return node.all_input_nodes  # a kernel in Triton
    if writes_by_name(node) or node.kwargs.get("inplace"):
        return node.all_input_nodes[:1]
    return []


def is_own(node: fx.Node, reader: fx.Node) -> bool:
    """Whether only the reader reads it, and that memory before it only what it was made by."""
    if node.op not in ("call_function", "call_method") or list(node.users) != [reader]:
        return False
    memory = memory_of_result(node)
    return all(is_own(one, node) for one in node.all_input_nodes if memory & memory_of_result(one))


#: Functions that change how the nodes behind them compute: gradients, autocast.
#: Those that begin and end a transform of torch.func are known by their names.
_MODES: tuple[Callable[..., Any], ...] = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)


_TRANSFORMS = ("_increment_nesting", "_decrement_nesting")


def changes_mode(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in _MODES or getattr(node.target, "__name__", "").endswith(_TRANSFORMS)
