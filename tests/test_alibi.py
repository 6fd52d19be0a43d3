"""The slopes of ALiBi, against those of transformers' models."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import cudnn_ops


@pytest.mark.parametrize("heads", [*range(1, 35), 40, 64, 71, 112, 128])
def test_slopes_are_those_of_bloom(heads):
    """Its biases at the second of two tokens, at position 1, are the slopes."""
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    slopes = cudnn_ops.alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, biases[:, 0, 1], rtol=1e-5, atol=0)


def test_slopes_of_the_paper():
    assert cudnn_ops.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert cudnn_ops.alibi_slopes(16)[:2].tolist() == pytest.approx([0.5**0.5, 0.5])
    assert cudnn_ops.alibi_slopes(1).tolist() == [2.0**-8]
    assert cudnn_ops.alibi_slopes(5, device="meta").device.type == "meta"


@pytest.mark.parametrize("heads", [0, -3, 2.0, "8", None])
def test_heads_that_are_none(heads):
    with pytest.raises(ValueError, match=r"^alibi_slopes: heads must be a whole number, .* got "):
        cudnn_ops.alibi_slopes(heads)
