"""Counts of batches: which of them a graph raises at once, and that they are raised."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cases.compiler import Rewritten

C = 6
_AT_ONCE = torch.ops.aten._foreach_add_.Scalar


def _norms(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.BatchNorm2d(C) for _ in range(count))).train()


def _x() -> Tensor:
    return torch.randn(3, C, 5, 4)


def _raised(function: Callable[..., Tensor], *modules: nn.Module) -> list[int]:
    """How many counts each launch raises; all are what they are without the compiler."""
    other = copy.deepcopy(modules)
    x = _x()
    found = Rewritten(lambda given: function(given, *modules), ["batch_norm"])
    for _ in range(2):
        torch.testing.assert_close(found(x), function(x, *other))
    for mine, right in zip(modules, other, strict=True):
        for name, buffer in right.named_buffers():
            torch.testing.assert_close(mine.get_buffer(name), buffer)
    (graph,) = found.graphs
    return [len(n.args[0]) for n in graph.graph.find_nodes(op="call_function", target=_AT_ONCE)]


def test_all_at_once():
    assert _raised(lambda x, norms: norms(x), _norms(4)) == [4]


def test_one_stays():
    assert _raised(lambda x, norms: norms(x), _norms(1)) == []


def test_a_norm_that_is_called_twice_counts_twice():
    norms = _norms(3)
    found = _raised(lambda x, norms: norms[0](norms(x)), norms)
    assert found == [2]
    assert norms[0].num_batches_tracked == 4


def test_a_count_that_is_read_stays():
    def function(x: Tensor, norms: nn.Sequential) -> Tensor:
        return norms(x) + norms[1].num_batches_tracked

    assert _raised(function, _norms(3)) == [2]


def test_under_other_switches_they_are_others():
    def function(x: Tensor, norms: nn.Sequential) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = norms[1](norms[0](x))
        return norms[3](norms[2](x))

    assert _raised(function, _norms(4)) == [2, 2]


class Counts(nn.Module):
    """What else is added to what is no count, or not by 1."""

    steps: Tensor
    seen: Tensor
    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x: Tensor, by: int) -> Tensor:
        self.steps.add_(by)
        self.seen.add_(1)
        self.sum.add_(1)
        return x + 1


@pytest.mark.parametrize(("by", "counts"), [(1, [3]), (2, [2])])
def test_others_that_are_raised(by, counts):
    assert _raised(lambda x, norms, more: more(norms(x), by), _norms(2), Counts()) == counts


@pytest.mark.parametrize("backend", ["cudnn_ops", "inductor"])
def test_compiled_in_training(backend):
    norms, x = _norms(3), _x().requires_grad_()
    options = {"swap": ["batch_norm"]} if backend == "cudnn_ops" else None
    compiled = torch.compile(norms, backend=backend, options=options)
    for _ in range(3):
        compiled(x).sum().backward()
    assert [norm.num_batches_tracked.item() for norm in norms] == [3, 3, 3]
