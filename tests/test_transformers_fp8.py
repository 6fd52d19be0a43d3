"""The adapter for transformers with attention in FP8."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cudnn_ops.integrations import transformers_fp8
from cudnn_ops.integrations.transformers import (
    CompactMask,
    cudnn_ops_attention,
    cudnn_ops_mask,
    register,
)
from tests.cases.models import make_inputs, make_model, make_tokens
from tests.cases.sdpa_in_fp8 import rounded
from tests.conftest import DEVICES

register()
register("cudnn_ops_in_fp8", fp8_from=16)


def rounded_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention in the precision of the inputs, on what FP8 rounds them to: straight through."""

    def straight_through(x: Tensor) -> Tensor:
        data, descale = rounded(x.detach())
        return x + (data.to(x.dtype) * descale.to(x.dtype) - x.detach())

    query, key, value = (straight_through(x) for x in (query, key, value))
    return cudnn_ops_attention(module, query, key, value, mask, **options)


AttentionInterface.register("rounded_heads", rounded_heads)
AttentionMaskInterface.register("rounded_heads", cudnn_ops_mask)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Which operators of attention ran, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        name = str(func).split(".")[1]
        if name in ("_sdpa_fp8", "sdpa", "sdpa_with_lse", "varlen_attention"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def attention_of(sizes: tuple[int, ...], mask: Any = None, device: str = "cpu", **options: Any):
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = torch.randn(3, *sizes, generator=generator).to(device, dtype)
    with Calls() as calls:
        out = cudnn_ops_attention(nn.Identity(), query, key, value, mask, **options)[0]
    return out, calls.names


@pytest.fixture
def nothing_told(monkeypatch):
    monkeypatch.setattr(transformers_fp8, "_told", set())


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_in_fp8(device):
    sizes = (2, 4, 40, 16)
    wide, names = attention_of(sizes, device=device)
    assert names == ["sdpa"]
    found, names = attention_of(sizes, device=device, fp8_from=40)
    assert names == ["_sdpa_fp8"]
    assert found.shape == wide.shape
    assert found.is_contiguous()
    error = (found - wide).float().norm() / wide.float().norm()
    assert 0.01 < error < 0.1
    assert attention_of(sizes, device=device, fp8_from=41)[1] == ["sdpa"]


@pytest.mark.parametrize("options", [{"mask": CompactMask((7, 0))}, {"scaling": 0.5}], ids=str)
def test_options_come_along(options):
    sizes = (2, 4, 40, 16)
    wide, _ = attention_of(sizes, **options)
    found, names = attention_of(sizes, **options, fp8_from=2)
    assert names == ["_sdpa_fp8"]
    assert (found - wide).norm() / wide.norm() < 0.1
    assert (found - attention_of(sizes, fp8_from=2)[0]).norm() / wide.norm() > 0.2


def test_padding_at_the_end():
    mask = CompactMask(lengths=torch.tensor([40, 17], dtype=torch.int32))
    found, names = attention_of((2, 4, 40, 16), mask, fp8_from=2)
    wide, _ = attention_of((2, 4, 40, 16), mask)
    assert names == ["_sdpa_fp8"]
    assert not found[1, 17:].any()
    assert (found - wide).norm() / wide.norm() < 0.1


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "dropout_p"),
    "softcap": ({"softcap": 5.0}, "softcap"),
    "sinks": ({"s_aux": torch.zeros(4)}, "sinks"),
    "mask": ({"mask": torch.ones(40, 40).bool()}, "a mask of other"),
    "position_bias": ({"position_bias": torch.zeros(1, 4, 40, 40)}, "a mask of other"),
    "head size": ({"sizes": (2, 4, 40, 24)}, "heads of 24 and 24 numbers"),
    "large heads": ({"sizes": (1, 2, 40, 144)}, "heads of 144 and 144 numbers"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_fp8_does_not_have_is_told_once(name, nothing_told):
    options, reason = WITHOUT[name]
    given = {"sizes": (2, 4, 40, 16), **options}
    with pytest.warns(UserWarning, match=f"attention with .*{reason}.* computed in 16 bits"):
        found, names = attention_of(**given, fp8_from=2)
    assert names == ["sdpa"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_of(**given, fp8_from=2)
    if name != "dropout":
        torch.testing.assert_close(found, attention_of(**given)[0])


def test_a_window_beside_lengths_on_hopper(monkeypatch, nothing_told):
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    mask = CompactMask((7, 0), lengths=lengths)
    assert attention_of((2, 4, 40, 16), mask, fp8_from=2)[1] == ["_sdpa_fp8"]
    monkeypatch.setattr(transformers_fp8, "_is_hopper", lambda _: True)
    with pytest.warns(UserWarning, match="padding beside a window or a cache, on Hopper"):
        assert attention_of((2, 4, 40, 16), mask, fp8_from=2)[1] == ["sdpa"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_models(name, device):
    """Logits and gradients are those of rounded heads; decoding is in 16 bits."""
    model, tokens = make_model(name, device), make_tokens(device)

    def run(implementation: str) -> list[Tensor]:
        model.set_attn_implementation(implementation)
        found = model(tokens, labels=tokens)
        grads = torch.autograd.grad(found.loss, list(model.parameters()))
        return [x.float() for x in (found.logits, *grads)]

    wide, rounded = run("cudnn_ops"), run("rounded_heads")
    with Calls() as calls:
        found = run("cudnn_ops_in_fp8")
    assert set(calls.names) == {"_sdpa_fp8"}
    for mine, other, exact in zip(found, rounded, wide, strict=True):
        if device == "cpu":
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
        else:  # probabilities and, on Hopper, outputs are rounded too
            assert (mine - exact).norm() <= 2 * (other - exact).norm() + 1e-3 * exact.norm()
    with Calls() as calls, torch.no_grad():
        model.generate(tokens, max_new_tokens=4, do_sample=False)
    layers = model.config.num_hidden_layers
    assert calls.names == ["_sdpa_fp8"] * layers + ["sdpa"] * 3 * layers


def test_packed_sequences_are_of_16_bits(nothing_told):
    model = make_model("llama", "cpu")
    given = make_inputs("packed by offsets", "cpu")
    expected = model(**given).logits
    register("cudnn_ops_in_fp8_at_once", fp8_from=2)
    model.set_attn_implementation("cudnn_ops_in_fp8_at_once")
    with pytest.warns(UserWarning, match="packed sequences"):
        torch.testing.assert_close(model(**given).logits, expected)


def test_compiled():
    model, tokens = make_model("llama", "cpu"), make_tokens("cpu")
    register("cudnn_ops_in_fp8_compiled", fp8_from=16, packing_under_compile=False)
    model.set_attn_implementation("cudnn_ops_in_fp8_compiled")
    with Calls() as calls:
        expected = model(tokens, use_cache=False).logits
    assert set(calls.names) == {"_sdpa_fp8"}
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, expected)


def test_mistakes():
    with pytest.raises(ValueError, match="fp8_from must be None or at least 2 queries, got 1"):
        register("cudnn_ops_wrong", fp8_from=1)
