"""Runs the kernels of depthwise convolutions' forward; prints as JSON what was wrong.

Gradients of the input are convolutions by the same kernels, where strides are 1. Of the weight's
gradient those run that have whole images, or parts.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.depthwise_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

import cudnn_ops
from cudnn_ops.ops.activation import ACTIVATIONS
from tests.deviceless.cpu_kernels import Kernels, copy_on_the_cpu, from_gpu, to_gpu
from tests.deviceless.grouped_kernels import (
    Case,
    check_forward,
    check_input_gradient,
    draw,
)

_ops = torch.ops.cudnn_ops

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
#: Where threads go down rows, for each number of taps: stretches of several lengths, tiles that are
#: not full, images smaller than the kernel, more zeros than taps reach and none, one pair of
#: channels and one of four, more of them than a block has, and blocks with sets of tiles one after
#: another.
ROLLING = (
    *(
        (sizes, channels, None)
        for sizes in ((1, 13, 8), (30, 9, 8), (90, 9, 6))
        for channels in (2, 6, 12)
    ),
    *((sizes, 4, None) for sizes in ((1, 1, 1), (2, 2, 3), (3, 1, 20))),
    *(((2, 9, 16), 4, padding) for padding in ((0, 0), (9, 0), (1, 8))),
    *((sizes, channels, None) for sizes in ((1, 7, 7), (60, 5, 15)) for channels in (66, 132)),
)
#: Where blocks have whole images, by taps, strides and pixels of a row of outputs: images of
#: several heights, more zeros above them than taps reach and none, channels that a block has some
#: threads for and more than it has, and more images than blocks.
WHOLE = tuple(
    Case(
        (batch, height, stride * columns),
        channels,
        1,
        1,
        (taps, taps),
        (stride, stride),
        (above, taps // 2),
        residual=taps == 5,
        activation="silu" if taps == 5 else "none",
    )
    for taps, stride, columns in product((3, 5, 7), (1, 2), (7, 14))
    for batch, height, channels, above in (
        (3, stride * columns, 24, taps // 2),
        (1, 9, 136, 0),
        (9, taps - 2, 8, taps + 1),
    )
)
#: Where they have parts of images, by taps: the last of a row and of a column that are not full,
#: parts smaller than a kernel, more zeros than taps reach and none, and more channels than a block
#: has.
PARTS = tuple(
    Case(sizes, channels, 1, 1, (taps, taps), padding=padding, residual=True)
    for taps in (5, 7)
    for sizes, channels, padding in (
        ((1, 31, 28), 16, (taps // 2, taps // 2)),
        ((2, 9, 25), 72, (taps // 2, taps // 2)),
        ((5, 2, 13), 40, (taps // 2, taps // 2)),
        ((1, 9, 14 + taps - 1), 8, (0, 0)),
        ((1, 3, 23 - taps), 136, (taps + 2, taps + 2)),
    )
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def rolling_cases() -> Iterator[Case]:
    for taps, (sizes, channels, padding) in product((3, 5, 7), ROLLING):
        padding = padding or (taps // 2, taps // 2)
        if min(sizes[1] + 2 * padding[0], sizes[2] + 2 * padding[1]) >= taps:
            yield Case(sizes, channels, 1, 1, (taps, taps), padding=padding, residual=True)


def check_both(case: Case, dtype: torch.dtype) -> None:
    check_input_gradient(case, dtype, *check_forward(case, dtype))


def check_whole(case: Case, dtype: torch.dtype) -> None:
    """Forward, and the gradients of weight and bias; of the input, where it is by these kernels."""
    x, weight = check_forward(case, dtype)
    if case.stride == (1, 1):
        check_input_gradient(case, dtype, x, weight)
    check_weight_gradient(case, dtype, x, weight)


def check_weight_gradient(case: Case, dtype: torch.dtype, x: Tensor, weight: Tensor) -> None:
    geometry = case.stride, case.padding, case.dilation, case.groups
    numbers = _ops._conv_geometry(2, weight, *geometry)
    grad = draw(dtype, *F.conv2d(x, weight, None, *geometry).shape)
    exact = conv2d_weight(x.double(), weight.shape, grad.double(), *geometry)
    sums = conv2d_weight(x.double().abs(), weight.shape, grad.double().abs(), *geometry)
    of_bias = grad.double().sum((0, 2, 3))
    epsilon = torch.finfo(dtype).eps
    for has_bias in (False, True):
        _, found, found_bias, _ = _ops._conv_backward.default(
            *(to_gpu(tensor) for tensor in (grad, x, weight)),
            *(None, numbers, 0, (False, True, has_bias, False)),
        )
        atol = 8 * torch.finfo(torch.float32).eps * sums.max().item()
        torch.testing.assert_close(from_gpu(found).double(), exact, rtol=epsilon, atol=atol)
        if has_bias:
            torch.testing.assert_close(
                from_gpu(found_bias).double(), of_bias, rtol=epsilon, atol=atol
            )


def check_odd_address(dtype: torch.dtype) -> None:
    """Two channels at a time where four are not at a multiple of their size."""
    torch.manual_seed(0)
    x, weight = draw(dtype, 2, 8, 9, 10), draw(dtype, 8, 1, 3, 3)
    memory = torch.empty(2 + x.numel(), dtype=dtype)
    moved = to_gpu(memory)[2:].as_strided(x.shape, x.stride())
    moved.copy_(to_gpu(x))
    found = cudnn_ops.conv2d(moved, to_gpu(weight), None, padding=1, groups=8)
    exact = F.conv2d(x.double(), weight.double(), None, padding=1, groups=8)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(from_gpu(found).double(), exact, rtol=2 * epsilon, atol=32 * epsilon)


def check_before(taps: int, dtype: torch.dtype) -> None:
    """What goes into an activation is kept for its slope."""
    torch.manual_seed(0)
    x, residual = (draw(dtype, 2, 6, 9, 10) for _ in range(2))
    weight, bias = draw(dtype, 6, 1, taps, taps), draw(dtype, 6)
    geometry = _ops._conv_geometry(2, weight, (1, 1), (taps // 2, taps // 2), (1, 1), 6)
    given = [to_gpu(tensor) for tensor in (x, weight, bias, residual)]
    out, before = _ops._conv.default(*given, geometry, ACTIVATIONS.index("silu"), True)
    exact = F.conv2d(x.double(), weight.double(), bias.double(), 1, taps // 2, 1, 6) + residual
    epsilon = torch.finfo(dtype).eps
    for found, wanted in ((before, exact), (out, F.silu(exact))):
        torch.testing.assert_close(
            from_gpu(found).double(), wanted, rtol=2 * epsilon, atol=32 * epsilon
        )


def main() -> None:
    types = ("Half", "BFloat16", "Float")
    names = tuple(
        f"depthwise_conv_{name}"
        for name in ("forward", "rolling", "weight", "whole", "whole_weight")
    )
    sources = [(name, f"-DKERNEL_TYPE={of_type}") for of_type, name in product(types, names)]
    kernels = Kernels(Path(sys.argv[1]), *sources)
    for step in range(3):
        _ops._conv_use_depthwise(step, 2)
    copies = copy_on_the_cpu()

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for index, dtype in enumerate(TYPES):
            kernels.first = index * len(names)
            for case in CASES:
                yield (case, dtype), partial(check_forward, case, dtype)
            for case in rolling_cases():
                yield (case, dtype), partial(check_both, case, dtype)
            for case in (*WHOLE, *PARTS):
                yield (case, dtype), partial(check_whole, case, dtype)
            yield dtype, partial(check_odd_address, dtype)
            for taps in (3, 5, 7):
                yield (taps, dtype), partial(check_before, taps, dtype)

    print(kernels.checked(checks()))
    del copies


if __name__ == "__main__":
    assert cudnn_ops
    main()
