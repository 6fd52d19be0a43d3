"""Every kernel of ours fits every described GPU, however it is launched."""

from __future__ import annotations

import json

import pytest
import torch

from tests.deviceless.fake_runtime import run_with_fake_runtime
from tests.deviceless.kernel_images import images_of_library

#: Launched beside a plan of cuDNN's or behind a product, which take a real GPU, on a grid alone:
#: with 128 threads, or as many as they declare, and no more shared memory than that; but for a
#: slope's kernels, which are launched as those of the other slopes are.
BESIDE_PLANS = (
    *("paged_pad", "paged_merge_", "conv_epilogue_forward_", "conv_epilogue_slope_"),
    "fp8_numbers",
)


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_every_launch_fits(runtime, tmp_path):
    done = run_with_fake_runtime(tmp_path, "-m", "tests.deviceless.launches")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["wrong"], f"{len(answer['wrong'])} times: {answer['wrong'][:20]}"
    kernels = {
        name
        for image in images_of_library()
        for name in image.kernels
        if not name.startswith(BESIDE_PLANS)
    }
    launched = [set(names) for names in answer["launched"]]
    assert len(launched) > 4
    assert set.union(*launched) == kernels


def test_what_runs_beside_plans_fits():
    for image in images_of_library():
        for name, facts in image.kernels.items():
            if name.startswith(BESIDE_PLANS):
                assert facts.registers * (facts.most_threads or 128) <= 1 << 16, name
                assert facts.shared <= 48 << 10, name


def test_images_cover_what_is_described():
    """Machine code where there is some, PTX for whatever comes later."""
    architectures = {image.architecture for image in images_of_library()}
    assert architectures == ({80, 90} if torch.version.cuda else set())
