"""Linear layers and pairs of them: results and gradients, engines, compile, mistakes."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.ops.activation import ACTIVATIONS, SLOPE
from cudnn_ops.ops.linear import KEEP_INPUT, KEEP_SLOPE, LINEAR_ENGINES, LINEAR_STEPS
from cudnn_ops.plans import linear_tuning
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.plans.tables import TABLES, EngineTable, LinearTiming
from tests.cases import linear, sdpa
from tests.cases.linear import CASES, MLP_CASES, LinearCase, MlpCase
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Each in its place in cudnn_ops.ops.activation.ACTIVATIONS.
RELU, SILU, GELU, GELU_TANH = 1, 2, 3, 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *MLP_CASES], ids=str)
def test_results_and_gradients(case, dtype, device, poisoned):
    linear.check(case, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_random_cases(device):
    rng = random.Random(7)
    for seed in range(60):
        linear.check(linear.draw(rng), rng.choice(DTYPES[:3]), device, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", LINEAR_ENGINES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        LinearCase((300,), 128, 264, "gelu_tanh"),
        LinearCase((300,), 128, 264, "relu", bias=False),
        LinearCase((7, 33), 96, 72, "none"),
        LinearCase((7, 33), 96, 72, "none", residual=True, layout="transposed"),
        LinearCase((300,), 128, 264, "silu", residual=True),
        MlpCase((300,), 128, 264, 128, "gelu_tanh"),
        MlpCase((300,), 128, 264, 128, "gelu"),
        MlpCase((300,), 128, 264, 128, "relu"),
        MlpCase((33, 5), 72, 130, 40, "gelu_tanh", bias=False),
        MlpCase((300,), 128, 264, 128, "gelu_tanh", layout="transposed"),
        MlpCase((300,), 128, 264, 128, "silu", gated=True),
    ],
    ids=str,
)
def test_every_engine(case, dtype, engine, linear_table):
    linear_table(engine)
    with using_plan_policy("exact"):
        linear.check(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sums", ["ours", "epilogue_sum"])
@pytest.mark.parametrize("keeps", ["ours", "graph"])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_graphs_of_a_pair(activation, dtype, keeps, sums, linear_table):
    """With the activation's input kept, or its slope; with the sum for the bias in either place."""
    linear_table("graph", training_slope=keeps, weight_gradient=sums)
    with using_plan_policy("exact"):
        for case in (
            MlpCase((300,), 128, 264, 128, activation),
            MlpCase((7, 33), 72, 136, 40, activation, bias=False),
            MlpCase((1,), 64, 1024, 64, activation),
        ):
            linear.check(case, dtype, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [SILU, GELU, GELU_TANH, 5, 6, 7])
@pytest.mark.parametrize("leading", [(2, 17), (), (0,)], ids=str)
def test_a_slope_is_kept_where_it_is_asked_for(number, dtype, leading, device, poisoned):
    """What the backward reads of it, and what the derivative of the whole operator is then."""
    case = MlpCase(leading, 24, 64, 40, ACTIVATIONS[number])
    tensors, grad_out = linear.make(case, dtype, device, seed=5)
    out, _, slope = _ops._mlp(*tensors.values(), number, False, KEEP_SLOPE)
    x, w1, b1 = (tensors[name].detach().double() for name in ("x", "w1", "b1"))
    before = F.linear(x, w1, b1).requires_grad_()
    (exact,) = torch.autograd.grad(linear.activate(before, case.activation).sum(), before)
    if number in (SILU, GELU, GELU_TANH):  # slopes of the others jump within a rounding of "before"
        sdpa.check(slope, exact, exact.to(dtype), f"{case} slope")
    found = [out, *torch.autograd.grad(out, list(tensors.values()), grad_out)]
    results = (linear.reference(case, tensors, grad_out, kind) for kind in (torch.float64, dtype))
    for mine, right, other in zip(found, *results, strict=True):
        sdpa.check(mine, right, other, str(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [SILU, GELU, GELU_TANH])
def test_slopes_of_huge_numbers(number, device, linear_table):
    """They are 0 and 1, as long as the numbers' squares are finite."""
    linear_table("graph")
    sizes = torch.logspace(1.5, 18, 64, dtype=torch.bfloat16, device=device)
    x = torch.cat([sizes, -sizes]).unsqueeze(1) * torch.eye(64, 64, device=device)[0].bfloat16()
    w1 = torch.zeros(8, 64, device=device, dtype=torch.bfloat16)
    w1[:, 0] = 1
    with using_plan_policy("exact"):
        _, hidden, slope = _ops._mlp(x, w1, None, w1.t(), None, number, False, KEEP_SLOPE)
    expected = (x[:, :1] > 0).to(slope).expand_as(slope), x[:, :1].clamp(0).expand_as(hidden)
    torch.testing.assert_close((slope, hidden), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_values_far_from_zero(activation, dtype, device):
    """Of a layer that multiplies by 1: the tails of both sides, each number by itself."""
    case = LinearCase((4001,), 8, 8, activation)
    x = torch.linspace(-14, 14, 4001 * 8, device=device, dtype=dtype).view(-1, 8).requires_grad_()
    weight = torch.eye(8, device=device, dtype=dtype)
    out = linear.run(case, {"input": x, "weight": weight, "bias": None, "residual": None})
    (slope,) = torch.autograd.grad(out.sum(), x)
    exact_x = x.detach().double().requires_grad_()
    exact = linear.activate(exact_x, activation)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_x)
    eps = torch.finfo(dtype).eps
    floor = 5e-6  # of 1 + erf and 1 - tanh^2, by which a CPU computes
    assert ((out - exact).abs() <= eps * exact.abs() + floor).all()
    assert ((slope - exact_slope).abs() <= eps * exact_slope.abs() + floor).all()


def test_the_package_s_tables_have_every_standard_size():
    wanted = set(itertools.product(LINEAR_STEPS, linear_tuning.STANDARD_SIZES))
    paths = list(TABLES.glob("linear_sm*.json"))
    assert paths
    for path in paths:
        shipped = EngineTable.read(path)
        assert path.name == f"linear_sm{shipped.sm}.json"
        assert all((shipped.gpu, shipped.driver, shipped.cudnn, shipped.torch, shipped.date))
        timings = [LinearTiming(**entry) for entry in shipped.entries]
        assert {(t.step, (t.rows, t.columns, t.depth)) for t in timings} >= wanted
        for timing in timings:
            assert set(timing.engine_ms) <= set(LINEAR_ENGINES), timing
            assert len(timing.engine_ms) > 1, timing
            assert min(timing.engine_ms.values()) > 0, timing


@pytest.mark.gpu
def test_large_products(linear_table):
    """Beyond one tile, with rows of every number."""
    for engine in LINEAR_ENGINES:
        linear_table(engine)
        for rows in (1, 63, 1000, 4097):
            case = MlpCase((rows,), 1024, 4096, 1024, "gelu_tanh")
            with using_plan_policy("exact"):
                linear.check(case, torch.bfloat16, "cuda", seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("columns", [4616, 4099])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_large_results(activation, columns, residual):
    """More than a GPU computes at once, in rows that blocks share, aligned and not."""
    case = LinearCase((4097,), 64, columns, activation, residual=residual)
    for dtype in (torch.bfloat16, torch.float32):
        linear.check(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_reductions_as_torch_is_told(allowed):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = allowed
        linear.check(LinearCase((17,), 4096, 64, "relu"), torch.bfloat16, "cuda")
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.gpu
def test_the_library_is_torchs():
    cudnn_ops.linear(*(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S+/libcublasLt\.so\S*", maps))) == 1


@pytest.mark.gpu
def test_cuda_graph():
    case = MlpCase((64,), 128, 256, 128, "gelu_tanh")
    tensors, grad_out = linear.make(case, torch.bfloat16, "cuda", 0)
    leaves = list(tensors.values())

    def step():
        out = linear.run(case, tensors)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf) / 8)
    graph.replay()
    for captured, eager in zip(results, step(), strict=True):
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
def test_nan_and_infinity_pass(activation, device):
    """As they do in torch's own: a model that has come apart says so."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.eye(8, device=device, dtype=dtype)
    x[3] = torch.nan
    x[5] = torch.inf
    weight = torch.eye(8, device=device, dtype=dtype)
    found = cudnn_ops.linear(x, weight, activation=activation)
    expected = linear.activate(F.linear(x, weight), activation)
    assert torch.equal(found.isnan().any(1), expected.isnan().any(1))


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_gradients_that_are_wanted(device):
    case = MlpCase((5,), 16, 24, 8, "gelu_tanh")
    tensors, grad_out = linear.make(case, torch.float32, device, 0)
    exact = linear.reference(case, tensors, grad_out, torch.float64)[1:]
    for chosen, name in enumerate(tensors):
        given = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
        (grad,) = torch.autograd.grad(linear.run(case, given), given[name], grad_out)
        sdpa.check(grad, exact[chosen], exact[chosen].float(), name)
    x, weight = torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)
    residual = torch.ones(3, 5, device=device, requires_grad=True)
    out = cudnn_ops.linear(x, weight, activation="gelu", residual=residual)
    (grad,) = torch.autograd.grad(out.sum(), residual)
    assert torch.equal(grad, torch.ones_like(grad))


def opcheck_arguments(device):
    """Calls of every operator with kernels, and the public ones."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    draw = linear.Draw(dtype, device, 0)
    x, weight, bias, residual = draw(3, 5, 16), draw(24, 16), draw(24), draw(3, 5, 24)
    w2, b2, grad = draw(8, 24), draw(8), draw(3, 5, 8)
    yield _ops.linear, (x, weight, bias, "relu", residual)
    yield _ops.mlp, (x, weight, bias, w2, b2, "gelu_tanh")
    for activation in (0, RELU, GELU_TANH):
        yield _ops._linear, (x, weight, bias, residual, activation, True)
        yield _ops._linear, (x, weight, None, None, activation, False)
        yield (
            _ops._linear_backward,
            (residual, x, weight, draw(3, 5, 24), activation, [True, True, True]),
        )
        for keep in (KEEP_INPUT, KEEP_SLOPE):
            yield _ops._mlp, (x, weight, bias, w2, b2, activation, False, keep)
        before, hidden = draw(3, 5, 24), draw(3, 5, 24)
        mask = [True] * 5
        yield (
            _ops._mlp_backward,
            (grad, x, weight, w2, hidden, before, activation, False, mask),
        )
    for keep in range(3):
        yield _ops._mlp, (x, weight, bias, w2[:, :12], None, 2, True, keep)
    through_slope = (grad, x, weight, w2, hidden, before, SLOPE, False, mask)
    yield _ops._mlp_backward, through_slope
    half = draw(3, 5, 12)
    yield (
        _ops._mlp_backward,
        (grad, x, weight, w2[:, :12], half, residual, 2, True, [False, True] * 2 + [False]),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    tolerance = 2e-2 if device == "cuda" else None
    for op, arguments in opcheck_arguments(device):
        if not op.__name__.endswith("backward"):
            arguments = tuple(
                a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_leaf else a
                for a in arguments
            )
        else:
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        torch.library.opcheck(op.default, arguments, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    torch._dynamo.reset()
    draw = linear.Draw(torch.float32, device, 0)
    w1, b1, w2, b2 = draw.weight(24, 16), draw(24), draw.weight(16, 24), draw(16)
    leaves = [leaf.requires_grad_() for leaf in (w1, b1, w2, b2)]

    def step(x):
        y = cudnn_ops.mlp(x * 2, w1, b1, w2, b2, "gelu_tanh")
        return cudnn_ops.linear(y, w1, b1, activation="silu").sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (5, 8):
        x = draw(rows, 3, 16)
        results = []
        for function in (compiled, step):
            out = function(x)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trace_decides_what_a_pair_keeps(dynamic, device, linear_table):
    """By the table of a GPU; of sizes that are not known, what the activation is of."""
    linear_table("graph")
    torch._dynamo.reset()
    case, dtype = MlpCase((300,), 128, 264, 128, "gelu"), torch.bfloat16
    tensors, grad_out = linear.make(case, dtype, device, seed=0)
    kept: list[int] = []

    def look(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls = [node for node in module.graph.nodes if node.target is _ops._mlp.default]
        kept.extend(node.args[-1] for node in calls)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    compiled = torch.compile(partial(linear.run, case), backend=backend, dynamic=dynamic)
    with using_plan_policy("exact"):
        out = compiled(tensors)
        found = [out, *torch.autograd.grad(out, list(tensors.values()), grad_out)]
    assert kept == [KEEP_SLOPE if device == "cuda" and not dynamic else KEEP_INPUT]
    results = (linear.reference(case, tensors, grad_out, kind) for kind in (torch.float64, dtype))
    for mine, right, other in zip(found, *results, strict=True):
        sdpa.check(mine, right, other, str(case))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    draw = linear.Draw(torch.float32, device, 0)
    x, weight, bias, residual = draw(5, 16), draw(8, 16).requires_grad_(), draw(8), draw(5, 8)
    with torch.autocast(device, torch.bfloat16):
        out = cudnn_ops.linear(x, weight, bias, activation="relu", residual=residual)
        pair = cudnn_ops.mlp(x, weight, bias, weight.t().contiguous(), None, "relu")
    assert out.dtype == pair.dtype == torch.bfloat16
    expected = F.linear(x, weight, bias).relu() + residual
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=5e-2)
    (grad,) = torch.autograd.grad(out.float().sum(), weight)
    assert grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_as_torch_is_told(allowed):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = allowed
        x, weight = torch.randn(64, 512, device="cuda"), torch.randn(64, 512, device="cuda")
        found = cudnn_ops.linear(x, weight, activation="relu")
        assert torch.equal(found, F.linear(x, weight).relu())
    finally:
        matmul.allow_tf32 = before


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_of_linear(device):
    x, weight = torch.ones(3, 8, device=device), torch.ones(4, 8, device=device)
    call = cudnn_ops.linear
    with pytest.raises(ValueError, match=r"a weight of \[4, 8\] has 8 inputs and does not fit 7"):
        call(x[:, :7], weight)
    with pytest.raises(ValueError, match=r"linear: weight must have 2 dimensions.*got \[8\]"):
        call(x, weight[0])
    with pytest.raises(ValueError, match="input must have a dimension"):
        call(x[0, 0], weight)
    with pytest.raises(ValueError, match=r'activation must be one of none, relu.*got "tanh"'):
        call(x, weight, activation="tanh")
    with pytest.raises(TypeError, match=r"input and weight must be of one dtype.*Float and Half"):
        call(x, weight.half())
    with pytest.raises(TypeError, match=r"must be of one dtype.*got Long and Long"):
        call(x.long(), weight.long())
    with pytest.raises(ValueError, match=r"bias must be \[4\] on .*got \[8\]"):
        call(x, weight, x[0])
    with pytest.raises(TypeError, match="bias must be Float, as input; got Half"):
        call(x, weight, weight[:, 0].half())
    with pytest.raises(ValueError, match=r"residual must be \[3, 4\] on .*got \[4\]"):
        call(x, weight, residual=weight[:, 0])
    with pytest.raises(TypeError, match="residual must be Float, as input; got Half"):
        call(x, weight, residual=torch.ones(3, 4, device=device).half())
    with pytest.raises(TypeError, match=r"^cudnn_ops\.linear: weight must be a tensor, got 1.0$"):
        call(x, 1.0)
    with pytest.raises(TypeError, match="input and weight must be tensors, got None"):
        call(x, None)
    with pytest.raises(TypeError, match="activation must be a string, got True"):
        call(x, weight, activation=True)
    with pytest.raises(ValueError, match=f"weight must be on {device}.*as input; got meta"):
        call(x, weight.to("meta"))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf, weight).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of linear"):
        grad.sum().backward()


@pytest.mark.gpu
def test_tensors_on_several_devices():
    x, weight = torch.ones(3, 8, device="cuda"), torch.ones(4, 8)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"weight must be on cuda:0, as input; got"
    ):
        cudnn_ops.linear(x, weight)


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_of_mlp(device):
    x, w1, w2 = (torch.ones(*shape, device=device) for shape in ((3, 8), (6, 8), (5, 6)))
    call = cudnn_ops.mlp
    with pytest.raises(ValueError, match=r"a w1 of \[6, 8\] has 8 inputs and does not fit 7"):
        call(x[:, :7], w1, None, w2, None)
    with pytest.raises(ValueError, match=r"w2 must be \[out, 6\] where w1 is \[6, 8\]; got"):
        call(x, w1, None, w2[:, :5], None)
    with pytest.raises(ValueError, match=r"w2 must be \[out, 3\] where w1 is \[6, 8\] and gated"):
        call(x, w1, None, w2, None, "silu", gated=True)
    with pytest.raises(ValueError, match="rows for gate and up, as many of each"):
        call(x, w1[:5], None, w2, None, "silu", gated=True)
    with pytest.raises(ValueError, match=r'gated activation must be one of silu.*got "relu"'):
        call(x, w1, None, w2, None, "relu", gated=True)
    with pytest.raises(ValueError, match=r"b1 must be \[6\]"):
        call(x, w1, w2[:, 0], w2, None)
    with pytest.raises(TypeError, match="x and w2 must be of one dtype"):
        call(x, w1, None, w2.half(), None)
    with pytest.raises(TypeError, match=r"^cudnn_ops\.mlp: gated must be True or False, got 'yes'"):
        call(x, w1, None, w2, None, gated="yes")
    leaf = x.clone().requires_grad_()
    out = call(leaf, w1, None, w2, None)
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of mlp"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_of_backwards(device):
    x, weight, saved = (torch.ones(*s, device=device) for s in ((3, 8), (4, 8), (3, 4)))
    mask = [True] * 3
    with pytest.raises(ValueError, match=r"linear backward: grad_out must be \[3, 4\]"):
        _ops._linear_backward(x, x, weight, saved, RELU, mask)
    with pytest.raises(ValueError, match="an activation needs saved"):
        _ops._linear_backward(saved, x, weight, None, RELU, mask)
    with pytest.raises(ValueError, match="there is no activation 99"):
        _ops._linear(x, weight, None, None, 99, False)
    w2, hidden = torch.ones(5, 4, device=device), saved
    mask = [True] * 5
    grad = torch.ones(3, 5, device=device)
    with pytest.raises(ValueError, match=r"mlp backward: hidden must be \[3, 4\]"):
        _ops._mlp_backward(grad, x, weight, w2, x, None, RELU, False, mask)
    for number in (GELU_TANH, SLOPE):
        with pytest.raises(ValueError, match="an activation needs before"):
            _ops._mlp_backward(grad, x, weight, w2, hidden, None, number, False, mask)
    with pytest.raises(ValueError, match="a gated activation must be one of"):
        _ops._mlp_backward(grad, x, weight, w2[:, :2], x, hidden, SLOPE, True, mask)
    for keep in (-1, 3):
        with pytest.raises(ValueError, match=r"mlp: keep must be 0 \(nothing\), 1"):
            _ops._mlp(x, weight, None, w2, None, GELU_TANH, False, keep)
    with pytest.raises(ValueError, match=f"there is no activation {SLOPE}"):
        _ops._mlp(x, weight, None, w2, None, SLOPE, False, KEEP_INPUT)


def test_cases_differ():
    """A case by another one's formula does not pass."""
    case = LinearCase((33,), 16, 24, "relu", residual=True)
    tensors, grad_out = linear.make(case, torch.float32, "cpu", 0)
    results = [
        linear.reference(replace(case, activation=activation), tensors, grad_out, torch.float64)
        for activation in ("relu", "silu")
    ]
    for mine, exact in zip(*results, strict=True):
        if mine is not results[0][-1]:  # the residual's, whatever the activation
            with pytest.raises(AssertionError, match="error"):
                sdpa.check(mine.float(), exact, exact.float(), "result")
