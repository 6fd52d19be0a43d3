"""Attention masks of transformers' models, as a few numbers.

``cudnn_ops_mask`` decides once per forward pass. It returns a :class:`CompactMask`, which becomes a
tensor where code expects one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

NO_WINDOW = (-1, -1)


class CompactMask(NamedTuple):
    """A causal mask with a window, padding or packing, as a few numbers.

    The last query is aligned with the last key, or with one ``unwritten`` keys before it. It is a
    tuple, so that code that moves a layer's arguments between devices moves its fields too. Code
    that uses it as a tensor gets the full mask, bool [batch, 1, queries, keys], True where a query
    sees a key, which is built on demand (:meth:`to_tensor`).

    Attributes:
        window: (left, right), as in ``cudnn_ops.scaled_dot_product_attention``.
        padding: bool [batch, keys], False hides a key; None: no padding.
        lengths: int32 [batch], the number of tokens before each sequence's padding; None: all.
        cu_seqlens: int32 [sequences + 1], the offset of each packed sequence among the batch's
            tokens, row by row; None: each row is one sequence.
        longest: with ``cu_seqlens``, the length of the longest sequence.
        unwritten: number of keys at the end of a static cache that no query sees yet.
        sizes: (batch, queries, keys); None if unknown.
        device: the full mask's device, if no field is a tensor.
    """

    window: tuple[int, int] = NO_WINDOW
    padding: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0
    unwritten: int = 0
    sizes: tuple[int, int, int] | None = None
    device: torch.device | str | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions of the full mask: not 2, as in transformers' padding masks."""
        return 4

    @property
    def dtype(self) -> torch.dtype:
        """As of the full mask."""
        return torch.bool

    @property
    def shape(self) -> torch.Size:
        """As of the full mask."""
        if self.sizes is None:
            raise ValueError("this CompactMask has no sizes, so it has no shape")
        batch, length, length_kv = self.sizes
        return torch.Size((batch, 1, length, length_kv))

    def contiguous(self) -> CompactMask:
        """Returns itself, for it is not a tensor yet."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> CompactMask | Tensor:
        """A copy on another device, still compact; in another dtype, the full mask."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, torch.bool):
            return self.to_tensor().to(*args, **kwargs)
        if device is None:
            return self
        moved = {
            name: part.to(device)
            for name in ("padding", "lengths", "cu_seqlens")
            if (part := getattr(self, name)) is not None
        }
        return self._replace(**moved, device=device)

    def to_tensor(self) -> Tensor:
        """The full mask: bool [batch, 1, queries, keys]."""
        batch, _, length, length_kv = self.shape
        parts = (self.padding, self.lengths, self.cu_seqlens)
        device = next((part.device for part in parts if part is not None), self.device)
        columns = torch.arange(length_kv, device=device)
        rows = torch.arange(length, device=device) + length_kv - self.unwritten - length
        rows = rows.unsqueeze(-1)
        visible = columns <= rows
        if self.window[0] >= 0:
            visible = visible & (columns >= rows - self.window[0])
        visible = visible.expand(batch, 1, -1, -1)
        if self.padding is not None:
            visible = visible & self.padding[:, None, None, :]
        if self.lengths is not None:
            visible = visible & (columns < self.lengths.view(-1, 1, 1, 1))
        if self.cu_seqlens is not None:
            tokens = torch.arange(batch * length, device=device)
            index = torch.bucketize(tokens, self.cu_seqlens, right=True).view(batch, 1, length)
            visible = visible & (index.unsqueeze(-1) == index.unsqueeze(-2))
        return visible

    def __getattr__(self, name: str) -> Any:
        """Other attributes of a tensor are those of the full mask."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.to_tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        """A field, by its number as in any tuple; otherwise an item of the full mask."""
        return tuple.__getitem__(self, index) if type(index) is int else self.to_tensor()[index]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Functions of torch receive the full mask."""
        args, kwargs = tree_map(
            lambda part: part.to_tensor() if isinstance(part, cls) else part,
            (args, kwargs or {}),
            is_leaf=lambda part: isinstance(part, cls),
        )
        return function(*args, **kwargs)


def _of_the_tensor(name: str) -> Callable[..., Any]:
    def method(self: CompactMask, *others: Any) -> Any:
        return getattr(self.to_tensor(), name)(*others)

    return method


# Operators are looked up on the class.
for _name in ("and", "rand", "or", "ror", "xor", "invert", "add", "radd", "sub", "rsub", "mul"):
    setattr(CompactMask, f"__{_name}__", _of_the_tensor(f"__{_name}__"))


def cudnn_ops_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | CompactMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    packing_under_compile: bool = True,
    **kwargs: Any,
) -> Tensor | CompactMask | None:
    """A mask function of transformers' ``AttentionMaskInterface``, beside :func:`sdpa_mask`.

    Returns a :class:`CompactMask` if the mask is causal, possibly with a window, padding or packed
    sequences, and the last query is aligned with the last key, or a static cache is empty. For all
    other masks (partly filled static caches, chunks, bidirectional blocks, users' masks) it returns
    the result of ``sdpa_mask``. None only if nothing is masked: not all layers know that they are
    causal.

    Without an ``attention_mask`` the host does not wait for the GPU; with one it waits once, to see
    whether and where there is padding. Under ``torch.compile`` it never waits, and assumes padding.

    Args:
        batch_size: as in ``transformers.masking_utils.sdpa_mask``; likewise the rest.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query; a tensor for static caches.
        kv_offset: position of the first key.
        mask_function: says which keys a query sees.
        attention_mask: bool [batch, tokens], False for padding; or an earlier result of this
            function, which ``generate`` passes to the model.
        local_size: the window or the chunk.
        allow_is_causal_skip: set by transformers if ``mask_function`` is merely causal, and local
            if there is a ``local_size``.
        allow_is_bidirectional_skip: likewise for a mask that hides nothing.
        use_vmap: whether ``mask_function`` has parts that users wrote.
        config: the model's configuration.
        device: the mask's device.
        packing_under_compile: as in :func:`register`.
        kwargs: for ``sdpa_mask``.

    Raises:
        NotImplementedError: the model uses its own attention, which would misread the mask.
    """
    wants_bias = config is not None and _wants_bias(config.__class__)
    if isinstance(attention_mask, CompactMask):
        return attention_mask
    compact = CompactMask(sizes=(batch_size, q_length, kv_length), device=device)
    sequences = None
    # Chunks come with a local_size as windows do; the configuration tells them apart.
    is_chunked = local_size is not None and getattr(config, "attention_chunk_size", None)
    understood = (
        not (use_vmap or is_chunked or isinstance(q_offset, Tensor))
        and q_offset + q_length == kv_offset + kv_length
    )
    if understood and not allow_is_causal_skip:
        # Maybe packed sequences, which come neither with a mask of padding nor with a cache.
        understood = attention_mask is None and q_length == kv_length
        if understood and is_tracing():
            # Blocks that see themselves are a union, and have another name.
            understood = not packing_under_compile and mask_function.__name__ == "and_mask"
        elif understood:
            sequences = packed_sequences(mask_function)
            understood = sequences is not None
    if not understood:
        dense_mask: Callable[..., Any] = (
            eager_mask if wants_bias and not allow_is_causal_skip else sdpa_mask
        )
        mask = dense_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            config=config,
            device=device,
            **kwargs,
        )
        if mask is None and allow_is_causal_skip:
            # One query sees all keys; several begin at the first one.
            return compact._replace(unwritten=0 if q_length == 1 else kv_length - q_length)
        return mask
    if local_size is not None and kv_length > local_size:
        compact = compact._replace(window=(local_size - 1, 0))
    if sequences is not None:
        cu_seqlens = _offsets(sequences)
        return compact._replace(cu_seqlens=cu_seqlens, longest=int(cu_seqlens.diff().max()))
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return compact
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if is_tracing(padding):
        return compact._replace(padding=padding)
    is_decreasing = (padding[:, 1:] <= padding[:, :-1]).all()
    is_whole, is_at_the_end = torch.stack([padding.all(), is_decreasing]).tolist()
    if is_whole:
        return compact
    if is_at_the_end and q_length == kv_length:
        return compact._replace(lengths=padding.sum(-1, dtype=torch.int32))
    return compact._replace(padding=padding)


def full_mask(config: Any = None, **kwargs: Any) -> Tensor | None:
    """A mask function that returns a tensor for every mask that is not merely causal.

    Causal masks too are tensors for models that may add them to scores of their own, for not all of
    their layers know that they are causal.
    """
    wants_bias = config is not None and _wants_bias(config.__class__)
    return (eager_mask if wants_bias else sdpa_mask)(config=config, **kwargs)


@torch.compiler.assume_constant_result
def _wants_bias(config: type) -> bool:
    return _models_want_bias(config)


@functools.cache
def _models_want_bias(config: type) -> bool:
    """Whether models of this configuration may add a mask to scores of their own.

    These are the models that transformers does not run with torch's attention, which accepts bool
    masks. A model that has only its own attention is refused: ``set_attn_implementation`` refuses
    it itself, but ``from_pretrained`` accepts any registered name.
    """
    module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    parts = vars(module).values() if module is not None else ()
    models = [
        part
        for part in parts
        if isinstance(part, type)
        and issubclass(part, PreTrainedModel)
        and part.config_class is config
    ]
    # It is told by the source, after transformers' own manner of writing.
    is_theirs = config.__module__.startswith("transformers.models.")
    for model in models:
        if is_theirs and not model._can_set_attn_implementation():
            raise NotImplementedError(
                f"{model.__name__} computes its attention by itself, without transformers' "
                "AttentionInterface, so that cudnn_ops cannot; leave attn_implementation out, or "
                "for a part of a model give one to each of its configurations"
            )
    return any(not model._supports_sdpa for model in models)


def packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """[batch, tokens]: the packed sequence of its row that each token belongs to.

    Extracted from what transformers' ``create_causal_mask`` and
    ``create_sliding_window_causal_mask`` build for them: in 5.17 ``and_masks(base, packed)``, in
    5.23 ``and_masks(packed, remapped(base))``, where ``base`` is causal or local. None if it is
    anything else.
    """
    parts = _captured(mask_function, "and_masks", "mask_functions")
    if parts is None or len(parts) != 2:
        return None
    for base, packing in (parts, parts[::-1]):
        sequences = _captured(packing, "packed_sequence_mask_function", "packed_sequence_mask")
        if sequences is not None:
            # Within a sequence positions count on by one: its keys are as far apart as they were.
            remapped = _captured(base, "remap_positions_for_packed_sequence", "mask_function")
            return sequences if _is_causal_or_local(remapped or base) else None
    return None


def _is_causal_or_local(mask_function: Callable[..., Any]) -> bool:
    if mask_function is causal_mask_function:
        return True
    local = _captured(mask_function, "and_masks", "mask_functions")
    return (
        local is not None
        and len(local) == 2
        and local[1] is causal_mask_function
        and _captured(local[0], "sliding_window_overlay", "sliding_window") is not None
    )


def _captured(function: Callable[..., Any], maker: str, variable: str) -> Any:
    """The variable that a function of transformers' ``maker`` has captured, or None."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>"):
        return None
    return inspect.getclosurevars(function).nonlocals.get(variable)


def _offsets(sequences: Tensor) -> Tensor:
    """Offsets of the sequences in the flattened batch: int32 [sequences + 1]."""
    begins = F.pad(sequences.diff(dim=-1) != 0, (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel()).int()
