"""Linear layers of 8 bits, and decoders of transformers that have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import cudnn_ops
from cudnn_ops.nn import Fp8Linear, Fp8RMSNorm, Fp8SwiGLU, RMSNorm, SwiGLU, convert_to_fp8_
from tests.cases.models import CONFIGS, VOCABULARY
from tests.conftest import DEVICES


def build(family: str) -> Any:
    torch.manual_seed(5)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    return AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attention)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias, dtype, device):
    torch.manual_seed(0)
    layer = nn.Linear(96, 48, bias, device, dtype)
    ours = Fp8Linear.of(layer)
    assert list(ours.state_dict()) == list(layer.state_dict())
    x = torch.randn(2, 7, 96, device=device, dtype=dtype)
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()(x.double())
        for given in (x, cudnn_ops.quantize_rows_fp8(x)):
            out = ours(given)
            assert out.dtype == dtype
            assert 0.005 < error(out, exact) < 0.045


def test_the_weight_is_rounded_once_until_it_changes():
    layer, x = Fp8Linear(32, 16), torch.randn(3, 32)
    with torch.no_grad():
        first, rounded = layer(x), layer.rounded_weight()
        assert layer.rounded_weight() is rounded
        layer.weight.mul_(2)
        torch.testing.assert_close(
            layer(x) - layer.bias, 2 * (first - layer.bias), atol=0.02, rtol=0
        )
        layer.load_state_dict({name: x * 0 for name, x in layer.state_dict().items()})
        assert not layer(x).any()
        assert not layer.bfloat16()(x.bfloat16()).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_norm_and_mlp(activation, device):
    torch.manual_seed(1)
    norm = RMSNorm(64, eps=1e-5, zero_centered=True, device=device)
    mlp = SwiGLU(64, 160, True, activation=activation, device=device)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 9, 64, device=device)
    with torch.no_grad():
        exact = mlp(norm(x))
        rows = Fp8RMSNorm(norm)(x)
        assert rows.shape == x.shape
        ours = Fp8SwiGLU(mlp)
        assert list(ours.state_dict()) == list(mlp.state_dict())
        assert 0.005 < error(ours(rows), exact) < 0.08
        assert 0.005 < error(ours(norm(x)), exact) < 0.08


def test_sizes():
    with pytest.raises(ValueError, match="must be multiples of 16, got 24 and 16"):
        Fp8Linear(24, 16)


def test_compiled():
    layer, x = Fp8Linear(32, 16, dtype=torch.bfloat16), torch.randn(3, 32).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_decoders_of_transformers(family, device):
    """The whole forward: logits beside those of the model in float32."""
    model = build(family).to(device).eval()
    exact = copy.deepcopy(model)
    model.bfloat16()
    keys = list(model.state_dict())
    done = convert_to_fp8_(model)
    assert len(done) == 2 * 7
    assert list(model.state_dict()) == keys
    assert all(not isinstance(module, SwiGLU) for module in model.modules())
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, 23), device=device)
    with torch.no_grad():
        found, wanted = (m(tokens, use_cache=False).logits for m in (model, exact))
        assert 0.01 < error(found, wanted) < 0.2
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 27)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_other_layers_are_left_alone(family):
    assert family in CONFIGS
    model = build(family)
    assert convert_to_fp8_(model) == []
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


def test_layers_with_hooks_and_odd_sizes_are_left_alone():
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    assert {each.name.split(".")[2] for each in convert_to_fp8_(model)} == {"1"}
