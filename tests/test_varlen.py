"""Packed attention: results and gradients, offsets of all kinds, what it leaves alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from tests.cases import varlen as cases
from tests.cases.sdpa_features import Features
from tests.cases.varlen import Packed
from tests.conftest import DEVICES

ONE = Features(1, 4, 2, 0, 0, 64, 64, bottom_right=True)
BASE = Packed((70, 0, 33, 129), (70, 0, 33, 129), ONE)
OTHER = replace(BASE, lengths_kv=(131, 5, 0, 64))
CASES = [
    BASE,
    replace(BASE, same=True, one=replace(ONE, is_causal=True)),
    replace(BASE, offsets=torch.int64, one=replace(ONE, heads_kv=4), together=True, same=True),
    replace(BASE, gaps=(2, 1, 0, 3), one=replace(ONE, is_causal=True)),
    OTHER,
    *(
        replace(OTHER, one=replace(ONE, is_causal=causal, window_size=window, bottom_right=br))
        for causal, window in ((True, (-1, -1)), (False, (20, 7)), (True, (20, -1)))
        for br in (True, False)
    ),
    *(
        replace(BASE, same=True, one=replace(ONE, is_causal=True, **feature))
        for feature in (
            {"softcap": 5.0},
            {"alibi": True},
            {"sinks": True},
            {"dropout_p": 0.3},
            {"deterministic": True},
        )
    ),
    replace(OTHER, one=replace(ONE, is_causal=True, dropout_p=0.3, sinks=True, softcap=5.0)),
    replace(BASE, lse=True, same=True, one=replace(ONE, is_causal=True, softcap=5.0)),
    replace(OTHER, lse=True, gaps=(2, 1, 0, 3), one=replace(ONE, sinks=True, window_size=(20, 7))),
    # rows that are copied
    replace(OTHER, lse=True, one=replace(ONE, head_size=20, value_size=12, is_causal=True)),
    replace(BASE, same=True, one=replace(ONE, head_size=60, value_size=64, scale=0.3)),
    replace(BASE, lengths=(1,), lengths_kv=(1,), one=replace(ONE, is_causal=True)),
    replace(BASE, lengths=(0, 0), lengths_kv=(0, 5)),
    replace(BASE, lengths=(5, 9), lengths_kv=(0, 0), one=replace(ONE, sinks=True)),
    replace(BASE, lengths=(), lengths_kv=()),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case, device, poisoned):
    tensors = cases.make(case, torch.bfloat16, device, seed=1)
    cases.check(case, tensors, cases.run(case, tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(4))
def test_any_combination(block, device, poisoned):
    rng = random.Random(2000 + block)
    refused, wrong = [], []
    for seed in range(25 if device == "cuda" else 30):
        case = cases.draw(rng)
        tensors = cases.make(case, rng.choice([torch.float16, torch.bfloat16]), device, seed)
        try:
            cases.check(case, tensors, cases.run(case, tensors))
        except NotImplementedError as error:
            refused.append((case, str(error)))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert device == "cuda" or not refused
    for case, reason in refused:  # cuDNN reads lengths wrongly where slopes are measured from ends
        assert case.one.alibi
        assert "slopes-from-the-end" in reason


@pytest.mark.parametrize("device", DEVICES)
def test_forward_alone_and_the_layout_of_the_results(device):
    case = CASES[1]
    t = cases.make(case, torch.bfloat16, device, seed=2)
    out, lse = cudnn_ops.varlen_attention_with_lse(t.q, t.k, t.v, *t.offsets, **case.kwargs())
    alone = cudnn_ops.varlen_attention(t.q, t.k, t.v, *t.offsets, **case.kwargs())
    torch.testing.assert_close(alone, out)
    assert out.is_contiguous()
    assert lse.shape == (4, t.q.shape[0])
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [False, True])
def test_any_last_stride(inference, device):
    case = replace(OTHER, one=replace(ONE, is_causal=True))
    t = cases.make(case, torch.bfloat16, device, seed=3)
    strided = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in (t.q, t.k, t.v)]
    assert all(tensor.stride(2) == 2 for tensor in strided)
    t = replace(t, q=strided[0], k=strided[1], v=strided[2])
    if not inference:
        cases.check(case, t, cases.run(case, t))
        return
    expected = cudnn_ops.varlen_attention(*strided, *t.offsets, **case.kwargs())
    with torch.inference_mode():
        out = cudnn_ops.varlen_attention(*strided, *t.offsets, **case.kwargs())
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_no_heads(device):
    case = replace(OTHER, lse=True, one=replace(ONE, heads=0, heads_kv=0, sinks=True))
    t = cases.make(case, torch.bfloat16, device, seed=1)
    results = cases.run(case, t)
    assert results.out.shape == t.q.shape
    assert results.lse.shape == (0, t.q.shape[0])
    assert results.grad_query.shape == t.q.shape
    assert results.grad_key.shape == t.k.shape
    assert results.grad_sinks.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("beyond", [2**31 - 1, 2**32, 2**63 - 1])
def test_windows_that_are_longer_than_any_sequence(beyond, same, device):
    case = replace(BASE if same else OTHER, same=same)
    for window, without in (
        ((beyond, 0), (-1, 0)),
        ((7, beyond), (7, -1)),
        ((beyond, beyond), (-1, -1)),
    ):
        wide = replace(case, one=replace(ONE, window_size=window))
        t = cases.make(wide, torch.bfloat16, device, seed=1)
        results = cases.run(wide, t)
        cases.check(replace(case, one=replace(ONE, window_size=without)), t, results)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_more_sequences_than_cudnn_takes_at_once(heads_kv, much_memory):
    """65,535 a launch; beyond them, or where the gradients of so many are too large, in parts."""
    much_memory(30)
    torch.manual_seed(0)
    count = 70001
    lengths = torch.arange(count, device="cuda") % 3 + 1
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    tokens = int(starts[-1])

    def random(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)

    leaves = [random(heads).requires_grad_() for heads in (2, heads_kv, heads_kv)]
    grad_out = random(2)
    out, lse = cudnn_ops.varlen_attention_with_lse(*leaves, starts, starts, 3, 3, causal=True)
    grads = torch.autograd.grad(out, leaves, grad_out)
    alone = cudnn_ops.varlen_attention(*leaves, starts, starts.clone(), 3, 3, causal=True)
    torch.testing.assert_close(alone, out, rtol=1e-2, atol=1e-2)
    for length in (1, 2, 3):  # all sequences of a length as one batch
        of_length = (lengths == length).nonzero().flatten()
        rows = starts[of_length].long()[:, None] + torch.arange(length, device="cuda")

        def batched(packed: torch.Tensor, rows=rows) -> torch.Tensor:
            return packed.detach()[rows].transpose(1, 2)

        one = cases.sdpa.Case(len(of_length), 2, heads_kv, length, length, 64, 64, is_causal=True)
        actual = cases.sdpa.Results(
            batched(out), lse.t()[rows].transpose(1, 2), *(batched(grad) for grad in grads)
        )
        inputs = tuple(batched(leaf) for leaf in leaves)
        cases.sdpa.check_results(one, actual, inputs, batched(grad_out))


@pytest.mark.gpu
def test_dropout_over_too_many_sequences_is_refused():
    q = torch.ones(65537, 1, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(65538, device="cuda", dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="with dropout cuDNN supports at most 65535 seq"):
        cudnn_ops.varlen_attention(q, q, q, starts, starts, 1, 1, dropout_p=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_the_sequences(device):
    case = replace(BASE, lengths=(10, 0, 3), lengths_kv=(4, 5, 3))
    t = cases.make(case, torch.bfloat16, device, seed=1)
    leaves = [tensor.requires_grad_() for tensor in (t.q, t.k, t.v)]
    with FlopCounterMode(display=False) as counter:
        cudnn_ops.varlen_attention(*leaves, *t.offsets, **case.kwargs()).sum().backward()
    assert counter.get_total_flops() == 4 * (10 * 4 + 3 * 3) * 2 * 64 * (2 + 5)
    window = {**case.kwargs(), "window_size": (1, 0)}
    with FlopCounterMode(display=False) as counter:
        cudnn_ops.varlen_attention(t.q, t.k, t.v, *t.offsets, **window)
    # the last 4 of 10 queries see keys, from the bottom right; of 3 and 3 all
    assert counter.get_total_flops() == 4 * ((1 + 2 + 2 + 2) + (1 + 2 + 2)) * 2 * 64 * 2


@pytest.mark.gpu
@pytest.mark.parametrize("feature", [{}, {"dropout_p": 0.2, "sinks": True}])
def test_the_host_never_waits(feature):
    """Neither for offsets and lengths, nor to draw random numbers; forward and backward."""
    case = replace(BASE, gaps=(1, 0, 2, 3), one=replace(ONE, **feature))
    t = cases.make(case, torch.bfloat16, "cuda", seed=1)
    t.extras.pop("rng_state", None)
    cases.run(case, t)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cases.run(case, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("heads", [(64, 4), (16, 16)])
def test_totals_beyond_2_to_the_31_elements(heads, much_memory):
    """Offsets are 64-bit numbers; the backward is cut into groups of heads."""
    much_memory(60)
    torch.manual_seed(0)
    lengths = [9000, 1, 70000, 190000] if heads[0] == 64 else [500000, 129, 600000]
    total = sum(lengths)

    def random(count: int) -> torch.Tensor:
        return torch.randn(total, count, 128, device="cuda", dtype=torch.bfloat16)

    q, k, v, grad_out = (random(count) for count in (heads[0], heads[1], heads[1], heads[0]))
    assert q.numel() > 2**31
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    # A window keeps the time and the reference small.
    options = {"causal": True, "window_size": (200, 0)}
    longest = max(lengths)
    out, lse = cudnn_ops.varlen_attention_with_lse(
        *leaves, starts, starts, longest, longest, **options
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    size, group = 300, heads[0] // heads[1]
    # The very last tokens; what they see lies among them.
    one = Features(
        1, heads[0], heads[1], size, size, 128, 128, is_causal=True, window_size=(200, 0)
    )
    rows = slice(total - size, total)
    seen = slice(size - 90, size)
    inputs = [t.detach()[rows].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    gradient = grad_out[rows].transpose(0, 1).unsqueeze(0)
    exact = cases.sdpa_features.reference(one, inputs, {}, gradient, torch.float64, None)
    rough = cases.sdpa_features.reference(one, inputs, {}, gradient, torch.bfloat16, None)
    of_heads = {"out": out.detach(), "grad_query": grads[0], "grad_key": grads[1]}
    of_heads["grad_value"] = grads[2]
    for name, tensor in of_heads.items():
        actual = tensor[rows].transpose(0, 1).unsqueeze(0)[:, :, seen]
        expected, low = (dict(r.items())[name][:, :, seen] for r in (exact, rough))
        cases.sdpa.check(actual, expected, low, f"{name} of {group} heads a key")
    wide = dict(exact.items())["lse"][0][:, seen].float()
    torch.testing.assert_close(lse[:, rows][:, seen], wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_the_keys_are_merged(packed, device):
    """Attention over all keys is that over some and over the others, put together."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    q, k, v = (torch.randn(2, 4, 48, 64, device=device, dtype=dtype) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def attend(*tensors):
        if not packed:
            return cudnn_ops.scaled_dot_product_attention_with_lse(*tensors)
        starts = [torch.arange(3, device=device).mul(t.shape[2]).int() for t in tensors[:2]]
        flat = [t.transpose(1, 2).flatten(0, 1) for t in tensors]
        lengths = [t.shape[2] for t in tensors[:2]]
        return cudnn_ops.varlen_attention_with_lse(*flat, *starts, *lengths)

    whole, lse = attend(q, k, v)
    parts = [attend(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 7), slice(7, 48))]
    out, merged = cudnn_ops.merge_attention_states(*parts[0], *parts[1])
    tolerance = 2e-2 if device == "cuda" else 1e-9
    torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged, lse, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.sum(), leaves)
    expected = torch.autograd.grad(whole.sum(), leaves)
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact, rtol=5 * tolerance, atol=5 * tolerance)


def test_merging_nothing_with_nothing():
    out = torch.randn(1, 2, 3, 8, requires_grad=True)
    empty = torch.full((1, 2, 3), -torch.inf, requires_grad=True)
    some = torch.zeros(1, 2, 3)
    both, lse = cudnn_ops.merge_attention_states(out, empty, out, empty)
    assert not both.any()
    assert lse.isneginf().all()
    both.sum().backward()
    assert out.grad.isfinite().all()
    assert empty.grad.isfinite().all()
    one, lse = cudnn_ops.merge_attention_states(out, empty, 2 * out, some)
    torch.testing.assert_close(one, 2 * out)
    torch.testing.assert_close(lse, some)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((1, 2, 3, 8), (1, 2, 3), (1, 2, 4, 8), (1, 2, 3)), "of one shape"),
        (((1, 2, 3, 8), (1, 2, 3), (1, 2, 3, 8), (1, 2)), "of one shape"),
        (((3, 2, 8), (3, 2), (3, 2, 8), (3, 2)), "lse_a must be"),
        (((3, 8), (3,), (3, 8), (3,)), "must both be"),
    ],
)
def test_states_that_do_not_fit(shapes, match):
    with pytest.raises(ValueError, match=match):
        cudnn_ops.merge_attention_states(*(torch.zeros(shape) for shape in shapes))
