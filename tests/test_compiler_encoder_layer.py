"""``nn.TransformerEncoderLayer`` in inference, which is a single call of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases.attention_graphs import compared, mask_as, told_by
from tests.cases.compiler import Rewritten, check_swap
from tests.conftest import DEVICES

B, S, E, H = 2, 7, 32, 4
NAME = "encoder_layer"


def _layer(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 48, batch_first=True, **options)
    with torch.no_grad():
        for one in layer.parameters():
            one.add_(torch.randn_like(one) * 0.1)
    return layer.eval().requires_grad_(False)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer(norm_first, activation):
    layer = _layer(norm_first=norm_first, activation=activation, layer_norm_eps=1e-3)
    check_swap(layer, torch.randn(B, S, E), expect=[NAME], gradients=False, tolerance=1e-4)


def _padding() -> Tensor:
    return torch.arange(S).expand(B, S) > torch.tensor([4, S])[:, None]


def _upper(x: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf"), dtype=x.dtype).triu(1)


MASKS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], bool, bool]] = {
    # Masks, whether attention is causal then, and whether it has a tensor.
    "padding": (lambda x: {"src_key_padding_mask": _padding()}, False, True),
    "causal": (lambda x: {"src_mask": _upper(x)}, True, False),
    "causal, hidden": (lambda x: {"src_mask": ~compared(S, S)}, True, False),
    "some": (lambda x: {"src_mask": torch.eye(S, dtype=torch.bool)}, False, True),
    "both": (
        lambda x: {"src_mask": ~compared(S, S), "src_key_padding_mask": _padding()},
        *(False, True),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    masks, is_causal, has_tensor = MASKS[name]
    layer = _layer()

    def encode(x: Tensor) -> Tensor:
        return layer(x, **masks(x))

    found = check_swap(encode, torch.randn(B, S, E), expect=[NAME], gradients=False, tolerance=1e-4)
    (attention,) = [node for node in found.ours if "sdpa" in str(node.target)]
    assert told_by(attention) == mask_as(causal=is_causal, mask=has_tensor)


def test_an_encoder():
    """Layers behind each other; padding that comes from outside."""
    encoder = nn.TransformerEncoder(_layer(), 3).eval()

    def encode(x: Tensor, padding: Tensor) -> Tensor:
        return encoder(x, src_key_padding_mask=padding)

    # Torch leaves out what is padding, and gives zeros there.
    check_swap(
        lambda x, padding: encode(x, padding)[:, :4],
        *(torch.randn(B, S, E), _padding()),
        expect=[NAME] * 3,
        gradients=False,
        tolerance=1e-4,
    )


def test_with_gradients_it_is_what_it_is_made_of():
    layer = _layer().requires_grad_(True)
    expected = ["multi_head_attention", "layer_norm", "layer_norm", "mlp"]
    check_swap(layer, torch.randn(B, S, E), expect=expected, tolerance=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_in_16_bits(norm_first, device):
    """As right as torch's layer; the reference computes it in float64, step by step."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, norm_first=norm_first, batch_first=True)
    layer = layer.eval().to(device, torch.bfloat16).requires_grad_(False)
    exact = nn.TransformerEncoderLayer(256, 4, 512, norm_first=norm_first, batch_first=True)
    exact = exact.eval().to(device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(3, 197, 256, device=device).bfloat16()
    padding = torch.arange(197, device=device).expand(3, 197) > 150
    reference = exact(x.double(), src_key_padding_mask=padding).detach()
    rewritten = Rewritten(layer)
    ours = rewritten(x, src_key_padding_mask=padding)
    assert rewritten.swapped == [NAME]
    stock = layer(x, src_key_padding_mask=padding)
    errors = [(one.double() - reference)[:, :150].norm() for one in (ours, stock)]
    assert errors[0] < 2 * errors[1]
