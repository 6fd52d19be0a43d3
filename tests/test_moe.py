"""Mixture of experts: permutation, grouped layers and sums; results, gradients, mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import moe as cases
from tests.cases.moe import CASES
from tests.conftest import DEVICES, deterministic

_ops = torch.ops.cudnn_ops
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_permutation(case, device, poisoned):
    """Rows are copies, in the order that a list of each expert's has."""
    for dtype in DTYPES:
        t = cases.make(case, dtype, device, seed=1)
        rows, offsets, positions = cudnn_ops.moe_permute(t.input, t.experts, case.experts)
        ends, expected = cases.places(t.experts, case.experts)
        assert offsets.tolist() == ends
        assert positions.tolist() == expected
        assert offsets.dtype == positions.dtype == torch.int32
        assert rows.is_contiguous()
        leaf = t.input.detach().clone().requires_grad_()
        exact = cases.permuted(case, t, leaf)
        assert torch.equal(rows, exact)
        if not rows.numel():
            continue
        grad = t.rows.detach()
        (found,) = torch.autograd.grad(rows, t.input, grad)
        results = []
        for wide in (torch.float64, dtype):
            leaf = t.input.detach().to(wide).requires_grad_()
            out = cases.permuted(case, t, leaf)
            gone = out.sum() * 0 + leaf.sum() * 0  # where no token has an expert
            (right,) = torch.autograd.grad((out * grad.to(wide)).sum() + gone, leaf)
            results.append([right])
        cases.check_all([found], *results, "input", (case, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(case, device, poisoned):
    for dtype in DTYPES:
        t = cases.make(case, dtype, device, seed=2)
        positions = cudnn_ops.moe_permute(t.input, t.experts, case.experts)[2]
        rows = t.rows.detach().clone()
        if rows.shape[1]:
            rows[(-1 - positions[positions < 0]).long()] = float("nan")  # are not read
        rows = rows.requires_grad_()
        out = cudnn_ops.moe_combine(rows, positions, t.weights)
        leaves = [rows] if t.weights is None else [rows, t.weights]
        found = [out, *torch.autograd.grad(out, leaves, t.grad)]
        assert out.is_contiguous()
        assert [one.dtype for one in found[1:]] == [leaf.dtype for leaf in leaves]
        results = []
        for wide in (torch.float64, dtype):
            theirs = [leaf.detach().nan_to_num().to(wide).requires_grad_() for leaf in leaves]
            result = cases.combined(case, t, theirs[0], theirs[1] if len(theirs) > 1 else None)
            loss = (result * t.grad.to(wide)).sum() + sum(leaf.sum() * 0 for leaf in theirs)
            results.append([result, *torch.autograd.grad(loss, theirs)])
        names = "out rows" if t.weights is None else "out rows weights"
        cases.check_all(found, *results, names, (case, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", ["", "rows", "weights"])
def test_only_the_gradients_that_are_wanted(frozen, device):
    t = cases.make(CASES[0], torch.float32, device, seed=3)
    positions = cudnn_ops.moe_permute(t.input, t.experts, 8)[2]
    leaves = {"rows": t.rows.detach(), "weights": t.weights.detach()}
    wanted = [leaf.requires_grad_() for name, leaf in leaves.items() if name != frozen]
    out = cudnn_ops.moe_combine(leaves["rows"], positions, leaves["weights"])
    found = torch.autograd.grad(out, wanted, t.grad)
    expected = torch.autograd.grad(
        cases.combined(CASES[0], t, leaves["rows"], leaves["weights"]), wanted, t.grad
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts(case, device, poisoned):
    """The whole of it, against one expert after the other."""
    for dtype in DTYPES:
        t = cases.make(case, dtype, device, seed=4)
        leaves = [t.input, t.gate_up, t.down, *([] if t.weights is None else [t.weights])]
        ones = torch.ones(t.experts.shape, device=device)
        weights = ones if t.weights is None else t.weights
        out = cudnn_ops.moe_experts(t.input, t.experts, weights, t.gate_up, t.down)
        found = [out, *torch.autograd.grad(out, leaves, t.grad)]
        results = []
        for wide in (torch.float64, dtype):
            theirs = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
            of_pairs = theirs[3] if len(theirs) > 3 else None
            result = cases.mixture(t, theirs[0], of_pairs, theirs[1], theirs[2])
            loss = (result * t.grad.to(wide)).sum() + sum(leaf.sum() * 0 for leaf in theirs)
            results.append([result, *torch.autograd.grad(loss, theirs)])
        names = "out input gate_up down weights"
        names = names if t.weights is not None else "out input gate_up down"
        cases.check_all(found, *results, names, (case, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("sizes", [(16, 24), (7, 5), (1, 8)])
def test_grouped_layers(sizes, dtype, device):
    if dtype == torch.float64 and device == "cuda":
        x, offsets = torch.ones(1, 8, device=device), torch.ones(1, device=device).int()
        with pytest.raises(TypeError, match="must be float16, bfloat16 or float32 on a GPU"):
            cudnn_ops.grouped_linear(x.double(), x.double()[None], offsets)
        return
    generator = torch.Generator().manual_seed(5)
    inputs, outputs = sizes
    for ends in ([3, 3, 10, 17], [0, 0, 0, 17], [17], [0, 0], [5, 9]):
        x = torch.randn(17, inputs, generator=generator, dtype=torch.float64)
        weight = torch.randn(len(ends), outputs, inputs, generator=generator, dtype=torch.float64)
        grad = torch.randn(17, outputs, generator=generator, dtype=torch.float64)
        leaves = [leaf.to(device, dtype).requires_grad_() for leaf in (x, weight)]
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        count = ends[-1]  # what is behind it has any content on a GPU
        out = cudnn_ops.grouped_linear(*leaves, offsets)
        assert out.is_contiguous()
        gradients = torch.autograd.grad(out, leaves, grad.to(device, dtype))
        found = [out[:count], gradients[0][:count], gradients[1]]
        results = []
        for wide in (torch.float64, dtype):
            theirs = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
            starts = [0, *ends[:-1]]
            parts = [
                theirs[0][start:end] @ theirs[1][group].t()
                for group, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            result = torch.cat(parts)
            loss = (result * grad[:count].to(device, dtype).to(wide)).sum()
            of_input, of_weight = torch.autograd.grad(loss + theirs[1].sum() * 0, theirs)
            results.append([result, of_input[:count], of_weight])
        cases.check_all(found, *results, "out input weight", (ends, sizes, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_parameters(device):
    """Weights that are transposed or start anywhere, and gradients of any strides."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(20, 32, device=device).to(dtype)[:, 8:24]
        memory = torch.randn(3 * 16 * 8 + 1, device=device).to(dtype)
        offsets = torch.tensor([4, 12, 20], dtype=torch.int32, device=device)
        for weight in (memory[1:].view(3, 8, 16), memory[:-1].view(3, 16, 8).transpose(1, 2)):
            leaf = weight.detach().requires_grad_()
            out = cudnn_ops.grouped_linear(x, leaf, offsets)
            grad = torch.ones(1, 1, device=device, dtype=dtype).expand(20, 8)
            (found,) = torch.autograd.grad(out, leaf, grad)
            parts = x.split([4, 8, 8])
            expected = torch.cat([p @ w.t() for p, w in zip(parts, weight, strict=True)])
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            sums = torch.stack([p.float().sum(0).expand(8, -1) for p in parts]).to(dtype)
            torch.testing.assert_close(found, sums, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    t = cases.make(CASES[5], torch.float32, device, seed=6)
    check = torch.library.opcheck
    tokens, rows = t.input.detach().requires_grad_(), t.rows.detach().requires_grad_()
    for op in (_ops._moe_permute.default, _ops.moe_permute.default):
        check(op, (tokens, t.experts, 64))
    positions = cudnn_ops.moe_permute(tokens.detach(), t.experts, 64)[2]
    for weights in (t.weights, None):
        for op in (_ops._moe_combine.default, _ops.moe_combine.default):
            check(op, (rows, positions, weights))
    plain = None if t.weights is None else t.weights.detach()
    for mask in ([True, True], [True, False], [False, True]):
        call = (t.grad, rows.detach(), positions, plain, mask)
        check(_ops._moe_combine_backward.default, call)
    check(_ops._moe_combine_backward.default, (t.grad, None, positions, None, [True, False]))
    x, weight = torch.randn(9, 16, device=device), torch.randn(3, 8, 16, device=device)
    offsets = torch.tensor([2, 2, 9], dtype=torch.int32, device=device)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for op in (_ops._grouped_linear.default, _ops.grouped_linear.default):
        check(op, (*leaves, offsets))
    grad = torch.randn(9, 8, device=device)
    for mask in ([True, True], [True, False], [False, True]):
        check(_ops._grouped_linear_backward.default, (grad, x, weight, offsets, mask))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    """Of any number of tokens, with the choice of experts."""
    torch._dynamo.reset()
    gate_up, down = torch.randn(4, 32, 16, device=device), torch.randn(4, 16, 16, device=device)
    router = torch.randn(16, 4, device=device)

    def step(x: Tensor) -> Tensor:
        weights, experts = cudnn_ops.moe_route(x @ router, 2)
        return cudnn_ops.moe_experts(x.sin(), experts, weights, gate_up, down) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (5, 8, 33):
        x = torch.randn(tokens, 16, device=device).requires_grad_()
        results = [(out, *torch.autograd.grad(out.sum(), x)) for out in (compiled(x), step(x))]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_permutation_is_differentiable_twice(device):
    t = cases.make(CASES[0], torch.float32, device, seed=7)

    def second(permute) -> Tensor:
        (grad,) = torch.autograd.grad(permute().square().sum(), t.input, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), t.input)[0]

    ours = second(lambda: cudnn_ops.moe_permute(t.input, t.experts, 8)[0])
    torch.testing.assert_close(ours, second(lambda: cases.permuted(CASES[0], t, t.input)))
    positions = cudnn_ops.moe_permute(t.input, t.experts, 8)[2]
    out = cudnn_ops.moe_combine(t.rows, positions, t.weights)
    (grad,) = torch.autograd.grad(out.square().sum(), t.rows, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of moe_combine"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """Products are of the lower precision, and so is the result; sums of float32 weights."""
    t = cases.make(CASES[0], torch.float32, device, seed=8)
    arguments = (t.input, t.experts, t.weights, t.gate_up, t.down)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = cudnn_ops.moe_experts(*arguments)
        offsets = torch.tensor([33], dtype=torch.int32, device=device)
        assert cudnn_ops.grouped_linear(t.input, t.gate_up[:1], offsets).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    wide = [leaf.bfloat16() for leaf in (t.input, t.gate_up, t.down)]
    expected = cudnn_ops.moe_experts(wide[0], t.experts, t.weights, *wide[1:])
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert t.gate_up.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[10]], ids=str)
def test_a_cuda_graph(case):
    """Nothing waits for the GPU: the experts of another batch are those that are used."""
    t = cases.make(case, torch.bfloat16, "cuda", seed=9)
    leaves = [t.input.detach(), *(w.detach().requires_grad_() for w in (t.gate_up, t.down))]
    weights = t.weights.detach()

    def step() -> list[Tensor]:
        out = cudnn_ops.moe_experts(leaves[0], t.experts, weights, *leaves[1:])
        return [out, *torch.autograd.grad(out, leaves[1:], t.grad.contiguous())]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = cases.make(case, torch.bfloat16, "cuda", seed=10)
    t.experts.copy_(other.experts)
    leaves[0].copy_(other.input)
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    t = cases.make(CASES[0], torch.bfloat16, "cuda", seed=9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = cudnn_ops.moe_experts(t.input, t.experts, t.weights, t.gate_up, t.down)
        out.backward(t.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_cuda_graph_of_what_waits_is_refused():
    x, weight = torch.randn(4, 8, device="cuda"), torch.randn(2, 8, 8, device="cuda")
    offsets = torch.tensor([2, 4], dtype=torch.int32, device="cuda")
    cudnn_ops.grouped_linear(x, weight, offsets)
    with (
        pytest.raises(NotImplementedError, match="in a CUDA graph input must be bfloat16"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cudnn_ops.grouped_linear(x, weight, offsets)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_in_every_run(device):
    t = cases.make(CASES[10], torch.bfloat16, device, seed=11)

    def step() -> list[Tensor]:
        out = cudnn_ops.moe_experts(t.input, t.experts, t.weights, t.gate_up, t.down)
        leaves = (t.input, t.weights, t.gate_up, t.down)
        return [out, *torch.autograd.grad(out, leaves, t.grad)]

    with deterministic():
        first = step()
        for _ in range(3):
            assert all(map(torch.equal, first, step()))


@pytest.mark.gpu
def test_torchs_grouped_product_runs():
    """Where it can: bfloat16 in whole multiples of 16 bytes."""
    offsets = torch.tensor([2, 4], dtype=torch.int32, device="cuda")
    for dtype, outputs in ((torch.bfloat16, 8), (torch.bfloat16, 7), (torch.float32, 8)):
        x = torch.randn(4, 8, device="cuda", dtype=dtype)
        weight = torch.randn(2, outputs, 8, device="cuda", dtype=dtype)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            cudnn_ops.grouped_linear(x, weight, offsets)
        names = {event.key for event in profiled.key_averages()}
        assert ("aten::_grouped_mm" in names) == (dtype == torch.bfloat16 and outputs == 8)


_ROWS, _INDEX = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64)
_PLACES = torch.arange(8, dtype=torch.int32).view(4, 2)
_OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
PERMUTE = {"input": _ROWS, "expert_indices": _INDEX, "num_experts": 2}
COMBINE = {"rows": torch.ones(8, 8), "positions": _PLACES, "weights": torch.ones(4, 2)}
LINEAR = {"input": _ROWS, "weight": torch.ones(2, 6, 8), "offsets": _OFFSETS}
MISTAKES = [
    ("moe_permute", {"input": torch.ones(4)}, ValueError, r"input must be \[tokens, columns\]"),
    ("moe_permute", {"input": _ROWS.long()}, TypeError, "input must be float16"),
    ("moe_permute", {"expert_indices": _INDEX[:3]}, ValueError, r"must be \[4, experts of each"),
    ("moe_permute", {"expert_indices": _INDEX.float()}, TypeError, "int32 or int64"),
    ("moe_permute", {"expert_indices": _INDEX + 2}, ValueError, "holds 2, and there are experts 0"),
    ("moe_permute", {"expert_indices": _INDEX - 2}, ValueError, "holds -2, and there are experts"),
    ("moe_permute", {"expert_indices": None}, TypeError, "must be tensors|must be a tensor"),
    ("moe_permute", {"num_experts": 0}, ValueError, "num_experts must be 1 to 2048, got 0"),
    ("moe_permute", {"num_experts": 2049}, ValueError, "num_experts must be 1 to 2048, got 2049"),
    ("moe_permute", {"num_experts": 2.5}, TypeError, "num_experts must be a whole number"),
    ("moe_combine", {"rows": torch.ones(7, 8)}, ValueError, "a row for each of the 8 positions"),
    ("moe_combine", {"positions": _PLACES.long()}, ValueError, "positions must be the int32"),
    ("moe_combine", {"positions": _PLACES + 1}, ValueError, "positions holds 8, and there are"),
    ("moe_combine", {"positions": _PLACES - 9}, ValueError, "positions holds -9, and there are"),
    ("moe_combine", {"weights": torch.ones(4, 1)}, ValueError, r"weights must be \[4, 2\]"),
    ("moe_combine", {"weights": torch.ones(4, 2).half()}, TypeError, "weights must be Float"),
    ("moe_combine", {"weights": [1.0]}, TypeError, "weights must be a tensor or None, got list"),
    ("grouped_linear", {"weight": torch.ones(2, 6, 7)}, ValueError, r"\[groups, outputs, 8\]"),
    ("grouped_linear", {"weight": torch.ones(2, 6, 8).half()}, TypeError, "weight must be Float"),
    ("grouped_linear", {"offsets": _OFFSETS.long()}, ValueError, r"an int32 tensor \[2\]"),
    ("grouped_linear", {"offsets": _OFFSETS[:1]}, ValueError, r"an int32 tensor \[2\]"),
    ("grouped_linear", {"offsets": _OFFSETS + 1}, ValueError, "begins with 3 and ends with 5"),
    ("grouped_linear", {"offsets": _OFFSETS.flip(0)}, ValueError, "must rise from 0 to at most"),
    ("grouped_linear", {"offsets": _OFFSETS - 3}, ValueError, "begins with -1"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "change", "error", "match"), MISTAKES)
def test_mistakes(name, change, error, match, device, monkeypatch):
    """On a GPU what tensors hold is checked where that is asked for."""
    monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    given = {"moe_permute": PERMUTE, "moe_combine": COMBINE, "grouped_linear": LINEAR}[name]
    arguments = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in {**given, **change}.items()
    }
    with pytest.raises(error, match=rf"^cudnn_ops\.{name}: .*(?:{match})"):
        getattr(cudnn_ops, name)(**arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_mistakes_of_experts(device):
    t = cases.make(CASES[0], torch.float32, device, seed=1)
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, got"):
        cudnn_ops.moe_experts(*t[:3], t.gate_up, t.down, activation="relu")
    with pytest.raises(ValueError, match=r"gate_up must be \[experts, 2 \* hidden, D\]"):
        cudnn_ops.moe_experts(*t[:3], t.gate_up[:, 1:], t.down)
    with pytest.raises(ValueError, match=r"gate_up must be \[experts, 2 \* hidden, D\]"):
        cudnn_ops.moe_experts(*t[:3], t.gate_up[1:], t.down)


@pytest.mark.gpu
def test_numbers_out_of_range_stand_for_none():
    """Without the check that waits for the GPU, nothing else is read or written."""
    x = torch.randn(4, 8, device="cuda")
    experts = torch.tensor([[0, 5], [-7, 1], [2**40, 1], [1, 0]])
    rows, offsets, positions = cudnn_ops.moe_permute(x, experts.cuda(), 2)
    right = torch.tensor([[0, -1], [-1, 1], [-1, 1], [1, 0]])
    expected = cudnn_ops.moe_permute(x.cpu(), right, 2)
    torch.testing.assert_close([t.cpu() for t in (rows, offsets, positions)], list(expected))
    wrong = torch.tensor([[0, 8], [2**31 - 1, -9], [-(2**31), 1], [2, 3]], dtype=torch.int32)
    out = cudnn_ops.moe_combine(rows, wrong.cuda())
    assert torch.equal(out[1], torch.zeros(8, device="cuda"))
    torch.testing.assert_close(out[2], rows[1])


@pytest.mark.parametrize("device", DEVICES)
def test_flops(device):
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(12, 16, device=device).requires_grad_()
    weight = torch.randn(3, 8, 16, device=device).requires_grad_()
    offsets = torch.tensor([1, 5, 12], dtype=torch.int32, device=device)
    with FlopCounterMode(display=False) as counter:
        cudnn_ops.grouped_linear(x, weight, offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 12 * 16 * 8


def test_activations_of_experts():
    t = cases.make(CASES[0], torch.float32, "cpu", seed=1)
    activations = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    for name, activation in activations.items():
        found = cudnn_ops.moe_experts(*t[:3], t.gate_up, t.down, activation=name)
        expected = torch.zeros_like(found)
        for token, j in torch.cartesian_prod(torch.arange(33), torch.arange(2)).tolist():
            expert = int(t.experts[token, j])
            gate, up = (t.gate_up[expert] @ t.input[token]).chunk(2)
            result = t.down[expert] @ (activation(gate) * up)
            expected[token] += (t.weights[token, j] * result).detach()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
