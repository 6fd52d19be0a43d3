"""torch.compile: whole graphs, static and dynamic shapes, both backends, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import cudnn_ops
from tests.cases import sdpa as cases
from tests.cases import sdpa_features, varlen
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
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", sdpa_features.SOME, ids=str)
def test_features(case, dynamic, device):
    """With its masks and sinks as inputs; other lengths need no other graph."""

    def run(inputs: list[Tensor], extras: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, key, value = inputs
        options = case.kwargs() | extras
        out, lse = cudnn_ops.scaled_dot_product_attention_with_lse(
            query * 1.5, key, value, **options
        )
        return out.relu(), lse.clamp(min=-9.0).sin()

    counter, graphs = CompileCounterWithBackend("inductor"), 0
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for length, length_kv in ((48, 70), (35, 90)) if dynamic else ((48, 70),):
        one = replace(case, batch=3, length=length, length_kv=length_kv)
        results = []
        for function in (run, compiled):
            inputs = [
                t.requires_grad_() for t in cases.make_inputs(one, _dtype(device), device, seed=1)
            ]
            extras = sdpa_features.make_extras(one, _dtype(device), device, seed=2)
            wanted = inputs
            for name in ("attn_mask", "sinks"):
                if name in extras and extras[name].is_floating_point():
                    wanted = [*wanted, extras[name].requires_grad_()]
            found = function(inputs, extras)
            given = [cases.make_grad_out(one, torch.float32, device).to(found[0].dtype)]
            given.append(given[0][..., 0].float())
            results.append([*found, *torch.autograd.grad(found, wanted, given)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=4e-2, atol=4e-2)
            assert actual.stride() == expected.stride()
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "feature", [{}, {"softcap": 5.0, "sinks": True}, {"dropout_p": 0.3}], ids=str
)
def test_packed(feature, dynamic, device):
    """Offsets are inputs and the longest lengths symbols: other batches need no other graph."""
    one = sdpa_features.Features(1, 4, 2, 0, 0, 64, 64, is_causal=True, **feature)

    def run(leaves: list[Tensor], options: dict[str, Any], starts: Tensor, longest: int) -> Tensor:
        query, key, value = leaves
        return cudnn_ops.varlen_attention(
            query * 1.5,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            causal=True,
            softcap=one.softcap,
            dropout_p=one.dropout_p,
            **options,
        ).relu()

    counter, graphs = CompileCounterWithBackend("inductor"), 0
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for lengths in ((33, 0, 18, 6), (40, 7, 9, 70, 1)) if dynamic else ((33, 0, 18, 6),):
        case = varlen.Packed(lengths, lengths, one)
        results = []
        for function in (run, compiled):
            t = varlen.make(case, _dtype(device), device, seed=1)
            leaves = [tensor.requires_grad_() for tensor in (t.q, t.k, t.v)]
            wanted = leaves
            if one.sinks:
                wanted = [*leaves, t.extras["sinks"].requires_grad_()]
            out = function(leaves, t.extras, t.offsets[0], t.offsets[2])
            results.append([out, *torch.autograd.grad(out, wanted, t.grad_out)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=4e-2, atol=4e-2)
            assert actual.stride() == expected.stride()
        graphs = graphs or counter.frame_count
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
