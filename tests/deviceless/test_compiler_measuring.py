"""What the compile backend measures, on a GPU that is not there: autograd gives it a thread."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import run_with_fake_runtime

#: As inductor, which compiles a backward under Dynamo's lock when it is first called. Dynamo holds
#: it meanwhile: it is compiling the graph that something is measured for.
BACKWARD = """
import ctypes
import faulthandler
import sys

faulthandler.dump_traceback_later(60, exit=True)  # of a deadlock

import torch
from torch._dynamo.convert_frame import compile_lock
from cudnn_ops.compiler import measuring

ctypes.CDLL(sys.argv[1]).fake_device(b"NVIDIA H200", 90, 132, 232448)

class Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(16)

    @staticmethod
    def backward(ctx, grad):
        with compile_lock:
            return grad.view(4, 4)

x = torch.empty(4, 4, device="cuda", requires_grad=True)
with compile_lock, measuring.outside_of_compilation():
    torch.autograd.grad([Compiled.apply(x)], [x], [torch.empty(16, device="cuda")])
assert torch._C._is_multithreading_enabled()
"""


@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_a_backward_is_compiled_while_a_graph_is(runtime, tmp_path):
    done = run_with_fake_runtime(tmp_path, "-c", BACKWARD)
    assert done.returncode == 0, done.stderr
