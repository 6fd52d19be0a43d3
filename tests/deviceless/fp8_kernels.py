"""Runs the kernels that write 8 bits, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.fp8_kernels fake_runtime.so
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import cudnn_ops
from tests.cases import rotary_fp8, rows_fp8
from tests.cases.fp8 import FORMATS
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

TYPES = (torch.float16, torch.bfloat16, torch.float32)


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
    kernels = Kernels(Path(sys.argv[1]), ("rotary_fp8",), *of_types)
    wrong = []
    for run in (run_rotary, run_rows):
        try:
            run(kernels)
        except AssertionError as error:
            wrong.append(f"{run.__name__}: {error}")
    answer = {"launched": sorted(set(kernels.launched)), "overruns": kernels.overruns()}
    print(json.dumps({**answer, "wrong": wrong}))


if __name__ == "__main__":
    assert cudnn_ops
    main()
