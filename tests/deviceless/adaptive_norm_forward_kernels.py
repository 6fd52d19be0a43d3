"""Runs the forward's kernels of adaptive norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.adaptive_norm_forward_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.cases import adaptive_norm as cases
from tests.cases import sdpa
from tests.cases.adaptive_norm import AdaptiveNormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Samples and their rows: in pairs and fours, with some left, and few rows in all.
ROWS = ((3, 173), (66, 8), (1, 515), (40, 3), (2, 19))
#: Pieces of 16 bytes: all that a thread can have, parts of warps, and several warps.
PIECES = (3, 8, 33, 96, 128, 144, 225)
#: Rows that no thread loads more than one number of at a time.
NUMBERS = (45, 517)


def cases_of(dtype: torch.dtype) -> Iterator[AdaptiveNormCase]:
    columns = [16 // dtype.itemsize * count for count in PIECES]
    for index, size in enumerate([*columns, *NUMBERS]):
        for (batch, tokens), is_gated in ((ROWS[index % 3], False), (ROWS[(index + 1) % 5], True)):
            case = AdaptiveNormCase((batch, tokens, size), is_layer=index % 4 > 0, gated=is_gated)
            yield replace(case, shift_by=300.0 if dtype == torch.float32 else 3.0)
            has_bias = "float32" if case.is_layer else ""
            yield replace(case, weight="same", bias=has_bias, wide=True, layout="sliced")
    yield from (AdaptiveNormCase((2, 19, size)) for size in (768, 517))
    yield AdaptiveNormCase((2, 300, 320), scale="", shift="", gated=True, weight="same")
    yield AdaptiveNormCase((2, 300, 512), scale="", gated=True, gate="batch", bias="same")
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
    x = to_gpu(torch.full((2, 300, columns), value, dtype=dtype))
    scale = to_gpu(torch.ones(2, columns, dtype=dtype))
    out, *_ = _ops._adaptive_norm(x, None, None, scale, None, None, None, 1e-6, True, False)
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
                for columns in (264, 1152, 517):
                    name = f"{value} in {columns} {dtype}"
                    yield name, partial(check_equal, value, columns, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
