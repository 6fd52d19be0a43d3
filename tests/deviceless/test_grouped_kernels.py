"""The kernels of grouped convolutions, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.deviceless.fake_runtime import run_with_fake_runtime


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    arguments = ("-m", "tests.deviceless.grouped_kernels")
    done = run_with_fake_runtime(tmp_path, *arguments, has_memory=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["wrong"], answer["wrong"]
    assert answer["overruns"] == 0
    kinds = [
        f"grouped_conv_{dtype}_{steps}" for dtype in ("bfloat16", "half") for steps in range(1, 5)
    ]
    assert answer["launched"] == kinds
