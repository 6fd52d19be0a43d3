"""Who the benchmarks compare with: every attention by the name that its rows carry.

All are called alike, `attention(query, key, value, is_causal=..., enable_gqa=...)` on logical
[B, H, S, D] tensors, and differ only in what they call and in the torch settings they need.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[..., Tensor]

_TORCH_BACKENDS = {
    "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "torch_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(*names: str) -> dict[str, Attention]:
    """The named attentions; a third party's is left out, and said to be, if it is not installed."""
    found: dict[str, Attention] = {}
    for name in names:
        try:
            found[name] = _LOADERS[name]()
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


_LOADERS: dict[str, Callable[[], Attention]] = {
    "cudnn_ops": _cudnn_ops,
    "cudnn_ops_function": _cudnn_ops_function,
    "torch_cudnn": _torch,
    "torch_flash": _torch,
    "torch_default": _torch,
    "flash_attn_4": _flash_attn_4,
}
_THIRD_PARTY = {"flash_attn_4"}
