"""Models of diffusers through the patterns: what fires in each, and that results stay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.cases.compiler import Rewritten
from tests.cases.diffusion import make, make_inputs

SWAPS: dict[str, dict[str, int]] = {
    "vae": {"attention": 2, "group_norm": 24},
    "unet": {"attention": 8, "group_norm": 21, "layer_norm": 12, "gated": 4},
    "sdxl": {"attention": 16, "group_norm": 21, "layer_norm": 24, "gated": 8},
    "dit": {"attention": 2, "adaptive_norm": 5, "mlp": 5},
    # Of a norm that is scaled twice the pattern takes none: it is a layer norm.
    "sd3": {"attention": 3, "adaptive_norm": 7, "layer_norm": 1, "rms_norm": 10, "mlp": 5},
    "flux": {"attention": 4, "adaptive_norm": 11, "rms_norm": 12, "rotary_qk": 4, "mlp": 6},
}


@pytest.mark.parametrize("name", SWAPS)
def test_what_is_swapped(name):
    model, inputs = make(name), make_inputs(name)

    def output(**inputs: Tensor) -> Tensor:
        out: Tensor = model(**inputs, return_dict=False)[0]
        return out

    compiled = Rewritten(output, swap=list(SWAPS[name]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs), output(**inputs), rtol=1e-4, atol=1e-4)
    assert Counter(compiled.swapped) == SWAPS[name]
