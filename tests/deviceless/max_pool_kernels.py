"""Runs the kernels of max pooling, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.max_pool_kernels fake_runtime.so
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops.ops.max_pool import as_list
from tests.cases import max_pool as cases
from tests.cases.max_pool import CASES, MaxPoolCase
from tests.deviceless.cpu_kernels import Kernels, copy_on_the_cpu, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Of more channels than a block has, of more columns, and of windows that nothing is known of.
MORE = (
    MaxPoolCase((2, 96, 7, 9), 3, 2, 1),
    MaxPoolCase((1, 520, 5, 4), 2),
    MaxPoolCase((1, 8, 3, 70), 3, 2, 1),
    MaxPoolCase((1, 8, 70, 3), 2, 2, 1),
    MaxPoolCase((1, 3, 30, 40), 3, 2, 1),
    MaxPoolCase((1, 70, 9, 8), 4, 3, 2, values="ties"),
    MaxPoolCase((2, 16, 20, 20), 3, 1, 1, 3, values="ties"),
    MaxPoolCase((2, 16, 20, 20), (2, 3), (3, 2), 1, (2, 5), ceil_mode=True),
    MaxPoolCase((2, 16, 9, 20), 3, 5, 1),
)


def pairs(case: MaxPoolCase) -> list[list[int]]:
    kernel_size, stride, padding, dilation, _ = case.numbers
    numbers = (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    return [(list(as_list(one)) * 2)[:2] for one in numbers]


def check(case: MaxPoolCase, dtype: torch.dtype) -> None:
    x = cases.make(case, dtype, "cpu", seed=2).detach()
    numbers = pairs(case)
    out, offsets = _ops._max_pool2d(x, *numbers, case.ceil_mode, True)
    grad, more = (cases.grad_of(case, out, seed) for seed in (3, 4))
    size = list(x.shape[2:])

    def same(found: Tensor, right: Tensor, name: str) -> None:
        found = from_gpu(found)
        assert found.stride() == right.stride(), f"strides of {name}"
        if right.dtype == torch.uint8:
            assert torch.equal(found, right), name
        elif name == "out":
            assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0)), name
            assert torch.equal(found.isnan(), right.isnan()), name
        else:  # sums of the same float32 numbers in another order
            torch.testing.assert_close(found, right, msg=lambda words: f"{name}: {words}")

    placed = to_gpu(x)
    ours = _ops._max_pool2d(placed, *numbers, case.ceil_mode, True)
    same(ours[0], out, "out")
    same(ours[1], offsets, "offsets")
    alone = _ops._max_pool2d(placed, *numbers, case.ceil_mode, False)
    same(alone[0], out, "out")
    assert alone[1].shape == (0,)
    for other in (None, more):
        right = _ops._max_pool2d_backward(grad, offsets, other, size, *numbers)
        given = None if other is None else to_gpu(other)
        found = _ops._max_pool2d_backward(to_gpu(grad), ours[1], given, size, *numbers)
        same(found, right, "grad" if other is None else "grad of two")


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("max_pool",))
    _copies = copy_on_the_cpu()

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        images = (case for case in (*CASES, *MORE) if len(case.shape) == 4)
        for case, dtype in itertools.product(images, TYPES):
            yield f"{case} {dtype}", partial(check, case, dtype)
            if case.layout == "last":
                first = replace(case, layout="first", grad_layout="first")
                yield f"{first} {dtype}", partial(check, first, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
