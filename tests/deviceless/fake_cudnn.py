"""Processes in which operators run by plans of cuDNN's on a GPU that is not there.

Plans are real ones, for an H200, and build as fast as on one; executing them does nothing. What
programs call of the library in ``fake_cudnn.c``, they call by ``cudnn``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cudnn_ops
from cudnn_ops import _C
from tests.deviceless.fake_runtime import include_folders

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_BUILD = Path(os.environ.get("CUDNN_OPS_BUILD_DIR", _ROOT / "build"))
#: Seconds; a program takes a few.
_TIMEOUT = 120
_H200 = Path(cudnn_ops.__file__).parent / "support" / "devices" / "h200.json"

#: fake_runtime.c has one function of the driver, and the package's stub all others.
_DRIVER = """
#define cuDevicePrimaryCtxGetState quietly_cuDevicePrimaryCtxGetState
#include "libcuda.c"
"""
_PRELUDE = f"""
import ctypes, os, sys, threading, time
from pathlib import Path
import torch
import cudnn_ops
from cudnn_ops import _C

runtime, cudnn = (ctypes.CDLL(path) for path in os.environ["LD_PRELOAD"].split(":"))
cudnn.fake_executed_here.restype = ctypes.c_void_p
runtime.fake_device(b"NVIDIA H200", 90, 132, 232448)
cudnn.fake_gpu(Path({str(_H200)!r}).read_bytes())
# Kernels of this package do nothing either.
integer, pointer = ctypes.c_int, ctypes.c_void_p
callbacks = (
    ctypes.CFUNCTYPE(integer, integer, pointer, pointer, pointer)(lambda *_: 0),
    ctypes.CFUNCTYPE(integer, integer, pointer, integer, integer)(lambda *_: 2),
    ctypes.CFUNCTYPE(None, integer, pointer, integer)(lambda *_: None),
)
runtime.fake_callbacks(*callbacks)
"""


def build_fakes(folder: Path) -> str:
    """What LD_PRELOAD is to name."""
    driver, version = folder / "driver.c", folder / "version.map"
    driver.write_text(_DRIVER)
    version.write_text("libcudnn.so.9 { *; };")
    runtime, cudnn = folder / "fake_runtime.so", folder / "fake_cudnn.so"
    command = ["cc", "-O1", "-w", "-shared", "-fPIC", *include_folders()]
    stub = [f"-I{_ROOT / 'csrc/stub'}", f"-I{_BUILD / 'stub'}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        [*command, *stub, "-o", runtime, _HERE / "fake_runtime.c", driver, "-ldl"], check=True
    )
    real = [f'-DCUDNN="{_C.cudnn_path()}"', "-Wl,-soname,libcudnn.so.9"]
    subprocess.run(
        [*command, *real, f"-Wl,--version-script={version}", "-o", cudnn, _HERE / "fake_cudnn.c"],
        check=True,
    )
    return f"{runtime}:{cudnn}"


def run_program(
    preload: str, program: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs it with what :func:`build_fakes` returned, under options of Python's."""
    return subprocess.run(
        [sys.executable, *options, "-c", _PRELUDE + program],
        env=os.environ | {"LD_PRELOAD": preload, "CUDNN_OPS_CACHE_DIR": ""} | variables,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT,
    )
