"""The forward's kernels of norms, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu
from tests.test_sanitizer_sample import norm_kernels


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.norm_forward_kernels", tmp_path)
    assert launched == sorted(name for name in norm_kernels() if "_forward_" in name)
