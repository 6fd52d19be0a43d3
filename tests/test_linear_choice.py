"""What runs a linear layer: the table of measured engines, explain, requests for plans."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

import cudnn_ops
from cudnn_ops import LinearTiming, plan_requests
from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.ops.linear import LINEAR_ENGINES, LINEAR_STEPS
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.support import explain
from tests.cases import linear
from tests.cases.linear import LinearCase, MlpCase

_C = cudnn_ops._C
BF16 = torch.bfloat16
X, W1, W2 = ((512, 256), BF16), ((1024, 256), BF16), ((256, 1024), BF16)


def choose(step: str, activation: str, *size: int, sm: int = 90) -> tuple[str, bool]:
    """The engine without a plan, and whether the graph is faster."""
    place = LINEAR_STEPS.index(step), ACTIVATIONS.index(activation)
    engine, is_graph_faster = torch.ops.cudnn_ops._linear_engine(sm, *place, *size)
    return LINEAR_ENGINES[engine], is_graph_faster


@pytest.mark.usefixtures("linear_table")
class TestTable:
    def test_the_nearest_product_decides(self):
        _C.set_linear_table(
            90,
            _C.cudnn_version(),
            [
                LinearTiming("inference", "gelu", *size, times).as_choice()
                for size, times in (
                    ((1024, 1024, 1024), {"ours": 1.0, "graph": 1.1}),
                    ((8192, 16384, 4096), {"ours": 1.0, "graph": 0.9}),
                    ((1024, 16384, 1024), {"ours": 1.0, "epilogue": 0.95, "graph": 0.9}),
                )
            ],
        )
        assert choose("inference", "gelu", 1000, 1000, 1000) == ("ours", False)
        assert choose("inference", "gelu", 9000, 20000, 5000) == ("ours", True)
        assert choose("inference", "gelu", 512, 16384, 1024) == ("epilogue", True)
        assert choose("training", "gelu", 9000, 20000, 5000) == ("ours", False)
        assert choose("inference", "silu", 9000, 20000, 5000) == ("ours", False)
        assert choose("inference", "gelu", 9000, 20000, 5000, sm=80) == ("ours", False)

    def test_a_graph_is_for_sizes_like_the_measured_one(self):
        times = {"ours": 1.0, "epilogue": 0.9, "graph": 0.5}
        timing = LinearTiming("inference", "relu", 1024, 4096, 1024, times)
        _C.set_linear_table(90, _C.cudnn_version(), [timing.as_choice()])
        for size, is_near in {
            (1024, 4096, 1024): True,
            (8192, 4096, 1024): True,
            (8193, 4096, 1024): False,
            (2048, 2048, 2048): True,
            (2048, 2048, 4096): False,
            (8, 64, 64): False,
            (1, 4096, 1024): False,
        }.items():
            assert choose("inference", "relu", *size) == ("epilogue", is_near), size

    def test_another_cudnn_has_other_graphs(self):
        timing = LinearTiming("inference", "relu", 64, 64, 64, {"epilogue": 1.0, "graph": 0.5})
        _C.set_linear_table(90, 1, [timing.as_choice()])
        assert choose("inference", "relu", 64, 64, 64) == ("epilogue", False)


def test_a_graph_must_be_worth_its_plan():
    times = {"ours": 1.0, "epilogue": 0.9, "graph": 0.89}
    timing = LinearTiming("inference", "relu", 1, 2, 3, times, "eng7_k1=2")
    assert timing.fastest == "epilogue"
    assert timing.as_choice() == ([0, 1, 1, 2, 3, 1, False], "eng7_k1=2")
    times["graph"] = 0.8
    assert timing.fastest == "graph"
    assert timing.as_choice() == ([0, 1, 1, 2, 3, 1, True], "eng7_k1=2")
    assert timing.as_choice("ours") == ([0, 1, 1, 2, 3, 0, False], "eng7_k1=2")
    assert str(timing).endswith("graph 0.8000 ms  eng7_k1=2")


def by(op: str, *tensors: Any, **options: Any) -> list[str]:
    answer = explain(op, *tensors, device="h200", **options)
    assert answer.supported
    assert answer.reason
    return answer.engine.split(", ")


def test_without_a_table_no_plan_runs(linear_table):
    linear_table(None)
    assert by("linear", X, W1) == by("linear", X, W1, bias=True) == ["torch"]
    for activation in ACTIVATIONS[1:]:
        assert by("linear", X, W1, bias=True, activation=activation) == ["cudnn_ops"]
    assert by("linear", X, W1, residual=True) == ["cublasLt"]
    assert by("linear", X, W1, bias=True, residual=True) == ["cublasLt"]
    # Without an epilogue a residual has a pass of its own.
    assert by("linear", X, W1, residual=True, activation="relu") == ["cudnn_ops"]
    wide = [(shape, torch.float32) for shape, _ in (X, W1)]
    assert by("linear", *wide, residual=True) == ["cudnn_ops"]
    assert by("linear_backward", X, W1, bias=True) == ["torch"]
    assert by("linear_backward", X, W1, bias=True, activation="relu") == ["cudnn_ops", "torch"]
    assert by("mlp", X, W1, W2) == ["cudnn_ops", "torch"]
    assert by("mlp_backward", X, W1, W2) == ["cudnn_ops", "torch"]
    gate = ((2048, 256), BF16)
    assert by("mlp", X, gate, W2, activation="silu", gated=True) == ["torch", "cudnn_ops", "torch"]
    assert by("mlp_backward", X, gate, W2, activation="silu", gated=True) == ["torch", "torch"]
    for training in (False, True):
        assert plan_requests("linear", X, W1, activation="gelu", training=training) == []
        assert plan_requests("mlp", X, W1, W2, training=training) == []


def test_by_cublaslt_where_it_has_the_epilogue(linear_table):
    linear_table("epilogue")
    for activation in ACTIVATIONS:
        has_one = activation in ("none", "relu", "gelu_tanh")
        layer = {"bias": True, "activation": activation}
        assert by("linear", X, W1, **layer) == ["cublasLt" if has_one else "cudnn_ops"]
        kept = "cublasLt" if activation in ("none", "relu", "gelu_tanh") else "cudnn_ops"
        assert by("linear", X, W1, **layer, with_before=True) == [kept]
        only = "cublasLt" if activation == "none" else "cudnn_ops"
        assert by("linear", X, W1, **layer, residual=True) == [only]
    assert by("mlp_backward", X, W1, W2, activation="gelu_tanh") == ["cublasLt", "torch"]
    assert by("mlp_backward", X, W1, W2, activation="gelu") == ["cudnn_ops", "torch"]
    wide = [(shape, torch.float32) for shape, _ in (X, W1)]
    assert by("linear", *wide, activation="relu") == ["cudnn_ops"]
    widest = [(shape, torch.float64) for shape, _ in (X, W1)]
    assert by("linear", *widest, activation="relu") == ["torch"]
    linear_table("epilogue_sum")
    assert by("linear_backward", X, W1, bias=True) == ["cublasLt"]
    assert by("linear_backward", X, W1) == ["torch"]


#: What no graph is made of: input, weight, and why.
UNFIT = {
    "float32": (((64, 64), torch.float32), ((64, 64), torch.float32), "float16 and bfloat16"),
    "odd columns": (((64, 64), BF16), ((65, 64), BF16), "multiples of 16 bytes"),
    "odd depth": (((64, 65), BF16), ((64, 65), BF16), "multiples of 16 bytes"),
    "columns apart": (((64, 64), BF16, (1, 64)), ((64, 64), BF16), "multiples of 16 bytes"),
    "nothing": (((0, 64), BF16), ((64, 64), BF16), "nothing needs no plan"),
    "too large": (((1 << 16, 64), BF16), ((1 << 16, 64), BF16), "2^31"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_no_graph_is_made_of(name, linear_table):
    x, weight, why = UNFIT[name]
    linear_table("graph")
    assert plan_requests("linear", x, weight, activation="gelu", training=False) == []
    answer = explain("linear", x, weight, activation="gelu", graph=True, device="h200")
    assert not answer.supported
    assert why in answer.reason
    with pytest.raises(ValueError, match=f"linear: .*{re.escape(why)}"):
        plan_requests("linear", x, weight, activation="gelu", graph=True)


def test_a_sum_is_none_where_torch_wants_determinism(linear_table):
    linear_table("graph")
    for bias, deterministic in product((True, False), repeat=2):
        torch.use_deterministic_algorithms(deterministic)
        try:
            found = plan_requests("mlp_backward", X, W1, W2, b1=bias)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(found) == (not (bias and deterministic))


def test_requests_are_for_the_rows_that_are_given(linear_table):
    linear_table("graph")
    (request,) = plan_requests("linear", X, W1, activation="silu", training=False)
    flat = torch.empty(2, 256, 256, dtype=BF16, device="meta")
    assert plan_requests("linear", flat, W1, activation="silu", training=False) == [request]
    other = ((513, 256), BF16)
    assert plan_requests("linear", other, W1, activation="silu", training=False) != [request]
    kept = plan_requests("linear", X, W1, activation="silu")
    assert len(kept) == 1
    assert kept != [request]
    assert "before=bf16[1, 512, 1024]" in str(kept[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": ((1024, 255), BF16)}, ValueError, "does not fit 256 columns"),
        ({"k": None}, ValueError, "linear needs k, the weight"),
        ({"k": W1, "activation": "tanh"}, ValueError, "activation must be one of none"),
        ({"k": W1, "bias": ((3,), BF16)}, ValueError, r"bias must be \[1024\]"),
        ({"k": W1, "residual": X}, ValueError, r"residual must be \[512, 1024\]"),
        ({"k": W1, "gated": True}, TypeError, "linear has no argument gated"),
    ],
)
def test_mistakes(arguments, error, message):
    with pytest.raises(error, match=message):
        explain("linear", X, device="h200", **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_results_and_gradients_by_plans(activation, linear_table):
    """Whatever epilogue there is: plans run, and are right."""
    linear_table("graph")
    cudnn_ops.cache_clear()
    cases: list[tuple[LinearCase | MlpCase, torch.dtype]] = [
        (LinearCase((300,), 128, 264, activation), torch.float16),
        (LinearCase((7, 33), 96, 72, activation, bias=False), BF16),
        (LinearCase((300,), 128, 264, activation, residual=True), BF16),
        (MlpCase((300,), 128, 264, 128, activation), BF16),
        (MlpCase((33, 5), 72, 136, 40, activation, bias=False), torch.float16),
    ]
    with using_plan_policy("exact"):
        for case, dtype in cases:
            before = cudnn_ops.cache_info()
            linear.check(case, dtype, "cuda")
            after = cudnn_ops.cache_info()
            # For inference and for training, where that keeps what the activation is of; of an MLP
            # the second layer too, and the gradient of what lies between.
            is_mlp = isinstance(case, MlpCase)
            keeps = activation != "relu" or (not is_mlp and case.residual)
            expected = 1 + keeps + 2 * is_mlp
            assert after.builds + after.loads - before.builds - before.loads == expected, case


@pytest.mark.gpu
def test_a_plan_is_built_for_rows_that_repeat(linear_table):
    linear_table("graph")
    cudnn_ops.cache_clear()
    weight = torch.randn(256, 128, device="cuda", dtype=BF16)

    def call(rows: int) -> None:
        cudnn_ops.linear(
            torch.ones(rows, 128, device="cuda", dtype=BF16), weight, activation="gelu"
        )

    with using_plan_policy("auto", promote_after=2), torch.no_grad():
        for rows in range(1, 40):
            call(rows)
        assert cudnn_ops.cache_info().builds == 0
        for _ in range(3):
            call(39)
        assert cudnn_ops.cache_info().builds == 1


@pytest.mark.gpu
def test_warmed_up_it_has_its_plans_from_the_first_call(linear_table):
    linear_table("graph")
    cudnn_ops.cache_clear()
    case = MlpCase((5, 64), 128, 256, 128, "gelu")
    shapes = [((5, 64, 128), BF16), ((256, 128), BF16), ((128, 256), BF16)]
    options = {"b1": True, "b2": True, "activation": "gelu"}
    for training in (False, True):
        requests = plan_requests("mlp", *shapes, training=training, **options)
        assert not cudnn_ops.warmup(requests, progress=False).refused
    before = cudnn_ops.cache_info()
    linear.check(case, BF16, "cuda")
    after = cudnn_ops.cache_info()
    assert (after.builds, after.loads) == (before.builds, before.loads) == (4, 0)
    assert after.hits >= before.hits + 5  # two layers twice, and a gradient


@pytest.mark.gpu
def test_a_graph_captured_before_there_is_a_plan(linear_table):
    linear_table("graph")
    cudnn_ops.cache_clear()
    x, weight = (torch.randn(64, 64, device="cuda", dtype=BF16) for _ in range(2))
    # Before the capture, in which cuBLAS cannot make its handle.
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))
    with using_plan_policy("exact"), torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cudnn_ops.linear(x, weight, activation="gelu")
        assert cudnn_ops.cache_info().builds == 0
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_autotune_times_plans_and_the_rest(linear_table):
    """Whatever wins is right, at the first call, which times, and at the next."""
    linear_table(None)
    cudnn_ops.cache_clear()
    case = MlpCase((320,), 136, 272, 128, "gelu")
    cudnn_ops.set_autotune(True)
    try:
        with using_plan_policy("exact"):
            for seed in range(2):
                linear.check(case, BF16, "cuda", seed)
    finally:
        cudnn_ops.set_autotune(False)
    info = cudnn_ops.cache_info()
    # The first layer for inference or training, and the hidden layer's gradient.
    assert info.builds + info.loads >= 2
    measured = {cudnn_ops.PlanRequest(tuple(words)).op for words, _ in _C.take_measurements()}
    assert measured >= {"linear", "hidden_gradient"}


@pytest.mark.gpu
def test_tuning_measures_the_graph():
    timings = cudnn_ops.tune_linear([(256, 512, 128)], rounds=3)
    steps = {(timing.step, timing.activation) for timing in timings}
    assert ("inference", "gelu") in steps
    assert len(steps) == len(timings)
    for timing in timings:
        assert all(ms > 0 for ms in timing.engine_ms.values())
        assert ("graph" in timing.engine_ms) == (timing.step != "weight_gradient")
        assert timing.plan_engine.startswith("eng") == (timing.step != "weight_gradient")
