"""Mistakes raise Python exceptions that name the argument, on every path, and break nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_ops
from tests.cases.sdpa_bad import GOOD, MISTAKES, Mistake
from tests.conftest import DEVICES

OPS = [torch.ops.cudnn_ops.sdpa, torch.ops.cudnn_ops.sdpa_with_lse]


def raises(mistake: Mistake, op, device: str) -> None:
    if mistake.only and device not in mistake.only:
        return  # no mistake there
    arguments = mistake.arguments(device)
    with pytest.raises(mistake.error, match=mistake.match):
        op(*arguments, **mistake.kwargs)


def works(device: str) -> None:
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    assert torch.ops.cudnn_ops.sdpa(good, good, good).shape == GOOD


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_real(mistake, device, op):
    raises(mistake, op, device)
    works(device)


# A torch without CUDA cannot make views of fake CUDA tensors.
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.version.cuda else ["cpu"])
def test_fake(mistake, device):
    with FakeTensorMode():
        raises(mistake, torch.ops.cudnn_ops.sdpa, device)
        works(device)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_meta(mistake):
    raises(mistake, torch.ops.cudnn_ops.sdpa, "meta")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_masks_are_refused(device, requires_grad):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(16, 16, dtype=torch.bfloat16, device=device, requires_grad=requires_grad)
    with pytest.raises(NotImplementedError, match="attn_mask is not supported"):
        cudnn_ops.scaled_dot_product_attention(good, good, good, mask)


@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_one_tensor_on_another_device(wrong):
    with FakeTensorMode():
        tensors = [
            torch.ones(GOOD, dtype=torch.bfloat16, device="cuda" if name == wrong else "cpu")
            for name in ("query", "key", "value")
        ]
        with pytest.raises(ValueError, match=r"query is on .*move them to one device"):
            torch.ops.cudnn_ops.sdpa(*tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_one_tensor_left_on_the_cpu(wrong):
    tensors = [
        torch.ones(GOOD, dtype=torch.bfloat16, device="cpu" if name == wrong else "cuda")
        for name in ("query", "key", "value")
    ]
    with pytest.raises(ValueError, match=r"query is on .*move them to one device"):
        torch.ops.cudnn_ops.sdpa(*tensors)
    works("cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_tensors(device):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    with pytest.raises((ValueError, NotImplementedError), match=r"to_dense|SparseC"):
        torch.ops.cudnn_ops.sdpa(good.to_sparse(), good, good)


@pytest.mark.gpu
def test_backward_checks_what_it_is_given():
    query = torch.ones(GOOD, dtype=torch.bfloat16, device="cuda")
    out, lse = torch.ops.cudnn_ops.sdpa_with_lse(query, query, query)
    backward = torch.ops.cudnn_ops._sdpa_backward
    with pytest.raises(ValueError, match="grad_out must have the shape of the output"):
        backward(out[:, :2], query, query, query, out, lse)
    with pytest.raises(TypeError, match="grad_out"):
        backward(out.float(), query, query, query, out, lse)
    with pytest.raises(ValueError, match="lse must be the float32 tensor"):
        backward(out, query, query, query, out, lse.double())
    works("cuda")


@pytest.mark.gpu
def test_what_cudnn_refuses_comes_with_its_reason():
    big = torch.ones(1, 2, 64, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = torch.ops.cudnn_ops.sdpa(big, big, big)  # cuDNN has a forward for this, no backward
    with pytest.raises(NotImplementedError, match=r"backward: cuDNN .*hidden_dim.*torch.no_grad"):
        out.sum().backward()
    works("cuda")


def test_no_libcudnn_to_be_found(tmp_path):
    """A torch without CUDA on a machine without cuDNN: everything but cuDNN works."""
    program = """
import torch, cudnn_ops
from cudnn_ops import _C
ones = torch.ones(1, 1, 8, 8)
assert torch.ops.cudnn_ops.sdpa(ones, ones, ones).allclose(ones)
try:
    _C.cudnn_version()
except RuntimeError as error:
    assert "pip install nvidia-cudnn" in str(error), error
else:
    raise SystemExit("a libcudnn was found")
assert torch.ops.cudnn_ops.sdpa(ones, ones, ones).allclose(ones)
print("told")
"""
    # A dlopen that knows no libcudnn stands in for a machine without one.
    source = tmp_path / "no_cudnn.c"
    source.write_text(
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void* dlopen(const char* name, int flags) {
  static void* (*real)(const char*, int);
  if (!real) real = dlsym(RTLD_NEXT, "dlopen");
  return real(name && strstr(name, "libcudnn.so") ? "/none/libcudnn.so" : name, flags);
}
"""
    )
    library = tmp_path / "no_cudnn.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "told", done.stderr
