"""Real cuDNN plans of linear layers for GPUs that are not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops import plan_requests, warmup
from cudnn_ops.ops.activation import needs_before
from cudnn_ops.support import explain

ROOT = Path(__file__).parents[2]
BF16, HALF = torch.bfloat16, torch.float16
ROWS, INPUTS, HIDDEN = 256, 128, 264
LAYER = (((ROWS, INPUTS), BF16), ((HIDDEN, INPUTS), BF16))
MLP = (*LAYER, ((INPUTS, HIDDEN), BF16))
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

pytestmark = pytest.mark.usefixtures("fresh_cache")


def is_plan(engine: str) -> bool:
    return engine.startswith("eng")


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_one_graph(activation, device):
    """With all that may be beside the product, the activation's input as a result included."""
    options: dict[str, Any] = {"bias": True, "activation": activation, "graph": True}
    for more in (
        {"with_before": needs_before(activation)},
        {"residual": True, "with_before": activation == "relu"},
    ):
        answer = explain("linear", *LAYER, device=device, **options, **more)
        assert answer.supported, answer.reason
        assert is_plan(answer.engine)
        assert not answer.reason


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_the_gradient_of_a_hidden_layer_is_one_graph(activation, device):
    """With its sum for the bias, and without."""
    for bias in (True, False):
        answer = explain(
            "mlp_backward", *MLP, b1=bias, activation=activation, graph=True, device=device
        )
        assert answer.supported, answer.reason
        assert is_plan(answer.engine)


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_pair_that_keeps_a_slope_is_of_graphs(activation, device, linear_table):
    """The layer that gives it, and the gradient that it is multiplied with."""
    sm = {"a100": 80, "h200": 90}[device]
    linear_table("graph", sm=sm)
    options = {"b1": True, "activation": activation, "graph": True, "device": device}
    answer = explain("mlp", *MLP, with_saved=True, **options)
    assert answer.supported, answer.reason
    assert all(is_plan(engine) for engine in answer.engine.split(", "))
    answer = explain("mlp_backward", *MLP, **options)
    assert answer.supported, answer.reason
    assert is_plan(answer.engine)


def test_both_layers_of_an_mlp_are_graphs():
    answer = explain("mlp", *MLP, b1=True, b2=True, graph=True, with_saved=True, device="h200")
    assert answer.supported
    assert all(is_plan(engine) for engine in answer.engine.split(", "))


def test_layouts_and_sizes():
    """Rows apart, one row, several leading dimensions, float16."""
    weight = ((HIDDEN, INPUTS), HALF)
    for x in (
        ((ROWS, INPUTS), HALF, (3 * INPUTS, 1)),
        ((1, INPUTS), HALF),
        ((INPUTS,), HALF),
        ((2, 3, 5, INPUTS), HALF),
    ):
        answer = explain("linear", x, weight, activation="gelu", graph=True, device="h200")
        assert answer.supported, answer.reason


@pytest.mark.parametrize("activation", ["relu6", "hardswish"])
def test_what_has_no_graph_is_refused_in_words(activation):
    answer = explain("linear", *LAYER, activation=activation, graph=True, device="h200")
    assert not answer.supported
    assert "graphs have no such activation" in answer.reason


def test_warmed_up_for_a_table_that_names_the_graph(linear_table):
    linear_table("graph")
    requests = plan_requests("mlp", *MLP, b1=True, activation="gelu")
    assert [request.op for request in requests] == ["linear", "linear", "hidden_gradient"]
    report = warmup(requests, device="h200", progress=False)
    assert (report.built, report.refused) == (3, {})
    # The very plans that explain finds.
    assert warmup(requests, device="h200", progress=False).ready == 3


def test_a_plan_gets_the_engine_of_the_nearest_product(linear_table):
    def engine(op: str, *tensors: Any) -> str:
        cudnn_ops.cache_clear()
        return explain(op, *tensors, b1=True, device="h200").engine.split(", ")[0]

    other = "eng7_k24=41"
    for op in ("mlp", "mlp_backward"):
        linear_table("graph")
        by_heuristics = engine(op, *MLP)
        assert is_plan(by_heuristics)
        assert by_heuristics != other
        linear_table("graph", plan_engine=other)
        assert engine(op, *MLP) == other


def test_a_plan_that_cudnn_refuses_leaves_what_runs_without(linear_table):
    linear_table("graph")
    answer = explain("linear", *LAYER, bias=True, activation="hardswish", device="h200")
    assert answer.supported
    assert answer.engine == "cudnn_ops"
    assert "graphs have no such activation" in answer.reason


def test_the_exact_gelu_of_graphs():
    """Its polynomial, as the source has it, by float32 as a GPU computes: the tails included."""
    source = (ROOT / "csrc" / "ops" / "activation_slope_graph.h").read_text()
    numbers = re.search(r"\{([-\d.ef, ]+)\}", source.partition("exact_gelu(")[2])
    assert numbers is not None, source
    coefficients = [float(number.strip().rstrip("f")) for number in numbers[1].split(",")]
    assert len(coefficients) == 3
    x = torch.cat([torch.linspace(-30, 30, 600001), torch.tensor([-1e30, -1e4, 1e4, 1e30])])
    square = (x * x).clamp(max=100)
    halves = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        halves = halves * square + coefficient / 2
    found = x * ((x * halves).tanh() * 0.5 + 0.5)
    exact = F.gelu(x.double())
    assert ((found - exact).abs() <= 2.6e-5 + 1e-6 * exact.abs()).all()
