"""The kernels of depthwise convolutions' forward, thread by thread on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.depthwise_kernels", tmp_path)
    forward = [f"forward_{name}" for name in ("3_2", "5_2", "7_2", "pairs", "singles")]
    rolling = [f"rolling_{name}" for name in ("3", "3_wide", "5", "7")]
    assert launched == [f"depthwise_conv_{name}" for name in (*forward, *rolling)]
