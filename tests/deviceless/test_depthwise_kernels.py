"""The kernels of depthwise convolutions, thread by thread on a CPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.depthwise_kernels", tmp_path)
    forward = [f"forward_{name}" for name in ("3_2", "5_2", "7_2", "pairs", "singles")]
    rolling = [f"rolling_{name}" for name in ("3", "3_wide", "5", "7")]
    whole = [
        f"{kind}_{taps}_{stride}_{columns}"
        for kind in ("whole", "whole_weight")
        for taps, stride, columns in product((3, 5, 7), (1, 2), (7, 14))
    ]
    parts = [f"{kind}_{taps}" for kind in ("parts", "weight_parts") for taps in (5, 7)]
    # Two images of 28 x 28 in single precision are more than a block has memory for.
    too_large = [f"weight_{taps}_2" for taps in (3, 5, 7)]
    names = sorted((*forward, *rolling, *whole, *parts, *too_large, "add_up"))
    assert launched == [f"depthwise_conv_{name}" for name in names]
