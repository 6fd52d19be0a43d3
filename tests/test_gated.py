"""SwiGLU and GEGLU: results and gradients, layouts, compile, mistakes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
ACTIVATIONS = {
    "swiglu": (cudnn_ops.swiglu, F.silu),
    "geglu": (cudnn_ops.geglu, F.gelu),
    "geglu_tanh": (
        lambda gate, up: cudnn_ops.geglu(gate, up, approximate="tanh"),
        lambda gate: F.gelu(gate, approximate="tanh"),
    ),
}


def halves(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Gate and up: side by side in one projection, dense, or transposed."""
    if layout == "halves":
        both = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64).to(dtype).to(device)
        return [half.requires_grad_() for half in both.chunk(2, -1)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype).to(device) * 3 for _ in range(2)]
    if layout == "transposed" and len(shape) > 1:
        tensors = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in tensors]
    return [tensor.requires_grad_() for tensor in tensors]


def formula(
    activation: Callable[[Tensor], Tensor], leaves: list[Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients in ``dtype``."""
    gate, up = (leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
    result = activation(gate) * up
    return [result, *torch.autograd.grad(result, (gate, up), grad.to(dtype))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_results_and_gradients(name, device, poisoned):
    ours, activation = ACTIVATIONS[name]
    rng = random.Random(5)
    torch.manual_seed(0)
    for _ in range(40):
        shape = (*rng.choice([(), (1,), (33,), (3, 7), (2, 3, 4), (0,)]), rng.randint(1, 200))
        layout = rng.choice(["dense", "halves", "transposed"])
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
        leaves = halves(shape, layout, dtype, device)
        grad = torch.randn(shape, dtype=torch.float64).to(dtype).to(device)
        if rng.random() < 0.3:
            grad = grad[..., :1].expand(shape)
        out = ours(*leaves)
        assert out.is_contiguous()
        found = [out, *torch.autograd.grad(out, leaves, grad)]

        exact, rough = (
            formula(activation, leaves, grad, precision) for precision in (torch.float64, dtype)
        )
        for what, mine, right, other in zip(
            ("out", "gate", "up"), found, exact, rough, strict=True
        ):
            sdpa.check(mine, right, other, f"{name} {shape} {layout} {dtype} {what}")


@pytest.mark.parametrize("device", DEVICES)
def test_strange_strides(device):
    """Of dimensions of size 1 they say nothing; and a flat buffer starts anywhere."""
    memory = torch.randn(1000, device=device)
    for gate in (
        memory.as_strided((2, 1, 3, 8), (100, 100, 16, 1)),
        memory.as_strided((2, 1, 3, 8), (100, 7, 16, 1), 1),
        memory.as_strided((1, 3, 1, 8), (5, 30, 1, 1)),
        memory.as_strided((4, 1), (9, 3)),
        memory[1:65].view(8, 8),
    ):
        torch.testing.assert_close(cudnn_ops.swiglu(gate, gate), F.silu(gate) * gate)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    gate, up = halves((3, 16), "halves", torch.float32, device)
    for activation in range(3):
        torch.library.opcheck(_ops._gated.default, (gate, up, activation))
        torch.library.opcheck(_ops._gated_.default, (gate.detach().clone(), up, activation))
        arguments = (torch.ones_like(gate).detach(), gate.detach(), up.detach(), activation)
        torch.library.opcheck(_ops._gated_backward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_in_the_place_of_the_gate(device):
    for shape, dtype in itertools.product(
        ((5, 24), (3, 7), (1, 1), (0, 8), (257, 4096)), (torch.float32, torch.bfloat16)
    ):
        gate, up = (x.detach() for x in halves(shape, "dense", dtype, device))
        for activation in range(3):
            expected = _ops._gated.default(gate, up, activation)
            own = gate.clone()
            assert _ops._gated_.default(own, up, activation) is None
            assert torch.equal(own, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    torch._dynamo.reset()

    def step(gate, up):
        return (cudnn_ops.swiglu(gate * 2, up) + cudnn_ops.geglu(gate, up)).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (5, 8):
        leaves = halves((rows, 24), "halves", torch.float32, device)
        results = []
        for function in (compiled, step):
            out = function(*leaves)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes(device):
    x = torch.ones(3, 8, device=device)
    with pytest.raises(ValueError, match=r"swiglu: gate and up must be of one shape"):
        cudnn_ops.swiglu(x, x[:, :4])
    with pytest.raises(TypeError, match="geglu: gate and up must be of one dtype"):
        cudnn_ops.geglu(x, x.half())
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", got "fast"'):
        cudnn_ops.geglu(x, x, approximate="fast")
    with pytest.raises(TypeError, match=r"^cudnn_ops\.swiglu: gate and up must be of one dtype"):
        cudnn_ops.swiglu(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"^cudnn_ops\.swiglu: up must be a tensor, got 1.0$"):
        cudnn_ops.swiglu(x, 1.0)
    with pytest.raises(TypeError, match=r"^cudnn_ops\.swiglu: gate and up must be tensors"):
        cudnn_ops.swiglu(x, None)
    with pytest.raises(TypeError, match=r"^cudnn_ops\.geglu: approximate must be a string, got T"):
        cudnn_ops.geglu(x, x, approximate=True)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cudnn_ops.swiglu(leaf, x).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of swiglu"):
        grad.sum().backward()
