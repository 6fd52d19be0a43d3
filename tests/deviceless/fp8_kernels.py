"""Runs the kernels that write 8 bits, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.fp8_kernels fake_runtime.so
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import cudnn_ops
from tests.cases import rotary_fp8
from tests.cases.fp8 import FORMATS
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

TYPES = (torch.float16, torch.bfloat16, torch.float32)


def run_rotary() -> None:
    for case in rotary_fp8.CASES:
        for dtype in TYPES:
            for fp8 in FORMATS:
                tensors = rotary_fp8.draw(case, dtype)
                rotary_fp8.check(case, tensors, fp8, to_gpu, from_gpu)


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("rotary_fp8",))
    wrong = []
    for run in (run_rotary,):
        try:
            run()
        except AssertionError as error:
            wrong.append(f"{run.__name__}: {error}")
    answer = {"launched": sorted(set(kernels.launched)), "overruns": kernels.overruns()}
    print(json.dumps({**answer, "wrong": wrong}))


if __name__ == "__main__":
    assert cudnn_ops
    main()
