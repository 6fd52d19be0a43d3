"""Rotary position embedding: results, gradients, layouts, and transformers' models on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import cudnn_ops
from cudnn_ops.integrations.transformers import fuse_rotary_, register
from tests.cases import models, sdpa
from tests.cases.families import tiny_model
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
    torch.library.opcheck(_ops._rotary.default, (x, None, cos, sin, None, [0, 0], False))
    torch.library.opcheck(_ops._rotary.default, (x.detach(), None, cos, sin, None, [0, 0], True))
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


#: Of whole heads; of parts of them; of neighbours, by halves of angles or by all, in parts of
#: heads; by angles of pairs; by float32 angles; with the heads third.
FAMILIES = {
    "llama": "causal",
    "modernbert": "masked",
    "gpt_neox": "causal",
    "phi3": "causal",
    "stablelm": "causal",
    "deepseek_v3": "causal",
    "glm": "causal",
    "cohere": "causal",
    "gpt_oss": "causal",
    "olmo2": "causal",
    "olmo3": "causal",
    "deepseek_v32": "causal",
}


class Calls(TorchDispatchMode):
    """Counts the operator's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.cudnn_ops._rotary.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("error:cudnn_ops.rotary_embedding does not take")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_reported_is_what_runs(family, device, dtype):
    """Queries and keys of every part are turned by one call, in bfloat16 too."""
    turned = 0.5 if family in ("phi3", "glm") else None
    stock = tiny_model(family, FAMILIES[family], turned=turned).to(device, dtype)
    model = copy.deepcopy(stock)
    fused = fuse_rotary_(model)
    assert len(fused) == model.config.num_hidden_layers
    tokens = models.make_tokens(device)
    with Calls() as calls:
        found = model(tokens).logits
    assert calls.count == len(fused)

    def gradients(model, logits):
        generator = torch.Generator().manual_seed(9)
        logits.backward(torch.randn(logits.shape, generator=generator).to(logits))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    rough = stock(tokens).logits
    mine, theirs = gradients(model, found), gradients(stock, rough)
    assert mine.keys() == theirs.keys()
    if dtype == torch.float32:
        torch.testing.assert_close(found, rough, rtol=1e-4, atol=1e-4)
        scale = max(grad.norm() for grad in theirs.values())
        for name, grad in theirs.items():
            assert (mine[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6 * scale, name
    else:
        exact = copy.deepcopy(stock).double()(tokens).logits
        models.check(found.detach(), exact.detach(), rough.detach(), "logits")


class Turned(torch.nn.Module):
    def forward(self, q, k, cos, sin, dim):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=dim)


def drawn(dim: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    angles = (5, 8) if dim == 0 else (2, 5, 8)
    sizes = ((2, 5, 3, 8), (2, 5, 1, 8)) if dim == 2 else ((2, 3, 5, 8), (2, 1, 5, 8))
    return tuple(torch.randn(size, generator=generator) for size in (*sizes, angles, angles))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_wherever_the_heads_are(dim, is_compiled):
    module = torch.nn.Sequential(Turned())
    assert fuse_rotary_(module) == ["0"]
    turn = module[0]
    if is_compiled:
        torch._dynamo.reset()
        turn = torch.compile(turn, fullgraph=True, backend="aot_eager")
    inputs = drawn(dim)
    with Calls() as calls:
        found = turn(*inputs, dim)
    assert is_compiled or calls.count == 1
    torch.testing.assert_close(found, Turned()(*inputs, dim))


def test_what_is_not_taken_is_told():
    module = torch.nn.Sequential(Turned())
    fuse_rotary_(module)
    q, k, cos, sin = drawn(1)
    angles = (cos.unsqueeze(1), sin.unsqueeze(1))
    with pytest.warns(
        UserWarning, match=r"does not support this call .* cos and sin \(2, 1, 5, 8\)"
    ):
        found = module[0](q, k, *angles, 0)
    torch.testing.assert_close(found, Turned()(q, k, *angles, 0))
