"""optimize_: everything that swaps modules, in one call."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
import transformers as hf
from torch import nn

import cudnn_ops


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def test_a_language_model():
    torch.manual_seed(0)
    model = _llama().eval()
    ids = torch.randint(0, 64, (2, 9))
    expected = model(ids).logits
    report = cudnn_ops.optimize_(model)
    assert report.model is model
    assert report.attention
    assert len(report.rotary) == 2
    assert len(report.replaced) == 7
    assert not report.notes
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert "attention: cudnn_ops" in str(report)


def test_an_image_model():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    report = cudnn_ops.optimize_(model, x)
    assert len(report.fused) == 20
    assert report.model is not model
    torch.testing.assert_close(report.model(x), expected, rtol=1e-4, atol=1e-5)


def test_an_image_model_that_trains():
    """Batch norms with their sums and ReLU; the parameters are the model's, for any optimizer."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    stock = copy.deepcopy(model)
    x = torch.randn(2, 3, 64, 64)
    report = cudnn_ops.optimize_(model, x)
    assert len(report.fused) == 20
    assert sum(one.residual for one in report.fused) == 8
    for one in (stock, report.model):
        one(x).square().sum().backward()
    pairs = zip(model.named_parameters(), stock.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        assert report.model.get_parameter(name) is parameter
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-2, atol=1e-3)
    for mine, right in zip(report.model.eval().buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


class Dropped(nn.Module):
    """Asks for its mode where a trace does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return nn.functional.dropout(self.norm(self.conv(x)).relu(), 0.5, self.training)


@pytest.mark.parametrize("make", [Dropped, lambda: torchvision.models.efficientnet_b0()])
def test_a_model_whose_functions_ask_for_the_mode_stays_itself(make):
    """It drops nothing in eval mode, whenever it was optimized."""
    torch.manual_seed(0)
    model = make()
    report = cudnn_ops.optimize_(model)
    assert report.model is model
    assert not report.fused
    assert report.notes[-1] == "batch norms: a function in the model asks for training mode"
    assert model.training
    assert all(module.training for module in model.modules())


def test_batch_norms_that_nothing_follows_stay():
    layers = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU()
    model = nn.Sequential(*layers)
    report = cudnn_ops.optimize_(model)
    assert report.model is model
    assert not report.fused


def test_what_is_left_alone_is_told():
    model = torchvision.models.resnet18(num_classes=5)
    report = cudnn_ops.optimize_(model)
    assert report.notes == [
        "convolutions: a batch norm is in training mode, and its statistics change; model.eval() "
        "allows fusing them"
    ]

    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x) if x.sum() > 0 else x

    (note,) = cudnn_ops.optimize_(Dynamic().eval()).notes
    assert note.startswith("convolutions: torch.fx cannot trace the model: ")


def test_a_dry_run_changes_nothing(capsys):
    model = _llama()
    before = [type(module) for module in model.modules()]
    report = cudnn_ops.optimize_(model, dry_run=True)
    assert [type(module) for module in model.modules()] == before
    assert len(report.replaced) == 7
    assert not report.attention
    assert report.notes == ["attention and rotary embedding: a dry run does not try them"]


def test_a_model_without_anything_to_swap():
    report = cudnn_ops.optimize_(nn.Linear(2, 2))
    assert str(report) == ""


def test_no_model():
    with pytest.raises(TypeError, match=r"optimize_: model must be a torch.nn.Module, got Tensor"):
        cudnn_ops.optimize_(torch.ones(1))
