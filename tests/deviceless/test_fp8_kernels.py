"""The kernels that write 8 bits, thread by thread on a CPU, as operators launch them."""

from __future__ import annotations

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.fp8_kernels", tmp_path)
    names = [f"rows_fp8_{width}_{way}" for width in ("16", "n") for way in ("4", "any")]
    names += [f"rotary_fp8_{kind}{types}_" for kind in ("", "pairs_") for types in _TYPES]
    names += [f"fp8_{way}_{kind}" for way in ("amax", "cast") for kind in ("half", "bfloat16")]
    names += [f"fp8_uncast_{kind}" for kind in ("e4m3", "e5m2")]
    for name in names:
        assert any(kernel.startswith(name) for kernel in launched), name


_TYPES = ("half", "half_float", "bfloat16", "bfloat16_float", "float")
