"""The memory of a paged cache: the pages of all layers in one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

ALIGNMENT = 256
"""Alignment, in bytes, of each layer's keys and values: kernels read 16 at once, TMA needs 128."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_append = torch.ops.cudnn_ops.paged_kv_append_


class PagedMemory:
    """Keys and values of all layers, page by page; it does not know who holds which page."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_size: int,
        *,
        value_size: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_layout: Literal["NHD", "HND"],
        descale_k: Tensor | None,
        descale_v: Tensor | None,
    ) -> None:
        self.layers = whole("layers", layers, 1)
        self.pages = whole("pages", pages, 1)
        self.page_size = whole("page_size", page_size, 1)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of 2, got {page_size}")
        self.heads_kv = whole("heads_kv", heads_kv, 1)
        self.head_size = whole("head_size", head_size, 1)
        self.value_size = head_size if value_size is None else whole("value_size", value_size, 1)
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')
        self.kv_layout = kv_layout
        given = {"descale_k": descale_k, "descale_v": descale_v}
        for name, each in given.items():
            if each is not None:
                self._check_descales(name, each, dtype)
        self._descales = [
            {name: each.to(device)[layer] for name, each in given.items() if each is not None}
            for layer in range(layers)
        ]
        # Tensors that are born in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            self._keys, self._values = self._allocate_memory(dtype, torch.device(device))
            self._key_caches, self._value_caches = self._keys.unbind(), self._values.unbind()

    def _check_descales(self, name: str, descales: Tensor, dtype: torch.dtype) -> None:
        if dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} belongs to a cache of float8_e4m3fn; dtype is {dtype}")
        shapes = (self.layers,), (self.layers, self.heads_kv)
        if descales.dtype != torch.float32 or descales.shape not in shapes:
            raise ValueError(
                f"{name} must be float32 [layers], {list(shapes[0])}, or [layers, heads_kv], "
                f"{list(shapes[1])}; got {descales.dtype} {list(descales.shape)}"
            )

    def _allocate_memory(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """[layers, pages, ...] of keys and of values."""
        rows = (self.page_size, self.heads_kv)
        if self.kv_layout == "HND":
            rows = (self.heads_kv, self.page_size)
        shapes = [(self.pages, *rows, size) for size in (self.head_size, self.value_size)]
        unit = max(1, ALIGNMENT // dtype.itemsize)
        strides = [-(-prod(shape) // unit) * unit for shape in shapes]
        memory = torch.zeros(self.layers * sum(strides), dtype=dtype, device=device)
        parts = memory.split([self.layers * stride for stride in strides])
        keys, values = (
            part.view(self.layers, stride)[:, : prod(shape)].unflatten(1, shape)
            for part, stride, shape in zip(parts, strides, shapes, strict=True)
        )
        return keys, values

    def _copy_page(self, source: int, target: int) -> None:
        self._keys[:, target].copy_(self._keys[:, source])
        self._values[:, target].copy_(self._values[:, source])

    def _zero_pages(self, pages: Sequence[int]) -> None:
        index = self._index(pages)
        for memory in (self._keys, self._values):
            # As whole numbers: float8 has no index_fill_.
            memory.view(_WORDS[memory.element_size()]).index_fill_(1, index, 0)

    def _zero_slots(self, slots: Sequence[int]) -> None:
        index = self._index(slots)
        pages, offsets = index // self.page_size, index % self.page_size
        for memory in (self._keys, self._values):
            rows = memory.view(_WORDS[memory.element_size()])
            if self.kv_layout == "HND":
                rows = rows.transpose(2, 3)
            rows[:, pages, offsets] = 0

    def _index(self, numbers: Sequence[int]) -> Tensor:
        """int64 [n] on the device, without waiting for it."""
        index = torch.tensor(numbers, dtype=torch.int64)
        if self._keys.is_cuda:
            index = index.pin_memory().to(self._keys.device, non_blocking=True)
        return index

    def by_page(self) -> tuple[Tensor, Tensor]:
        """[pages, layers, ...], keys and values of all layers, as integers of the same size.

        So those of any dtype can be copied by their page's number.
        """
        dtype = _WORDS[self._keys.element_size()]
        return self._keys.view(dtype).transpose(0, 1), self._values.view(dtype).transpose(0, 1)

    def key_cache(self, layer: int) -> Tensor:
        """One layer's keys: [pages, page_size, heads_kv, head_size], for HND the middle swapped.

        Raises:
            ValueError: there is no such layer.
        """
        return self._key_caches[self._layer(layer)]

    def value_cache(self, layer: int) -> Tensor:
        """One layer's values, as :meth:`key_cache`, with ``value_size``.

        Raises:
            ValueError: there is no such layer.
        """
        return self._value_caches[self._layer(layer)]

    def descales(self, layer: int) -> dict[str, Tensor]:
        """What one layer's keys and values of 8 bits are multiplied with.

        Returns:
            ``descale_k`` and ``descale_v`` of :func:`cudnn_ops.paged_attention`, those that are
            there.

        Raises:
            ValueError: there is no such layer.
        """
        return self._descales[self._layer(layer)]

    def append(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Writes one layer's keys and values of new tokens into their slots.

        A cache of ``float8_e4m3fn`` rounds them (:func:`cudnn_ops.paged_kv_append_`).

        Args:
            layer: 0 to ``layers - 1``.
            key: [tokens, heads_kv, head_size].
            value: [tokens, heads_kv, value_size].
            slot_mapping: int64 [tokens] on the device, as ``extend_all`` returns it; a token whose
                slot is -1 is not written.

        Raises:
            ValueError: there is no such layer; shapes, dtypes or devices that do not fit.
        """
        caches = self.key_cache(layer), self.value_cache(layer)
        is_head_major = self.kv_layout == "HND"
        _append(*caches, key, value, slot_mapping, is_head_major, **self._descales[layer])

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be 0 to {self.layers - 1}, got {layer}")
        return layer


def whole(name: str, number: int, least: int) -> int:
    """The number, if it is a whole one and large enough.

    Raises:
        ValueError: it is not; the message has ``name``.
    """
    if not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")
    return number
