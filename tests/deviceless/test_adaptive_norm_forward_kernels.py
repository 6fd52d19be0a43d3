"""The forward of adaptive norms, thread by thread on a CPU, as the operator launches it."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.adaptive_norm_forward_kernels", tmp_path)
    together = {f"adaptive_norm_forward_{vectors}_together" for vectors in (3, 4, 5, "n")}
    alone = {f"adaptive_norm_forward_{which}" for which in ("16_2", "16_4", "n_8")}
    assert together | alone <= set(launched)
