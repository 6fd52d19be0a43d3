"""Runs the kernels of depthwise convolutions' forward; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.depthwise_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

import cudnn_ops
from tests.deviceless.cpu_kernels import Kernels, copy_on_the_cpu
from tests.deviceless.grouped_kernels import ACTIVATIONS, Case, check_forward

#: Each kernel's taps and strides, with every activation; then all that an epilogue has.
CASES = (
    *(
        Case((2, 9, 15), 6, 1, 1, (size, size), (stride, stride), (size // 2, size // 2))
        for size, stride in product((3, 5, 7), (1, 2))
    ),
    *(Case((1, 8, 9), 4, 1, 1, activation=activation) for activation in ACTIVATIONS),
    Case((1, 8, 9), 4, 1, 1, bias=False, activation="none"),
    Case((2, 8, 9), 10, 1, 1, residual=True, activation="silu"),
    Case((1, 8, 9), 4, 1, 1, (9, 9), padding=(4, 4), residual=True, activation="hardswish"),
    Case((1, 8, 9), 5, 1, 1, (2, 3), (1, 2), (0, 2), (2, 1), activation="gelu"),
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def main() -> None:
    types = ("Half", "BFloat16", "Float")
    sources = [("depthwise_conv_forward", f"-DKERNEL_TYPE={name}") for name in types]
    kernels = Kernels(Path(sys.argv[1]), *sources)
    torch.ops.cudnn_ops._conv_use_depthwise(0, 2)
    copies = copy_on_the_cpu()

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for (kernels.first, dtype), case in product(enumerate(TYPES), CASES):
            yield (case, dtype), partial(check_forward, case, dtype)

    print(kernels.checked(checks()))
    del copies


if __name__ == "__main__":
    assert cudnn_ops
    main()
