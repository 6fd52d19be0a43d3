"""Attention's features, alone and together: results and gradients against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import cudnn_ops
from cudnn_ops import support
from cudnn_ops.ops.sdpa import empty_like_order
from tests.cases import sdpa as plain
from tests.cases import sdpa_features as cases
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES

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
    replace(BASE, length=1, length_kv=1, mask="bhqk", window_size=(0, 0)),
    replace(BASE, batch=4, length=1, length_kv=1, lengths="both"),
]


def _problem(case: Features, dtype: torch.dtype, device: str, seed: int):
    inputs = plain.make_inputs(case, dtype, device, seed)
    grad_out = plain.make_grad_out(case, dtype, device, seed + 1)
    # In memory as the output, which is how a plan that is built beforehand expects it.
    grad_out = empty_like_order(grad_out.shape, inputs[0]).copy_(grad_out)
    return inputs, cases.make_extras(case, dtype, device, seed), grad_out


def _check(case: Features, dtype: torch.dtype, device: str, seed: int, with_lse: bool) -> None:
    inputs, extras, grad_out = _problem(case, dtype, device, seed)
    grad_lse = None
    if with_lse:
        shape = (case.batch, case.heads, case.length)
        grad_lse = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    actual = cases.run(case, inputs, extras, grad_out, grad_lse)
    cases.check(case, inputs, extras, grad_out, actual, grad_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case, device, poisoned):
    _check(case, torch.bfloat16, device, seed=3, with_lse=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(10))
def test_any_combination(block, device, poisoned, fresh_cache):
    """1,500 configurations on a GPU. What is skipped, cuDNN refuses in its own words."""
    rng = random.Random(1000 + block)
    on_gpu = device == "cuda"
    drawn = [
        (cases.draw(rng, on_gpu=on_gpu), rng.choice([torch.float16, torch.bfloat16]), seed)
        for seed in range(150 if on_gpu else 60)
    ]
    policy = "polymorphic" if block % 2 else "exact"
    cudnn_ops.set_cache_limit(2000)
    if on_gpu:  # many at once
        requests = [request for one in drawn for request in _requests(*one, policy)]
        cudnn_ops.warmup(requests, threads=16, progress=False)
    refused, wrong = [], []
    for case, dtype, seed in drawn:
        with_lse = seed % 10 == 0 and case.dropout_p == 0
        try:
            with cudnn_ops.using_plan_policy(policy):
                _check(case, dtype, device, seed, with_lse)
        except NotImplementedError as error:
            refused.append(f"{case}: {error}")
        except AssertionError as error:
            wrong.append(str(error))
    print(*refused, sep="\n")
    assert not wrong, "\n".join(wrong)
    assert len(refused) <= (15 if on_gpu else 0)
    assert all("does not take this" in text or "known to" in text for text in refused)


def _requests(
    case: Features, dtype: torch.dtype, seed: int, policy: str
) -> list[cudnn_ops.PlanRequest]:
    inputs, extras, _ = _problem(case, dtype, "cpu", seed)
    options = {**case.kwargs(), **extras}
    for name in ("scale", "enable_gqa", "rng_state"):
        options.pop(name, None)
    words = []
    for op, with_lse in (("sdpa", True), ("sdpa", False), ("sdpa_backward", True)):
        if op == "sdpa" and not with_lse and not case.dropout_p:
            continue
        for polymorphic in (False, True) if policy == "polymorphic" else (False,):
            words.append(
                support.plan_key(
                    op,
                    *inputs,
                    with_lse=with_lse,
                    polymorphic=polymorphic,
                    grad_mask=case.wants_grad_mask and op != "sdpa",
                    **options,
                )[0]
            )
            if polymorphic and words[-1]:
                words.pop(-2)  # of the exact one, which is for those without
    return [cudnn_ops.PlanRequest(tuple(key)) for key in words if key]
