"""Any combination of attention's features, over any geometry, against float64."""

from __future__ import annotations

import random

import pytest
import torch

import cudnn_ops
from cudnn_ops import support
from tests.cases import sdpa_features as cases
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES


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
                cases.check_all(case, dtype, device, seed, with_lse)
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
    inputs, extras, _ = cases.make_problem(case, dtype, "cpu", seed)
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
