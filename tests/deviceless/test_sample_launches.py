"""Which kernels the sample for compute-sanitizer launches, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from tests.deviceless.fake_runtime import run_with_fake_runtime
from tests.test_sanitizer_sample import adaptive_norm_kernels


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_kernels_of_adaptive_norms(runtime, tmp_path):
    done = run_with_fake_runtime(tmp_path, "-m", "tests.deviceless.sample_launches")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert adaptive_norm_kernels() <= set(found["kernels"])
    # As measured: of several rows always, of one where there are many and much is read for each.
    for tokens, columns, is_gated, is_by_blocks in found["by blocks"]:
        is_one = columns > 4096
        assert is_by_blocks == (not is_one or (tokens > 1056 and (is_gated or columns >= 7168)))
