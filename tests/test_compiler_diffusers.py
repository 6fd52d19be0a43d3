"""Models of diffusers through the patterns: what fires in each, and that results stay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.cases.compiler import Rewritten
from tests.cases.diffusion import make, make_inputs

SWAPS: dict[str, dict[str, int]] = {
    "vae": {"attention": 2, "group_norm": 24},
    "unet": {"attention": 8, "group_norm": 21, "layer_norm": 12, "gated": 4},
    "sdxl": {"attention": 16, "group_norm": 21, "layer_norm": 24, "gated": 8},
    "dit": {"attention": 2, "adaptive_norm": 5, "linear": 8},
    # Of a norm that is scaled twice the pattern takes none: it is a layer norm.
    "sd3": {"attention": 3, "adaptive_norm": 7, "layer_norm": 1, "rms_norm": 10, "linear": 6},
    "flux": {"attention": 4, "adaptive_norm": 11, "rms_norm": 12, "rotary_qk": 4, "linear": 9},
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


def test_wan():
    """Its norms are computed in float32, and its rotary embedding is written into a tensor."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True,
        rope_max_seq_len=32,
    ).eval()  # fmt: skip
    latents, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 6, 16)
    compiled = Rewritten(lambda: model(latents, torch.tensor([5]), text, return_dict=False)[0])
    with torch.no_grad():
        expected = model(latents, torch.tensor([5]), text, return_dict=False)[0]
        torch.testing.assert_close(compiled(), expected, rtol=1e-4, atol=1e-4)
    swapped = Counter(compiled.swapped)
    assert (swapped["attention"], swapped["rms_norm"], swapped["rotary_qk"]) == (2, 4, 1)
