"""Merging the linear layers of models in transformers whose layers are not Llama's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from cudnn_ops.nn import MLP, LinearAct, MergedSwiGLU, SwiGLU, replace_modules_
from cudnn_ops.nn.merge import SharedProjection
from tests.conftest import DEVICES

WORDS = 97
#: A model, and what its merged modules are called, with their types.
MODELS: dict[str, tuple[Any, dict[str, type[nn.Module]]]] = {
    "gpt2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        ),
        {"transformer.h.0.mlp": MLP, "transformer.h.1.mlp": MLP},
    ),
    "bert": (
        lambda: BertForMaskedLM(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=72,
            )
        ),
        {"bert.encoder.layer.0.intermediate": LinearAct},
    ),
    "distilbert": (
        lambda: DistilBertForMaskedLM(
            DistilBertConfig(vocab_size=WORDS, dim=32, n_layers=1, n_heads=4, hidden_dim=72)
        ),
        {"distilbert.transformer.layer.0.ffn": MLP},
    ),
}


def make(name: str, device: str) -> tuple[nn.Module, nn.Module]:
    """A model, and a copy of it that is merged."""
    torch.manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.float32
    stock = MODELS[name][0]().to(device, dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    merged = copy.deepcopy(stock)
    found = {done.name: done.new for done in replace_modules_(merged, merge=True)}
    found = {n: new for n, new in found.items() if isinstance(new, (MLP, LinearAct))}
    assert {n: type(new) for n, new in found.items()} == MODELS[name][1]
    return stock, merged


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Results and gradients, with the same numbers to drop."""
    torch.manual_seed(3)
    device = next(model.parameters()).device
    tokens = torch.arange(3 * 20, device=device).view(3, 20) % WORDS
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_computes_the_same(name, is_training, device):
    stock, merged = (model.train(is_training) for model in make(name, device))
    exact = {"rtol": 1e-9, "atol": 1e-9} if device == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(step(merged), step(stock), **exact)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_stays_as_it_was(name):
    stock, merged = make(name, "cpu")
    assert list(merged.state_dict()) == list(stock.state_dict())
    torch.testing.assert_close(merged.state_dict(), stock.state_dict(), rtol=0, atol=0)
    # The same parameters: an optimizer that has them keeps them.
    again = MODELS[name][0]()
    before = dict(again.named_parameters())
    replace_modules_(again, merge=True)
    assert all(p is before[n] for n, p in again.named_parameters())
    merged.load_state_dict(again.state_dict())
    stock.load_state_dict(merged.state_dict())
    torch.testing.assert_close(stock.float().state_dict(), again.state_dict())
    assert not [r for r in replace_modules_(merged, merge=True) if isinstance(r.new, MLP)]


def test_of_vit_too():
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=72,
        image_size=16,
        patch_size=8,
    )
    stock = ViTForImageClassification(config).double().eval()
    merged = copy.deepcopy(stock)
    found = [type(done.new) for done in replace_modules_(merged, merge=True)]
    assert LinearAct in found or MLP in found
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(merged(image).logits, stock(image).logits)


class Gpt2Mlp(nn.Module):
    """As the MLP of GPT-2."""

    def __init__(self, share: float = 0.1) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(24, 8), Conv1D(8, 24)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(share)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


def merge(module: nn.Module) -> nn.Module:
    model = nn.ModuleDict({"module": copy.deepcopy(module)})
    replace_modules_(model, merge=True)
    return model["module"]


def test_dropout_behind_an_mlp_stays():
    ours, theirs = merge(Gpt2Mlp(0.5)), Gpt2Mlp(0.5)
    theirs.load_state_dict(ours.state_dict())
    assert type(ours) is MLP
    assert type(ours.dropout) is nn.Dropout
    x = torch.randn(2, 5, 8)
    results = []
    for module in (ours, theirs):
        torch.manual_seed(1)
        results.append(module.train()(x))
    torch.testing.assert_close(*results)
    assert (results[0] == 0).any()
    assert not (ours.eval()(x) == 0).any()


def test_a_conv1d_with_a_hook_or_of_another_is_called():
    ours, x = merge(Gpt2Mlp()).eval(), torch.randn(2, 5, 8)
    expected, calls = ours(x), []
    handle = ours.c_fc.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(x), expected)
    assert calls == [1]
    handle.remove()
    other = nn.Linear(24, 8)
    with torch.no_grad():
        other.weight.copy_(ours.c_proj.weight.t())
        other.bias.copy_(ours.c_proj.bias)
    ours.c_proj = other
    torch.testing.assert_close(ours(x), expected)


def test_what_is_merged_compiles():
    torch._dynamo.reset()
    module = nn.Sequential(merge(Gpt2Mlp()), LinearAct(8, 16, activation="silu")).eval()
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_linear_act(activation, device):
    torch.manual_seed(0)
    ours = LinearAct(24, 40, activation=activation, device=device)
    assert list(ours.state_dict()) == ["dense.weight", "dense.bias"]
    x = torch.randn(3, 7, 24, device=device)
    expected = getattr(F, activation)(F.linear(x, ours.dense.weight, ours.dense.bias))
    torch.testing.assert_close(ours(x), expected, rtol=1e-3, atol=1e-3)
    calls = []
    ours.dense.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(x), expected, rtol=1e-3, atol=1e-3)
    assert calls == [1]
    with pytest.raises(ValueError, match=r"activation must be one of none, relu.*got 'tanh'"):
        LinearAct(8, 16, activation="tanh")


class Between(nn.Module):
    """An MLP that drops its hidden layer, by the module that drops its result too or not."""

    def __init__(self, is_twice: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 24), nn.Linear(24, 8)
        self.dropout, self.is_twice = nn.Dropout(0.1), is_twice

    def forward(self, x):
        x = self.fc2(self.dropout(self.fc1(x).relu()))
        return self.dropout(x) if self.is_twice else x


@pytest.mark.parametrize(
    "module",
    [
        Between(False),
        Between(True),
        nn.Sequential(nn.Flatten(), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)),
        nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1)),
        nn.Sequential(nn.ReLU(), nn.Linear(8, 24)),
        nn.Sequential(nn.Linear(8, 24)),
        nn.Sequential(nn.Linear(8, 24), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.LayerNorm(24)),
        nn.Sequential(nn.Linear(8, 24), nn.GELU(), Conv1D(8, 24)),
    ],
    ids=str,
)
def test_what_is_left_alone(module):
    assert type(merge(module)) is type(module)


def projections(**changes: nn.Parameter) -> nn.Module:
    """The projections of an attention, with other weights."""
    attention = nn.Module()
    for name, size in (("q_proj", 12), ("k_proj", 4), ("v_proj", 4)):
        setattr(attention, name, nn.Linear(8, size))
    for name, weight in changes.items():
        getattr(attention, name).weight = weight
    return attention


def test_frozen_layers_stay_frozen():
    for names in (["q_proj"], ["k_proj", "v_proj"]):
        attention = projections()
        for name in names:
            getattr(attention, name).requires_grad_(False)
        merged = merge(attention)
        assert type(merged.q_proj) is nn.Linear, "learned and frozen ones are no one parameter"
    merged = merge(projections().requires_grad_(False))
    assert type(merged.q_proj) is SharedProjection
    assert not any(p.requires_grad for p in merged.parameters())
    gated = SwiGLU(8, 24)
    gated.gate_proj.requires_grad_(False)
    assert type(merge(gated)) is SwiGLU
    module = Gpt2Mlp()
    module.c_fc.requires_grad_(False)
    module = merge(module)
    assert type(module) is MLP
    module(torch.randn(2, 5, 8)).sum().backward()
    assert module.c_fc.weight.grad is None
    assert module.c_proj.weight.grad is not None


def test_tied_layers_stay_tied():
    shared = nn.Parameter(torch.randn(4, 8))
    assert type(merge(projections(k_proj=shared, v_proj=shared)).k_proj) is nn.Linear
    model = nn.ModuleDict({"one": projections(k_proj=shared), "other": projections(v_proj=shared)})
    model["gated"] = SwiGLU(8, 24)
    model["like"] = nn.Linear(8, 24)
    model["like"].weight = model["gated"].up_proj.weight
    model["free"] = SwiGLU(8, 24)
    replace_modules_(model, merge=True)
    assert model["one"].k_proj.weight is model["other"].v_proj.weight is shared
    assert type(model["gated"]) is SwiGLU
    assert model["like"].weight is model["gated"].up_proj.weight
    assert type(model["free"]) is MergedSwiGLU
    # What keeps its parameters may have tied ones, and one module may be there twice.
    module = Gpt2Mlp()
    model = nn.ModuleDict({"one": module, "other": Gpt2Mlp(), "again": module})
    model["other"].c_fc.weight = module.c_fc.weight
    replace_modules_(model, merge=True)
    assert all(type(part) is MLP for part in model.values())
    assert model["one"] is model["again"]
    assert model["other"].c_fc.weight is model["one"].c_fc.weight
