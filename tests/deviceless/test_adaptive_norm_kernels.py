"""The backward's kernels of adaptive norms, thread by thread on a CPU, as it launches them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu

SOURCE = Path(__file__).parents[2] / "csrc" / "kernels" / "adaptive_norm_backward.cu"


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.adaptive_norm_kernels", tmp_path)
    names = re.findall(r"^ADAPTIVE_NORM\((\w+),", SOURCE.read_text(), re.MULTILINE)
    assert launched == sorted(f"adaptive_norm_{name}" for name in names)
