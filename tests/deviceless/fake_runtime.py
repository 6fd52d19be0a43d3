"""Processes with fake_runtime.c in the place of CUDA's runtime and driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def run_with_fake_runtime(
    folder: Path, *arguments: str, has_memory: bool = False
) -> subprocess.CompletedProcess[str]:
    """This Python with those arguments, and behind them the library, which is built there.

    Args:
        folder: where it is built.
        arguments: Python's.
        has_memory: whether memory of the GPU is the host's, each allocation by itself.
    """
    library = folder / "fake_runtime.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *include_folders()]
    macros = ["-DMEMORY_IS_REAL"] if has_memory else []
    subprocess.run([*command, *macros, "-o", library, _HERE / "fake_runtime.c"], check=True)
    variables = {"LD_PRELOAD": str(library), "CUDNN_OPS_CACHE_DIR": ""}
    if has_memory:
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return subprocess.run(
        [sys.executable, *arguments, str(library)],
        env=os.environ | variables,
        cwd=_HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def launched_on_a_cpu(module: str, folder: Path) -> list[str]:
    """The names of the kernels that a module launched, which checks what they compute.

    Args:
        module: whose output is that of ``cpu_kernels.Kernels.report``.
        folder: for the library.
    """
    done = run_with_fake_runtime(folder, "-m", module, has_memory=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["wrong"], answer["wrong"]
    assert answer["overruns"] == 0
    return list(answer["launched"])


def include_folders() -> list[str]:
    """Where headers of the runtime and of cuDNN may be: in wheels, or with a toolkit."""
    wheels = [
        Path(entry) / "nvidia" / name / "include"
        for entry in sys.path
        if entry
        for name in ("cu13", "cudnn")
    ]
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return [f"-I{folder}" for folder in (*wheels, *toolkits) if folder.is_dir()]
