"""Attention masks that a graph computes of nothing but sizes, recognized by computing them.

A causal mask, a window, or a mask that hides nothing needs no tensor: cuDNN skips what they hide.
Models write them in dozens of ways, most of which come down to comparing ``arange``s. So the part
of the graph that gives a mask is run, and its values are looked at: what holds for them holds for
every call of the graph, as its sizes do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from cudnn_ops.compiler.nodes import (
    call_of,
    has_static_sizes,
    is_own,
    memory_of,
    target_name,
    value_of,
    writes_by_name,
    written_by,
)

#: Numbers of a mask up to which it is computed.
_MOST_NUMBERS = 1 << 28
_DEVICE = re.compile(r"(cuda|cpu)(:\d+)?")
_RANDOM = re.compile(r"rand|dropout|bernoulli|empty|normal_|uniform_|exponential|multinomial")
#: A number this low hides what it is added to.
_HIDDEN = -1e30


class Visible(NamedTuple):
    """What of the keys a query sees, as arguments of the operator.

    Attributes:
        is_causal: as of ``scaled_dot_product_attention``, like the next two.
        window_size: see there.
        bottom_right: see there.
        rest: a node whose mask hides further keys, or adds something; None where nothing does.
        lengths: a node with the number of keys of each sequence, in place of such a mask.
    """

    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    rest: fx.Node | None = None
    lengths: fx.Node | None = None


def visible_of(
    mask: fx.Node, length: int, length_kv: int, *, is_hidden: bool = False
) -> Visible | None:
    """What a mask hides, as far as that is known without calling the graph.

    Args:
        mask: bool or added to the scores; broadcasts to [..., length, length_kv].
        length: the number of queries.
        length_kv: the number of keys.
        is_hidden: whether True hides a key, as in ``masked_fill``.

    Returns:
        None where the mask is no more than a tensor.
    """
    parts = [mask] if is_hidden else _conjuncts(mask)
    visible, unknown = _known_of(mask, parts, length, length_kv, is_hidden)
    if visible is None or unknown is None:
        return visible
    rest = parts[unknown]
    lengths = None if is_hidden else _lengths_of(rest, length_kv)
    if lengths is not None:
        return visible._replace(lengths=lengths)
    return visible._replace(rest=rest) if len(parts) > 1 else None


class _Known(NamedTuple):
    """What is known of a mask's parts. It has no nodes, which would keep the graph.

    Attributes:
        visible: what those parts hide that are known; None where that has no name, or where more
            than one is not known.
        unknown: the place of the part that is not known.
    """

    visible: Visible | None
    unknown: int | None = None


#: The layers of a model share a mask, and to compute it takes tens of milliseconds.
_known: WeakKeyDictionary[fx.Node, dict[tuple[int, int, bool], _Known]] = WeakKeyDictionary()


def _known_of(
    mask: fx.Node, parts: Sequence[fx.Node], length: int, length_kv: int, is_hidden: bool
) -> _Known:
    if not isinstance(length, int) or not isinstance(length_kv, int):
        return _compute(parts, length, length_kv, is_hidden)  # to look up a dynamic one guards it
    of_mask = _known.setdefault(mask, {})
    key = length, length_kv, is_hidden
    if key not in of_mask:
        of_mask[key] = _compute(parts, *key)
    return of_mask[key]


def _compute(parts: Sequence[fx.Node], length: int, length_kv: int, is_hidden: bool) -> _Known:
    known: Tensor | None = None
    unknown: list[int] = []
    for index, part in enumerate(parts):
        value = computed(part)
        if value is None:
            unknown.append(index)
        else:
            value = _as_bool(_without_batch(value))
            if value is None:  # it does more than hide
                unknown.append(index)
                continue
            value = ~value if is_hidden else value
            known = value if known is None else known & value
    if len(unknown) > 1:
        return _Known(None)
    place = unknown[0] if unknown else None
    if known is None:
        return _Known(Visible(), place)
    numbers = torch.broadcast_shapes(known.shape[-2:], (length, length_kv))
    if numbers != (length, length_kv):
        return _Known(None)
    return _Known(_classify(known.expand(*known.shape[:-2], length, length_kv)), place)


def _conjuncts(mask: fx.Node) -> list[fx.Node]:
    """The masks that together are this one; the mask itself where it is no such thing.

    Of bool ones all have to be true; those that are added to the scores are added up.
    """
    value = value_of(mask)
    call = call_of(mask)
    if call is None or value is None:
        return [mask]
    is_bool = value.dtype == torch.bool
    if not is_bool and not value.is_floating_point():
        return [mask]
    if call.name == "expand" and isinstance(call["input"], fx.Node):
        source = value_of(call["input"])
        if source is not None and source.dim() == value.dim():
            return _conjuncts(call["input"])
    if call.name == "and" if is_bool else call.name == "add" and call["alpha"] == 1:
        parts = call["input"], call["other"]
    elif call.name == "where" and _hides(call["other"], value.dtype):
        parts = call["condition"], call["input"]
    else:
        return [mask]
    if not all(isinstance(part, fx.Node) for part in parts):
        return [mask]
    # A row of numbers, or those of another dtype, are no mask by themselves.
    found = [value_of(part) for part in parts]
    are_masks = (one is not None and one.dtype in (torch.bool, value.dtype) for one in found)
    if not all(are_masks) or any(one is not None and one.dim() < 2 for one in found):
        return [mask]
    return [each for part in parts for each in _conjuncts(part)]


def _hides(number: Any, dtype: torch.dtype) -> bool:
    """Whether it is one that, in place of something added to a score, hides the key."""
    return dtype.is_floating_point and isinstance(number, (int, float)) and number < _lowest(dtype)


def _lengths_of(mask: fx.Node, length_kv: int) -> fx.Node | None:
    """The lengths, where a mask says that a key's place is below its sequence's length."""
    shape = _squeezed(mask)
    value = value_of(mask)
    if len(shape) != 2 or value is None or value.shape != (shape[0], 1, 1, length_kv):
        return None
    call = call_of(mask)
    # [batch, keys], which is given dimensions for heads and queries.
    while call is not None and call.name in ("getitem", "unsqueeze", "expand", "reshape"):
        whole = (slice(None), None, ...)
        index = call["index"] if call.name == "getitem" else ()
        if not isinstance(index, tuple) or any(part not in whole for part in index):
            return None
        mask = call["input"]
        if _squeezed(mask) != shape:
            return None
        call = call_of(mask)
    if call is None or call.name not in ("lt", "gt"):
        return None
    sides = [call["input"], call["other"]]
    places, lengths = sides if call.name == "lt" else sides[::-1]
    columns = computed(places) if isinstance(places, fx.Node) else None
    if columns is None or not torch.equal(columns.flatten(), torch.arange(length_kv)):
        return None
    value = value_of(lengths)
    if value is None or value.is_floating_point() or value.dim() < 2:
        return None
    is_column = _squeezed(lengths) == shape[:1] and value.shape[-1] == 1
    return lengths if is_column and columns.shape[-1] == length_kv else None


def _squeezed(node: fx.Node) -> tuple[int, ...]:
    """The sizes that are not 1."""
    value = value_of(node)
    return () if value is None else tuple(size for size in value.shape if size != 1)


def computed(node: fx.Node) -> Tensor | None:
    """The tensor that a node gives in every call, on the CPU; None where it reads an input."""
    value = value_of(node)
    if value is None or not has_static_sizes(value):
        return None
    if value.numel() > _MOST_NUMBERS or not (needed := _needed(node)):
        return None
    results: dict[fx.Node, Any] = {}
    try:
        with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
            for one in needed:
                args, kwargs = (
                    map_arg(_on_cpu(given), results.__getitem__) for given in (one.args, one.kwargs)
                )
                if one.op == "call_method":
                    results[one] = getattr(args[0], str(one.target))(*args[1:], **kwargs)
                else:
                    assert callable(one.target)
                    results[one] = one.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None  # what does not run alone is not known
    result = results[node]
    return result if isinstance(result, Tensor) and result.shape == value.shape else None


def _needed(node: fx.Node) -> list[fx.Node]:
    """All that a node is computed of, in the graph's order.

    Empty where it reads an input, or something that is changed in place and read elsewhere too.
    """
    found: set[fx.Node] = set()
    open_ = [node]
    while open_:
        one = open_.pop()
        if one in found:
            continue
        is_call = one.op in ("call_function", "call_method")
        if not is_call or _RANDOM.search(target_name(one)):
            return []
        if writes_by_name(one) and not all(is_own(written, one) for written in written_by(one)):
            return []
        found.add(one)
        open_ += one.all_input_nodes
    memory = set().union(*(memory_of(one.meta.get("example_value")) for one in found))
    for writer in node.graph.nodes:
        for one in written_by(writer) if writer not in found else ():
            if memory & memory_of(one.meta.get("example_value")):
                return []
    return [one for one in node.graph.nodes if one in found]


def _on_cpu(argument: Any) -> Any:
    """Arguments with the CPU in place of every device."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(_on_cpu(one) for one in argument)
    if isinstance(argument, dict):
        return {key: _on_cpu(one) for key, one in argument.items()}
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    if isinstance(argument, str) and _DEVICE.fullmatch(argument):
        return "cpu"
    return argument


def _as_bool(mask: Tensor) -> Tensor | None:
    """True where a key is seen; None where the mask does more than hide."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    return seen if bool((seen | (mask < _lowest(mask.dtype))).all()) else None


def _without_batch(mask: Tensor) -> Tensor:
    """One matrix where all are that one: what follows takes milliseconds for each."""
    if mask.dim() <= 2 or mask.numel() == 0:
        return mask
    first = mask[(0,) * (mask.dim() - 2)]
    return first if torch.equal(mask, first.expand_as(mask)) else mask


def _lowest(dtype: torch.dtype) -> float:
    """Below this, a number that is added to a score leaves nothing of its weight."""
    return max(_HIDDEN, torch.finfo(dtype).min / 2)


def _classify(mask: Tensor) -> Visible | None:
    """What all matrices [length, length_kv] of a bool mask are; None where they are nothing known.

    Every query must see a key: of a row without one, torch and ours give different results.
    """
    length, length_kv = mask.shape[-2:]
    if mask.numel() == 0:
        return None
    first = _without_batch(mask)
    if first.dim() > 2:
        return None
    count = int(first.count_nonzero())
    if count == first.numel():
        return Visible()
    rows = torch.arange(length)
    # The first and the last True of each row: of several maxima torch gives the first. A row
    # without one, or with a gap, has fewer of them than these say.
    seen = first.contiguous().view(torch.uint8)
    low, high = seen.max(-1).indices, length_kv - 1 - seen.flip(-1).max(-1).indices
    if count != int((high - low + 1).sum()):
        return None
    right = _bound(high - rows, high == length_kv - 1)
    left = _bound(rows - low, low == 0)
    if right is None or left is None:
        return None
    # Rows and columns that begin at the same token, or that end at it.
    found = []
    for bottom_right, shift in ((False, 0), (True, length_kv - length)):
        before = -1 if left == _UNBOUNDED else left + shift
        after = -1 if right == _UNBOUNDED else right - shift
        if (left == _UNBOUNDED or before >= 0) and (right == _UNBOUNDED or after >= 0):
            window = (before, -1 if after == 0 else after)
            found.append(Visible(after == 0, window, bottom_right))
    return max(found, key=lambda visible: visible.is_causal, default=None)


_UNBOUNDED = -(1 << 62)


def _bound(reach: Tensor, is_end: Tensor) -> int | None:
    """How far every row reaches that does not reach the end; None where that differs."""
    short = reach[~is_end]
    if short.numel() == 0:
        return _UNBOUNDED
    bound = int(short[0])
    # A row that reaches the end must not have been able to go further.
    same = bool((short == bound).all()) and bool((reach[is_end] <= bound).all())
    return bound if same else None
