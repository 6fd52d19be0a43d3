"""torch.compile: whole graphs, static and dynamic shapes, both backends, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import cudnn_ops
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case
from tests.conftest import DEVICES

# No two sizes alike by accident: the compiler would take them for one symbol.
CASES = [
    Case(5, 4, 2, 40, 56, 64, 64, is_causal=True),
    Case(5, 4, 4, 33, 34, 32, 64, layout="bhsd"),
    Case(5, 4, 1, 17, 24, 64, 64, layout="packed", scale=0.3),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _block(case: Case):
    """Attention between things that a compiler fuses."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = cudnn_ops.scaled_dot_product_attention(query * 1.5, key.sin(), value, **case.kwargs())
        return out.transpose(1, 2).flatten(2).relu()

    return run


def _compare(case: Case, compiled, device: str, seed: int) -> None:
    inputs = cases.make_inputs(case, _dtype(device), device, seed)
    eager_leaves = [t.detach().requires_grad_() for t in inputs]
    leaves = [t.detach().requires_grad_() for t in inputs]
    expected, actual = _block(case)(*eager_leaves), compiled(*leaves)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert actual.stride() == expected.stride()
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad)
    for leaf, eager_leaf in zip(leaves, eager_leaves, strict=True):
        torch.testing.assert_close(leaf.grad, eager_leaf.grad, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fullgraph(case, dynamic, backend, device):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_block(case), fullgraph=True, dynamic=dynamic, backend=counter)
    _compare(case, compiled, device, seed=0)
    if not dynamic:
        return
    # Other lengths and another batch need no other graph.
    graphs = counter.frame_count
    for seed, (batch, length, length_kv) in enumerate([(3, 18, 80), (7, 50, 9)]):
        other = replace(case, batch=batch, length=length, length_kv=length_kv)
        _compare(other, compiled, device, seed)
    assert counter.frame_count == graphs


@pytest.mark.parametrize("device", DEVICES)
def test_the_log_sum_exp_in_a_compiled_loss(device):
    case = CASES[0]
    inputs = cases.make_inputs(case, _dtype(device), device)

    def loss(*leaves: Tensor) -> Tensor:
        out, lse = torch.ops.cudnn_ops.sdpa_with_lse(*leaves, **case.kwargs())
        return out.float().square().sum() + lse.sum()

    eager = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.compile(loss, fullgraph=True)(*leaves).backward()
    for leaf, expected in zip(leaves, eager, strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_in_a_compiled_graph(device):
    case = CASES[0]
    inputs = cases.make_inputs(case, torch.float32, device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(*tensors: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return torch.ops.cudnn_ops.sdpa(*tensors, **case.kwargs())

    assert run(*inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_are_told_at_compile_time(device):
    query, key, value = cases.make_inputs(CASES[0], _dtype(device), device)
    compiled = torch.compile(
        lambda *tensors: torch.ops.cudnn_ops.sdpa(*tensors), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="pass enable_gqa=True"):
        compiled(query, key, value)


@pytest.mark.parametrize("device", DEVICES)
def test_unbacked_lengths(device):
    """A length that depends on data stays symbolic in the graph."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(tokens: Tensor, count: Tensor) -> Tensor:
        length = count.item()
        torch._check(length >= 2)
        torch._check(length <= tokens.shape[1])
        query = tokens[:, :length].unflatten(-1, (4, 16)).transpose(1, 2)
        return torch.ops.cudnn_ops.sdpa(query, query, query)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        tokens = torch.randn(2, 12, 64, dtype=_dtype(device), device=device)
        for count in (5, 9):
            assert run(tokens, torch.tensor(count)).shape == (2, 4, count, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device):
    tensor = torch.randn(3, 2, 4, 16, 32, device=device, dtype=_dtype(device))

    def loss(query: Tensor) -> Tensor:
        return torch.ops.cudnn_ops.sdpa(query, query, query).square().sum()

    batched = torch.vmap(torch.func.grad(loss))(tensor)
    for one, expected in zip(batched, tensor, strict=True):
        torch.testing.assert_close(one, torch.func.grad(loss)(expected), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_export(device):
    case = CASES[0]
    inputs = cases.make_inputs(case, _dtype(device), device)

    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.ops.cudnn_ops.sdpa(query, key, value, **case.kwargs())

    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        Attention(), inputs, dynamic_shapes=[{0: batch}, {0: batch}, {0: batch}]
    )
    torch.testing.assert_close(exported.module()(*inputs), Attention()(*inputs))
