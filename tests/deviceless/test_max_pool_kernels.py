"""The kernels of max pooling, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu
from tests.test_sanitizer_sample import max_pool_kernels


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.max_pool_kernels", tmp_path)
    assert launched == sorted(max_pool_kernels())
