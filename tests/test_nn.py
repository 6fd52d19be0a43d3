"""Modules against torch's, their state, and swapping them into models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.bit.configuration_bit import BitConfig
from transformers.models.bit.modeling_bit import BitGroupNormActivation
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.pe_audio.modeling_pe_audio import PeAudioMaskedGroupNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import cudnn_ops.nn
from cudnn_ops.integrations.transformers import register
from tests.cases import models
from tests.cases.families import tiny_config
from tests.conftest import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_take_each_others_state(name, device):
    torch.manual_seed(0)
    theirs = getattr(nn, name)(64, eps=1e-5, device=device)
    ours = getattr(cudnn_ops.nn, name)(64, eps=1e-5, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 64, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("affine", [False, True])
def test_group_norms_take_each_others_state(affine, device):
    torch.manual_seed(0)
    theirs = nn.GroupNorm(4, 12, eps=1e-4, affine=affine, device=device)
    ours = cudnn_ops.nn.GroupNorm(4, 12, 1e-4, affine, device=device)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 12, 5, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    model = nn.Sequential(theirs)
    cudnn_ops.nn.replace_modules_(model)
    assert isinstance(model[0], cudnn_ops.nn.GroupNorm)
    assert model[0].weight is theirs.weight
    assert list(model[0].state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(model(x), theirs(x))
    activated = cudnn_ops.nn.GroupNorm(4, 12, 1e-4, affine, activation="silu", device=device)
    activated.load_state_dict(ours.state_dict())
    torch.testing.assert_close(activated(x), F.silu(theirs(x)))
    assert repr(activated).endswith("activation=silu)")
    with pytest.raises(ValueError, match="GroupNorm: activation must be one of none, silu, got"):
        cudnn_ops.nn.GroupNorm(4, 12, activation="relu")


class ActivatedNorm(nn.GroupNorm):
    """As timm's ``GroupNormAct``, and with ``nn.Identity`` as its ``GroupNorm1``."""

    def __init__(self, activation: nn.Module, affine: bool = True, eps: float = 1e-4) -> None:
        super().__init__(4, 12, 1e-4, affine)
        self.drop, self.act, self.other_eps = nn.Identity(), activation, eps

    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.other_eps)
        return self.act(self.drop(x))


def norm_with_a_buffer() -> nn.Module:
    norm = ActivatedNorm(nn.SiLU())
    norm.register_buffer("calls", torch.zeros(1))
    return norm


GROUP_NORMS = {
    "silu": (lambda: ActivatedNorm(nn.SiLU(inplace=True)), "silu"),
    "identity": (lambda: ActivatedNorm(nn.Identity()), "none"),
    "no affine": (lambda: ActivatedNorm(nn.SiLU(), affine=False), "silu"),
    "bit": (
        lambda: BitGroupNormActivation(BitConfig(num_groups=4, hidden_act="silu"), 12, 1e-4),
        "silu",
    ),
    "relu": (lambda: ActivatedNorm(nn.ReLU()), None),
    "another eps": (lambda: ActivatedNorm(nn.SiLU(), eps=1e-3), None),
    "more parameters": (lambda: ActivatedNorm(nn.PReLU(init=1.0)), None),
    "a buffer": (norm_with_a_buffer, None),
    "dropout": (lambda: ActivatedNorm(nn.Dropout(0.5)), None),
    "mask": (lambda: PeAudioMaskedGroupNorm(4, 12), None),
}


@pytest.mark.parametrize("name", GROUP_NORMS)
def test_subclasses_of_group_norm(name):
    make, activation = GROUP_NORMS[name]
    stock = nn.Sequential(make())
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    ours = copy.deepcopy(stock)
    cudnn_ops.nn.replace_modules_(ours)
    if activation is None:
        assert type(ours[0]) is type(stock[0])
        return
    assert type(ours[0]) is cudnn_ops.nn.GroupNorm
    assert ours[0].activation == activation
    assert list(ours.state_dict()) == list(stock.state_dict())
    x = torch.randn(3, 12, 5) * 1e-2  # small, so that eps shows
    torch.testing.assert_close(ours(x), stock(x))


def test_zero_centered_norms_begin_as_plain_ones():
    x = torch.randn(5, 64)
    norm = cudnn_ops.nn.RMSNorm(64, eps=1e-6, zero_centered=True)
    assert not norm.weight.any()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (64,), eps=1e-6))


class Norm(nn.Module):
    """An RMS norm as models have it, under a name that nobody knows."""

    def __init__(self, size: int, centered: bool = False, extra: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.tiny, self.extra, self.centered = 1e-4, extra, centered

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return (wide * (self.weight + self.centered) + self.extra).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, activation, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj = nn.Linear(12, 8)
        self.act_fn, self.swapped = activation, swapped

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self.swapped else (gate, up)
        return self.down_proj(self.act_fn(gate) * up)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm(8, elementwise_affine=False),
        Norm(8),
        Norm(8, centered=True),
        Norm(8, extra=0.5),  # something else
        Mlp(nn.SiLU()),
        Mlp(nn.GELU(approximate="tanh")),
        Mlp(F.gelu),
        Mlp(nn.ReLU()),  # something else
        Mlp(nn.SiLU(), swapped=True),  # something else
        nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-3)),
    )


def test_what_computes_the_same_is_swapped(capsys):
    stock = model()
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    ours = copy.deepcopy(stock)
    planned = cudnn_ops.nn.replace_modules_(ours, dry_run=True)
    assert [type(module) for module in ours] == [type(module) for module in stock]
    names = ["0", "1", "2", "3", "4", "6", "7", "8", "11.1"]
    assert [replacement.name for replacement in planned] == names
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "0: LayerNorm -> LayerNorm"
    assert printed[4] == "4: Norm -> RMSNorm, zero-centered"
    assert printed[5] == "6: Mlp -> SwiGLU"

    parameters = dict(ours.named_parameters())
    assert len(cudnn_ops.nn.replace_modules_(ours)) == len(names)
    assert {name: id(p) for name, p in ours.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    assert list(ours.state_dict()) == list(stock.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-4)
    stock(x).square().sum().backward()
    ours(x).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert cudnn_ops.nn.replace_modules_(ours) == []


def test_shared_modules_stay_shared_and_hooks_stay():
    shared, hooked = nn.RMSNorm(8), nn.LayerNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    both = nn.Sequential(shared, hooked, shared).eval()
    cudnn_ops.nn.replace_modules_(both)
    assert both[0] is both[2]
    assert isinstance(both[0], cudnn_ops.nn.RMSNorm)
    assert not both[0].training
    assert both[1] is hooked


@pytest.mark.parametrize("kind", [cudnn_ops.nn.SwiGLU, cudnn_ops.nn.PackedSwiGLU])
def test_an_activation_that_there_is_not(kind):
    with pytest.raises(
        ValueError, match="activation must be one of silu, gelu, gelu_tanh, got 'relu'"
    ):
        kind(8, 16, activation="relu")


#: A module of transformers, what it is swapped for, and what it computes, where the module goes by
#: float32 even in float64.
PARTS = {
    "phi3": (lambda: Phi3MLP(tiny_config("phi3")), cudnn_ops.nn.PackedSwiGLU, None),
    "glm4": (lambda: Glm4MLP(tiny_config("glm4")), cudnn_ops.nn.PackedSwiGLU, None),
    "modernbert": (
        lambda: ModernBertMLP(tiny_config("modernbert")),
        cudnn_ops.nn.PackedSwiGLU,
        None,
    ),
    "cohere2": (
        lambda: Cohere2LayerNorm(64, eps=1e-3),
        cudnn_ops.nn.LayerNorm,
        lambda x, weight: F.layer_norm(x, (64,), weight, None, 1e-3),
    ),
    "llama4": (
        lambda: Llama4TextL2Norm(1e-3),
        cudnn_ops.nn.UnitRMSNorm,
        lambda x: F.rms_norm(x, (64,), None, 1e-3),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_other_families(name, device):
    """Fused gates, a layer norm without a bias, a norm without a weight."""
    make, kind, formula = PARTS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    stock = nn.Sequential(make()).to(device, dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = copy.deepcopy(stock)
    parameters = dict(ours.named_parameters())
    (replacement,) = cudnn_ops.nn.replace_modules_(ours)
    assert type(replacement.new) is type(ours[0]) is kind
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(parameters[name] is p for name, p in ours.named_parameters())
    assert cudnn_ops.nn.replace_modules_(ours) == []

    x, grad = torch.randn(2, 2, 9, 64).to(device, dtype)

    def results(model: nn.Module, call=None) -> dict[str, torch.Tensor]:
        own = dict(model.named_parameters())
        kind = next(iter(own.values()), x).dtype if call is None else torch.float64
        leaf = x.to(kind, copy=True).requires_grad_()
        out = model(leaf) if call is None else call(leaf, *own.values())
        out.backward(grad.to(kind))
        return {"out": out.detach(), "x": leaf.grad, **{name: p.grad for name, p in own.items()}}

    exact = results(copy.deepcopy(stock).double(), formula)
    found, rough = results(ours), results(stock)
    for part, tensor in found.items():
        models.check(tensor, exact[part], rough[part], part)


class Packed(nn.Module):
    def __init__(self, compute) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(12, 8)
        self.compute = compute

    def forward(self, x):
        return self.out(self.compute(self, *self.into(x).chunk(2, -1)))


def test_what_computes_another_is_left_alone(capsys):
    hooked = nn.LayerNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    alone = {
        "second half": Packed(lambda _, gate, up: F.silu(up) * gate),
        "clamped": Packed(lambda _, gate, up: F.silu(gate.clamp(max=1.0)) * up),
        "dropped": Packed(lambda self, gate, up: F.dropout(F.silu(gate) * up, 0.1, self.training)),
        "experts": GptOssExperts(tiny_config("gpt_oss")),
        "norm": Norm(8, extra=0.5),
        "hooked": hooked,
    }
    silent = {
        "plain": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
        "dropout": nn.Dropout(0.1),
    }
    model = nn.ModuleDict({**alone, **silent}).eval()
    assert cudnn_ops.nn.replace_modules_(model, dry_run=True) == []
    gate = "it is not down(act(gate) * up) by silu, gelu or gelu_tanh"
    reasons = [
        f"Packed is left alone: {gate}",
        f"Packed is left alone: {gate}",
        f"Packed is left alone: {gate}",
        "GptOssExperts is left alone: it is not gate_up_proj and down_proj of experts, by silu, "
        "gelu or gelu_tanh",
        "Norm is left alone: it is neither an RMS norm nor a layer norm",
        "LayerNorm is left alone: it has hooks",
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: {reason}" for name, reason in zip(alone, reasons, strict=True)
    ]
    assert cudnn_ops.nn.replace_modules_(model) == []


#: A layer's norms, the activation of its MLP, and whether the norms are zero-centered.
MODELS = {
    "llama": (("input_layernorm", "post_attention_layernorm"), "silu", False),
    "qwen2": (("input_layernorm", "post_attention_layernorm"), "silu", False),
    "qwen3": (
        ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
        "silu",
        False,
    ),
    "mistral": (("input_layernorm", "post_attention_layernorm"), "silu", False),
    "gemma2": (
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "gelu_tanh",
        True,
    ),
}


def stock_and_swapped(name, device):
    register()
    stock = models.make_model(name, device)
    ours = copy.deepcopy(stock)
    cudnn_ops.nn.replace_modules_(ours)
    return stock, ours


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_in_a_model(name, capsys):
    stock, ours = stock_and_swapped(name, "cpu")
    norms, activation, zero_centered = MODELS[name]
    wanted = {f"model.layers.{layer}.{norm}" for layer in (0, 1) for norm in norms}
    wanted.add("model.norm")
    mlps = {f"model.layers.{layer}.mlp" for layer in (0, 1)}

    before = dict(stock.named_modules())
    planned = cudnn_ops.nn.replace_modules_(stock, dry_run=True)
    assert dict(stock.named_modules()) == before
    assert capsys.readouterr().out.splitlines() == [str(replacement) for replacement in planned]
    assert {replacement.name for replacement in planned} == wanted | mlps

    for module in wanted:
        norm = ours.get_submodule(module)
        assert type(norm) is cudnn_ops.nn.RMSNorm
        assert norm.eps == stock.config.rms_norm_eps
        assert norm.zero_centered == zero_centered
    for module in mlps:
        mlp = ours.get_submodule(module)
        assert type(mlp) is cudnn_ops.nn.SwiGLU
        assert mlp.activation == activation
    assert list(ours.state_dict()) == list(stock.state_dict())
    torch.testing.assert_close(ours.state_dict(), stock.state_dict(), rtol=0, atol=0)
    assert cudnn_ops.nn.replace_modules_(ours) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_computes_the_same(name, device):
    stock, ours = stock_and_swapped(name, device)
    models.check_all(name, ours, models.make_inputs("plain", device), original=stock)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_trains_the_same(name, device):
    losses = []
    for model in stock_and_swapped(name, device):
        # float32 on a GPU too: a step of AdamW is as large for a gradient that is but rounding.
        model.float().train().set_attn_implementation("eager")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        tokens = models.make_tokens(device)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    stock, ours = losses[:3], losses[3:]
    assert stock[-1] < stock[0]
    assert ours == pytest.approx(stock, rel=1e-4)
