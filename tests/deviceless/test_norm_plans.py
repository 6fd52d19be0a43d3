"""Real cuDNN plans of norms for GPUs that are not there, forward and backward."""

from __future__ import annotations

import pytest
import torch

from cudnn_ops.support import NORMS, explain

GPUS = ("a100", "h200", "b200")
#: Hidden size, dtype of the input, of the weight.
CASES = (
    (64, torch.bfloat16, torch.bfloat16),
    (100, torch.float16, torch.float32),
    (4097, torch.float32, torch.float32),
    (32768, torch.bfloat16, torch.float32),
)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("op", NORMS)
def test_sizes_and_dtypes(op, device):
    # A norm's derivative needs no forward that stores: only the forward has with_stats.
    options = {} if op.endswith("_backward") else {"with_stats": True}
    for size, dtype, weight in CASES:
        answer = explain(op, ((33, size), dtype), weight=weight, device=device, **options)
        assert answer.supported, (size, dtype, weight, answer.reason)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("rows", [1, 1 << 20])
def test_rows(op, rows):
    for zero_centered in (False, True):
        answer = explain(
            op, ((rows, 128), torch.bfloat16), zero_centered=zero_centered, device="h200"
        )
        assert answer.supported, answer.reason


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_without_parameters_and_over_two_dimensions(op):
    for weight, bias in ((False, False), (True, op == "layer_norm"), (False, op == "layer_norm")):
        for with_stats in (False, True):
            answer = explain(
                op,
                ((4, 3, 8, 64), torch.bfloat16),
                normalized_shape=(8, 64),
                weight=weight,
                with_stats=with_stats,
                **({"bias": True} if bias else {}),
                device="h200",
            )
            assert answer.supported, answer.reason
