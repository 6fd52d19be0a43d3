"""Runs the kernel that merges attention, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.merge_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.cases import merge
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("attention_merge",))
    checks: list[tuple[str, Callable[..., None]]] = [
        *((str(case), partial(merge.check, case)) for case in merge.CASES),
        ("no numbers", merge.check_what_is_no_number),
    ]
    print(kernels.checked((name, partial(check, to_gpu, from_gpu)) for name, check in checks))


if __name__ == "__main__":
    main()
