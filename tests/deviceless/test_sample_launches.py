"""Which kernels the sample for compute-sanitizer launches, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from tests.deviceless.fake_runtime import run_with_fake_runtime
from tests.test_sanitizer_sample import adaptive_norm_kernels


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_all_kernels_of_adaptive_norms(runtime, tmp_path):
    done = run_with_fake_runtime(tmp_path, "-m", "tests.deviceless.sample_launches")
    assert done.returncode == 0, done.stderr
    assert adaptive_norm_kernels() <= set(json.loads(done.stdout))
