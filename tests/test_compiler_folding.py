"""Batch norms that are folded into convolutions, at once where they can be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor

from cudnn_ops.compiler.patterns import folding
from cudnn_ops.compiler.patterns.folding import folded, folded_together
from tests.cases.compiler import Rewritten

C = 4


def _blocks(count: int, channels: int = C, **of_norm: Any) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(count):
        norm = nn.BatchNorm2d(channels, **of_norm)
        for tensor in (norm.running_mean, norm.running_var, *norm.parameters()):
            if tensor is not None:
                nn.init.uniform_(tensor, 0.5, 1.5)
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=number % 2 == 0)
        layers += [conv, norm, nn.ReLU()]
    return nn.Sequential(*layers).double().eval()


def _targets(found: Rewritten) -> list[object]:
    return [node.target for graph in found.graphs for node in graph.graph.nodes]


def _check(model: nn.Module, x: Tensor) -> Rewritten:
    """Compiled, it gives the results and the gradients that it gives without."""
    torch._dynamo.reset()
    mine = copy.deepcopy(model)
    found = Rewritten(mine)
    for function in (model, found):
        function(x).sin().sum().backward()
    torch.testing.assert_close(found(x), model(x))
    for one, other in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    return found


def test_all_at_once():
    found = _check(_blocks(5), torch.randn(2, C, 6, 5, dtype=torch.float64))
    assert _targets(found).count(folded_together) == 1
    assert folded not in _targets(found)


def test_no_more_than_shows(monkeypatch):
    """What is folded early is kept for longer."""
    of_one = C * C * 9 * 8
    monkeypatch.setattr(folding, "MOST_BYTES", 2 * of_one)
    found = _check(_blocks(5), torch.randn(2, C, 6, 5, dtype=torch.float64))
    assert _targets(found).count(folded_together) == 2
    assert _targets(found).count(folded) == 1


@pytest.mark.parametrize(("rows", "groups"), [(6, 5), (30, 5), (90, 3), (150, 2), (400, 1)])
def test_more_beside_large_images(rows, groups, monkeypatch):
    """A share of the largest image, of which 5 weights of the same size are several parts."""
    of_one = C * C * 9 * 8
    monkeypatch.setattr(folding, "LEAST_BYTES", of_one)
    x = torch.randn(2, C, rows, 20, dtype=torch.float64)
    found = _check(_blocks(5), x)
    targets = _targets(found)
    assert targets.count(folded_together) + targets.count(folded) == groups


def test_without_a_bias_each_is_its_own():
    found = _check(_blocks(3, affine=False), torch.randn(2, C, 6, 5, dtype=torch.float64))
    assert _targets(found).count(folded) == 3


def test_weights_of_several_dtypes_are_not_mixed():
    graph = fx.Graph()
    groups = [
        [
            _folded_node(graph, dtype, of_norm)
            for dtype, of_norm in ((torch.half, torch.half), (torch.half, torch.float))
        ]
        for _ in range(2)
    ]
    nodes = [node for group in groups for node in group]
    assert list(folding._groups(graph, dict.fromkeys(nodes), set())) == [[nodes[0], nodes[2]]]


def test_sharded_weights_are_each_their_own():
    graph = fx.Graph()
    nodes = [_folded_node(graph, torch.half, torch.half) for _ in range(3)]
    for name, value in nodes[1].args[0].meta.items():
        nodes[1].args[0].meta[name] = TwoTensor(value, value.clone())
    assert list(folding._groups(graph, dict.fromkeys(nodes), set())) == [[nodes[0], nodes[2]]]


def _folded_node(graph: fx.Graph, dtype: torch.dtype, of_norm: torch.dtype) -> fx.Node:
    tensors = []
    for place in range(6):
        node = graph.placeholder(f"x_{len(graph.nodes)}")
        size = (C, C, 3, 3) if place == 0 else (C,)
        node.meta["example_value"] = torch.ones(size, dtype=dtype if place < 2 else of_norm)
        tensors.append(node)
    return graph.call_function(folded, (*tensors, 1e-5))


@pytest.mark.parametrize("changed", [False, True])
def test_what_changes_is_folded_where_it_was(changed):
    model = _blocks(3)

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[:3](x)
            if changed:
                self.blocks[4].running_mean.add_(1.0)
            return self.blocks[3:](x)

    x = torch.randn(2, C, 6, 5, dtype=torch.float64)
    mine = Changing()
    torchs = copy.deepcopy(mine)
    torch._dynamo.reset()
    found = Rewritten(mine)
    with torch.no_grad():
        torch.testing.assert_close(found(x), torchs(x))
    assert _targets(found).count(folded_together) == 1
    assert _targets(found).count(folded) == (1 if changed else 0)


@pytest.mark.gpu
def test_on_a_gpu():
    # Few channels may all be dead behind a ReLU, and say more of chance than of rounding.
    channels = 32
    model = _blocks(6, channels).to("cuda")
    x = torch.randn(4, channels, 32, 24, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        right = model(x)
        model.bfloat16()
        x = x.bfloat16()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="cudnn_ops", options={"swap": ["convolution"]})
        mine, torchs = (float((one(x) - right).norm() / right.norm()) for one in (compiled, model))
    assert mine <= 2 * torchs + 1e-3
