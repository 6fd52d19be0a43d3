"""What fails is no refusal: it raises, is not remembered, and leaves nothing unfused.

A driver that is made for these tests refuses to load kernels while a file says so, and a library
without a function stands in for a missing NVRTC. Both have to be there before torch is, so each
test is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.wheels import readelf

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("CUDNN_OPS_BUILD_DIR", ROOT / "build"))
#: The package's stub, but for the functions that load kernels. A file FOLDER/fails: each of them
#: is out of memory. FOLDER/fails-once: the next one is, and deletes it. FOLDER/first-fails: those
#: of the first thread that comes are, as soon as there is FOLDER/go.
DRIVER = """
#define cuLibraryLoadData quietly_cuLibraryLoadData
#define cuModuleLoadData quietly_cuModuleLoadData
#define cuModuleLoadDataEx quietly_cuModuleLoadDataEx
#include "libcuda.c"
#undef cuLibraryLoadData
#undef cuModuleLoadData
#undef cuModuleLoadDataEx
#include <pthread.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_t first;
static void come_first(void) { first = pthread_self(); }

static int fails(void) {
  if (access(FOLDER "/fails", F_OK) == 0 || unlink(FOLDER "/fails-once") == 0) return 1;
  if (access(FOLDER "/first-fails", F_OK) != 0) return 0;
  pthread_once(&once, come_first);
  if (!pthread_equal(first, pthread_self())) return 0;
  while (access(FOLDER "/go", F_OK) != 0) usleep(1000);
  return 1;
}

#define LOADER(name) \\
  int name(void** handle) { return fails() ? 2 : quietly_##name(handle); }
LOADER(cuLibraryLoadData)
LOADER(cuModuleLoadData)
LOADER(cuModuleLoadDataEx)
"""
PRELUDE = """
import ctypes, sys, threading, time
from pathlib import Path
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
import cudnn_ops
from cudnn_ops import _C
from cudnn_ops.support import explain

bf16 = torch.bfloat16
CALLS = [
    ("sdpa", [((1, 2, 64, 64), bf16)], {}),
    ("sdpa_backward", [((1, 2, 64, 64), bf16)], {}),
    ("layer_norm", [((64, 512), bf16)], {"weight": True, "bias": True}),
    (
        "conv2d",
        [((2, 32, 14, 14), bf16), ((64, 32, 3, 3), bf16)],
        {"padding": 1, "activation": "silu", "bias": True},
    ),
]

def ask(call):
    op, shapes, options = call
    return explain(op, *shapes, device="h200", **options)

def failure_of(call):
    try:
        answer = ask(call)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{call[0]} did not fail: {answer}")
"""


def run(tmp_path: Path, soname: str, source: str, program: str) -> None:
    """Runs the program beside a library of that name."""
    code, library = tmp_path / "stub.c", tmp_path / "stub.so"
    code.write_text(source)
    command = ["cc", "-w", "-shared", "-fPIC", f'-DFOLDER="{tmp_path}"', f"-Wl,-soname,{soname}"]
    folders = [f"-I{ROOT / 'csrc/stub'}", f"-I{BUILD / 'stub'}"]
    subprocess.run([*command, *folders, "-o", library, code, "-ldl", "-lpthread"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, library, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDNN_OPS_CACHE_DIR": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_failed_once_is_tried_again(tmp_path):
    run(
        tmp_path,
        "libcuda.so.1",
        DRIVER,
        """
fails = Path(sys.argv[2]) / "fails"
fails.touch()
for call in CALLS:
    message = failure_of(call)
    assert "cuLibraryLoadData returned error" in message, message
    assert "EXECUTION_FAILED_CUDA_DRIVER" in message, message
    assert "\\n" not in message and len(message) < 250, message
fails.unlink()
for call in CALLS:
    answer = ask(call)
    assert (answer.supported, answer.reason) == (True, ""), answer
assert cudnn_ops.cache_info().builds == len(CALLS)
""",
    )


def test_a_second_best_engine_is_not_stored(tmp_path):
    """The first engine fails and another serves: other processes need not do with that one."""
    run(
        tmp_path,
        "libcuda.so.1",
        DRIVER,
        """
fails = Path(sys.argv[2]) / "fails-once"
call = CALLS[3]
best = ask(call).engine
cudnn_ops.cache_clear()
cudnn_ops.store_clear()
fails.touch()
assert ask(call).engine != best
assert not fails.exists()
assert cudnn_ops.store_info().files == 0
cudnn_ops.cache_clear()
assert ask(call).engine == best
assert cudnn_ops.store_info().files == 1
""",
    )


def test_a_missing_compiler_is_no_refusal(tmp_path):
    assert torch.version.cuda is not None
    if "libnvrtc" in readelf(Path(torch.__path__[0], "lib", "libtorch_cuda.so"), "--dynamic"):
        pytest.skip("this torch does not start without NVRTC")
    run(
        tmp_path,
        f"libnvrtc.so.{torch.version.cuda.split('.')[0]}",
        "int nothing;",
        """
for call in CALLS:  # the convolution too, which has engines for less than all of it
    if _C.cudnn_version() >= 92100:  # it has a compiler of its own
        assert ask(call).supported
        continue
    message = failure_of(call)
    assert "libnvrtc" in message and "compiles kernels" in message, message
""",
    )


def test_who_waits_tries_when_the_other_thread_failed(tmp_path):
    run(
        tmp_path,
        "libcuda.so.1",
        DRIVER,
        """
folder = Path(sys.argv[2])
(folder / "first-fails").touch()
failures, answers = [], []
one = threading.Thread(target=lambda: failures.append(failure_of(CALLS[0])))
one.start()
time.sleep(1)
other = threading.Thread(target=lambda: answers.append(ask(CALLS[0])))
other.start()
while cudnn_ops.cache_info().hits < 1:  # it waits for the first one
    time.sleep(0.01)
(folder / "go").touch()
one.join()
other.join()
assert "cuLibraryLoadData returned error" in failures[0]
assert answers[0].supported
assert cudnn_ops.cache_info()[:2] == (0, 1)
""",
    )
