"""Calls of the operators that Python reaches past torch.ops, on small tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cudnn_ops.ops import call

#: What calls an overload, by the overload's name.
FAST = {op._name.removeprefix("cudnn_ops::"): (fast, op) for fast, op in call._FAST.items()}


@dataclass(frozen=True)
class Call:
    """A call of an overload."""

    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.overload}-{len(self.args)}-{'-'.join(self.kwargs)}"

    @property
    def both(self) -> tuple[Any, Any]:
        """What is tested, and the overload that it stands for."""
        return FAST[self.overload]

    def by_name(self) -> dict[str, Any]:
        """All arguments, in the order of the schema."""
        schema = FAST[self.overload][1]._schema.arguments
        names = (argument.name for argument in schema)
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def make(device: str, dtype: torch.dtype) -> list[Call]:
    """Each operator plainly, and with every argument that it has."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def whole(*numbers: int, like: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=like, device=device)

    x, y, weight, bias = randn(3, 16), randn(3, 16), randn(16), randn(16)
    q, kv = randn(2, 4, 5, 16), randn(2, 2, 5, 16)
    mask, slopes, sinks = randn(2, 1, 5, 5), randn(4).float(), randn(4).float()
    packed, starts = randn(7, 2, 16), whole(0, 3, 7)
    cache, table, lengths = randn(6, 4, 2, 16), whole(1, 2, 3, 5).view(2, 2), whole(3, 7)
    one = randn(2, 1, 4, 16)
    cos, sin = randn(1, 5, 16), randn(1, 5, 16)
    w1, b1, w2, b2 = randn(8, 16), randn(8), randn(6, 8), randn(6)
    options = {"scale": 0.3, "is_causal": True, "window_size": (3, 0), "bottom_right": True}
    turned = {"interleaved": True, "rotary_dim": 8, "positions": whole(3, 1, 0, 2, 2).view(1, 5)}
    columns = cos[0, :, :8], sin[0, :, :8]
    norm = {"zero_centered": True}
    image, channels, shift = randn(2, 4, 5, 5), randn(4), randn(2, 1, 16)
    x3, scale = randn(2, 3, 16), randn(2, 16)
    varlen = (packed, packed, packed, starts, starts, 4, 4)
    pages = (one, cache, cache, table, lengths)
    slots = whole(4, 0, -1, 9, 23, 5, 6, like=torch.int64)
    calls = [
        Call("swiglu", (x, y), {}),
        Call("geglu", (x, y), {}),
        Call("geglu", (x, y), {"approximate": "tanh"}),
        Call("rms_norm", (x, (16,)), {}),
        Call("rms_norm", (x, [16], weight, 1e-3), norm),
        Call("rms_norm", (x, x.shape), {"eps": 1}),
        Call("layer_norm", (x, (16,)), {}),
        Call("layer_norm", (x, (3, 16), None, None, 0), {}),
        Call("layer_norm", (x, x.shape[1:], weight, bias, 1e-3), norm),
        Call("add_rms_norm", (x, y, (16,)), {}),
        Call("add_rms_norm", (x, y, (16,), weight, 1e-3), norm),
        Call("add_layer_norm", (x, y, (16,)), {}),
        Call("add_layer_norm", (x, y, (16,), weight, bias, 1e-3), norm),
        Call("group_norm", (image, 2), {}),
        Call("group_norm", (image, 2, channels, channels, 1e-3), {"activation": "silu"}),
        Call("add_group_norm", (image, image, 4), {}),
        Call("add_group_norm", (image, image, 2, channels, None, 0), {"activation": "silu"}),
        Call("batch_norm", (image, None, None, channels, channels, True), {}),
        Call("batch_norm", (image, randn(4), randn(4).square(), channels, channels),
             {"activation": "relu", "residual": image, "training": True, "momentum": 1}),
        Call("batch_norm", (image, randn(4), randn(4).square(), None, None, False, 0.1, 1e-3), {}),
        Call("max_pool2d", (image, (2,)), {}),
        Call("max_pool2d", (image, [3, 3], (2,), (1,), [1, 1], True), {}),
        Call("max_pool2d", (image, (3, 2)), {"stride": [1, 2], "ceil_mode": True}),
        Call("adaptive_layer_norm", (x3, scale, shift), {}),
        Call("adaptive_layer_norm", (x3, scale, shift), {"weight": weight, "bias": bias, "eps": 1}),
        Call("adaptive_rms_norm", (x3, scale), {}),
        Call("adaptive_rms_norm", (x3, shift, shift), {"weight": weight, "eps": 1e-3}),
        Call("gate_add_adaptive_layer_norm", (x3, x3, scale, scale, shift), {}),
        Call("gate_add_adaptive_layer_norm", (x3, x3, scale),
             {"weight": weight, "bias": bias, "eps": 1e-3}),
        Call("gate_add_adaptive_rms_norm", (x3, x3, shift), {}),
        Call("gate_add_adaptive_rms_norm", (x3, x3, scale, scale, shift), {"weight": weight}),
        Call("linear", (x, w1), {}),
        Call("linear", (x, w1, b1, "gelu", randn(3, 8)), {}),
        Call("mlp", (x, w1, None, w2, None), {}),
        Call("mlp", (x, w1, b1, randn(6, 4), b2, "silu", True), {}),
        Call("rotary_embedding", (q, cos, sin), {}),
        Call("rotary_embedding.options", (q, cos, sin), {}),
        Call("rotary_embedding.options", (q, *columns), turned),
        Call("rotary_embedding.options", (q, *(torch.stack([f] * 2) for f in (cos, sin))),
             {"sections": [3, 5]}),
        Call("rotary_embedding_qk", (q, kv, cos, sin), {}),
        Call("rotary_embedding_qk", (q, kv, *columns), turned),
        Call("sdpa", (q, q, q), {}),
        Call("sdpa", (q, kv, kv, mask, 0, False), {"scale": 1, "enable_gqa": True}),
        Call("paged_attention", pages, {}),
        Call("paged_attention", pages, options | {"softcap": 2.0, "sinks": sinks}),
        Call("paged_attention_with_lse", pages, {}),
        Call("paged_attention_with_lse", (packed[:, :2], cache, cache, table, lengths),
             options | {"cu_seqlens_q": starts, "max_seqlen_q": 4, "head_major": False}),
        Call("paged_kv_append_", (cache, cache.clone(), packed, packed, slots), {}),
        Call("paged_kv_append_", (cache, cache.clone(), packed, packed, slots, False), {}),
    ]  # fmt: skip
    for dims in (1, 2, 3):
        volume, point = randn(2, 4, *([5] * dims)), randn(4, 4, *([1] * dims))
        kernel = randn(4, 2, *([3] * dims))
        # How many strides, paddings and dilations, these, and the groups; output paddings behind
        # the paddings of a transposed one.
        plain: tuple[int, ...] = (1, 1, 1, 1, 0, 1, 1)
        other = [1, dims, 1, 2, *([1] * dims), 1, 2]
        epilogue = {"activation": "gelu", "residual": randn(2, 4, *([3] * dims))}
        name = f"_conv{dims}d"
        calls += [
            Call(name, (volume, point, None, plain), {}),
            Call(name, (volume, kernel, channels, other), epilogue),
        ]
        plain = (1, 1, 1, 1, 1, 0, 0, 1, 1)
        other = [1, dims, 1, 1, 2, *([1] * dims), 1, 1, 2]
        epilogue = {"activation": "relu", "residual": randn(2, 4, *([10] * dims))}
        name = f"_conv_transpose{dims}d"
        calls += [
            Call(name, (volume, point, None, plain), {}),
            Call(name, (volume, kernel, channels, other), epilogue),
        ]
    for name in ("sdpa", "sdpa_with_lse"):
        others: dict[str, Any] = {"alibi_slopes": slopes, "seq_lens_q": lengths.clamp(max=5)}
        others |= {"seq_lens_kv": lengths.clamp(max=5), "deterministic": True, "softcap": 0}
        calls += [
            Call(name, (q, q, q), {"is_causal": True}),
            Call(name, (q, kv, kv), {"enable_gqa": True} | options | others),
            Call(name, (q, q, q), {"sinks": sinks, "softcap": 2.0, "window_size": [-1, 2]}),
        ]
    for name in ("varlen_attention", "varlen_attention_with_lse"):
        calls += [
            Call(name, varlen, {}),
            Call(name, (*varlen, 0.0, 0.3, True), {"window_size": (3, 0), "deterministic": False}),
        ]
    return calls


def mistakes(tensor: Tensor) -> Iterator[object]:
    """What a caller may hand over for anything."""
    yield from (None, True, False, 0, 1, -1, 3, 1 << 70, 0.5, float("nan"), 1j, "", "relu", b"none")
    yield from ((), (16,), [16], [3, 16], (2, 2, 2), (1.5,), (True,), [None], ["16"], {16}, {})
    yield from (range(16, 17), torch.Size([16]), torch.float32, torch.device("cpu"), object)
    yield from (np.int64(16), np.float32(0.5), np.bool_(True), np.ones(16), (np.int64(16),))
    yield from (tensor, [tensor], (tensor, tensor), tensor[:0], tensor.flatten()[0], tensor > 0)
    yield from (torch.tensor(16), [torch.tensor(16)], tensor.to_sparse(), tensor.to("meta"))
    yield from (torch.nn.Parameter(tensor), tensor.double(), tensor.half(), tensor.long())
