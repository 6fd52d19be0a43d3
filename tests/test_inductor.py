"""Inductor knows our operators before it meets them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import exc, lowering

import cudnn_ops
import cudnn_ops.distributed
from cudnn_ops.ops import inductor

_ops = torch.ops.cudnn_ops


def test_every_operator_with_kernels_is_known():
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = {name for name in kernels if name.startswith("cudnn_ops::")}
    found = {operator.name(): operator for operator in inductor.operators()}
    assert len(names) > 40
    assert "cudnn_ops::_ring_attention" in names
    for name in names:
        operator = found[name]
        assert operator in lowering.lowerings, name
        # As eager mode gives them, which is what kernels and fake kernels agree on.
        constraint = lowering.maybe_layout_constraints(operator)
        assert constraint is lowering.constrain_to_fake_tensors, name


def test_a_module_that_is_being_imported():
    inductor.register(ModuleType("lowering"))


def test_once_is_enough():
    known = lowering.lowerings[_ops.sdpa.default]
    inductor.register(lowering)
    assert lowering.lowerings[_ops.sdpa.default] is known


@pytest.mark.parametrize("trains", [False, True])
def test_an_operator_behind_many_layers(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of ours ends the forward; the gradient of the gate before all layers, the backward."""

    def write(*_: Any) -> str:
        raise AssertionError("a message is written, of all that was computed before")

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(write))
    torch._dynamo.reset()
    first, weight = torch.randn(16, requires_grad=trains), torch.randn(16, 16) / 4

    def model(x: Tensor) -> Tensor:
        gate = cudnn_ops.swiglu(x, first.expand_as(x)) if trains else x
        for _ in range(60):
            gate = gate + torch.mm(gate, weight).tanh()
        return cudnn_ops.rms_norm(gate, (16,), first)

    x = torch.randn(3, 16)
    result = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
    if trains:
        (grad,) = torch.autograd.grad(result.sum(), first)
        (right,) = torch.autograd.grad(model(x).sum(), first)
        torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-2)
