"""A contiguous cache of keys and values: for a batch that begins and ends together."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cudnn_ops.serving.memory import whole


class CachedKV(NamedTuple):
    """One layer's keys and values, as attention takes them; views of the cache's memory."""

    key: Tensor
    """[batch, heads_kv, length, head_size]"""
    value: Tensor
    """[batch, heads_kv, length, value_size]"""
    seq_lens_kv: Tensor
    """int32 [batch], how many tokens of each sequence are there."""


class KVCache(nn.Module):
    """Keys and values of a fixed batch, with room for ``length`` tokens in each sequence.

    All memory is allocated once, and :meth:`update` writes into it, so that a step compiles once
    and can be replayed from a CUDA graph: lengths are on the device, and shapes never change. Where
    sequences come and go or share beginnings, :class:`~cudnn_ops.PagedKVCache` needs less memory.

    A module, so that ``torch.compile`` knows its memory to stay; its buffers are not part of a
    state_dict. The memory is [batch, length, heads_kv, size], attention's fast path.

    Args:
        layers: number of layers with attention.
        batch: sequences.
        length: the largest number of tokens in a sequence.
        heads_kv: key and value heads in a layer.
        head_size: elements of a key.
        value_size: elements of a value; None stands for ``head_size``.
        dtype: dtype of keys and values.
        device: their device.

    Raises:
        ValueError: a number less than 1.

    Example:
        >>> import torch, cudnn_ops
        >>> cache = cudnn_ops.KVCache(1, 2, 16, 1, 8, dtype=torch.float32, device="cpu")
        >>> for tokens in (5, 1, 1):  # a prompt, then decoding
        ...     q, k, v = torch.randn(3, 2, 1, tokens, 8)
        ...     key, value, lengths = cache.update(0, k, v)
        ...     out = cudnn_ops.scaled_dot_product_attention(
        ...         q, key, value, is_causal=tokens > 1, seq_lens_kv=lengths
        ...     )
        >>> lengths
        tensor([7, 7], dtype=torch.int32)
    """

    seq_lens: Tensor

    def __init__(
        self,
        layers: int,
        batch: int,
        length: int,
        heads_kv: int,
        head_size: int,
        *,
        value_size: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layers, self.batch = whole("layers", layers, 1), whole("batch", batch, 1)
        self.length = whole("length", length, 1)
        self.heads_kv = whole("heads_kv", heads_kv, 1)
        self.head_size = whole("head_size", head_size, 1)
        self.value_size = head_size if value_size is None else whole("value_size", value_size, 1)
        # Tensors that are born in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            for name, size in (("key", self.head_size), ("value", self.value_size)):
                shape = (batch, length, heads_kv, size)
                for layer in range(layers):
                    # One tensor a layer: compiled code that writes to a part may copy the whole.
                    # Zeros, for attention multiplies what is behind a sequence's end by zero.
                    memory = torch.zeros(shape, dtype=dtype, device=device)
                    self.register_buffer(f"{name}_{layer}", memory, persistent=False)
            lengths = torch.zeros(layers, batch, dtype=torch.int32, device=device)
            self.register_buffer("seq_lens", lengths, persistent=False)

    def update(
        self, layer: int, key: Tensor, value: Tensor, seq_lens: Tensor | None = None
    ) -> CachedKV:
        """Writes the keys and values of new tokens behind those of each sequence, in place.

        Args:
            layer: 0 to ``layers - 1``.
            key: [batch, heads_kv, tokens, head_size], with positions applied, in the cache's dtype.
            value: [batch, heads_kv, tokens, value_size].
            seq_lens: int32 or int64 [batch] on the device, how many of the tokens belong to each
                sequence, the others being padding behind them; None stands for all.

        Returns:
            All that is cached of the layer, and the lengths, with the new tokens. The lengths are a
            copy, which later calls do not change.

        Raises:
            TypeError: another dtype than the cache's.
            ValueError: there is no such layer; shapes or devices that do not fit; more tokens than
                there is room for. On a GPU lengths are checked only with ``CUDNN_OPS_CHECK=1``,
                which waits for the GPU, and not in compiled code: there, tokens that find no room
                are not written.
        """
        tokens = self._check(layer, key, value, seq_lens)
        lengths = self.seq_lens[layer]
        count = lengths.new_full((self.batch,), tokens) if seq_lens is None else seq_lens
        steps = torch.arange(tokens, device=lengths.device)
        places = lengths[:, None] + steps
        is_kept = (steps < count[:, None]) & (places < self.length)
        if self._checks():
            if not bool(((count >= 0) & (count <= tokens)).all()):
                raise ValueError(
                    f"KVCache.update: seq_lens must be 0 to {tokens}, the tokens of key, "
                    f"got {count.tolist()}"
                )
            if not bool((lengths + count <= self.length).all()):
                raise ValueError(
                    f"KVCache.update: sequences have room for {self.length} tokens, and layer "
                    f"{layer} has {lengths.tolist()}, with {count.tolist()} to be written: create "
                    "a cache with a larger length"
                )
        # Tokens that are not kept write what is there: around the end, so that no two places of a
        # sequence are the same.
        where = torch.arange(self.batch, device=lengths.device)[:, None], places % self.length
        for memory, new in zip(self._memory(layer), (key, value), strict=True):
            rows = torch.where(is_kept[:, :, None, None], new.transpose(1, 2), memory[where])
            memory.index_put_(where, rows)
        lengths.add_(is_kept.sum(1, dtype=lengths.dtype))
        return self.get(layer)

    def get(self, layer: int) -> CachedKV:
        """What is cached of a layer, without writing to it.

        Raises:
            ValueError: there is no such layer.
        """
        self._check_layer("get", layer)
        key, value = (memory.transpose(1, 2) for memory in self._memory(layer))
        return CachedKV(key, value, self.seq_lens[layer].clone())

    def reset(self) -> None:
        """Empties all sequences, so that others can begin. Touches no key and no value."""
        self.seq_lens.zero_()

    def extra_repr(self) -> str:
        """The sizes."""
        return (
            f"layers={self.layers}, batch={self.batch}, length={self.length}, "
            f"heads_kv={self.heads_kv}, head_size={self.head_size}, value_size={self.value_size}"
        )

    def _memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [batch, length, heads_kv, size]."""
        return self.get_buffer(f"key_{layer}"), self.get_buffer(f"value_{layer}")

    def _checks(self) -> bool:
        """Whether lengths are looked at."""
        if torch.compiler.is_compiling():
            return False
        if self.seq_lens.device.type == "cpu":
            return True
        return os.environ.get("CUDNN_OPS_CHECK") == "1"

    def _check_layer(self, method: str, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise ValueError(f"KVCache.{method}: layer must be 0 to {self.layers - 1}, got {layer}")

    def _check(self, layer: int, key: Tensor, value: Tensor, seq_lens: Tensor | None) -> int:
        """The number of tokens in a call, which is checked but for the lengths."""
        self._check_layer("update", layer)
        memory, _ = self._memory(layer)
        tokens = key.shape[2] if key.dim() == 4 else 0
        if tokens > self.length:
            raise ValueError(
                f"KVCache.update: key has {tokens} tokens, and sequences have room for "
                f"{self.length}: create a cache with a larger length"
            )
        for name, given, size in (
            ("key", key, self.head_size),
            ("value", value, self.value_size),
        ):
            if given.shape != (self.batch, self.heads_kv, tokens, size):
                wanted = f"[{self.batch}, {self.heads_kv}, {tokens or 'tokens'}, {size}]"
                raise ValueError(
                    f"KVCache.update: {name} must be {wanted}, got {list(given.shape)}"
                )
            if given.dtype != memory.dtype:
                raise TypeError(
                    f"KVCache.update: {name} must be {memory.dtype}, as the cache, got "
                    f"{given.dtype}"
                )
            _check_device(name, given, memory.device)
        if seq_lens is not None:
            if seq_lens.shape != (self.batch,) or seq_lens.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"KVCache.update: seq_lens must be int32 or int64 [{self.batch}], got "
                    f"{seq_lens.dtype} {list(seq_lens.shape)}"
                )
            _check_device("seq_lens", seq_lens, memory.device)
        return tokens


def _check_device(name: str, given: Tensor, device: torch.device) -> None:
    if given.device != device:
        raise ValueError(f"KVCache.update: {name} must be on {device}, got {given.device}")
