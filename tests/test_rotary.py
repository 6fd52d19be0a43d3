"""Rotary position embedding: results, gradients, layouts, and transformers' models on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops.integrations.transformers import fuse_rotary_, register
from tests.cases import models, sdpa
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
register()


def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def draw(device: str, dtype: torch.dtype, size: int, layout: str, angles: torch.dtype, batch: int):
    torch.manual_seed(size)
    if layout == "BSHD":
        x = torch.randn(2, 7, 3, size, device=device).to(dtype).transpose(1, 2)
    else:
        x = torch.randn(2, 3, 7, size + 8, device=device).to(dtype)[..., 8:]
    cos, sin = (torch.randn(batch, 7, size, device=device).to(angles) for _ in range(2))
    return x.requires_grad_(), cos, sin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["BSHD", "sliced"])
@pytest.mark.parametrize("size", [64, 80, 128, 6, 50])
def test_results_and_gradients(size, layout, device, poisoned):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for angles, batch in ((dtype, 2), (torch.float32, 1)):
            x, cos, sin = draw(device, dtype, size, layout, angles, batch)
            out = cudnn_ops.rotary_embedding(x, cos, sin)
            assert out.transpose(1, 2).is_contiguous()
            grad = torch.randn_like(out)
            found = (out, *torch.autograd.grad(out, x, grad))
            results = []
            for wide in (torch.float64, dtype):
                leaf = x.detach().to(wide).requires_grad_()
                result = formula(leaf, cos.to(wide), sin.to(wide))
                results.append((result, *torch.autograd.grad(result, leaf, grad.to(wide))))
            for mine, exact, rough in zip(found, *results, strict=True):
                sdpa.check(mine, exact, rough, f"{dtype} {angles}")


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_and_derivatives_of_any_order(device):
    x, cos, sin = draw(device, torch.float32, 16, "BSHD", torch.float32, 2)
    torch.library.opcheck(_ops._rotary.default, (x, cos, sin, False))
    torch.library.opcheck(_ops._rotary.default, (x.detach(), cos, sin, True))
    torch.library.opcheck(_ops.rotary_embedding.default, (x, cos, sin))
    out = cudnn_ops.rotary_embedding(x, cos, sin)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(formula(leaf, cos, sin).square().sum(), leaf, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(grad.sum(), leaf)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"input": torch.ones(2, 3, 7)}, ValueError, r"input must be \[B, H, S, D\]"),
        ({"cos": torch.ones(2, 6, 8)}, ValueError, r"cos and sin must be \[B or 1, S, D\]"),
        ({"cos": torch.ones(2, 7, 8).half()}, TypeError, "must be of the input's dtype"),
        ({"sin": torch.ones(2, 7, 8, requires_grad=True)}, NotImplementedError, "no gradient"),
        ({"cos": None}, TypeError, "cos and sin must be tensors"),
        (
            {"cos": [1.0]},
            TypeError,
            r"^cudnn_ops\.rotary_embedding: cos must be a tensor, got list",
        ),
    ],
    ids=str,
)
def test_bad_input(change, error, match, device):
    arguments = {"input": torch.ones(2, 3, 7, 8), "cos": torch.ones(2, 7, 8)}
    arguments = {**arguments, "sin": arguments["cos"], **change}
    with pytest.raises(error, match=match):
        cudnn_ops.rotary_embedding(
            **{
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_models_of_transformers(name, device, monkeypatch):
    stock = models.make_model(name, device)
    model = copy.deepcopy(stock)
    fused = fuse_rotary_(model)
    assert len(fused) == model.config.num_hidden_layers
    assert fuse_rotary_(model) == fused
    calls = []
    forward = model.get_submodule(fused[0]).forward.__globals__
    assert forward is not type(model.get_submodule(fused[0])).forward.__globals__
    ours = forward["apply_rotary_pos_emb"]
    monkeypatch.setitem(
        forward, "apply_rotary_pos_emb", lambda *args: calls.append(args) or ours(*args)
    )
    models.check_all(name, model, models.make_inputs("plain", device), original=stock)
    assert len(calls) == len(fused)


def test_a_model_without_one():
    assert fuse_rotary_(torch.nn.Linear(2, 2)) == []
