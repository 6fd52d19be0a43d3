"""The forward of adaptive norms, thread by thread on a CPU, as the operator launches it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.adaptive_norm_forward_kernels", tmp_path)
    wide = [*product(("16", "usual", "gated"), (2, 4, 8)), ("16", 5), ("16", 6)]
    wide += product(("usual_ahead", "gated_ahead"), (4, 5, 6))
    names = [f"{which}_{vectors}" for which, vectors in wide]
    names += ["n_2", "n_8", "usual_n", "gated_n", "any_16", "any_n"]
    assert launched == sorted(f"adaptive_norm_forward_{name}" for name in names)
