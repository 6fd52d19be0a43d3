"""Runs the kernel that folds batch norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.fold_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cases import batch_norm_fold as cases
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("batch_norm_fold",))
    wrong = []
    for case in cases.CASES:
        if case.layout == "strided":
            continue  # torch's kernels copy those
        try:
            cases.check(case, to_gpu, from_gpu)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    print(kernels.report(wrong))


if __name__ == "__main__":
    main()
