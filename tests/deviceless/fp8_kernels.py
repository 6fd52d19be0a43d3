"""Runs the kernels that write 8 bits, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.fp8_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import cudnn_ops
from tests.cases import rotary_fp8, rows_fp8
from tests.cases.fp8 import FORMATS
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu
from tests.test_quantize import LAYOUTS, expected, like_in_memory, same_bits

TYPES = (torch.float16, torch.bfloat16, torch.float32)


#: Those that the kernels read as they lie: torch's kernels do not copy here.
AS_THEY_LIE = ("contiguous", "heads third", "part of a projection", "odd rows", "one row")


def run_tensors(_: Kernels) -> None:
    for name, dtype in product(AS_THEY_LIE, TYPES):
        torch.manual_seed(len(name))
        x = like_in_memory(LAYOUTS[name](), dtype, "cpu")
        for fp8, dim, is_power, is_known in product(FORMATS, (None, 1), *((False, True),) * 2):
            scale = torch.rand(1 if dim is None else x.shape[1]) * 300 if is_known else None
            given = None if scale is None else to_gpu(scale)
            options: dict[str, Any] = {"dim": dim, "dtype": fp8}
            found = cudnn_ops.quantize_fp8(to_gpu(x), given, **options, power_of_two=is_power)
            for one, other in zip(found, expected(x, scale, dim, fp8, is_power), strict=True):
                same_bits(from_gpu(one), other)
            back = cudnn_ops.dequantize_fp8(found.data, found.descale, dim=dim, dtype=dtype)
            sizes = [-1 if one == dim else 1 for one in range(x.dim())]
            wide = from_gpu(found.data).float() * from_gpu(found.descale).reshape(sizes)
            assert torch.equal(from_gpu(back), wide.to(dtype)), (name, options)


def run_rotary(_: Kernels) -> None:
    for case in rotary_fp8.CASES:
        for dtype in TYPES:
            for fp8 in FORMATS:
                tensors = rotary_fp8.draw(case, dtype)
                rotary_fp8.check(case, tensors, fp8, to_gpu, from_gpu)


def run_rows(kernels: Kernels) -> None:
    for case in rows_fp8.CASES:
        for kernels.first, dtype in enumerate(TYPES, 1):
            if dtype == torch.float16 and case.kind not in ("rows", "norm"):
                continue
            for fp8 in FORMATS:
                rows_fp8.check(case, dtype, fp8, to_gpu, from_gpu)


def main() -> None:
    of_types = (("rows_fp8", f"-DKERNEL_TYPE={name}") for name in ("Half", "BFloat16", "Float"))
    kernels = Kernels(Path(sys.argv[1]), ("rotary_fp8",), *of_types, ("fp8",))
    runs = (run_tensors, run_rotary, run_rows)
    print(kernels.checked((run.__name__, partial(run, kernels)) for run in runs))


if __name__ == "__main__":
    assert cudnn_ops
    main()
