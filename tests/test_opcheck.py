"""torch.library.opcheck on every operator over the whole case list.

It tests the schema, the autograd registration, the fake kernel against the real one, and AOT
dispatch with dynamic shapes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import sdpa as cases
from tests.cases import sdpa_features, varlen
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


def _with_features(case, device):
    """Inputs that want a gradient, as do a bias and sinks; the other options."""
    leaves = [tensor.detach().requires_grad_() for tensor in _arguments(case, device)]
    extras = sdpa_features.make_extras(case, _DTYPES[device], device, seed=1)
    for name in ("attn_mask", "sinks"):
        if name in extras and extras[name].is_floating_point():
            extras[name].requires_grad_()
    return tuple(leaves), case.kwargs() | extras


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", sdpa_features.SOME, ids=str)
def test_sdpa_features(case, device):
    leaves, options = _with_features(case, device)
    _opcheck(_ops.sdpa.default, leaves, options, device)
    _opcheck(_ops.sdpa_with_lse.default, tuple(t.detach() for t in leaves), options, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", sdpa_features.SOME, ids=str)
def test_sdpa_features_backward(case, device):
    leaves, options = _with_features(case, device)
    options = {n: o.detach() if torch.is_tensor(o) else o for n, o in options.items()}
    inputs = tuple(leaf.detach() for leaf in leaves)
    out, lse = _ops.sdpa_with_lse(*inputs, **options)
    grad_out = cases.make_grad_out(case, _DTYPES[device], device)
    options.pop("enable_gqa")
    options["grad_mask"] = case.wants_grad_mask
    _opcheck(_ops._sdpa_backward.default, (grad_out, *inputs, out, lse), options, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("rms_norm", ["input", "weight"]),
        ("layer_norm", ["input", "weight", "weight"]),
        ("add_rms_norm", ["input", "input", "weight"]),
        ("add_layer_norm", ["input", "input", "weight", "weight"]),
        ("swiglu", ["input", "input"]),
        ("geglu", ["input", "input"]),
    ],
)
def test_norms_and_gated(name, shapes, device):
    """The public operators; those underneath are in test_norm.py and test_gated.py."""
    torch.manual_seed(0)
    arguments = [
        torch.randn((3, 40) if shape == "input" else (40,), device=device).requires_grad_()
        for shape in shapes
    ]
    if "norm" in name:
        arguments.insert(shapes.count("input"), (40,))
    torch.library.opcheck(getattr(_ops, name).default, tuple(arguments))


PACKED = varlen.Packed(
    (33, 0, 17), (33, 5, 40), sdpa_features.Features(1, 4, 2, 0, 0, 64, 64, is_causal=True)
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        PACKED,
        replace(PACKED, one=replace(PACKED.one, window_size=(9, 9), softcap=5.0, sinks=True)),
        replace(PACKED, gaps=(1, 0, 2), offsets=torch.int64),
        replace(PACKED, one=replace(PACKED.one, dropout_p=0.3)),
    ],
    ids=str,
)
def test_varlen(case, device):
    t = varlen.make(case, _DTYPES[device], device, seed=1)
    inputs = tuple(tensor.nan_to_num() for tensor in (t.q, t.k, t.v))
    options = case.kwargs() | t.extras
    out, lse = _ops.varlen_attention_with_lse(*inputs, *t.offsets, **options)
    backward = (t.grad_out, *inputs, out, lse, *t.offsets)
    _opcheck(_ops._varlen_backward.default, backward, options, device)
    _opcheck(_ops._varlen_check.default, (*inputs, *t.offsets), options, device)
    if case.one.sinks:
        options["sinks"].requires_grad_()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    _opcheck(_ops.varlen_attention.default, (*leaves, *t.offsets), options, device)
