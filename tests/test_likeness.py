"""Fake kernels and replacements of layers that are alike are run once, and made again from that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cudnn_ops.compiler import running
from cudnn_ops.compiler.nodes import memory_of_result
from cudnn_ops.ops.likeness import Unknown, described, key_of, made, tensors_in
from cudnn_ops.ops.remembered import remembered
from tests.cases.compiler import Rewritten


class Counted:
    """A fake kernel that remembers, and how often it was computed."""

    def __init__(self) -> None:
        self.count = 0
        self.kernel = remembered(self._compute)

    def _compute(self, x: Tensor, factor: Any, *, bias: Tensor | None = None) -> Any:
        self.count += 1
        if x.shape[0] == 0:
            raise ValueError("empty")
        rows = x.new_empty(x.shape[0], dtype=torch.float64)
        return x.new_empty(x.shape[::-1]).t(), rows if bias is None else bias.new_empty(0)


def _strides_of(results: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in results]


def test_a_kernel_computes_each_kind_of_call_once():
    counted = Counted()
    with FakeTensorMode():
        first, second = torch.empty(4, 3), torch.empty(4, 3)
        expected, results = counted.kernel(first, 2), counted.kernel(second, 2)
        assert counted.count == 1
        assert _strides_of(results) == _strides_of(expected)
        assert all(isinstance(x, FakeTensor) for x in results)
        memory = {x.untyped_storage()._cdata for x in (first, second, *expected, *results)}
        assert len(memory) == 6
        # Again for what differs in anything.
        others: list[tuple[Any, ...]] = [
            (torch.empty(4, 3, dtype=torch.float16), 2),
            (torch.empty(3, 4).t(), 2),
            (torch.empty(5, 3)[1:], 2),
            (first, 2.0),
            (first, True),
        ]
        for count, args in enumerate(others, 2):
            counted.kernel(*args)
            assert counted.count == count
        counted.kernel(first, 2, bias=second)
        assert counted.count == len(others) + 2


def test_what_a_kernel_refuses_it_refuses_again():
    counted = Counted()
    with FakeTensorMode():
        for count in (1, 2):
            with pytest.raises(ValueError, match="empty"):
                counted.kernel(torch.empty(0, 3), 1)
            assert counted.count == count


def test_what_is_refused_depends_on_determinism():
    counted = Counted()
    with FakeTensorMode():
        x = torch.empty(4, 3)
        counted.kernel(x, 1)
        torch.use_deterministic_algorithms(True)
        try:
            counted.kernel(x, 1)
        finally:
            torch.use_deterministic_algorithms(False)
    assert counted.count == 2


def test_sizes_that_are_symbols_stay_symbols():
    counted = Counted()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(4, 3), symbolic_context=context)
    with mode:
        for count in (1, 2):
            out, _ = counted.kernel(x, 1)
            assert counted.count == count
            assert isinstance(out.shape[0], torch.SymInt)


def test_views_are_of_the_tensors_that_they_are_of():
    with FakeTensorMode():
        sources = [torch.empty(4, 6), torch.empty(3, 5)]
        view, fresh = sources[1][1:, 2:], torch.empty(7)
        values = [view, (fresh, fresh[3:])]
        description = described(values, list(sources))
        others = [torch.empty(4, 6), torch.empty(3, 5)]
        again = made(description, list(others))
    assert _strides_of(tensors_in(again)) == _strides_of(tensors_in(values))
    memory = [x.untyped_storage()._cdata for x in (*others, *tensors_in(again))]
    assert memory[2] == memory[1] != memory[0]
    assert memory[3] == memory[4]
    assert memory[3] not in memory[:2]


def test_sparse_tensors_have_no_key():
    """Nor a memory that could be asked for."""
    with FakeTensorMode():
        sparse = torch.empty(4, 6, layout=torch.sparse_coo)
    with pytest.raises(Unknown):
        key_of([sparse])


def test_which_tensors_have_one_memory_counts():
    with FakeTensorMode():
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        assert key_of([x, y]) == key_of([y, x]) != key_of([x, x.view(4, 6)])
        with pytest.raises(Unknown):
            key_of([x, object()])


def test_layers_that_are_alike_have_memory_of_their_own(monkeypatch):
    calls = []
    original = running._called

    def called(node: Any, *args: Any) -> Any:
        calls.append(node.target)
        return original(node, *args)

    def norms(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return F.layer_norm(x, (8,), w), F.layer_norm(y, (8,), w), F.layer_norm(y[1:], (8,), w)

    monkeypatch.setattr(running, "_called", called)
    inputs = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)
    found = Rewritten(norms)
    for result, expected in zip(found(*inputs), norms(*inputs), strict=True):
        torch.testing.assert_close(result, expected)
    assert found.swapped == ["layer_norm"] * 3
    assert calls.count(found.ours[0].target) == 2
    memory = [memory_of_result(node) for node in found.ours]
    assert len(set().union(*memory)) == 3
    shapes = [tuple(node.meta["example_value"].shape) for node in found.ours]
    assert shapes == [(2, 5, 8), (2, 5, 8), (1, 5, 8)]
