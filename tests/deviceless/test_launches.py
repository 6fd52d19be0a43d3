"""Every kernel of ours fits every described GPU, however it is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.deviceless.kernel_images import images_of_library

HERE = Path(__file__).parent
#: Launched beside a plan of cuDNN's, which takes a real GPU, on a grid alone: with 128 threads, or
#: as many as they declare, and no more shared memory than that.
BESIDE_PLANS = ("paged_pad", "paged_merge_", "conv_epilogue_forward_")


def include_folders() -> list[str]:
    """Where the runtime's header may be: in a wheel, or with a toolkit."""
    wheels = [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return [f"-I{folder}" for folder in (*wheels, *toolkits) if folder.is_dir()]


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_every_launch_fits(runtime, tmp_path):
    library = tmp_path / "fake_runtime.so"
    source = HERE / "fake_runtime.c"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *include_folders()]
    subprocess.run([*command, "-o", library, source], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.deviceless.launches", library],
        env=os.environ | {"LD_PRELOAD": str(library), "CUDNN_OPS_CACHE_DIR": ""},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
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
