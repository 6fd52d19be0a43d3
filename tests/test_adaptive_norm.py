"""Adaptive norms: results and gradients, what broadcasts, mistakes, strange rows, compile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import cudnn_ops
from tests.cases import adaptive_norm as cases
from tests.cases import sdpa
from tests.cases.adaptive_norm import AdaptiveNormCase
from tests.cases.drawn import check_all
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
LAYER = AdaptiveNormCase((2, 5, 24), bias="same", weight="same")
SUM = replace(LAYER, gated=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    check_all(cases, 60, device, random.Random(8000 + block))


#: Transformers of images and videos, rows that a thread, a warp or a block has, those that no
#: registers hold, odd ones, many samples, and few rows.
SHAPES = [
    (4, 256, 1152),
    (2, 1024, 1536),
    (1, 4608, 3072),
    (1, 700, 5120),
    (3, 333, 64),
    (7, 100, 256),
    (3, 77, 520),
    (2, 19, 8192),
    (2, 19, 8200),
    (2, 9, 16384),
    (2, 9, 16392),
    (1, 3, 70_000),
    (3, 50, 1023),
    (2, 40, 7),
    (2, 300, 1),
    (900, 3, 128),
    (3000, 640),
    (1, 1, 3072),
    (2, 3, 4, 5, 384),
]


@GPU
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, gated, device, poisoned):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        case = AdaptiveNormCase(shape, is_layer=seed != 1, gated=gated, wide=seed == 1)
        cases.check(case, cases.make(case, dtype, device, seed))
        case = replace(case, weight="same", layout="sliced")
        cases.check(case, cases.make(case, dtype, device, seed))


@GPU
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(2, 260, 1152), (1, 130, 3072), (65, 640)], ids=str)
def test_numbers_of_each_token(shape, gated, device, poisoned):
    for scale, gate in (("token", "token"), ("sample", "token"), ("token", "batch")):
        case = AdaptiveNormCase(shape, gated=gated, scale=scale, shift=scale, gate=gate)
        for weight in ("", "float32"):
            case = replace(case, weight=weight, wide=bool(weight))
            cases.check(case, cases.make(case, torch.bfloat16, device, seed=1))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_shift_of_each_token_is_the_outputs(device):
    """It is nothing to compute, unless it lies otherwise than a gradient should."""
    x, scale, shift = (torch.randn(2, 5, 24, device=device).requires_grad_() for _ in range(3))
    by = torch.randn(2, 5, 25, device=device)
    for grad_out in (by[..., :24].contiguous(), by[..., :24]):
        out = cudnn_ops.adaptive_layer_norm(x, scale, shift)
        (grad,) = torch.autograd.grad(out, shift, grad_out)
        assert torch.equal(grad, grad_out)
        assert grad.is_contiguous()
        assert (grad.data_ptr() == grad_out.data_ptr()) == grad_out.is_contiguous()


@GPU
@pytest.mark.parametrize("kilobytes", [163, 99, 8])
def test_with_less_shared_memory(kilobytes, device, poisoned):
    """What an A100 and an L40S have, on any GPU; and next to nothing."""
    _ops._norm_limit_shared_memory(kilobytes << 10)
    try:
        for shape in SHAPES[:9]:
            case = AdaptiveNormCase(shape, gated=True, weight="same", bias="same")
            cases.check(case, cases.make(case, torch.float16, device, seed=1))
    finally:
        _ops._norm_limit_shared_memory(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_in_float64(gated, is_layer, device):
    if device == "cuda":
        return  # float64 is for CPUs
    for kind in ("sample", "token", "first"):
        case = AdaptiveNormCase((2, 3, 2, 6), is_layer, gated, scale=kind, weight="same")
        case = replace(case, bias="same" if is_layer else "")
        t = cases.make(case, torch.float64, device, seed=1)
        names = list(t.leaves)

        def call(*leaves, case=case, t=t, names=names):
            return tuple(cases.run(case, replace(t, **dict(zip(names, leaves, strict=True)))))

        assert torch.autograd.gradcheck(call, tuple(t.leaves.values()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated, is_layer, device):
    case = AdaptiveNormCase((2, 5, 24), is_layer, gated, weight="same", layout="sliced")
    t = cases.make(replace(case, bias="same" if is_layer else ""), torch.float32, device, seed=1)
    tensors = (t.input, t.update, t.gate, t.scale, t.shift, t.weight, t.bias)
    for with_stats in (False, True):
        call = (*tensors, 1e-6, is_layer, with_stats)
        torch.library.opcheck(_ops._adaptive_norm.default, call)
    _, _, *stats = _ops._adaptive_norm(*tensors, 1e-6, is_layer, True)
    saved = [None if one is None else one.detach() for one in (*tensors, *stats)]
    wanted = [one is not None for one in tensors]
    for mask in (wanted, [True] + [False] * 6, [False, *wanted[1:]]):
        backward = (t.grad_out, t.grad_sum if gated else None, *saved, is_layer, mask)
        torch.library.opcheck(_ops._adaptive_norm_backward.default, backward)
    kind = "layer" if is_layer else "rms"
    options = {"weight": t.weight, **({"bias": t.bias} if is_layer else {})}
    if gated:
        op = getattr(_ops, f"gate_add_adaptive_{kind}_norm").default
        torch.library.opcheck(op, tensors[:5], options)
    else:
        op = getattr(_ops, f"adaptive_{kind}_norm").default
        torch.library.opcheck(op, (t.input, t.scale, t.shift), options)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_one_projection(device):
    """As transformers have them; the six gradients are one tensor's again."""
    projection = torch.randn(2, 6 * 24, device=device, requires_grad=True)
    x, update = (torch.randn(2, 5, 24, device=device) for _ in range(2))

    def both(ours):
        shift, scale, gate, shift2, scale2, _ = projection.chunk(6, -1)
        if ours:
            out = cudnn_ops.adaptive_layer_norm(x, scale, shift)
            out2, total = cudnn_ops.gate_add_adaptive_layer_norm(x, update, gate, scale2, shift2)
        else:
            out = F.layer_norm(x, (24,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
            total = x + gate[:, None] * update
            out2 = F.layer_norm(total, (24,), eps=1e-6)
            out2 = out2 * (1 + scale2[:, None]) + shift2[:, None]
        loss = (out.sin() + out2.cos() + total.sin()).sum()
        return [out, out2, total, *torch.autograd.grad(loss, projection)]

    torch.testing.assert_close(both(True), both(False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_contiguous(device):
    x = torch.randn(5, 2, 24, device=device).transpose(0, 1)
    modulation = torch.randn(2, 24, device=device)
    out, total = cudnn_ops.gate_add_adaptive_layer_norm(x, x, modulation, modulation, modulation)
    assert out.is_contiguous()
    assert total.is_contiguous()
    with FakeTensorMode() as mode:
        fake = _ops._adaptive_norm(mode.from_tensor(x), *(None,) * 6, 1e-6, True, True)
    real = _ops._adaptive_norm(x, *(None,) * 6, 1e-6, True, True)
    assert [one.stride() for one in fake] == [one.stride() for one in real]
    assert [one.shape for one in fake] == [one.shape for one in real]


_ROWS, _ONE = torch.ones(2, 5, 24), torch.ones(2, 24)
MISTAKES = [
    ({"input": None}, TypeError, "input must be a tensor, got None"),
    ({"input": torch.ones(24)}, ValueError, r"input must be \[B, ..., C\].*got \[24\]"),
    ({"input": _ROWS.int()}, TypeError, "input must be float16, bfloat16 or float32.*got Int"),
    ({"scale": None}, TypeError, "scale must be a tensor, got None"),
    ({"shift": "none"}, TypeError, "shift must be a tensor, got 'none'"),
    ({"scale": torch.ones(24)}, ValueError, r"scale must be \[2, 24\].*got \[24\]"),
    ({"scale": torch.ones(3, 24)}, ValueError, r"scale must be \[2, 24\].*got \[3, 24\]"),
    ({"scale": torch.ones(2, 4, 24)}, ValueError, r"scale must be .*got \[2, 4, 24\]"),
    ({"shift": torch.ones(2, 1, 23)}, ValueError, r"shift must be .*got \[2, 1, 23\]"),
    ({"shift": torch.ones(2, 1, 1, 24)}, ValueError, r"shift must be .*got \[2, 1, 1, 24\]"),
    ({"shift": _ONE.half()}, TypeError, "shift must be of the input's dtype, .*got Half"),
    ({"scale": torch.ones(2, 24, device="meta")}, ValueError, "scale must be .*on cpu.*on meta"),
    ({"weight": torch.ones(23)}, ValueError, r"weight must be \[24\].*got \[23\]"),
    ({"weight": torch.ones(24).double()}, TypeError, "weight must be of the input's.*Double"),
    ({"bias": torch.ones(1, 24)}, ValueError, r"bias must be \[24\].*got \[1, 24\]"),
    ({"eps": "small"}, TypeError, "eps must be a number, got 'small'"),
]
MISTAKES_OF_SUM = [
    ({"update": None}, TypeError, "update must be a tensor, got None"),
    ({"gate": None}, TypeError, "gate must be a tensor, got None"),
    ({"update": torch.ones(2, 4, 24)}, ValueError, r"update must be of input's shape.*2, 4, 24"),
    ({"update": _ROWS.half()}, TypeError, "update must be of input's dtype, Float; got Half"),
    ({"gate": torch.ones(2, 5)}, ValueError, r"gate must be \[2, 24\].*got \[2, 5\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message):
    given = {"input": _ROWS, "scale": _ONE, "shift": _ONE} | change
    with pytest.raises(error, match=f"(?s)cudnn_ops.adaptive_layer_norm: .*{message}"):
        cudnn_ops.adaptive_layer_norm(**given)


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES_OF_SUM)
def test_mistakes_of_the_sum(change, error, message):
    given = {"input": _ROWS, "update": _ROWS, "gate": _ONE} | change
    for name in ("layer", "rms"):
        op = f"gate_add_adaptive_{name}_norm"
        with pytest.raises(error, match=f"(?s)cudnn_ops.{op}: .*{message}"):
            getattr(cudnn_ops, op)(**given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equal_numbers_are_their_own_mean(dtype, device):
    """A little beside it, and a small eps makes much of that."""
    for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
        for shape in ((2, 3, 100), (2, 3, 1023), (1, 5, 3072), (1, 2, 70_000)):
            x = torch.full(shape, value, dtype=dtype, device=device, requires_grad=True)
            shift = torch.full((shape[0], shape[-1]), 2.0, dtype=dtype, device=device)
            out = cudnn_ops.adaptive_layer_norm(x, shift, shift, eps=1e-10)
            assert (out == 2).all(), f"{shape}: {(out - 2).abs().max().item()}"
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_costs_no_digits(device):
    """A thousand deviations from zero, in float32."""
    for shape in ((2, 9, 640), (1, 7, 3072), (2, 3, 1023)):
        case = AdaptiveNormCase(shape, shift_by=1000.0)
        cases.check(case, cases.make(case, torch.float32, device, seed=1))


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_near_the_largest(device):
    """float16 as exactly as any others."""
    for shape in ((2, 5, 640), (1, 2, 70_000)):
        x = torch.full(shape, 65504.0, dtype=torch.float16, device=device)
        x[..., ::2] = -65504.0
        scale, shift = (torch.rand(shape[0], shape[-1], device=device).half() for _ in range(2))
        exact = F.layer_norm(x.double(), shape[-1:], eps=1e-6)
        exact = exact * (1 + scale[:, None].double()) + shift[:, None].double()
        sdpa.check(cudnn_ops.adaptive_layer_norm(x, scale, shift), exact, exact.half(), str(shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 5, 24), (2, 0, 24), (2, 5, 0), (0, 24)])
def test_nothing_to_norm(shape, device):
    case = replace(SUM, shape=shape)
    t = cases.make(case, torch.float32, device, seed=1)
    results = cases.run(case, t)
    assert [one.shape for one in results] == [shape, shape]
    grads = torch.autograd.grad(results[0].sum(), list(t.leaves.values()))
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in t.leaves.values()]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [64, 1001, 1152])
def test_each_gradient_alone(columns, device):
    """Is the one of all together, and those that are frozen are none."""
    case = replace(SUM, shape=(3, 40, columns), shift_by=0.5)
    t = cases.make(case, torch.float32, device, seed=1)
    results = cases.run(case, t)
    by = [t.grad_out, t.grad_sum]
    leaves = list(t.leaves.values())
    together = torch.autograd.grad(results, leaves, by, retain_graph=True)
    for leaf, right in zip(leaves, together, strict=True):
        (alone,) = torch.autograd.grad(results, leaf, by, retain_graph=True)
        torch.testing.assert_close(alone, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_alone_has_a_gradient(device):
    t = cases.make(SUM, torch.float32, device, seed=1)
    _, total = cases.run(SUM, t)
    of_sum = torch.autograd.grad(total, list(t.leaves.values()), t.grad_sum)
    found = dict(zip(t.leaves, of_sum, strict=True))
    assert t.gate is not None
    assert t.update is not None
    torch.testing.assert_close(found["input"], t.grad_sum)
    torch.testing.assert_close(found["update"], t.grad_sum * t.gate[:, None])
    torch.testing.assert_close(found["gate"], (t.grad_sum * t.update).sum(1))
    assert not any(found[name].any() for name in ("scale", "shift", "weight", "bias"))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_in_any_memory(device):
    """Of the output, as a loss may bring them: strided, and one number for all."""
    t = cases.make(SUM, torch.float32, device, seed=1)
    leaves = list(t.leaves.values())
    strided = t.grad_out.transpose(0, 1).contiguous().transpose(0, 1)
    for grad in (strided, t.grad_out[:1, :1, :1].expand(2, 5, 24)):
        runs = []
        for given in (grad, grad.contiguous()):
            results = cases.run(SUM, t)
            runs.append(torch.autograd.grad(results, leaves, [given, given.flip(0)]))
        torch.testing.assert_close(*runs)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_again(device):
    for shape in ((2, 900, 320), (3, 200, 1001)):
        case = replace(SUM, shape=shape)
        t = cases.make(case, torch.float32, device, seed=1)
        runs = []
        for _ in range(2):
            results = cases.run(case, t)
            by = [t.grad_out, t.grad_sum]
            runs.append([*results, *torch.autograd.grad(results, list(t.leaves.values()), by)])
        assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["sample", "token"])
def test_compiled_without_a_break_for_any_size(kind, device):
    torch._dynamo.reset()

    def step(x, update, gate, scale, shift):
        out, total = cudnn_ops.gate_add_adaptive_layer_norm(x * 2, update, gate, scale, shift)
        return out.sin() + cudnn_ops.adaptive_rms_norm(total, scale)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch, tokens in ((2, 5), (3, 9)):
        case = AdaptiveNormCase((batch, tokens, 24), True, True, kind, kind, kind)
        t = cases.make(case, torch.float32, device, seed=1)
        runs = []
        for function in (compiled, step):
            out = function(*t.leaves.values())
            runs.append([out, *torch.autograd.grad(out, list(t.leaves.values()), t.grad_out)])
        torch.testing.assert_close(*runs)
        assert runs[0][0].stride() == runs[1][0].stride()


@pytest.mark.parametrize("device", DEVICES)
def test_exported(device):
    class Block(torch.nn.Module):
        def forward(self, x, modulation):
            scale, shift = modulation.chunk(2, -1)
            return cudnn_ops.adaptive_layer_norm(x, scale, shift)

    given = torch.randn(2, 5, 24, device=device), torch.randn(2, 48, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Block(), given, dynamic_shapes=({1: tokens}, None))
    longer = torch.randn(2, 9, 24, device=device), given[1]
    torch.testing.assert_close(program.module()(*longer), Block()(*longer))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_is_that_of_torch(device):
    """Mixed dtypes promote as in torch's arithmetic, and a layer norm on CUDA is float32."""
    x, modulation = torch.randn(2, 5, 24, device=device), torch.randn(2, 24, device=device)
    low, low_modulation = x.bfloat16(), modulation.bfloat16()
    with torch.autocast(device, torch.bfloat16):
        layer = cudnn_ops.adaptive_layer_norm(low, low_modulation, low_modulation)
        mixed = cudnn_ops.adaptive_rms_norm(x, low_modulation)
        out, total = cudnn_ops.gate_add_adaptive_layer_norm(
            x, low, low_modulation, low_modulation, modulation
        )
    assert layer.dtype == (torch.float32 if device == "cuda" else torch.bfloat16)
    assert mixed.dtype == out.dtype == total.dtype == torch.float32
    expected = F.rms_norm(x, (24,), eps=1e-6) * (1 + low_modulation[:, None].float())
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    expected = x + low_modulation[:, None].float() * low.float()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_after_the_forward_is_told(device):
    for name in ("input", "update", "gate", "scale", "weight", "bias"):
        case = LAYER if name == "input" else SUM  # whose backward reads the sum in its place
        t = cases.make(case, torch.float32, device, seed=1)
        out = cases.run(case, t)[0]
        with torch.no_grad():
            t.leaves[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@GPU
@pytest.mark.parametrize("shape", [(2, 300, 1152), (3, 20, 1001)], ids=str)
def test_in_a_graph(shape, device):
    case = replace(SUM, shape=shape)
    t = cases.make(case, torch.bfloat16, device, seed=1)

    def step():
        results = cases.run(case, t)
        grads = torch.autograd.grad(results, list(t.leaves.values()), [t.grad_out, t.grad_sum])
        return [*results, *grads]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        t.input.copy_(t.input.flip(0) + 1)
    graph.replay()
    for mine, right in zip(found, step(), strict=True):
        assert torch.equal(mine, right)


def test_other_derivatives_are_refused():
    x, scale = torch.randn(2, 5, 24), torch.randn(2, 24)
    with pytest.raises(NotImplementedError, match="adaptive_layer_norm: forward-mode"):
        torch.func.jvp(lambda x: cudnn_ops.adaptive_layer_norm(x, scale, scale), (x,), (x,))
    leaf = x.requires_grad_()
    out = cudnn_ops.adaptive_layer_norm(leaf, scale, scale)
    (grad,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of a norm"):
        grad.sum().backward()
