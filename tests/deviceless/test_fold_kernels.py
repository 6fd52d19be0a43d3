"""The kernel that folds batch norms, thread by thread on a CPU, as the operator launches it."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.fold_kernels", tmp_path)
    assert launched == [f"batch_norm_fold_{name}" for name in ("bfloat16", "float", "half")]
