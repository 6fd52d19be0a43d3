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
        op(*arguments, **mistake.options(device))


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
def test_slopes_have_no_gradient(device):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    slopes = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"no gradient for alibi_slopes; detach"):
        torch.ops.cudnn_ops.sdpa(good, good, good, alibi_slopes=slopes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[17, 3], [-1, 3]])
def test_lengths_are_checked_on_a_cpu_and_when_asked(lengths, device, monkeypatch):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    if device == "cuda":
        monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    for name in ("seq_lens_q", "seq_lens_kv"):
        with pytest.raises(ValueError, match=rf"{name} holds lengths from .*the tensors have 16"):
            torch.ops.cudnn_ops.sdpa(good, good, good, **{name: lengths})
        torch.ops.cudnn_ops.sdpa(good, good, good, **{name: lengths.clamp(0, 16)})


def test_fake_tensors_have_no_lengths_to_be_checked(monkeypatch):
    monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    with FakeTensorMode():
        good = torch.ones(GOOD, dtype=torch.bfloat16)
        lengths = torch.tensor([17, 3], dtype=torch.int32)
        torch.ops.cudnn_ops.sdpa(good, good, good, seq_lens_kv=lengths)
        torch.ops.cudnn_ops.varlen_attention(**packed("cpu"))


_BOTH = [
    cudnn_ops.scaled_dot_product_attention,
    cudnn_ops.scaled_dot_product_attention_with_lse,
]
_BOTH_PACKED = [cudnn_ops.varlen_attention, cudnn_ops.varlen_attention_with_lse]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", _BOTH, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "name", ["seq_lens_q", "seq_lens_kv", "alibi_slopes", "sinks", "rng_state"]
)
def test_lists_for_tensors(name, function, device):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    match = rf"^cudnn_ops.{function.__name__}: {name} must be a tensor .*, got a list: torch.tensor"
    with pytest.raises(TypeError, match=match):
        function(good, good, good, **{name: [3, 4]})
    with pytest.raises(RuntimeError, match="enable_gqa"):  # the others keep torch's words
        function(good, good, good, enable_gqa="yes", bottom_right=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", _BOTH_PACKED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lists_for_tensors_of_packed_sequences(name, function, device):
    match = rf"^cudnn_ops.{function.__name__}: {name} must be a tensor .*, got a list: torch.tensor"
    with pytest.raises(TypeError, match=match):
        function(**packed(device, **{name: [0, 4, 9]}))
    if name.startswith("cu"):
        with pytest.raises(TypeError, match=match):
            function(*packed(device, **{name: [0, 4, 9]}).values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [*_BOTH, *_BOTH_PACKED], ids=lambda f: f.__name__)
def test_one_number_for_a_window(function, device):
    good = torch.ones(GOOD, dtype=torch.bfloat16, device=device)
    tensors = (good, good, good) if function in _BOTH else packed(device).values()
    match = r"window_size must be \(left, right\), got 128: \(128, 0\)"
    with pytest.raises(TypeError, match=match):
        function(*tensors, window_size=128)
    function(*tensors, window_size=(128, 0))


# --- packed sequences -------------------------------------------------------------------


def packed(device: str, **changes):
    """The arguments of a good call, but for the changes."""
    made = {
        "q": torch.ones(9, 4, 64, dtype=torch.bfloat16, device=device),
        "k": torch.ones(9, 2, 64, dtype=torch.bfloat16, device=device),
        "v": torch.ones(9, 2, 64, dtype=torch.bfloat16, device=device),
        "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32, device=device),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    return made | {
        name: change(made.get(name)) if callable(change) else change
        for name, change in changes.items()
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": lambda t: t.unsqueeze(0)}, ValueError, r"q must be \[tokens, heads, head size\]"),
        ({"k": lambda t: t[:8]}, ValueError, "tokens and heads must be equal"),
        ({"v": lambda t: t[:, :1]}, ValueError, "tokens and heads must be equal"),
        ({"q": lambda t: t[:, :3]}, ValueError, "q has 3 heads and k 2"),
        ({"q": lambda t: t[..., :32]}, ValueError, "q has head size 32 and k 64"),
        ({"k": lambda t: t.half()}, TypeError, "cast them to one dtype"),
        ({"cu_seqlens_q": lambda t: t.float()}, ValueError, "cu_seqlens_q must be an int32 or"),
        ({"cu_seqlens_q": lambda t: t[None]}, ValueError, "cu_seqlens_q must be an int32 or"),
        (
            {"cu_seqlens_k": lambda t: t[[0, 2]], "max_seqlen_k": 9},
            ValueError,
            "of 2 sequences and cu_seqlens_k of 1",
        ),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must not be negative"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0"),
        ({"k": lambda t: t[:, :0], "v": lambda t: t[:, :0]}, ValueError, "q has 4 heads and k 0"),
        ({"window_size": (-3, 0)}, ValueError, "window_size must be"),
        ({"softcap": -1.0}, ValueError, "softcap must be"),
        ({"softmax_scale": float("inf")}, ValueError, "scale must be a finite"),
        (
            {"seqused_k": lambda _: torch.ones(3, dtype=torch.int32)},
            ValueError,
            "seqused_k must be",
        ),
    ],
)
def test_packed(changes, error, match, device):
    with pytest.raises(error, match=match):
        torch.ops.cudnn_ops.varlen_attention(**packed(device, **changes))
    torch.ops.cudnn_ops.varlen_attention(**packed(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cu_seqlens_q": [1, 4, 9]}, "cu_seqlens_q must start at 0, got 1"),
        ({"cu_seqlens_k": [0, 4, 8]}, "cu_seqlens_k ends at 8, and there are 9 tokens"),
        ({"cu_seqlens_k": [0, 4, 10]}, "cu_seqlens_k ends at 10, and there are 9 tokens"),
        ({"cu_seqlens_q": [0, 10, 9]}, "cu_seqlens_q must not decrease, and does by 1"),
        ({"cu_seqlens_q": [0, -1, 9]}, "cu_seqlens_q must not decrease, and does by 1"),
        ({"max_seqlen_k": 4}, "max_seqlen_k is 4, and there is a sequence of 5 tokens"),
        ({"seqused_q": [4, 6]}, "seqused_q must lie between 0 and the length"),
        ({"seqused_q": [4, 4], "max_seqlen_q": 3}, "max_seqlen_q is 3, and seqused_q has 4"),
        ({"seqused_k": [-1, 5]}, "seqused_k must lie between 0 and the length"),
    ],
    ids=str,
)
def test_offsets_are_checked_on_a_cpu_and_when_asked(changes, match, device, monkeypatch):
    changes = {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        if isinstance(value, list)
        else value
        for name, value in changes.items()
    }
    if device == "cuda":
        monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    with pytest.raises(ValueError, match=match):
        torch.ops.cudnn_ops.varlen_attention(**packed(device, **changes))
    torch.ops.cudnn_ops.varlen_attention(**packed(device))


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
