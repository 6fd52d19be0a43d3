"""Attention at geometries that nobody thought of: results, gradients, strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import sdpa as cases
from tests.cases import sdpa_features
from tests.cases.sdpa import Case
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES

LAYOUTS = ["bhsd", "bshd", "sbhd", "hbsd", "packed", "sliced", "misaligned", "broadcast"]


@st.composite
def geometries(draw: st.DrawFn) -> Case:
    heads_kv = draw(st.integers(1, 3))
    lengths = st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 300))
    sizes = st.sampled_from([8, 16, 24, 32, 48, 64, 88, 112, 128])
    return Case(
        batch=draw(st.integers(0, 3)),
        heads=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        length=draw(lengths),
        length_kv=draw(lengths),
        head_size=draw(sizes),
        value_size=draw(sizes),
        is_causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(-0.5, 0.5)),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@pytest.mark.parametrize("device", DEVICES)
@given(case=geometries(), seed=st.integers(0, 2**31), bf16=st.booleans())
@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_geometry(device, poisoned, case, seed, bf16):
    dtype = torch.bfloat16 if bf16 else torch.float16
    inputs = cases.make_inputs(case, dtype, device, seed)
    grad_out = cases.make_grad_out(case, dtype, device, seed + 1)
    plain = Features(**vars(case))  # whose check knows what rounding the output does to few keys
    actual = sdpa_features.run(plain, inputs, {}, grad_out)
    sdpa_features.check(plain, inputs, {}, grad_out, actual)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        fake_out, fake_lse = torch.ops.cudnn_ops.sdpa_with_lse(*fakes, **case.kwargs())
        fake_grads = torch.ops.cudnn_ops._sdpa_backward(
            fake_out, *fakes, fake_out, fake_lse, is_causal=case.is_causal, scale=case.scale
        )[:3]
    fakes = [fake_out, fake_lse, *fake_grads]
    for (_, real), fake in zip(actual.items(), fakes, strict=True):
        assert real.shape == fake.shape
        assert real.stride() == fake.stride()
        assert real.dtype == fake.dtype
