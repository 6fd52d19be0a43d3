"""torch.library.opcheck on every operator over the whole case list.

It tests the schema, the autograd registration, the fake kernel against the real one, and AOT
dispatch with dynamic shapes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import sdpa as cases
from tests.cases.sdpa import CASES, HOPPER_CASES
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
# AOT dispatch compares by value with a tolerance of its own: float32 where there is a choice.
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def _arguments(case, device):
    return cases.make_inputs(case, _DTYPES[device], device)


def _opcheck(op, arguments, kwargs, device):
    tolerance = 2e-2 if device == "cuda" else None
    torch.library.opcheck(op, arguments, kwargs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, *HOPPER_CASES], ids=str)
def test_sdpa(case, device):
    leaves = [tensor.detach().requires_grad_() for tensor in _arguments(case, device)]
    _opcheck(_ops.sdpa.default, tuple(leaves), case.kwargs(), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, *HOPPER_CASES], ids=str)
def test_sdpa_without_gradient(case, device):
    _opcheck(_ops.sdpa.default, _arguments(case, device), case.kwargs(), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, *HOPPER_CASES], ids=str)
def test_sdpa_with_lse(case, device):
    if case.length_kv == 0:
        # The gradient of a log-sum-exp of nothing: -inf compares as NaN in opcheck's loss.
        leaves = list(_arguments(case, device))
    else:
        leaves = [tensor.detach().requires_grad_() for tensor in _arguments(case, device)]
    _opcheck(_ops.sdpa_with_lse.default, tuple(leaves), case.kwargs(), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, *HOPPER_CASES], ids=str)
def test_sdpa_backward(case, device):
    query, key, value = _arguments(case, device)
    out, lse = _ops.sdpa_with_lse(query, key, value, **case.kwargs())
    grad_out = cases.make_grad_out(case, _DTYPES[device], device)
    arguments = (grad_out, query, key, value, out, lse)
    options = {"is_causal": case.is_causal, "scale": case.scale}
    _opcheck(_ops._sdpa_backward.default, arguments, options, device)


@pytest.mark.parametrize("device", DEVICES)
def test_sdpa_check(device):
    case = replace(CASES[0], heads_kv=2)
    _opcheck(_ops._sdpa_check.default, _arguments(case, device), case.kwargs(), device)
