"""Runs the kernel that folds batch norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.fold_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.cases import batch_norm_fold
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("batch_norm_fold",))
    cases = [
        case for case in batch_norm_fold.CASES if case.layout != "strided"
    ]  # torch copies those
    print(kernels.checked((x, partial(batch_norm_fold.check, x, to_gpu, from_gpu)) for x in cases))


if __name__ == "__main__":
    main()
