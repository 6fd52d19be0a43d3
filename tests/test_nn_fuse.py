"""Folding into convolutions: torchvision's models, subclasses, dropout, further activations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import efficientnet_b0, mobilenet_v2, mobilenet_v3_small
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.video import r3d_18
from torchvision.ops import StochasticDepth
from torchvision.ops.misc import FrozenBatchNorm2d

from cudnn_ops.nn import ConvAct2d, ConvAct3d, fuse_conv_bn_act_
from tests.conftest import DEVICES
from tests.test_nn_conv import block, calls, check, convolutions, randomize

pytestmark = pytest.mark.usefixtures("without_tf32")


def randomize_frozen(model):
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.weight.uniform_(0.5, 1.5)
            module.running_var.uniform_(0.5, 2)
            module.bias.normal_(std=0.3)
            module.running_mean.normal_(std=0.3)
    return model


def test_a_detection_backbone_with_frozen_norms():
    """Every convolution of the ResNet; the pyramid reads the size of those that end in a sum."""
    stock = resnet_fpn_backbone(backbone_name="resnet50", weights=None)
    stock = randomize_frozen(stock.eval())
    frozen = [m for m in stock.modules() if isinstance(m, FrozenBatchNorm2d)]
    assert len(frozen) == len(convolutions(stock.body)) == 53
    fused = fuse_conv_bn_act_(stock)
    assert len([conv for conv in fused.meta["fused_convs"] if conv.norm]) == 53
    assert not any(isinstance(m, FrozenBatchNorm2d) for m in fused.modules())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        results = (fused(x), stock(x), copy.deepcopy(stock).double()(x.double()))
    check(*(list(levels.values()) for levels in results))


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_norm_trains_on(device):
    """It has no training mode, and its convolution a gradient."""
    stock = nn.Sequential(nn.Conv2d(4, 8, 3), FrozenBatchNorm2d(8), nn.ReLU()).to(device)
    randomize_frozen(stock)
    exact = copy.deepcopy(stock).double()
    fused = fuse_conv_bn_act_(stock)
    assert calls(fused) == (["0"], [])
    x = torch.randn(2, 4, 9, 9, device=device)
    check([fused(x)], [stock(x)], [exact(x.double())])
    fused(x).sum().backward()
    assert fused.get_submodule("0").weight.grad is not None


class Renamed(nn.Conv2d):
    """Fixes arguments, as torchvision's and timm's subclasses do."""

    def __init__(self, channels):
        super().__init__(channels, channels, 3, padding=1)


class Doubled(Renamed):
    def forward(self, input):
        return 2 * super().forward(input)


def test_subclasses_that_compute_the_same():
    for kind, is_folded in ((Renamed, True), (Doubled, False)):
        stock = randomize(nn.Sequential(kind(4), nn.BatchNorm2d(4), nn.ReLU()))
        x = torch.randn(2, 4, 5, 5)
        fused = fuse_conv_bn_act_(stock)
        assert (type(fused.get_submodule("0")) is ConvAct2d) == is_folded
        torch.testing.assert_close(fused(x), stock(x), rtol=1e-4, atol=1e-5)


def test_a_parametrized_convolution_stays():
    """Its weight is computed, and its class one of torch's making."""
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    fused = fuse_conv_bn_act_(nn.Sequential(conv, nn.ReLU()))
    assert fused.meta["fused_convs"] == []


def test_every_convolution_of_a_video_resnet():
    stock = randomize(r3d_18())
    fused = fuse_conv_bn_act_(stock)
    assert sorted(calls(fused)[0]) == sorted(convolutions(stock))
    assert {type(fused.get_submodule(name)) for name in calls(fused)[0]} == {ConvAct3d}
    x = torch.randn(1, 3, 4, 32, 32)
    with torch.no_grad():
        check([fused(x)], [stock(x)], [copy.deepcopy(stock).double()(x.double())])


@pytest.mark.parametrize(
    ("make", "residuals", "activations"),
    [
        (efficientnet_b0, 9, {"none", "silu"}),
        (mobilenet_v2, 10, {"none", "relu6"}),
        (mobilenet_v3_small, 6, {"none", "relu", "hardswish"}),
    ],
)
def test_mobile_models(make, residuals, activations):
    """Their sums follow an eval-mode StochasticDepth, or nothing; their gates have other ends."""
    stock = randomize(make())
    fused = fuse_conv_bn_act_(stock)
    folded = fused.meta["fused_convs"]
    assert sum(conv.residual for conv in folded) == residuals
    assert {conv.activation for conv in folded} == activations
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert {type(m) for m in fused.modules()}.isdisjoint({nn.ReLU6, StochasticDepth})
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        check([fused(x)], [stock(x)], [copy.deepcopy(stock).double()(x.double())])


FOLDED = {
    "relu6": [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(0, 6)],
    "hardswish": [nn.Hardswish(), nn.Hardswish(inplace=True)],
    "leaky_relu": [nn.LeakyReLU(), nn.LeakyReLU(0.01, inplace=True)],
}
KEPT = {
    "LeakyReLU(negative_slope=0.2)": nn.LeakyReLU(0.2),
    "Hardtanh(min_val=-1.0, max_val=1.0)": nn.Hardtanh(),
    "Sigmoid()": nn.Sigmoid(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FOLDED)
def test_further_activations(name, device):
    for activation in FOLDED[name]:
        stock = randomize(nn.Sequential(*block(activation))).to(device)
        exact = copy.deepcopy(stock).double()
        fused = fuse_conv_bn_act_(stock)
        assert [conv.activation for conv in fused.meta["fused_convs"]] == [name]
        assert not fused.meta["unfused_activations"]
        x = 4 * torch.randn(2, 4, 9, 9, device=device)
        check([fused(x)], [stock(x)], [exact(x.double())])


@pytest.mark.parametrize("words", KEPT)
def test_other_activations_stay_and_are_told(words, capsys):
    stock = randomize(nn.Sequential(*block(KEPT[words])))
    fuse_conv_bn_act_(stock, dry_run=True)
    told = ["0 + 1 -> ConvAct2d", f"0: {words} cannot be fused"]
    assert capsys.readouterr().out.splitlines() == told
    fused = fuse_conv_bn_act_(stock)
    assert [str(one) for one in fused.meta["unfused_activations"]] == told[1:]
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(fused(x), stock(x), rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    """A convolution and a norm, and what a test makes of them."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.identity = nn.Dropout(0.5), nn.Identity()
        self.depth = StochasticDepth(0.5, "row")
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x)


FORWARDS = {
    "dropout": lambda m, x: F.relu(m.drop(m.norm_a(m.a(x))) + x),
    "identity before the norm": lambda m, x: m.norm_a(m.identity(m.a(x))) + x,
    "depth": lambda m, x: m.depth(m.norm_a(m.a(x))) + x,
    "functional dropout": lambda m, x: F.dropout(m.a(x), 0.5, m.training) + x,
    "several": lambda m, x: m.identity(F.dropout2d(m.drop(m.a(x)), training=False)) + x,
    "clamp": lambda m, x: torch.clamp(m.a(x), 0, 6),
    "clamp from below": lambda m, x: m.a(x).clamp(min=0),
    "hardtanh": lambda m, x: F.hardtanh(m.a(x), max_val=6, min_val=0),
    "leaky": lambda m, x: F.leaky_relu(m.a(x), inplace=True),
    "hardswish": lambda m, x: F.hardswish(m.norm_a(m.a(x))),
}
KEPT_FORWARDS = {
    "identity alone": lambda m, x: m.identity(m.a(x)),
    "dropout in training": lambda m, x: F.dropout(m.a(x), 0.5, training=True),
    "clamp to others": lambda m, x: torch.clamp(m.a(x), -1, 1),
    "leaky of another slope": lambda m, x: F.leaky_relu(m.a(x), 0.3),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_lies_between_and_functions(name):
    stock, x = randomize(Net(FORWARDS[name])), 3 * torch.randn(2, 4, 6, 6)
    fused = fuse_conv_bn_act_(stock, x)
    assert calls(fused) == (["a"], [])
    check([fused(x)], [stock(x)], [copy.deepcopy(stock).double()(x.double())])


@pytest.mark.parametrize("name", KEPT_FORWARDS)
def test_what_is_not_folded(name):
    fused = fuse_conv_bn_act_(randomize(Net(KEPT_FORWARDS[name])))
    assert fused.meta["fused_convs"] == []
    assert len(calls(fused)[1]) == 2


def test_dropout_of_a_model_in_training_stays():
    stock = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.5), nn.ReLU())
    assert fuse_conv_bn_act_(stock).meta["fused_convs"] == []
    assert len(fuse_conv_bn_act_(stock.eval()).meta["fused_convs"]) == 1
