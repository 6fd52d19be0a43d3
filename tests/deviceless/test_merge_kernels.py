"""The kernel that merges attention, thread by thread on a CPU, as the operator launches it."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.merge_kernels", tmp_path)
    types = [f"{part}{state}" for part in ("bfloat16", "half") for state in ("", "_float")]
    assert launched == sorted(f"attention_merge_{name}_{width}" for name in types for width in "18")
