"""Attention whose scores are all far below or above zero, at the lengths where cuDNN's tiles end.

Random scores lie around zero, and what a kernel takes for the score of a key that does not exist is
zero too: nothing shows. With a log-sum-exp below -88.7 the exponential of that score overflows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cudnn_ops
from tests.cases import sdpa_features as cases
from tests.cases.sdpa_features import Features
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops

BASE = Features(2, 4, 2, 192, 192, 64, 64)
ONE = replace(BASE, length=1)
CASES: list[Features] = [
    # lengths, and what hides keys by their position
    *(
        replace(BASE, length=length, length_kv=length_kv)
        for length, length_kv in ((64, 64), (63, 64), (320, 192), (200, 192), (2, 192), (192, 200))
    ),
    *(replace(BASE, length=448, length_kv=448, deterministic=how) for how in (None, True)),
    *(
        replace(BASE, length=length, bottom_right=corner, **band)
        for length in (128, 192, 320)
        for corner in (False, True)
        for band in (
            {"is_causal": True},
            {"window_size": (40, -1)},
            {"window_size": (-1, 40)},
            {"window_size": (40, 40)},
        )
    ),
    # masks
    *(
        replace(BASE, mask=mask, mask_dtype=dtype, hides=hides)
        for mask, dtype, hides in (
            ("bhqk", "bool", ""),
            ("b11k", "bool", "some"),
            ("11qk", "same", ""),
            ("1hqk", "float32", "some"),
            ("k", "other", ""),
        )
    ),
    *(
        replace(BASE, mask="1hqk", **more)
        for more in (
            {"length": 320},
            {"is_causal": True},
            {"is_causal": True, "bottom_right": True, "length": 128},
            {"window_size": (40, -1)},
            {"lengths": "both"},
            {"deterministic": True},
            {"dropout_p": 0.3},
            {"head_size": 128, "value_size": 128},
        )
    ),
    # everything else
    *(
        replace(BASE, bottom_right=corner, **feature)
        for corner in (False, True)
        for feature in ({"alibi": True}, {"softcap": 500.0}, {"sinks": True}, {"dropout_p": 0.3})
    ),
    replace(BASE, lengths="both"),
    replace(BASE, layout="bhsd"),
    *(replace(BASE, head_size=d, value_size=d) for d in (32, 72, 128)),
    # a single query
    *(
        replace(ONE, length_kv=length_kv, mask=mask, mask_dtype="bool")
        for length_kv in (2, 64, 128, 192, 300)
        for mask in ("", "b1qk")
    ),
    *(
        replace(ONE, **feature)
        for feature in (
            {"mask": "bhqk"},
            {"lengths": "kv"},
            {"sinks": True},
            {"alibi": True, "bottom_right": True},
            {"dropout_p": 0.3},
            {"window_size": (100, 0), "bottom_right": True},
            {"deterministic": True},
        )
    ),
    Features(1, 1, 1, 1, 128, 64, 64),
]
#: cuDNN has its backward on Hopper.
HOPPER = [replace(BASE, head_size=256, value_size=256, mask=mask) for mask in ("", "b1qk")]
CASE_AND_DEVICE = [
    *(pytest.param(case, "cpu", id=f"{case}-cpu") for case in CASES[::3]),
    *(
        pytest.param(case, "cuda", id=f"{case}-cuda", marks=pytest.mark.gpu)
        for case in [*CASES, *HOPPER]
    ),
]


def shifted(inputs: tuple[Tensor, ...], score: float) -> tuple[Tensor, ...]:
    """The same, but for one number of each query and key, that brings all scores to ``score``."""
    query, key, value = (tensor.clone(memory_format=torch.preserve_format) for tensor in inputs)
    size = round(math.sqrt(abs(score) * math.sqrt(query.shape[-1])))
    query[..., 0] = size
    key[..., 0] = math.copysign(size, score)
    return query, key, value


@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
@pytest.mark.parametrize(("case", "device"), CASE_AND_DEVICE)
def test_scores_around_minus_120(case, device, policy, poisoned, fresh_cache):
    dtype = torch.bfloat16
    inputs, extras, grad_out = cases.make_problem(case, dtype, device, seed=5)
    inputs = shifted(inputs, -120.0)
    if case.sinks:
        extras["sinks"] = extras["sinks"] - 120.0
    with cudnn_ops.using_plan_policy(policy):
        actual = cases.run(case, inputs, extras, grad_out)
        cases.check(case, inputs, extras, grad_out, actual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", [-1000.0, -90.0, -15.0, 120.0, 1000.0])
@pytest.mark.parametrize("length", [1, 192])
def test_scores_of_any_size(score, dtype, length, device, poisoned):
    """In float16 a weight that overflows there would show from scores of -11 on."""
    case = replace(BASE, length=length, mask="b1qk", mask_dtype="bool", hides="some")
    inputs, extras, grad_out = cases.make_problem(case, dtype, device, seed=6)
    inputs = shifted(inputs, score)
    actual = cases.run(case, inputs, extras, grad_out)
    cases.check(case, inputs, extras, grad_out, actual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "length_kv"), [(192, 192), (1, 64), (320, 192), (7, 448)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed(length, length_kv, is_causal, device, poisoned):
    case = replace(BASE, length=length, length_kv=length_kv, is_causal=is_causal)
    inputs, extras, grad_out = cases.make_problem(case, torch.bfloat16, device, seed=7)
    inputs = shifted(inputs, -120.0)

    def packed(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).flatten(0, 1)

    def padded(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (case.batch, -1)).transpose(1, 2)

    leaves = [packed(tensor).contiguous().requires_grad_() for tensor in inputs]
    offsets = [
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * n
        for n in (length, length_kv)
    ]
    out, lse = cudnn_ops.varlen_attention_with_lse(
        *leaves, *offsets, length, length_kv, causal=is_causal, bottom_right=False
    )
    grads = torch.autograd.grad(out, leaves, packed(grad_out))
    lse = lse.detach().unflatten(1, (case.batch, -1)).transpose(0, 1)
    actual = cases.Results(padded(out.detach()), lse, *(padded(grad) for grad in grads))
    cases.check(case, inputs, extras, grad_out, actual)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_all_equal_or_see_nothing(device, poisoned):
    """Equal scores, hidden rows and a row with one key, in one mask."""
    case = replace(BASE, mask="11qk", mask_dtype="bool")
    inputs, extras, grad_out = cases.make_problem(case, torch.bfloat16, device, seed=8)
    inputs[1].copy_(inputs[1][:, :, :1].expand_as(inputs[1]))
    inputs = shifted(inputs, -120.0)
    mask = extras["attn_mask"]
    mask[..., 3, :] = False
    mask[..., 5, :] = False
    mask[..., 5, 190] = True
    actual = cases.run(case, inputs, extras, grad_out)
    cases.check(case, inputs, extras, grad_out, actual)
