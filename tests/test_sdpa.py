"""Attention's results and gradients, on the CPU and (``-m gpu``) on the GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from tests.cases import sdpa as cases
from tests.cases.sdpa import CASES, CPU_DTYPES, HOPPER_CASES, LOW_PRECISION, Case, run
from tests.conftest import DEVICES, deterministic

CASE_AND_DEVICE = [
    *(
        pytest.param(case, dtype, "cpu", id=f"{case}-{str(dtype)[6:]}-cpu")
        for case, dtype in itertools.product([*CASES, *HOPPER_CASES], CPU_DTYPES)
    ),
    *(
        pytest.param(case, dtype, "cuda", id=f"{case}-{str(dtype)[6:]}-cuda", marks=pytest.mark.gpu)
        for case, dtype in itertools.product([*CASES, *HOPPER_CASES], LOW_PRECISION)
    ),
]
GQA = Case(2, 4, 2, 40, 56, 64, 64, is_causal=True)


@pytest.mark.parametrize(("case", "dtype", "device"), CASE_AND_DEVICE)
def test_results_and_gradients(case, dtype, device, poisoned):
    inputs = cases.make_inputs(case, dtype, device)
    grad_out = cases.make_grad_out(case, dtype, device)
    cases.check_results(case, run(case, inputs, grad_out), inputs, grad_out)


@pytest.mark.parametrize(("case", "dtype", "device"), CASE_AND_DEVICE)
def test_forward_alone(case, dtype, device, poisoned):
    """Inference takes another plan: one that stores no log-sum-exp."""
    inputs = cases.make_inputs(case, dtype, device, seed=2)
    out = torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
    exact, _ = cases.attention(*(t.double() for t in inputs), case.is_causal, case.scale)
    rough, _ = cases.attention(*inputs, case.is_causal, case.scale)
    cases.check(out, exact, rough, "out")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [GQA, Case(1, 2, 2, 33, 33, 32, 64), CASES[0]], ids=str)
def test_gradient_of_the_log_sum_exp(case, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = cases.make_inputs(case, dtype, device)
    grad_out = cases.make_grad_out(case, dtype, device)
    grad_lse = torch.randn(case.batch, case.heads, case.length, device=device)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out, lse = cudnn_ops.scaled_dot_product_attention_with_lse(*leaves, **case.kwargs())
    grads = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])
    actual = cases.Results(out.detach(), lse.detach(), *grads)
    cases.check_results(case, actual, inputs, grad_out, grad_lse)

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    lse = cudnn_ops.scaled_dot_product_attention_with_lse(*leaves, **case.kwargs())[1]
    grads = torch.autograd.grad(lse, leaves, grad_lse)
    exact = cases.reference(case, inputs, torch.zeros_like(grad_out), torch.float64, grad_lse)
    rough = cases.reference(case, inputs, torch.zeros_like(grad_out), dtype, grad_lse)
    cases.check(grads[0], exact.grad_query, rough.grad_query, "grad_query")
    cases.check(grads[1], exact.grad_key, rough.grad_key, "grad_key")
    assert not grads[2].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "hbsd", "packed", "sliced"])
def test_results_lie_in_memory_as_their_inputs(layout, device):
    case = Case(2, 4, 4, 24, 24, 32, 64, layout=layout)
    query, key, value = cases.make_inputs(case, torch.bfloat16, device)
    out, lse = torch.ops.cudnn_ops.sdpa_with_lse(query, key, value)

    def order(tensor: Tensor) -> list[int]:
        strides = tensor.stride()
        return sorted(range(4), key=lambda dim: -strides[dim])

    assert order(out) == order(query)
    assert out.permute(order(out)).is_contiguous()
    assert lse.is_contiguous()
    grads = torch.ops.cudnn_ops._sdpa_backward(torch.ones_like(out), query, key, value, out, lse)
    assert [grad.numel() for grad in grads[3:]] == [0, 0]
    for grad, tensor in zip(grads[:3], (query, key, value), strict=True):
        assert order(grad) == order(tensor)
        assert grad.permute(order(grad)).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("needed", [n for n in itertools.product([0, 1], repeat=3) if any(n)])
def test_gradients_only_where_they_are_needed(needed, device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)
    grad_out = cases.make_grad_out(GQA, torch.bfloat16, device)
    leaves = [t.detach().requires_grad_(bool(n)) for t, n in zip(inputs, needed, strict=True)]
    cudnn_ops.scaled_dot_product_attention(*leaves, **GQA.kwargs()).backward(grad_out)
    expected = run(GQA, inputs, grad_out)
    expected_grads = (expected.grad_query, expected.grad_key, expected.grad_value)
    for leaf, need, grad in zip(leaves, needed, expected_grads, strict=True):
        assert (leaf.grad is not None) == bool(need)
        if need:
            torch.testing.assert_close(leaf.grad, grad, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced", "misaligned", "strided"])
def test_any_layout_of_the_output_gradient(kind, device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)
    shape = (GQA.batch, GQA.heads, GQA.length, GQA.value_size)
    values = torch.randn(shape, device=device).bfloat16()
    grad_out = {
        "expanded": lambda: torch.ones((), device=device, dtype=torch.bfloat16).expand(shape),
        "transposed": lambda: values.transpose(1, 3).contiguous().transpose(1, 3),
        "sliced": lambda: F.pad(values, (0, 8))[..., :-8],
        "misaligned": lambda: F.pad(values, (1, 0))[..., 1:],
        "strided": lambda: values.repeat_interleave(2, dim=-1)[..., ::2],
    }[kind]()
    cases.check_results(GQA, run(GQA, inputs, grad_out), inputs, grad_out)


@pytest.mark.parametrize("device", DEVICES)
def test_the_public_function_takes_torchs_arguments(device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)
    ours = cudnn_ops.scaled_dot_product_attention(*inputs, None, 0.0, True, enable_gqa=True)
    torchs = F.scaled_dot_product_attention(*inputs, None, 0.0, True, enable_gqa=True)
    torch.testing.assert_close(ours, torchs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms_are_obeyed(device):
    case = Case(2, 8, 2, 700, 700, 64, 64, is_causal=True)
    inputs = cases.make_inputs(case, torch.bfloat16, device)
    grad_out = cases.make_grad_out(case, torch.bfloat16, device)
    with deterministic():
        first, *others = (run(case, inputs, grad_out) for _ in range(5))
    cases.check_results(case, first, inputs, grad_out)
    for other in others:
        for (name, expected), (_, tensor) in zip(first.items(), other.items(), strict=True):
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode_and_inference_tensors(device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)
    expected = torch.ops.cudnn_ops.sdpa(*inputs, **GQA.kwargs())
    with torch.inference_mode():
        out = torch.ops.cudnn_ops.sdpa(*(t.clone() for t in inputs), **GQA.kwargs())
    assert out.is_inference()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_double_backward_is_refused(device):
    leaves = [t.requires_grad_() for t in cases.make_inputs(GQA, torch.bfloat16, device)]
    out = torch.ops.cudnn_ops.sdpa(*leaves, **GQA.kwargs())
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not available"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_forward_mode_is_refused(device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)

    def attend(query):
        return torch.ops.cudnn_ops.sdpa(query, *inputs[1:], **GQA.kwargs())

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(attend, (inputs[0],), (torch.ones_like(inputs[0]),))


@pytest.mark.parametrize("device", DEVICES)
def test_saved_tensors_are_guarded_against_changes(device):
    leaves = [t.requires_grad_() for t in cases.make_inputs(GQA, torch.bfloat16, device)]
    shifted = leaves[0] + 1
    out = torch.ops.cudnn_ops.sdpa(shifted, *leaves[1:], **GQA.kwargs())
    shifted.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_autocast(device, with_lse):
    inputs = [t.requires_grad_() for t in cases.make_inputs(GQA, torch.float32, device)]
    op = torch.ops.cudnn_ops.sdpa_with_lse if with_lse else torch.ops.cudnn_ops.sdpa
    with torch.autocast(device, dtype=torch.bfloat16):
        out = op(*inputs, **GQA.kwargs())
        mixed = op(inputs[0].bfloat16(), *inputs[1:], **GQA.kwargs())
    out, mixed = (out[0], mixed[0]) if with_lse else (out, mixed)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, out)
    torch.testing.assert_close(
        out, torch.ops.cudnn_ops.sdpa(*(t.bfloat16() for t in inputs), **GQA.kwargs())
    )
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_func_grad_checkpoint_and_hooks_work(device):
    inputs = cases.make_inputs(GQA, torch.bfloat16, device)
    grad_out = torch.ones(
        GQA.batch, GQA.heads, GQA.length, GQA.value_size, device=device
    ).bfloat16()
    expected = run(GQA, inputs, grad_out)

    def loss(query, key, value):
        return torch.ops.cudnn_ops.sdpa(query, key, value, **GQA.kwargs()).sum()

    by_func = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [t.detach().requires_grad_() for t in inputs]
    checkpoint(loss, *leaves, use_reentrant=False).backward()
    for ours, expect, leaf in zip(
        by_func, (expected.grad_query, expected.grad_key, expected.grad_value), leaves, strict=True
    ):
        torch.testing.assert_close(ours, expect, rtol=0.05, atol=0.02)
        torch.testing.assert_close(leaf.grad, expect, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grouped", [False, True])
def test_flops_are_counted_as_torch_counts_its_own(device, grouped):
    case = Case(2, 4, 2 if grouped else 4, 32, 48, 64, 64)
    leaves = [t.requires_grad_() for t in cases.make_inputs(case, torch.bfloat16, device)]
    with FlopCounterMode(display=False) as ours:
        torch.ops.cudnn_ops.sdpa(*leaves, **case.kwargs()).sum().backward()
    scores = case.batch * case.heads * case.length * case.length_kv
    matmul = 2 * scores * case.head_size
    # 2 products forward; backward: the scores again, grad of probabilities, and one each for
    # query, key and value
    assert ours.get_total_flops() == 2 * matmul + 5 * matmul


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "entries"),
    [
        pytest.param(Case(1040, 128, 8, 128, 128, 128, 128, True), [0, 519, 520, 1039], id="batch"),
        pytest.param(Case(1, 16640, 1040, 1024, 128, 128, 128), [0], id="heads"),
        pytest.param(Case(130, 8, 8, 128, 16384, 128, 128), [0, 129], id="keys"),
        pytest.param(Case(70000, 2, 1, 16, 24, 64, 64, True), [0, 65535, 69999], id="batches"),
        pytest.param(Case(2, 66000, 33000, 16, 16, 64, 64), [0, 1], id="many-heads"),
    ],
)
def test_more_than_cudnn_takes_at_once(case, entries, much_memory):
    """Beyond 2^31 elements cuDNN 9.19's own backward, and so torch's, is wrong without a word."""
    much_memory(40)
    torch.manual_seed(0)

    def random(heads: int, length: int, size: int) -> Tensor:
        shape = (case.batch, length, heads, size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    inputs = (
        random(case.heads, case.length, case.head_size),
        random(case.heads_kv, case.length_kv, case.head_size),
        random(case.heads_kv, case.length_kv, case.value_size),
    )
    grad_out = random(case.heads, case.length, case.value_size)
    assert max(t.numel() for t in inputs) > 2**31 or max(case.batch, case.heads) > 65535
    results = run(case, inputs, grad_out)
    group = case.heads // case.heads_kv
    for entry in entries:
        for head in (0, case.heads_kv // 2, case.heads_kv - 1):  # of the keys

            def part(t: Tensor, entry=entry, head=head) -> Tensor:
                unit = t.shape[1] // case.heads_kv
                return t[entry : entry + 1, head * unit : (head + 1) * unit]

            one = replace(case, batch=1, heads=group, heads_kv=1)
            cases.check_results(
                one,
                cases.Results(*(part(tensor) for _, tensor in results.items())),
                tuple(part(tensor) for tensor in inputs),
                part(grad_out),
            )


def test_empty_results_are_counted_and_typed():
    case = Case(2, 4, 2, 5, 0, 64, 32)
    out, lse = torch.ops.cudnn_ops.sdpa_with_lse(
        *cases.make_inputs(case, torch.float64, "cpu"), **case.kwargs()
    )
    assert out.shape == (2, 4, 5, 32)
    assert not out.any()
    assert out.dtype == lse.dtype == torch.float64
    assert torch.equal(lse, torch.full((2, 4, 5), -torch.inf, dtype=torch.float64))


@pytest.mark.parametrize("sink", [None, -3.0, 65536.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_on_a_cpu(sign, sink):
    """Beside their log-sum-exp float32 has no room for what tells them apart."""
    torch.manual_seed(0)
    query, key = torch.zeros(1, 2, 5, 64), torch.zeros(1, 2, 7, 64)
    query[..., 0], key[..., 0] = 8192.0, 64.0 * sign  # every score about +-524288 / 8, and exact
    for tensor in (query, key):
        tensor[..., 1] = torch.randint(-8, 9, tensor.shape[:3]) / 2
    leaves = [query, key, torch.randn(1, 2, 7, 64)]
    if sink is not None:
        leaves.append(torch.full((2,), sink))
    grad_out = torch.randn(1, 2, 5, 64)

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        scores = q @ k.mT / 8
        columns = [scores, *(s.view(1, 2, 1, 1).expand(1, 2, 5, 1) for s in sinks)]
        return torch.cat(columns, -1).softmax(-1)[..., :7] @ v

    def ours(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return torch.ops.cudnn_ops.sdpa(q, k, v, sinks=sinks[0] if sinks else None)

    results = []
    for function, dtype in ((ours, torch.float32), (attend, torch.float64)):
        typed = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = function(*typed)
        grads = list(torch.autograd.grad(out, typed, grad_out.to(dtype)))
        for i in range(2):  # in the first column the rounding of 8192 and 64 terms shows
            grads[i] = grads[i][..., 1:]
        results.append([out, *grads])
    for actual, exact in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
