"""Runs a program, and ends with status 3 if its groups outlive it.

    torchrun --nproc-per-node 2 -m tests.distributed.ended examples.generate --tp 2

Gloo's threads end with their group. One that lets go of a tensor while the interpreter ends aborts
the process, once in hundreds of runs on a busy machine: so the threads are counted instead.
"""

import importlib
import sys
from pathlib import Path


def main() -> int:
    status = importlib.import_module(sys.argv[1]).main(sys.argv[2:])
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return 3 if status == 0 and "pt_gloo_runloop" in names else status


if __name__ == "__main__":
    sys.exit(main())
