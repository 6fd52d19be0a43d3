"""cuDNN's own libraries are loaded while CUDA starts, and not before anybody uses it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import ctypes, os, time
import torch
import cudnn_ops
from cudnn_ops import _C

def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "libcudnn_" in line}

def wait():
    end = time.monotonic() + 60
    while not any("libcudnn_heuristic" in one for one in mapped()):
        assert time.monotonic() < end, mapped()
        time.sleep(0.01)

assert not mapped(), mapped()
"""
#: What `torch.cuda` does once CUDA has started.
STARTED = """
for call, _ in torch.cuda._queued_calls:
    if getattr(call, "func", None) == _C._operator("load_ahead").func:
        call()
"""


def _run(code: str) -> None:
    command = [sys.executable, "-c", SETUP + code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_libraries_are_there_soon_after_the_start():
    _run(
        STARTED + "wait()\nassert {os.path.dirname(one) for one in mapped()} == {os.path.dirname("
        "_C.cudnn_path())}"
    )


def test_whoever_forks_waits_for_them():
    """The child could load nothing otherwise: the loader's lock would be taken for ever."""
    _run(
        STARTED
        + """
child = os.fork()
if child == 0:
    assert any("libcudnn_heuristic" in one for one in mapped())
    ctypes.CDLL("libm.so.6")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_a_process_that_ends_at_once():
    _run(STARTED)


@pytest.mark.gpu
def test_the_first_use_of_cuda_loads_them():
    _run('torch.zeros(1, device="cuda")\nwait()')
