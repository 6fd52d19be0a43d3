"""Compiled autograd: a forward in eager mode, its backward as one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

import cudnn_ops
from tests.cases import varlen
from tests.cases.derivatives import DERIVATIVES
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES
from tests.test_saved_tensors import HOOKS


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _compiled(backend: str = "aot_eager") -> AbstractContextManager[None]:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))


def _graphs() -> int:
    return counters["compiled_autograd"]["captures"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("derivative", DERIVATIVES, ids=str)
def test_gradients(derivative, device):
    derivative.check(device, _compiled())
    assert _graphs() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_any_size_by_one_graph(device):
    def loss(x: Tensor, weight: Tensor, by: Any) -> Tensor:
        normed = by.rms_norm(x, (64,), weight, 1e-6)
        gate, up = normed.chunk(2, -1)
        gated = cudnn_ops.swiglu(gate, up) if by is cudnn_ops else F.silu(gate) * up
        q = gated.unflatten(-1, (2, 16)).transpose(1, 2)
        return by.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    for i, tokens in enumerate((5, 9, 12, 7)):
        x = torch.randn(2, tokens, 64, device=device)
        leaves = [x.requires_grad_(), torch.ones(64, device=device, requires_grad=True)]
        if device == "cuda":
            leaves = [leaf.detach().half().requires_grad_() for leaf in leaves]
        with _compiled():
            found = torch.autograd.grad(loss(*leaves, cudnn_ops), leaves)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = torch.autograd.grad(loss(*wide, F), wide)
        tolerance = 3e-2 if device == "cuda" else 1e-4
        for grad, exact in zip(found, expected, strict=True):
            error = (grad.double() - exact).abs().max() / exact.abs().max()
            assert error <= tolerance, (tokens, error)
        assert _graphs() <= 1 + (i > 0)  # the second size makes it symbolic


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_of_any_length_by_one_graph(device):
    for lengths in ((3, 5), (4, 6, 7), (9, 2)):
        one = Features(1, 4, 2, 0, 0, 64, 64, is_causal=True, bottom_right=True)
        case = varlen.Packed(lengths, lengths, one, same=True)
        tensors = varlen.make(case, torch.bfloat16, device, seed=1)
        with _compiled():
            actual = varlen.run(case, tensors)
        varlen.check(case, tensors, actual)
    assert _graphs() == 1


def test_a_graph_is_for_its_options_alone():
    x = torch.randn(1, 2, 6, 16, dtype=torch.float64, requires_grad=True)
    for is_causal, scale in ((False, 0.3), (True, 0.3), (True, 0.9), (True, None)):
        options = {"is_causal": is_causal, "scale": scale}
        with _compiled("eager"):
            out = cudnn_ops.scaled_dot_product_attention(x, x, x, **options)
            (found,) = torch.autograd.grad(out.square().sum(), x)
        out = F.scaled_dot_product_attention(x, x, x, **options)
        torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), x)[0])


def test_any_of_the_inputs():
    leaves = [torch.randn(1, 2, 6, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def lse(by: str) -> Tensor:
        if by == "ours":
            return cudnn_ops.scaled_dot_product_attention_with_lse(*leaves)[1]
        return torch.logsumexp(leaves[0] @ leaves[1].mT / 4, -1)

    for wanted in ([leaves[0]], [leaves[1]], leaves[:2]):
        with _compiled():
            found = torch.autograd.grad(lse("ours").sum(), wanted)
        torch.testing.assert_close(found, torch.autograd.grad(lse("formula").sum(), wanted))
    with _compiled():
        found = torch.autograd.grad(lse("ours").sum(), leaves)
    assert not found[2].any()


@contextmanager
def _compiled_with_hooks(name: str) -> Iterator[None]:
    with _compiled(), HOOKS[name]():
        yield


# Not save_on_cpu: torch's own operators cannot be traced through it either.
@pytest.mark.parametrize("hooks", ["contiguous", "strided"])
@pytest.mark.parametrize(
    "derivative", [one for one in DERIVATIVES if one.name in ("lengths", "conv_relu")], ids=str
)
def test_saved_tensors_by_hooks(derivative, hooks):
    derivative.check("cpu", _compiled_with_hooks(hooks))
    assert _graphs() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_samples_of_vmap(device):
    """The graph has the call of all samples."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    x = torch.randn(3, 2, 2, 6, 16, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(16, dtype=dtype, device=device, requires_grad=True)

    def loss(x: Tensor, weight: Tensor, by: Any) -> Tensor:
        def of_one(x: Tensor) -> Tensor:
            q = by.rms_norm(x, (16,), weight, 1e-6)
            return by.scaled_dot_product_attention(q, q, q, is_causal=True)

        if by is cudnn_ops:
            return torch.vmap(of_one)(x).double().square().sum()
        return torch.stack([of_one(sample) for sample in x]).square().sum()

    with _compiled():
        found = torch.autograd.grad(loss(x, weight, cudnn_ops), (x, weight))
    assert _graphs() == 1
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(loss(*wide, F), wide)
    for grad, exact in zip(found, expected, strict=True):
        difference, within = grad.double() - exact, 3e-2 if device == "cuda" else 1e-12
        assert difference.norm() <= within * exact.norm()
        # Which of all numbers is off the most is chance: in torch's own bf16 by up to 4e-2.
        assert difference.abs().max() <= 2 * within * exact.abs().max()


def test_leaves_accumulate_and_a_second_backward_is_an_error():
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    for _ in range(2):
        with _compiled():
            out = cudnn_ops.swiglu(gate, up).sum()
            out.backward()
    (expected,) = torch.autograd.grad((F.silu(gate) * up).sum(), up)
    torch.testing.assert_close(up.grad, 2 * expected)
    with _compiled(), pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
