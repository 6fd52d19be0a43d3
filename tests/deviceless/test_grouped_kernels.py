"""The kernels of grouped convolutions, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.grouped_kernels", tmp_path)
    kinds = [
        f"grouped_conv_{dtype}_{steps}" for dtype in ("bfloat16", "half") for steps in range(1, 5)
    ]
    assert launched == kinds
