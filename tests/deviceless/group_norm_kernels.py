"""Runs the kernels of group norm, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.group_norm_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops.ops.group_norm import NormActivation
from tests.cases import group_norm as cases
from tests.cases.group_norm import GroupNormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
#: Images whose groups fit into a block, and such that are shared by several; all orders of both.
SHAPES = (
    ((2, 40, 12, 16), 4),
    ((2, 24, 8, 8), 3),
    ((1, 6, 5, 7), 2),
    ((3, 64, 3), 32),
    ((1, 16, 130, 112), 2),
    ((2, 12, 181, 64), 3),
    ((1, 10, 211, 99), 1),
)
#: Groups that stay in registers: parts of a warp, warps and blocks of several; of one channel, of
#: rows of channels that are a part of a sector, planes whose pieces have two channels, and numbers
#: in no vectors.
HELD = (
    ((256, 512), 32),
    ((3, 64), 8),
    ((5, 96, 7, 7), 12),
    ((66, 64, 7, 7), 8),
    ((1, 320, 8, 8), 32),
    ((2, 64, 16, 16), 32),
    ((3, 8, 9, 11), 8),
    ((2, 16, 5), 4),
    ((1, 12, 7, 9), 4),
    ((2, 20, 41, 13), 4),
    ((1, 40, 64, 32), 2),
    ((1, 24, 64, 64), 2),
    ((1, 3, 25, 27), 1),
    ((1, 6, 19, 25), 1),
    ((1, 6, 61, 25), 1),
    ((2, 6, 45, 30), 1),
)
ACTIVATIONS: tuple[NormActivation, ...] = ("none", "silu")
#: Whether something is added before them too.
SUMS: tuple[tuple[NormActivation, bool], ...] = (("silu", False), ("none", True))
CASES = (
    *(
        GroupNormCase(shape, groups, activation, layout=layout, residual=residual)
        for (shape, groups), activation, layout, residual in product(
            SHAPES, ACTIVATIONS, ("first", "last"), (False, True)
        )
    ),
    *(
        GroupNormCase(shape, groups, activation, layout=layout, residual=residual, weight="float32")
        for (shape, groups), (activation, residual), layout in product(
            HELD, SUMS, ("first", "last")
        )
    ),
    # Too large for registers, and not for shared memory.
    GroupNormCase((1, 10, 131, 64), 1, "silu"),
    GroupNormCase((1, 10, 61, 64), 1, "silu"),
    *(
        GroupNormCase(shape, 1, "silu", layout=layout)
        for shape, layout in product(((1, 3, 4, 2003), (1, 4, 73, 83)), ("first", "last"))
    ),
    GroupNormCase((4, 64, 7, 7), 8, "silu", layout="flat", weight="", shift=300.0),
    # In pieces of 8 bytes, of which an odd number is a channel.
    GroupNormCase((2, 24, 4, 3), 3),
    GroupNormCase((1, 8, 28, 1109), 2, "silu"),
    GroupNormCase((2, 48, 9, 8), 4, weight="", bias=""),
    GroupNormCase((2, 48, 9, 8), 4, "silu", weight="float32", bias="float32", layout="last"),
    GroupNormCase((2, 40, 32, 32), 4, "silu", shift=300.0, weight="float32"),
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(case: GroupNormCase, dtype: torch.dtype) -> None:
    t = cases.make(case, dtype, "cpu", seed=1)

    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_gpu(tensor.detach())

    x, residual, weight, bias = map(placed, t.leaves)
    activation = 2 if case.activation == "silu" else 0
    call = (x, residual, case.groups, weight, bias, case.eps, activation, True)
    out, total, mean, rstd = _ops._group_norm(*call)
    results = [from_gpu(out), *([from_gpu(total)] if case.residual else [])]
    grad_sum = to_gpu(t.grad_sum) if case.residual else None
    saved = (total if case.residual else x, case.groups, weight, bias, mean, rstd, activation)
    mask = (True, weight is not None, bias is not None)
    grads = _ops._group_norm_backward(to_gpu(t.grad_out), grad_sum, *saved, mask)
    wanted = [from_gpu(grad) for grad, is_wanted in zip(grads, mask, strict=True) if is_wanted]
    cases.compare(case, t, results, wanted)


def check_equal(
    value: float, shape: tuple[int, ...], groups: int, is_last: bool, dtype: torch.dtype
) -> None:
    """Equal numbers are their own mean, large ones too."""
    x = torch.full(shape, value, dtype=dtype)
    x = cases.channels_last(x) if is_last and x.dim() > 2 else x
    out, *_ = _ops._group_norm(to_gpu(x), None, groups, None, None, 1e-5, 0, False)
    assert not from_gpu(out).any()


def main() -> None:
    names = [f"group_norm_{name}" for name in ("held", "held_backward", "forward", "backward")]
    types = ("Half", "BFloat16", "Float")
    sources = [(name, f"-DKERNEL_TYPE={one}") for one in types for name in names]
    kernels = Kernels(Path(sys.argv[1]), *sources)

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for number, dtype in enumerate(TYPES):
            kernels.first = number * len(names)
            for case in CASES:
                yield f"{case} {dtype}", partial(check, case, dtype)
            for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
                for (shape, groups), is_last in product(SHAPES + HELD, (False, True)):
                    name = f"{value} in {shape} {dtype} {is_last}"
                    yield name, partial(check_equal, value, shape, groups, is_last, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
