"""Attention of 16 bits in FP8: results, gradients, what is saved, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import cudnn_ops
from tests.cases import sdpa_in_fp8 as cases
from tests.cases.fp8 import CASES, Case, options_of
from tests.conftest import DEVICES
from tests.test_sdpa_fp8 import CHECKS

_op = torch.ops.cudnn_ops.sdpa_in_fp8.default
attend = cudnn_ops.scaled_dot_product_attention_fp8
CAUSAL = Case(heads=6, heads_kv=2, length=33, length_kv=33, options={"is_causal": True})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, dtype, device, poisoned):
    cases.check(case, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kinds_of_inputs(is_causal, kind, device):
    """With outliers, the log-sum-exp of the tensors as they were is another one by 100."""
    case = Case(2, 4, 2, 200, 200, options={"is_causal": is_causal})
    for seed in range(3):
        cases.check(case, torch.bfloat16, device, kind, seed)


def test_float32_on_a_cpu():
    cases.check(CAUSAL, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.0, 2.0**-120, 2e36])
def test_values_at_the_ends_of_the_range(value, device):
    """All equal, like all keys: the mean is the same number, and scores have no gradient."""
    x = torch.ones(1, 2, 40, 32, device=device, dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_(), value * x]
    leaves[2].requires_grad_()
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.full_like(out, 1e-3))
    torch.testing.assert_close(out.double(), value * x.double(), rtol=2.0**-4, atol=0)
    assert all(grad.isfinite().all() for grad in grads)
    torch.testing.assert_close(grads[2], torch.full_like(x, 1e-3), rtol=1e-2, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_as_it_lies(device):
    """Parts of one projection, a last dimension with a stride, one head for all."""
    *inputs, grad = cases.make(CAUSAL, torch.bfloat16, device, "normal", 0)
    expected = cases.run(CAUSAL, [*inputs, grad], torch.enable_grad())
    parts = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in inputs]
    apart = [x.mT.contiguous().mT for x in inputs]
    for given in (parts, apart):
        for mine, other in zip(
            cases.run(CAUSAL, [*given, grad], torch.enable_grad()), expected, strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    leaf = inputs[0][:, :1].clone().requires_grad_()
    one = leaf.expand(-1, CAUSAL.heads, -1, -1)
    out = attend(one, *inputs[1:], is_causal=True)
    (found,) = torch.autograd.grad(out, leaf, torch.ones((), device=device).expand_as(out).to(out))
    whole = leaf.detach().repeat(1, CAUSAL.heads, 1, 1).requires_grad_()
    again = attend(whole, *inputs[1:], is_causal=True)
    (each,) = torch.autograd.grad(again, whole, torch.ones_like(again))
    torch.testing.assert_close(found, each.sum(1, keepdim=True), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_of_8_bits_are_what_is_saved(device):
    *inputs, _ = cases.make(CAUSAL, torch.bfloat16, device, "normal", 0)
    leaves = [x.requires_grad_() for x in inputs]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(*leaves, is_causal=True)
    assert [x.dtype for x in saved[:3]] == [torch.float8_e4m3fn] * 3
    heads = sum(x.numel() for x in leaves)
    rest = out.nbytes + 4 * out.shape[:3].numel() + 3 * 4
    assert sum(x.nbytes for x in saved) == heads + rest


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_gradients_that_are_wanted(device):
    query, key, value, grad = cases.make(CAUSAL, torch.bfloat16, device, "normal", 0)
    out = attend(query, key.requires_grad_(), value, is_causal=True)
    (found,) = torch.autograd.grad(out, key, grad)
    every = cases.run(CAUSAL, [query, key.detach(), value, grad], torch.enable_grad())
    torch.testing.assert_close(found, every[2], rtol=0, atol=0)
    with torch.no_grad():
        assert not attend(query, key, value).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(attend(query, key, value, is_causal=True), out.detach())


def test_no_second_derivative():
    x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(attend(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not available"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="_fp8: forward-mode derivatives"):
        torch.func.jvp(lambda x: attend(x, x, x), (x.detach(),), (x.detach(),))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES[:4], *CASES[-6:-2]], ids=str)
def test_opcheck(case, device):
    *inputs, _ = cases.make(case, torch.bfloat16, device, "normal", 0)
    arguments = tuple(x.requires_grad_() for x in inputs)
    options = options_of(case, device)
    torch.library.opcheck(_op, arguments, options, test_utils=CHECKS, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_other_lengths(backend, device):
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for length in (33, 64, 70):
        case = Case(length=length, length_kv=length, options={"is_causal": True})
        *inputs, grad = cases.make(case, torch.bfloat16, device, "normal", 0)
        leaves = [x.requires_grad_() for x in inputs]
        out = compiled(*leaves, is_causal=True)
        expected = attend(*leaves, is_causal=True)
        torch.testing.assert_close(out, expected)
        assert out.stride() == expected.stride()
        for mine, other in zip(
            torch.autograd.grad(out, leaves, grad),
            torch.autograd.grad(expected, leaves, grad),
            strict=True,
        ):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("device", DEVICES)
def test_exported_by_torch_s_operators(device):
    class Attend(torch.nn.Module):
        def forward(self, *heads):
            return attend(*heads, is_causal=True)

    *inputs, _ = cases.make(CAUSAL, torch.bfloat16, device, "normal", 0)
    program = torch.export.export(Attend(), tuple(inputs))
    program = program.run_decompositions(cudnn_ops.decompositions())
    assert "cudnn_ops" not in str(program.graph)
    found, expected = program.module()(*inputs), attend(*inputs, is_causal=True)
    # On a GPU torch's operators round no probabilities, and no output before the last.
    bound = (0.05 if device == "cuda" else 2.0**-8) * expected.norm()
    assert (found - expected).norm() <= bound


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device):
    x = torch.randn(3, 2, 4, 20, 16, device=device, dtype=torch.bfloat16)

    def loss(x):
        return attend(x, x, x, is_causal=True).float().square().sum()

    found = torch.vmap(torch.func.grad(loss))(x)
    for sample, grad in zip(x, found, strict=True):
        leaf = sample.clone().requires_grad_()
        torch.testing.assert_close(grad, torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    *inputs, grad = cases.make(CAUSAL, torch.float32, device, "normal", 0)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast(device, torch.bfloat16):
        out = attend(*leaves, is_causal=True)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, leaves, grad.bfloat16())
    low = [x.detach().bfloat16() for x in (*leaves, grad)]
    for mine, other in zip(found, cases.run(CAUSAL, low, torch.enable_grad())[1:], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other.float(), rtol=0, atol=0)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "8 bits": (
        dict.fromkeys(("query", "key", "value"), torch.ones(1, 2, 8, 32).to(torch.float8_e4m3fn)),
        TypeError,
        "float16 or bfloat16 .* query is Float8_e4m3fn on cpu; cudnn_ops.sdpa_fp8 takes 8 bits",
    ),
    "float64": (
        dict.fromkeys(("query", "key", "value"), torch.ones(1, 2, 8, 32).double()),
        TypeError,
        "float32 too on a CPU.*query is Double",
    ),
    "two dtypes": ({"value": torch.ones(1, 2, 8, 32).half()}, TypeError, "value is Half on cpu"),
    "three dimensions": ({"key": torch.ones(2, 8, 32).bfloat16()}, ValueError, r"\[batch, heads"),
    "head size": (
        dict.fromkeys(("query", "key"), torch.ones(1, 2, 8, 24).bfloat16()),
        ValueError,
        "multiples of 16",
    ),
    "heads": ({"query": torch.ones(1, 3, 8, 32).bfloat16()}, ValueError, "must be a multiple"),
    "lengths of the keys": (
        {"key": torch.ones(1, 2, 9, 32).bfloat16()},
        ValueError,
        "the same heads and length",
    ),
    "a negative scale": ({"scale": -1.0}, ValueError, "scale must be a normal, positive"),
    "numbers with their descale": (
        {"query": cudnn_ops.quantize_fp8(torch.ones(1, 2, 8, 32))},
        TypeError,
        "query must be a tensor, got QuantizedFp8",
    ),
    "window": ({"window_size": 3}, TypeError, r"must be \(left, right\)"),
    "a list": ({"seq_lens_kv": [3]}, TypeError, "must be a tensor"),
    "too long": ({"seq_lens_kv": torch.tensor([9]).int()}, ValueError, "holds lengths from 9"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    x = torch.ones(1, 2, 8, 32).bfloat16()
    given = {"query": x, "key": x, "value": x, **change}
    with pytest.raises(error, match=f"scaled_dot_product_attention_fp8: .*{match}"):
        attend(**given)
