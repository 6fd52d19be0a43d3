"""Runs the forward's kernels of norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.norm_forward_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops import _C
from tests.cases import norm as cases
from tests.cases import sdpa
from tests.cases.norm import NormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Rows and their pieces of 16 bytes: parts of a warp, full and not, all numbers of pieces that a
#: thread has, several warps, full and not, and rows that no threads hold.
PIECES = (
    *((64, 8), (65, 5), (64, 16), (16, 32), (33, 30), (16, 64), (9, 128), (515, 160), (515, 192)),
    *((3, 256), (520, 256), (2, 1024), (514, 384), (3, 300), (513, 600), (2, 2048), (2, 4096)),
    (2, 4200),
)
#: Rows that are loaded 8 bytes at a time, and by their numbers.
HALVES, NUMBERS = ((9, 9), (5, 101), (3, 1001)), ((70, 45), (19, 201), (3, 1021), (2, 9001))


def cases_of(dtype: torch.dtype) -> Iterator[NormCase]:
    around = 300.0 if dtype == torch.float32 else 3.0
    sizes = [(rows, 16 // dtype.itemsize * count) for rows, count in PIECES]
    sizes += [(rows, max(8 // dtype.itemsize, 1) * count) for rows, count in HALVES]
    for index, (rows, columns) in enumerate((*sizes, *NUMBERS)):
        layer = NormCase((rows, columns), (columns,), True, bias="same", shift=around)
        yield layer
        bias = ("same", "float32", "")[index % 3]
        yield replace(layer, weight=bias, bias=bias, zero_centered=bool(bias), layout="sliced")
        yield replace(layer, is_layer=False, bias="", layout=("dense", "flat")[index % 2])


def norm(
    case: NormCase, t: cases.Tensors, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = [None if one is None else to_gpu(one.detach()) for one in (t.input, residual)]
    parameters = [None if one is None else to_gpu(one.detach()) for one in (t.weight, t.bias)]
    options = (case.eps, case.is_layer, case.zero_centered, True)
    return _ops._norm(*tensors, case.normalized, *parameters, *options)


def check(case: NormCase, dtype: torch.dtype, has_residual: bool) -> None:
    t = cases.make(case, dtype, "cpu", seed=1)
    residual = cases.make(case, dtype, "cpu", seed=2).input if has_residual else None
    out, total, mean, rstd = map(from_gpu, norm(case, t, residual))
    rows = t.input.detach()
    if residual is not None:
        rows = rows + residual.detach()
        assert torch.equal(total, rows)

    def formula(kind: torch.dtype) -> Tensor:
        both = (t.weight, t.bias)
        weight, bias = (None if one is None else one.detach().to(kind) for one in both)
        return cases.norm(case, rows.to(kind), weight, bias)

    exact, rough = formula(torch.float64), formula(dtype)
    sdpa.check(out, exact, rough, str(case))
    wide = rows.double()
    if case.is_layer:
        torch.testing.assert_close(mean.double(), wide.mean(-1), rtol=1e-5, atol=1e-5)
    square = wide.var(-1, unbiased=False) if case.is_layer else wide.square().mean(-1)
    torch.testing.assert_close(rstd.double(), (square + case.eps).rsqrt(), rtol=1e-5, atol=0)


def check_equal(value: float, columns: int, dtype: torch.dtype) -> None:
    """Equal numbers are their own mean, large ones too."""
    case = NormCase((3, columns), (columns,), True, weight="", eps=1e-12)
    t = replace(cases.make(case, dtype, "cpu", 0), input=torch.full(case.shape, value, dtype=dtype))
    out, _, _, rstd = norm(case, t, None)
    assert not from_gpu(out).any()
    torch.testing.assert_close(from_gpu(rstd), torch.full((3,), case.eps**-0.5))


def check_steps(columns: int, dtype: torch.dtype) -> None:
    """Each eighth of a row is of equal numbers: all that is apart are the means of its warps."""
    case = NormCase((2, columns), (columns,), True, weight="")
    steps = torch.arange(1, 9, dtype=dtype).repeat_interleave(columns // 8).expand(2, -1)
    t = replace(cases.make(case, dtype, "cpu", 0), input=steps.contiguous())
    out, *_ = norm(case, t, None)
    exact, rough = (cases.norm(case, steps.to(kind), None, None) for kind in (torch.float64, dtype))
    sdpa.check(from_gpu(out), exact, rough, f"steps {columns}")


def check_not_finite(value: float, columns: int, dtype: torch.dtype) -> None:
    """A row with such a number is NaN, and no other is."""
    case = NormCase((3, columns), (columns,), True, weight="")
    t = cases.make(case, dtype, "cpu", 0)
    with torch.no_grad():
        t.input[1, columns - 3] = value
    found = from_gpu(norm(case, t, None)[0]).isnan()
    assert found[1].all()
    assert not found[[0, 2]].any()


def main() -> None:
    # Nowhere a plan of cuDNN's.
    _C.set_norm_table(9, 0, [])
    types = ("Half", "BFloat16", "Float")
    sources = [("norm_forward", f"-DKERNEL_TYPE={one}") for one in types]
    kernels = Kernels(Path(sys.argv[1]), *sources)

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for kernels.first, dtype in enumerate(TYPES):
            for index, case in enumerate(cases_of(dtype)):
                has_residual = index % 5 == 0
                name = f"{case} {dtype} residual: {has_residual}"
                yield name, partial(check, case, dtype, has_residual)
            for columns in (64, 256, 2048, 8192, 9600, 16384):
                yield f"steps {columns} {dtype}", partial(check_steps, columns, dtype)
                for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
                    name = f"{value} in {columns} {dtype}"
                    yield name, partial(check_equal, value, columns, dtype)
                for value in (float("inf"), float("nan")):
                    name = f"{value} in {columns} {dtype}"
                    yield name, partial(check_not_finite, value, columns, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
