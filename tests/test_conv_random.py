"""Convolutions at random geometries."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cudnn_ops import record_shapes
from tests.cases import conv as cases
from tests.cases import sdpa
from tests.cases.drawn import check_all
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32", "poisoned")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(10))
def test_any_geometry(block, device):
    count = 50 if device == "cuda" else 12
    check_all(cases, count, device, random.Random(6000 + block))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("block", range(4))
def test_measured_engines_for_bias_and_residual(block, device, monkeypatch):
    """Those of either order, at any geometry."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    rng = random.Random(6100 + block)
    for seed in range(8):
        activation, dtype = rng.choice(["none", "relu"]), rng.choice([torch.half, torch.bfloat16])
        case = replace(cases.draw(rng), bias=True, residual=True, activation=activation)
        cases.check(case, cases.make(case, dtype, device, seed))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("engine", cases.MORE_ENGINES)
def test_engines_that_the_heuristics_leave_out(engine, device, engine_table):
    """At any geometry, with what is kept for the gradient and without."""
    rng = random.Random(engine)
    for seed in range(12):
        activation, dtype = rng.choice(["relu", "silu"]), rng.choice([torch.half, torch.bfloat16])
        case = replace(cases.draw(rng), bias=True, residual=True, activation=activation)
        t = cases.make(case, dtype, device, seed)
        with record_shapes() as requests:
            cases.run(case, t)
            with torch.no_grad():
                cases.run(case, t)
        engine_table(requests, engine)
        cases.check(case, t)
        with torch.no_grad():
            out = cases.run(case, t)
        exact, rough = (cases.reference(case, t, kind)[0] for kind in (torch.float64, dtype))
        sdpa.check(out, exact, rough, str(case))
