"""cuDNN's graph engine as ordinary PyTorch operators.

Importing registers ``torch.ops.cudnn_ops.*``; the public functions are listed below.
"""

from cudnn_ops import _library as _library  # first: it registers the operators
from cudnn_ops import support
from cudnn_ops.cache import CacheInfo, cache_clear, cache_info, set_cache_limit
from cudnn_ops.ops.sdpa import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
)

__version__ = "0.1.0"

__all__ = [
    "CacheInfo",
    "cache_clear",
    "cache_info",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_with_lse",
    "set_cache_limit",
    "support",
]
