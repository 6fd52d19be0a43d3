"""Plans whose engine is measured: how they are made where the machine has no threads to spare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: No thread can be made while there is FOLDER/full.
NO_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <unistd.h>
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  if (access(FOLDER "/full", F_OK) == 0) return EAGAIN;
  return real(thread, attributes, start, argument);
}
"""
PROGRAM = """
import sys
from pathlib import Path
import torch
import cudnn_ops
from cudnn_ops import _C

full = Path(sys.argv[1]) / "full"
last = torch.channels_last
x = torch.randn(2, 64, 14, 14, device="cuda").bfloat16().contiguous(memory_format=last)
weight = torch.randn(64, 64, 3, 3, device="cuda").bfloat16().contiguous(memory_format=last)
options = {"padding": 1, "activation": "silu"}
with torch.no_grad():
    expected = cudnn_ops.conv2d(x, weight, **options)  # CUDA and cuDNN have their threads by now
    torch.cuda.synchronize()
    cudnn_ops.cache_clear()
    _C.take_measurements()
    cudnn_ops.set_autotune(True)
    full.touch()
    out = cudnn_ops.conv2d(x, weight, **options)
    torch.cuda.synchronize()
    full.unlink()
((_, engines),) = _C.take_measurements()
assert len(engines) > 3
torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-1)
print("measured")
"""


@pytest.mark.gpu
def test_engines_are_compiled_with_the_threads_that_there_are(tmp_path):
    code, library = tmp_path / "no_threads.c", tmp_path / "no_threads.so"
    code.write_text(NO_THREADS)
    command = ["cc", "-shared", "-fPIC", f'-DFOLDER="{tmp_path}"', "-o", library, code, "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "measured", done.stderr[-3000:]
