"""Modules of linear layers: results, gradients, the state of separate layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.integrations.transformers import register
from cudnn_ops.nn import (
    MLP,
    FusedQKV,
    MergedLinear,
    MergedSwiGLU,
    PackedSwiGLU,
    SwiGLU,
    replace_modules_,
)
from cudnn_ops.nn.merge import SharedProjection
from tests.cases import models
from tests.cases.linear import Sums
from tests.conftest import DEVICES
from tests.test_nn import MODELS, Mlp

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def check(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """Both have one state and compute the same, gradients of all parameters included."""
    assert set(ours.state_dict()) == set(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    # On the CPU, for on a GPU our modules refuse float64.
    exact = copy.deepcopy(theirs).to("cpu", torch.float64)
    found = []
    for module, like in ((ours, x), (exact, x.cpu().double()), (theirs, x)):
        leaf = like.detach().clone().requires_grad_()
        out = module(leaf)
        out = out if isinstance(out, torch.Tensor) else torch.cat([o.flatten() for o in out])
        out.sin().sum().backward()
        # Of merged layers the gradients lie as their state does.
        grads: Any = copy.copy(module)
        grads._parameters = {n: p if p is None else p.grad for n, p in grads._parameters.items()}
        state = dict(grads.state_dict() if module is ours else {})
        own = {name: p.grad for name, p in module.named_parameters() if name in state or not state}
        found.append({"out": out.detach(), "x": leaf.grad, **state, **own})
    for name, right in found[1].items():
        models.check(found[0][name], right.to(x.device), found[2][name], name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_mlp(activation, device):
    torch.manual_seed(0)
    ours = MLP(24, 64, 40, activation=activation, device=device, dtype=DTYPES[device])
    by_name = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(24, 64), nn.Linear(64, 40)
            self.act = by_name[activation]

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    theirs = Theirs().to(device, DTYPES[device])
    check(ours, theirs, torch.randn(3, 7, 24, device=device, dtype=DTYPES[device]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_merged_swiglu(activation, bias, device):
    torch.manual_seed(0)
    options = {"activation": activation, "device": device, "dtype": DTYPES[device]}
    ours = MergedSwiGLU(24, 64, bias, **options)
    theirs = SwiGLU(24, 64, bias, **options)
    check(ours, theirs, torch.randn(3, 7, 24, device=device, dtype=DTYPES[device]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [MLP, MergedSwiGLU])
def test_a_residual(kind, bias, dtype, device):
    """In 16 bits and without gradients the last product adds it."""
    torch.manual_seed(0)
    module = kind(24, 64, bias=bias, device=device, dtype=dtype)
    x, residual = torch.randn(2, 3, 7, 24, device=device, dtype=dtype)
    right = (copy.deepcopy(module).cpu().double()(x.cpu().double()) + residual.cpu()).to(device)
    with torch.no_grad():
        apart = residual + module(x)
        with Sums() as sums:
            models.check(module(x, residual), right, apart, "without gradients")
    assert sums.in_products == (dtype == torch.bfloat16)
    residual.requires_grad_()
    with Sums() as sums:
        out = module(x, residual)
    assert sums.in_products == 0
    models.check(out, right, apart, "with gradients")
    assert torch.equal(torch.autograd.grad(out.sum(), residual)[0], torch.ones_like(residual))


@pytest.mark.parametrize("kind", [MLP, MergedSwiGLU])
def test_a_residual_keeps_its_dtype(kind):
    """A float32 residual stream stays one, and is not rounded in between."""
    module = kind(24, 64, bias=False)
    x = torch.randn(7, 24)
    residual = 1 + torch.rand(7, 24) / 1024
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = module(x, residual), residual + module(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    module.to(torch.bfloat16)
    with torch.no_grad():
        found, expected = module(x.bfloat16(), residual), residual + module(x.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_a_residual_is_added_behind_other_layers_and_dropout():
    x, residual = torch.randn(7, 8), torch.randn(7, 8)
    for module, name in ((MLP(8, 16), "fc2"), (MergedSwiGLU(8, 16), "down_proj")):
        expected = residual + module(x)
        setattr(module, name, Replaced(getattr(module, name)))
        with torch.no_grad():
            torch.testing.assert_close(module(x, residual), expected)
        assert getattr(module, name).calls == 1
    dropped = nn.Module()
    dropped.fc1, dropped.fc2, dropped.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(1.0)
    module = MLP.of(dropped, "gelu", ("fc1", "fc2"), last="drop")
    with torch.no_grad():
        assert torch.equal(module(x, residual), residual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_qkv(bias, device):
    torch.manual_seed(0)
    dtype = DTYPES[device]
    ours = FusedQKV(48, 6, 2, 16, bias, device=device, dtype=dtype)

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(48, 96, bias)
            self.k_proj, self.v_proj = (nn.Linear(48, 32, bias) for _ in range(2))

        def forward(self, x):
            return [
                layer(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj)
            ]

    x = torch.randn(2, 9, 48, device=device, dtype=dtype)
    check(ours, Theirs().to(device, dtype), x)
    # Views of one product, which nobody copies.
    q, k, v = ours(x)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_qkv_with_positions(device):
    torch.manual_seed(0)
    projection = FusedQKV(48, 6, 2, 16, device=device)
    x, angles = torch.randn(2, 9, 48, device=device), torch.randn(1, 9, 16, device=device)
    plain, turned = projection(x), projection(x, angles.cos(), angles.sin())
    for before, after in zip(plain[:2], turned[:2], strict=True):
        expected = cudnn_ops.rotary_embedding(before, angles.cos(), angles.sin())
        torch.testing.assert_close(after, expected)
    assert torch.equal(plain[2], turned[2])
    assert torch.autograd.grad(sum(part.sum() for part in turned), projection.weight)


def test_a_head_size_that_does_not_fit():
    with pytest.raises(ValueError, match=r"in_features, 50, is no multiple of heads, 6"):
        FusedQKV(50, 6)
    with pytest.raises(ValueError, match=r"activation must be one of none, relu.*got 'tanh'"):
        MLP(8, 16, activation="tanh")
    with pytest.raises(ValueError, match="must be one of silu, gelu, gelu_tanh, got 'relu'"):
        MergedSwiGLU(8, 16, activation="relu")


class Replaced(nn.Module):
    """What someone put in the place of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MLP(8, 16), "fc1"),
        (lambda: MLP(8, 16), "fc2"),
        (lambda: MergedSwiGLU(8, 16), "down_proj"),
        (lambda: PackedSwiGLU(8, 16), "gate_up_proj"),
        (lambda: PackedSwiGLU(8, 16), "down_proj"),
    ],
)
def test_layers_with_hooks_or_of_others_are_called(make, name):
    module, x = make(), torch.randn(3, 8)
    expected = module(x)
    calls = []
    layer = getattr(module, name)
    handle = layer.register_forward_hook(lambda *_: calls.append(name))
    torch.testing.assert_close(module(x), expected)
    assert calls == [name]
    handle.remove()
    module(x)
    assert calls == [name]
    setattr(module, name, Replaced(layer))
    torch.testing.assert_close(module(x), expected)
    assert getattr(module, name).calls == 1


class TestState:
    """Of merged layers: as that of separate ones, whatever torch does with it."""

    layers = ("query", "key")

    def merged(self, **options) -> MergedLinear:
        return MergedLinear(8, {"query": 6, "key": 4}, **options)

    def separate(self) -> nn.ModuleDict:
        return nn.ModuleDict({"query": nn.Linear(8, 6), "key": nn.Linear(8, 4)})

    def test_there_and_back(self):
        separate, merged = self.separate(), self.merged()
        assert list(merged.state_dict()) == list(separate.state_dict())
        merged.load_state_dict(separate.state_dict())
        torch.testing.assert_close(merged.state_dict(), separate.state_dict())
        other = self.separate()
        other.load_state_dict(merged.state_dict())
        torch.testing.assert_close(other.state_dict(), separate.state_dict())
        x = torch.randn(3, 8)
        for part, name in zip(merged(x), self.layers, strict=True):
            torch.testing.assert_close(part, separate[name](x))

    def test_within_a_model(self):
        model, separate = nn.Sequential(nn.ReLU(), self.merged()), self.separate()
        state = {f"1.{name}": value for name, value in separate.state_dict().items()}
        model.load_state_dict(state)
        assert list(model.state_dict()) == list(state)

    def test_of_layers(self):
        separate = self.separate()
        merged = MergedLinear.of(dict(separate))
        torch.testing.assert_close(merged.state_dict(), separate.state_dict())
        with pytest.raises(ValueError, match=r"layers to be merged must have the same input"):
            MergedLinear.of({"a": nn.Linear(8, 6), "b": nn.Linear(8, 6, bias=False)})

    def test_mistakes(self):
        merged, state = self.merged(), self.separate().state_dict()
        partial = {name: value for name, value in state.items() if name != "key.bias"}
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"key.bias\""):
            merged.load_state_dict(partial)
        with pytest.raises(
            RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"value.bias\""
        ):
            merged.load_state_dict({**state, "value.bias": torch.ones(4)})
        with pytest.raises(RuntimeError, match=r"size mismatch for key.weight"):
            merged.load_state_dict({**state, "key.weight": torch.ones(4, 7)})
        found = merged.load_state_dict({**partial, "value.bias": torch.ones(4)}, strict=False)
        assert found.missing_keys == ["key.bias"]

    def test_assigned_to_a_model_without_memory(self):
        merged, separate = self.merged(device="meta"), self.separate()
        merged.load_state_dict(separate.state_dict(), assign=True)
        torch.testing.assert_close(merged.state_dict(), separate.state_dict())
        assert merged.weight.requires_grad

    def test_parts_are_of_the_parameter(self):
        merged = self.merged()
        merged.state_dict()["key.weight"].zero_()
        assert not merged.weight[6:].any()
        assert merged.weight[:6].all()


def test_merged_modules_compile():
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(MLP(16, 32), MergedSwiGLU(16, 24))
    x = torch.randn(5, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    assert F.mse_loss(compiled(x), x).item() >= 0


class TestMerging:
    """``replace_modules_(model, merge=True)``."""

    @pytest.mark.parametrize("name", MODELS)
    def test_what_is_found_in_a_model(self, name):
        register()
        model = models.make_model(name, "cpu")
        names, state = list(model.state_dict()), copy.deepcopy(model.state_dict())
        replace_modules_(model, merge=True)
        for layer in model.model.layers:
            assert type(layer.mlp) is MergedSwiGLU
            for part in ("q_proj", "k_proj", "v_proj"):
                assert type(getattr(layer.self_attn, part)) is SharedProjection
        assert list(model.state_dict()) == names
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
        stock = models.make_model(name, "cpu")
        for parameter in stock.parameters():
            nn.init.normal_(parameter)
        model.load_state_dict(stock.state_dict())
        torch.testing.assert_close(model.state_dict(), stock.state_dict(), rtol=0, atol=0)
        assert replace_modules_(model, merge=True) == []

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
    def test_a_merged_model_computes_the_same(self, name, device):
        register()
        stock = models.make_model(name, device)
        merged = copy.deepcopy(stock)
        replace_modules_(merged, merge=True)
        tokens = models.make_tokens(device)
        losses, grads = [], []
        for model in (stock, merged):
            model.float().train().set_attn_implementation("eager")
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
            grads.append(model.model.embed_tokens.weight.grad)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)

    def test_torchs_mlps(self):
        from torchvision.ops.misc import MLP as VisionMLP

        model = nn.ModuleDict(
            {
                "vision": VisionMLP(8, [16, 8], activation_layer=nn.GELU, inplace=None),
                "plain": nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 4)),
                "other": nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
                "dropped": nn.Sequential(
                    nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8)
                ),
                "gated": Mlp(nn.SiLU()),
                "ours": SwiGLU(8, 12, activation="gelu"),
            }
        )
        x, stock = torch.randn(3, 8), copy.deepcopy(model)
        done = {replacement.name: type(replacement.new) for replacement in replace_modules_(model)}
        assert done == {"gated": SwiGLU}
        done = {r.name: type(r.new) for r in replace_modules_(model, merge=True)}
        assert done == {
            **{"vision": MLP, "plain": MLP},
            **{"gated": MergedSwiGLU, "ours": MergedSwiGLU},
        }
        assert list(model.state_dict()) == list(stock.state_dict())
        for name, module in stock.items():
            torch.testing.assert_close(model[name].eval()(x), module.eval()(x))

    def shared(self) -> nn.Module:
        attention = nn.Module()
        for name, size in (("q_proj", 12), ("k_proj", 4), ("v_proj", 4)):
            setattr(attention, name, nn.Linear(8, size))
        model = nn.ModuleDict({"attention": attention})
        replace_modules_(model, merge=True)
        return model["attention"]

    def test_one_product_for_one_input(self, monkeypatch):
        attention, x = self.shared(), torch.randn(3, 8)
        product = attention.q_proj.merged
        calls = []
        run = product.product
        monkeypatch.setattr(product, "product", lambda x: calls.append(x) or run(x))
        for part in (attention.k_proj, attention.q_proj, attention.v_proj):
            expected = F.linear(x, part.weight, part.bias)
            torch.testing.assert_close(part(x), expected)
        assert len(calls) == 1
        assert product.held is None, "the outputs are let go"
        attention.q_proj(x)
        attention.q_proj(x)  # again, before the others
        assert len(calls) == 3

    def test_inputs_that_differ_or_change(self):
        attention, x, other = self.shared(), torch.randn(3, 8), torch.randn(5, 8)
        attention.q_proj(x)
        key = attention.k_proj(other)
        expected = F.linear(other, attention.k_proj.weight, attention.k_proj.bias)
        torch.testing.assert_close(key, expected)
        assert attention.q_proj.merged.is_apart
        changed = self.shared()
        changed.q_proj(x)
        x.mul_(2)
        expected = F.linear(x, changed.k_proj.weight, changed.k_proj.bias)
        torch.testing.assert_close(changed.k_proj(x), expected)
        with torch.inference_mode():
            y = torch.randn(3, 8)
            expected = F.linear(y, changed.v_proj.weight, changed.v_proj.bias)
            torch.testing.assert_close(changed.v_proj(y), expected)

    def test_mistakes_of_a_state(self):
        attention = self.shared()
        state = attention.state_dict()
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"k_proj.bias\""):
            attention.load_state_dict({n: v for n, v in state.items() if n != "k_proj.bias"})
        with pytest.raises(RuntimeError, match=r"size mismatch for v_proj.weight"):
            attention.load_state_dict({**state, "v_proj.weight": torch.ones(3, 3)})
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"q_proj.x\""):
            attention.load_state_dict({**state, "q_proj.x": torch.ones(3)})
        empty = self.shared().to("meta")
        empty.load_state_dict(state, assign=True)
        torch.testing.assert_close(dict(empty.state_dict()), dict(state))
