"""Batch norm's kernels of training, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.batch_norm_kernels", tmp_path)
    relus = ("none", "of_input", "of_out")
    names = ["stats", "finish_stats", "finish_sums", "sums_of_two"]
    names += [f"{step}_{relu}" for step in ("sums", "gradient") for relu in relus]
    of_types = [
        f"batch_norm_{name}_{kind}" for name in names for kind in ("half", "bfloat16", "float")
    ]
    pixels = [
        "batch_norm_pixels_half_8",
        "batch_norm_pixels_bfloat16_8",
        "batch_norm_pixels_float_4",
    ]
    assert launched == sorted([*of_types, *pixels])
