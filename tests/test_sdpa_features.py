"""Attention's features, alone and together: results and gradients against float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from cudnn_ops import support
from tests.cases import sdpa as plain
from tests.cases import sdpa_features as cases
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES, deterministic

BASE = Features(2, 4, 2, 70, 70, 64, 64)
CASES: list[Features] = [
    # masks
    *(
        replace(BASE, mask=mask, mask_dtype=dtype, hides=hides)
        for mask in ("bhqk", "11qk", "b11k", "1h1k", "qk", "k")
        for dtype, hides in (("bool", "rows"), ("same", ""), ("float32", "some"), ("other", "rows"))
    ),
    replace(BASE, mask="bhqk", is_causal=True, length_kv=131),
    replace(BASE, mask="1hqk", is_causal=True, bottom_right=True, length_kv=131),
    # windows and alignment
    *(
        replace(BASE, window_size=window, bottom_right=br, length=length, length_kv=length_kv)
        for window in ((17, 0), (0, 17), (17, 17), (0, 0), (-1, 5), (5, -1))
        for br in (False, True)
        for length, length_kv in ((70, 70), (40, 131), (131, 40))
    ),
    *(
        replace(BASE, is_causal=True, bottom_right=True, length=length, length_kv=length_kv)
        for length, length_kv in ((40, 131), (131, 40), (1, 65), (65, 1), (64, 128))
    ),
    # slopes, caps, sinks
    *(
        replace(BASE, is_causal=causal, bottom_right=br, length_kv=length_kv, **feature)
        for feature in ({"alibi": True}, {"softcap": 5.0}, {"sinks": True})
        for causal, br, length_kv in ((False, False, 70), (True, False, 70), (True, True, 131))
    ),
    replace(BASE, alibi=True, bottom_right=True, length=40, length_kv=131),
    replace(BASE, sinks=True, length=1, length_kv=65),
    replace(BASE, sinks=True, length_kv=0),
    replace(BASE, softcap=1.0, alibi=True, sinks=True, is_causal=True, window_size=(30, 0)),
    # dropout
    *(replace(BASE, dropout_p=p, is_causal=causal) for p in (0.1, 0.9) for causal in (False, True)),
    replace(BASE, dropout_p=0.2, is_causal=True, bottom_right=True, length_kv=131),
    # padding
    *(
        replace(BASE, batch=4, lengths=lengths, is_causal=causal, bottom_right=br)
        for lengths in ("q", "kv", "both")
        for causal, br in ((False, False), (True, False), (True, True))
    ),
    replace(BASE, batch=4, lengths="both", mask="b1qk"),
    replace(BASE, batch=4, lengths="both", sinks=True, alibi=True, bottom_right=True),
    replace(BASE, batch=4, lengths="both", sinks=True, length=1),
    replace(BASE, batch=4, lengths="both", dropout_p=0.3),
    replace(BASE, batch=4, lengths="both", layout="bhsd", window_size=(9, 9)),
    replace(BASE, length=1, length_kv=1, sinks=True),
    replace(BASE, batch=4, length=1, length_kv=1, lengths="both"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case, device, poisoned, fresh_cache):
    """Each alone: what ran before decides whether a shape gets a plan of its own."""
    cases.check_all(case, torch.bfloat16, device, seed=3, with_lse=False)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["argument", "torch"])
@pytest.mark.parametrize("feature", [{}, {"sinks": True}, {"dropout_p": 0.3}, {"mask": "b1qk"}])
def test_a_deterministic_backward_gives_the_same_bits_twenty_times(feature, asked):
    """With enough queries and heads a key that the default adds in another order each time."""
    case = Features(2, 8, 1, 1030, 1000, 64, 64, is_causal=True, **feature)
    if asked == "argument":
        case = replace(case, deterministic=True)
    inputs, extras, grad_out = cases.make_problem(case, torch.bfloat16, "cuda", seed=1)
    with deterministic() if asked == "torch" else nullcontext():
        first, *others = (cases.run(case, inputs, extras, grad_out) for _ in range(20))
    for other in others:
        for (name, tensor), (_, same) in zip(first.items(), other.items(), strict=True):
            assert torch.equal(tensor, same), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_how_many_weights_dropout_keeps_and_at_which_scale(dropout_p, device):
    """With one-hot values an output is the sum of some weights that are kept, scaled."""
    torch.manual_seed(0)
    query, key = (torch.randn(4, 8, 256, 64, device=device).bfloat16() for _ in range(2))
    one_hot = torch.eye(64, device=device).bfloat16().repeat(4, 1)
    value = one_hot.expand(4, 8, 256, 64).contiguous()
    out = torch.ops.cudnn_ops.sdpa(query, key, value, dropout_p=dropout_p)
    # Uniform weights, so that what is kept can be counted: 4 keys in each column of the output.
    kept = torch.ops.cudnn_ops.sdpa(0 * query, key, value, dropout_p=dropout_p).float()
    counts = kept * 256 * (1 - dropout_p)
    torch.testing.assert_close(counts, counts.round(), rtol=0.02, atol=0.02)
    counts = counts.round()
    trials = 4 * counts.numel()
    spread = 5 * (dropout_p * (1 - dropout_p) / trials) ** 0.5
    assert abs(counts.sum().item() / trials - (1 - dropout_p)) < spread
    # Neighbours are independent: as many keep both as chance has it.
    some = counts.view(-1)
    variance = 4 * dropout_p * (1 - dropout_p)
    assert some.var().item() == pytest.approx(variance, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([some[:-1], some[1:]]))[0, 1].item()) < 0.01
    rows = counts.sum(-1).view(-1)
    assert abs(torch.corrcoef(torch.stack([rows[:-1], rows[1:]]))[0, 1].item()) < 0.06
    # Other numbers each call, the same from the same seed, and unbiased.
    again = torch.ops.cudnn_ops.sdpa(query, key, value, dropout_p=dropout_p)
    assert not torch.equal(out, again)
    torch.manual_seed(0)
    for _ in range(2):  # as were drawn before
        torch.randn(4, 8, 256, 64, device=device)
    assert torch.equal(out, torch.ops.cudnn_ops.sdpa(query, key, value, dropout_p=dropout_p))
    total = out.float().sum(-1).mean().item()
    assert total == pytest.approx(
        1.0, abs=5 * (dropout_p / (1 - dropout_p) / 256 / 8192) ** 0.5 * 3
    )


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
@pytest.mark.parametrize("case", cases.SOME, ids=str)
def test_the_host_never_waits(case, policy):
    inputs, extras, grad_out = cases.make_problem(case, torch.bfloat16, "cuda", seed=1)
    extras.pop("rng_state", None)  # drawn by the operator
    with cudnn_ops.using_plan_policy(policy):
        cases.run(case, inputs, extras, grad_out)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cases.run(case, inputs, extras, grad_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_workspace_that_does_not_fit_is_refused_with_its_bytes():
    """Before cuDNN 9.25 that of a deterministic backward on Hopper grows with the square."""
    case = Features(1, 8, 1, 16384, 16384, 64, 64, is_causal=True, deterministic=True)
    options = {"is_causal": True, "deterministic": True}
    q, k, v = plain.make_inputs(case, torch.bfloat16, "cuda")
    expected = support.explain("sdpa_backward", q, k, v, **options).workspace_bytes
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torch.ops.cudnn_ops.sdpa(*leaves, **case.kwargs())
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() + expected // 2
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(held / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=f"workspace for this takes {expected} "):
            torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"window_size": (2, 0)}, 1 + 2 + 3 * 8),
        ({"window_size": (2, 5), "is_causal": True}, 1 + 2 + 3 * 8),
        ({"window_size": (0, 1)}, 2 * 10),
        ({"window_size": (0, 0), "bottom_right": True}, 10),
        ({"window_size": (-1, 0), "bottom_right": True}, sum(range(7, 17))),
    ],
)
def test_flops_of_a_window_are_those_of_what_it_shows(options, pairs, device):
    case = Features(2, 4, 2, 10, 16, 64, 32)
    leaves = [t.requires_grad_() for t in plain.make_inputs(case, torch.bfloat16, device)]
    with FlopCounterMode(display=False) as counter:
        torch.ops.cudnn_ops.sdpa(*leaves, **case.kwargs() | options).sum().backward()
    forward, backward = 64 + 32, 3 * 64 + 2 * 32
    assert counter.get_total_flops() == 2 * 4 * pairs * 2 * (forward + backward)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("beyond", [2**31 - 1, 2**32, 2**63 - 1])
def test_windows_that_are_longer_than_any_sequence(beyond, bottom_right, policy, device):
    base = Features(2, 4, 2, 40, 56, 64, 64, bottom_right=bottom_right)
    for window, without in (
        ((beyond, 0), (-1, 0)),
        ((7, beyond), (7, -1)),
        ((beyond, beyond), (-1, -1)),
    ):
        wide, none = replace(base, window_size=window), replace(base, window_size=without)
        inputs, extras, grad_out = cases.make_problem(wide, torch.bfloat16, device, seed=1)
        with cudnn_ops.using_plan_policy(policy):
            results = cases.run(wide, inputs, extras, grad_out)
        cases.check(none, inputs, extras, grad_out, results)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("polymorphic", [False, True])
def test_such_windows_are_no_part_of_a_plan(polymorphic, backward):
    query = torch.empty(2, 4, 200, 64, dtype=torch.bfloat16, device="meta")

    def words(*window: int) -> list[int]:
        options = {"backward": backward, "polymorphic": polymorphic}
        key = torch.ops.cudnn_ops._sdpa_plan_key(query, query, query, window_size=window, **options)
        return key[0]

    for beyond in (2**30, 2**31, 2**32, 2**63 - 1):
        assert words(beyond, 0) == words(-1, 0)
        assert words(3, beyond) == words(3, -1)
        assert words(beyond, beyond) == words(-1, -1)
    assert words(2**30 - 1, 0) != words(-1, 0) or not polymorphic


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("beyond", [2**31 - 1, 2**32, 2**63 - 1])
def test_such_windows_are_no_part_of_a_paged_plan(beyond, queries):
    def requests(*window: int) -> list[cudnn_ops.PlanRequest]:
        # A head size that cuDNN has plans for with few queries, too.
        query = ((2, queries, 4, 32), torch.bfloat16)
        cache = ((9, 16, 2, 32), torch.bfloat16)
        return cudnn_ops.plan_requests(
            "paged_attention", query, cache, page_table=(2, 4), window_size=window
        )

    assert requests(beyond, 0) == requests(-1, 0)
    assert requests(3, beyond) == requests(3, -1)
    assert requests(3, 0) != requests(-1, 0)
