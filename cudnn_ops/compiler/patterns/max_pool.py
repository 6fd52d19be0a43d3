"""Max pooling of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, is_tensor, tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Numbers of a window whose offsets fit into 8 bits.
_MOST_TAPS = 255


class MaxPool(Pattern):
    """``max_pool2d``, without the indices of the greatest numbers."""

    name = "max_pool"
    of_images = True
    ends_in = frozenset({"max_pool2d"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        call = call_of(node)
        if call is None or call.name != "max_pool2d" or not is_tensor(call["input"]):
            return
        if call["return_indices"] is not False or not isinstance(call["ceil_mode"], bool):
            return
        value = tensor(call["input"])
        kernel_size = _pair(call["kernel_size"])
        numbers = (
            kernel_size,
            kernel_size if call["stride"] in (None, (), []) else _pair(call["stride"]),
            _pair(call["padding"]),
            _pair(call["dilation"]),
        )
        if kernel_size is None or None in numbers or value.dtype not in _DTYPES:
            return
        if kernel_size[0] * kernel_size[1] > _MOST_TAPS:
            return
        if value.is_cuda and value.dtype == torch.float64:
            raise Refusal("on a GPU max pooling supports float16, bfloat16 and float32")

        def build(input: Any) -> Any:
            return torch.ops.cudnn_ops.max_pool2d.default(input, *numbers, call["ceil_mode"])

        yield Found([node], [node], [call["input"]], build)


def _pair(numbers: Any) -> list[int] | None:
    """Of rows and columns, where both are known."""
    pair = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
    if len(pair) not in (1, 2) or not all(type(number) is int for number in pair):
        return None
    return pair * 2 if len(pair) == 1 else pair
