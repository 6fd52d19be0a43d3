"""Modules of linear layers: results, gradients, the state of separate layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnn_ops
from cudnn_ops.nn import MLP, FusedQKV, MergedLinear, MergedSwiGLU, PackedSwiGLU, SwiGLU
from tests.cases import models
from tests.conftest import DEVICES

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def check(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """Both have one state and compute the same, gradients of all parameters included."""
    assert set(ours.state_dict()) == set(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    exact = copy.deepcopy(theirs).double()
    found = []
    for module, dtype in ((ours, x.dtype), (exact, torch.float64), (theirs, x.dtype)):
        leaf = x.detach().to(dtype).requires_grad_()
        out = module(leaf)
        out = out if isinstance(out, torch.Tensor) else torch.cat([o.flatten() for o in out])
        out.sin().sum().backward()
        # Of merged layers the gradients lie as their state does.
        grads = copy.copy(module)
        grads._parameters = {n: p if p is None else p.grad for n, p in grads._parameters.items()}
        state = dict(grads.state_dict() if module is ours else {})
        own = {name: p.grad for name, p in module.named_parameters() if name in state or not state}
        found.append({"out": out.detach(), "x": leaf.grad, **state, **own})
    for name, right in found[1].items():
        models.check(found[0][name], right, found[2][name], name)


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
