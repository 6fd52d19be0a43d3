"""Selective activation checkpointing: what checkpoint_ops names is computed once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cudnn_ops
from tests.conftest import DEVICES


class Count(TorchDispatchMode):
    """How often each operator ran: what a checkpoint hands out again does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def _dense(x: Tensor) -> Tensor:
    heads = cudnn_ops.rms_norm(x, x.shape[-1:]).unflatten(-1, (2, -1)).transpose(1, 2)
    out = cudnn_ops.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
    return out.transpose(1, 2).flatten(2).sin()


def _packed(x: Tensor) -> Tensor:
    heads = cudnn_ops.rms_norm(x, x.shape[-1:]).flatten(0, 1).unflatten(-1, (2, -1))
    starts = torch.arange(0, heads.shape[0] + 1, x.shape[1], device=x.device, dtype=torch.int32)
    return cudnn_ops.varlen_attention(heads, heads, heads, starts, starts, 8, 8, 0.5).sin()


def _in_fp8(x: Tensor) -> Tensor:
    heads = cudnn_ops.rms_norm(x, x.shape[-1:]).unflatten(-1, (2, 16)).transpose(1, 2)
    return cudnn_ops.scaled_dot_product_attention_fp8(heads, heads, heads, is_causal=True).sin()


def _image(x: Tensor) -> Tensor:
    image = cudnn_ops.rms_norm(x, x.shape[-1:]).unflatten(-1, (8, 4))
    weight = image.repeat(3, 1, 1, 1)[:8, :, :3, :3]
    return cudnn_ops.conv2d(image, weight, padding=1, activation="silu").sin()


#: Each with the operator that runs where a gradient is needed.
BLOCKS = [
    (_dense, "sdpa_with_lse"),
    (_packed, "varlen_attention_with_lse"),
    (_in_fp8, "_sdpa_fp8"),
    (_image, "_conv"),
]


def _input(device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
    return x.to(device, dtype).requires_grad_()


def _gradient(function: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.autograd.grad(function(x).float().square().sum(), x)[0]


def _selective(block: Any, kept: list[Any]) -> Any:
    context_fn = partial(create_selective_checkpoint_contexts, kept)
    return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=context_fn)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block", "operator"), BLOCKS)
def test_eager(block, operator, device):
    x = _input(device)
    expected = _gradient(block, x)
    for kept, calls in (([], 2), (cudnn_ops.checkpoint_ops(), 1)):
        with Count() as count:
            found = _gradient(_selective(block, kept), x)
        assert count.calls[operator] == calls
        assert count.calls["_norm"] == 2
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_dropout_keeps_its_numbers_without_torchs_help():
    """The generator's state is kept: torch need not put the generator back."""
    x = _input("cpu")
    expected = _gradient(_dense, x)
    context_fn = partial(create_selective_checkpoint_contexts, cudnn_ops.checkpoint_ops())
    found = _gradient(
        lambda x: checkpoint(
            _dense, x, use_reentrant=False, context_fn=context_fn, preserve_rng_state=False
        ),
        x,
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block", "operator"), BLOCKS)
def test_compiled(block, operator, device):
    torch._dynamo.reset()
    x = _input(device)
    for kept, calls in (([], 2), (cudnn_ops.checkpoint_ops(), 1)):
        with Count() as count:
            compiled = torch.compile(_selective(block, kept), fullgraph=True, backend="aot_eager")
            _gradient(compiled, x)  # compiles, which calls fake kernels
            count.calls.clear()
            found = _gradient(compiled, x)
        assert count.calls[operator] == calls
        torch.testing.assert_close(found, _gradient(block, x), rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
