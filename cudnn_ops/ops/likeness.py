"""What tensors without memory are like, in plain numbers, and more tensors that are so.

To make one of these takes a tenth of what torch takes to find out what an operator gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

_PLAIN = (
    *(bool, int, float, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Unknown(Exception):
    """Raised for what plain numbers do not describe, such as sizes that are symbols."""


class _Like(NamedTuple):
    """What a tensor is like; ``source`` is the number of the tensor that it is a view of."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None = None


def key_of(values: list[Any]) -> object:
    """What can be looked up in a dictionary: equal for what differs in its tensors' memory alone.

    Which of them have one memory counts.

    Raises:
        Unknown: there is something else in it than tensors without memory and plain values.
    """
    kind, numbers = kind_of(values), dict[int, int]()
    memory = map(_memory_of, tensors_in(values))
    return kind, tuple(numbers.setdefault(one, len(numbers)) for one in memory)


def kind_of(value: Any) -> object:
    """Of one value, as :func:`key_of`."""
    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, FakeTensor):
        return _like(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(kind_of, value))
    if isinstance(value, slice):
        return slice, kind_of((value.start, value.stop, value.step))
    raise Unknown


def tensors_in(value: Any) -> list[FakeTensor]:
    """Those of a value, or of several within each other."""
    if isinstance(value, FakeTensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def described(value: Any, sources: list[FakeTensor]) -> Any:
    """For :func:`made`: what tensors of a value are like.

    Args:
        value: a tensor, several, or something plain.
        sources: what it may have views of; gets its tensors, too.

    Raises:
        Unknown: as of :func:`key_of`; or a tensor is part of memory that none of these is.
    """
    if isinstance(value, FakeTensor):
        like, memory = _like(value), _memory_of(value)
        source = next((i for i, one in enumerate(sources) if _memory_of(one) == memory), None)
        if source is None and like.offset != 0:
            raise Unknown
        sources.append(value)
        return like._replace(source=source)
    if type(value) in (tuple, list):
        return type(value)([described(one, sources) for one in value])
    if isinstance(value, _PLAIN):
        return value
    raise Unknown


def made(description: Any, sources: list[FakeTensor]) -> Any:
    """What was described, of other sources, which get its tensors, too."""
    if isinstance(description, _Like):
        mode = sources[0].fake_mode
        with no_dispatch():
            shape, strides = description.shape, description.strides
            meta = torch.empty_strided(shape, strides, dtype=description.dtype, device="meta")
        if description.source is not None:
            memory = sources[description.source].untyped_storage()
            with in_kernel_invocation_manager(mode), no_dispatch():
                meta.set_(memory, description.offset, shape, strides)
        tensor = FakeTensor(mode, meta, description.device)
        sources.append(tensor)
        return tensor
    if isinstance(description, (tuple, list)):
        return type(description)([made(one, sources) for one in description])
    return description


def _like(tensor: FakeTensor) -> _Like:
    if tensor.layout != torch.strided:
        raise Unknown
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if type(offset) is not int or not all(type(number) is int for number in (*shape, *strides)):
        raise Unknown
    return _Like(shape, strides, offset, tensor.dtype, tensor.device)


def _memory_of(tensor: FakeTensor) -> int:
    return tensor.untyped_storage()._cdata
