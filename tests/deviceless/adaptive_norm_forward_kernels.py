"""Runs the forward's kernels of adaptive norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.adaptive_norm_forward_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from tests.cases import adaptive_norm as cases
from tests.cases import sdpa
from tests.cases.adaptive_norm import AdaptiveNormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Samples, their rows and the pieces of 16 bytes in a row: parts of a warp, all numbers of pieces
#: that a thread has, several warps, and rows that no threads hold.
PIECES = (
    *((3, 5, 5), (66, 8, 33), (2, 19, 96), (3, 173, 144), (13, 40, 160), (1, 515, 161)),
    *((40, 13, 192), (2, 19, 225), (1, 515, 225), (2, 3, 300), (1, 3, 2100), (2, 2, 4200)),
    # Samples of fewer rows than a block has, and of a few more.
    *((300, 2, 150), (47, 11, 125), (130, 5, 100)),
)
#: Rows that no thread loads more than one number of at a time: parts of a warp, a warp, several
#: warps, and rows that no threads hold.
NUMBERS = (
    *((3, 19, 45), (13, 40, 45), (5, 9, 100), (7, 9, 201), (2, 19, 517), (3, 19, 1021)),
    (1, 3, 9001),
)


def cases_of(dtype: torch.dtype) -> Iterator[AdaptiveNormCase]:
    wide = [(*rows, 16 // dtype.itemsize * count) for *rows, count in PIECES]
    around = 300.0 if dtype == torch.float32 else 3.0
    for (index, shape), is_gated in product(enumerate([*wide, *NUMBERS]), (False, True)):
        case = AdaptiveNormCase(shape, gated=is_gated, is_layer=index % 3 > 0)
        yield replace(case, shift_by=around, layout=("dense", "sliced")[index % 2])
        has_bias = "float32" if case.is_layer else ""
        yield replace(case, weight="same", bias=has_bias, wide=index % 2 > 0, layout="part")
    sum = AdaptiveNormCase((2, 30, 320), gated=True)
    yield replace(sum, scale="", shift="", weight="same")
    yield replace(sum, scale="", gate="batch", bias="same")
    yield replace(sum, shift="", gate="token")
    yield replace(sum, scale="token", shift="token", gate="token")
    yield AdaptiveNormCase((2, 31, 9, 512), scale="first", shift="batch", layout="flat")


def check(case: AdaptiveNormCase, dtype: torch.dtype) -> None:
    t = cases.make(case, dtype, "cpu", seed=1)

    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_gpu(tensor.detach())

    names = ("input", "update", "gate", "scale", "shift", "weight", "bias")
    tensors = [placed(getattr(t, name)) for name in names]
    found = _ops._adaptive_norm(*tensors, case.eps, case.is_layer, True)
    out, total, mean, rstd = map(from_gpu, found)
    if not case.gated:
        total = t.input.detach()
    leaves = {name: leaf.detach() for name, leaf in t.leaves.items()}
    exact, rough = (
        cases.formula(case, {name: leaf.to(kind) for name, leaf in leaves.items()}, total.to(kind))
        for kind in (torch.float64, dtype)
    )
    sdpa.check(out, exact[0], rough[0], f"{case} out")
    if case.gated:
        exact, rough = (
            cases.formula(case, {name: leaf.to(kind) for name, leaf in leaves.items()})
            for kind in (torch.float64, dtype)
        )
        sdpa.check(total, exact[1], rough[1], f"{case} sum")
    rows = total.double()
    if case.is_layer:
        torch.testing.assert_close(mean.double(), rows.mean(-1), rtol=1e-5, atol=1e-5)
    square = rows.var(-1, unbiased=False) if case.is_layer else rows.square().mean(-1)
    torch.testing.assert_close(rstd.double(), (square + case.eps).rsqrt(), rtol=1e-5, atol=0)


def check_equal(value: float, columns: int, dtype: torch.dtype) -> None:
    """Equal numbers are their own mean, large ones too."""
    x = to_gpu(torch.full((2, 30, columns), value, dtype=dtype))
    zeros = to_gpu(torch.zeros(2, columns, dtype=dtype))
    out, *_ = _ops._adaptive_norm(x, None, None, zeros, zeros, None, None, 1e-6, True, False)
    assert not from_gpu(out).any()


def main() -> None:
    types = ("Half", "BFloat16", "Float")
    sources = [("adaptive_norm_forward", f"-DKERNEL_TYPE={one}") for one in types]
    kernels = Kernels(Path(sys.argv[1]), *sources)

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for kernels.first, dtype in enumerate(TYPES):
            for case in cases_of(dtype):
                yield f"{case} {dtype}", partial(check, case, dtype)
            for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
                for columns in (264, 1152, 1536, 517):
                    name = f"{value} in {columns} {dtype}"
                    yield name, partial(check_equal, value, columns, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
