"""What ``csrc/python/fast.cpp`` has for ``cudnn_ops/ops/call.py``."""

from collections.abc import Callable
from typing import Any

def callable(
    name: str, overload_name: str, overload: Callable[..., Any], is_first_read: bool = False, /
) -> Callable[..., Any]:
    """What calls that overload of ``torch.ops.cudnn_ops``; LookupError where there is none.

    Of several results it may leave out those behind the first, where ``is_first_read``.
    """
