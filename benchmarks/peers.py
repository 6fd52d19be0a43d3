"""Who the benchmarks compare with: every implementation by the name that its rows carry.

All of one operator are called alike, and differ only in what they call and in the torch settings
they need: attentions as `attention(query, key, value, is_causal=..., enable_gqa=...)` on logical
[B, H, S, D] tensors, norms and gated activations as RowOps says.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

T = TypeVar("T")
Attention = Callable[..., Tensor]

EPS = 1e-5  # of every norm
LIGER_WIDEST = 65536  # numbers in a row: it refuses longer ones


class RowOps(NamedTuple):
    """What one implementation computes row by row, over the last dimension."""

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    """Of input and weight."""
    layer_norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of input, weight and bias."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Of input, residual and weight: the norm of the sum, and the sum."""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """Of gate and up."""


_TORCH_BACKENDS = {
    "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "torch_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(*names: str) -> dict[str, Attention]:
    """The named attentions; a third party's is left out, and said to be, if it is not installed."""
    return _installed(_LOADERS, names)


def row_ops(*names: str) -> dict[str, RowOps]:
    """The named implementations of norms and gated activations, as `sdpa` gives attentions."""
    return _installed(_ROW_LOADERS, names)


def _installed(loaders: Mapping[str, Callable[[], T]], names: Iterable[str]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name in names:
        try:
            found[name] = loaders[name]()
        except ImportError:
            if name not in _THIRD_PARTY:
                raise
            print(f"{name} is not installed: left out")
    return found


def backend(name: str) -> AbstractContextManager[object]:
    """The torch settings that make `name` what it says.

    Entering them costs microseconds, which are no part of an attention call: enter them once
    around many calls, outside the timed part.
    """
    return sdpa_kernel(_TORCH_BACKENDS[name]) if name in _TORCH_BACKENDS else nullcontext()


def _cudnn_ops() -> Attention:
    import cudnn_ops  # noqa: F401  (registers the operators)

    attention: Attention = torch.ops.cudnn_ops.sdpa
    return attention


def _cudnn_ops_function() -> Attention:
    import cudnn_ops

    attention: Attention = cudnn_ops.scaled_dot_product_attention
    return attention


def _torch() -> Attention:
    return scaled_dot_product_attention


def _flash_attn_4() -> Attention:
    flash_attn_func = import_module("flash_attn.cute").flash_attn_func

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        del enable_gqa  # grouped heads need no leave here
        packed = (tensor.transpose(1, 2) for tensor in (query, key, value))
        result = flash_attn_func(*packed, causal=is_causal)
        # Some releases return the log-sum-exp too.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return attention


def _cudnn_ops_rows() -> RowOps:
    import cudnn_ops

    return RowOps(
        lambda x, weight: cudnn_ops.rms_norm(x, x.shape[-1:], weight, EPS),
        lambda x, weight, bias: cudnn_ops.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        lambda x, residual, weight: cudnn_ops.add_rms_norm(x, residual, x.shape[-1:], weight, EPS),
        cudnn_ops.swiglu,
    )


def _eager_rows() -> RowOps:
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight), total

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    return RowOps(rms_norm, layer_norm, add_rms_norm, swiglu)


def _liger_rows() -> RowOps:
    def function(module: str, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(f"liger_kernel.ops.{module}"), name).apply
        return found

    rms_norm = function("rms_norm", "LigerRMSNormFunction")
    layer_norm = function("layer_norm", "LigerLayerNormFunction")
    add_rms_norm = function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    # The last argument keeps the backward from writing into the gradient that it is given.
    options = (EPS, 0.0, "llama", False)
    return RowOps(
        lambda x, weight: rms_norm(x, weight, *options),
        lambda x, weight, bias: layer_norm(x, weight, bias, EPS),
        lambda x, residual, weight: add_rms_norm(x, residual, weight, *options),
        function("swiglu", "LigerSiLUMulFunction"),
    )


_LOADERS: dict[str, Callable[[], Attention]] = {
    "cudnn_ops": _cudnn_ops,
    "cudnn_ops_function": _cudnn_ops_function,
    "torch_cudnn": _torch,
    "torch_flash": _torch,
    "torch_default": _torch,
    "flash_attn_4": _flash_attn_4,
}
_ROW_LOADERS: dict[str, Callable[[], RowOps]] = {
    "cudnn_ops": _cudnn_ops_rows,
    "eager": _eager_rows,
    "liger": _liger_rows,
}
_THIRD_PARTY = {"flash_attn_4", "liger"}
