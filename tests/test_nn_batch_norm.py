"""Batch and instance norms as modules; swapped into models, and fused with what follows them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import BatchNormAct2d
from torch import Tensor, fx, nn

import cudnn_ops
from cudnn_ops.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    SyncBatchNorm,
    fuse_bn_act_,
    fuse_conv_bn_act_,
    replace_modules_,
)
from tests.conftest import DEVICES

BATCH_NORMS = [
    (BatchNorm1d, nn.BatchNorm1d, (4, 6)),
    (BatchNorm1d, nn.BatchNorm1d, (4, 6, 5)),
    (BatchNorm2d, nn.BatchNorm2d, (3, 6, 5, 4)),
    (BatchNorm3d, nn.BatchNorm3d, (2, 6, 2, 3, 4)),
    (SyncBatchNorm, nn.BatchNorm2d, (3, 6, 5, 4)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"eps": 1e-3, "momentum": 0.3},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


def _train_both(ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...], device: str) -> None:
    """Results, gradients and states of some steps, and results in eval mode."""
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        x = torch.randn(shape, generator=generator).to(device) * (step + 1) + step
        pair = [x.clone().requires_grad_() for _ in range(2)]
        results = [module(leaf) for module, leaf in zip((ours, theirs), pair, strict=True)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        for out in results:
            out.sin().sum().backward()
        torch.testing.assert_close(pair[0].grad, pair[1].grad, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kind", "stock", "shape"), BATCH_NORMS)
def test_batch_norms_are_torchs(kind, stock, shape, options, device):
    theirs = stock(6, **options, device=device)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = kind(6, **options, device=device)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, stock) or kind is SyncBatchNorm
    _train_both(ours, theirs, shape, device)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_norm_with_a_residual_and_relu(device):
    ours = BatchNorm2d(6, activation="relu", device=device)
    theirs = nn.BatchNorm2d(6, device=device)
    assert repr(ours).endswith("activation=relu)")
    assert "activation" not in repr(BatchNorm2d(6))
    for is_training in (True, False):
        ours.train(is_training), theirs.train(is_training)
        x, residual = torch.randn(2, 3, 6, 5, 4, device=device).unbind()
        torch.testing.assert_close(ours(x, residual), F.relu(theirs(x) + residual))
        torch.testing.assert_close(ours(x), F.relu(theirs(x)))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    with pytest.raises(ValueError, match="BatchNorm2d: activation must be one of none, relu, got"):
        BatchNorm2d(6, activation="silu")
    with pytest.raises(ValueError, match="expected 4D input"):
        BatchNorm2d(6)(torch.ones(2, 6, 5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNorm2d(6)(torch.ones(1, 6, 1, 1))


INSTANCE_NORMS = [
    (InstanceNorm1d, nn.InstanceNorm1d, (4, 6, 5)),
    (InstanceNorm1d, nn.InstanceNorm1d, (6, 5)),
    (InstanceNorm2d, nn.InstanceNorm2d, (3, 6, 5, 4)),
    (InstanceNorm2d, nn.InstanceNorm2d, (6, 5, 4)),
    (InstanceNorm3d, nn.InstanceNorm3d, (2, 6, 2, 3, 4)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize(("kind", "stock", "shape"), INSTANCE_NORMS)
def test_instance_norms_are_torchs(kind, stock, shape, track, affine, device):
    options = {"eps": 1e-3, "affine": affine, "track_running_stats": track, "device": device}
    theirs, ours = stock(6, **options), kind(6, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    _train_both(ours, theirs, shape, device)
    activated = kind(6, **options, activation="silu").train()
    x = torch.randn(shape, device=device)
    expected = F.silu(stock(6, **options)(x))
    torch.testing.assert_close(activated(x), expected, rtol=1e-5, atol=1e-5)


class _Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class _OtherEps(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, training=self.training)


class _TwoArguments(nn.BatchNorm2d):
    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(input if mask is None else input * mask)


SWAPPED: dict[str, tuple[nn.Module, type[nn.Module] | None, str]] = {
    "1d": (nn.BatchNorm1d(6), BatchNorm1d, "none"),
    "2d": (nn.BatchNorm2d(6, momentum=None), BatchNorm2d, "none"),
    "3d": (nn.BatchNorm3d(6, affine=False), BatchNorm3d, "none"),
    "sync": (nn.SyncBatchNorm(6), SyncBatchNorm, "none"),
    "instance": (nn.InstanceNorm2d(6, track_running_stats=True), InstanceNorm2d, "none"),
    "timm": (BatchNormAct2d(6), BatchNorm2d, "relu"),
    "timm, no activation": (BatchNormAct2d(6, apply_act=False, eps=1e-3), BatchNorm2d, "none"),
    "timm, silu": (BatchNormAct2d(6, act_layer=nn.SiLU), None, ""),
    "timm, dropout": (BatchNormAct2d(6, drop_layer=nn.Dropout), None, ""),
    "another eps": (_OtherEps(6, eps=1e-2, affine=False), None, ""),
    "two arguments": (_TwoArguments(6), None, ""),
    "lazy": (nn.LazyBatchNorm2d(), None, ""),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_what_is_swapped(name, capsys):
    module, kind, activation = SWAPPED[name]
    # A lazy one cannot be copied.
    model = _Net(module if kind is None else copy.deepcopy(module))
    planned = replace_modules_(model, dry_run=True)
    printed = capsys.readouterr().out
    replace_modules_(model)
    if kind is None:
        assert type(model.norm) is type(module)
        assert planned == []
        assert "norm: " in printed
        reason = "it has hooks" if name == "lazy" else "it is another norm"
        assert f"is left alone: {reason}" in printed
        return
    assert type(model.norm) is kind
    assert model.norm.activation == activation
    assert replace_modules_(model) == []
    stock = _Net(copy.deepcopy(module))
    assert list(model.state_dict()) == list(stock.state_dict())
    if name == "sync":
        return  # torch's is for GPUs
    sizes = {"1d": (5,), "3d": (2, 3, 4)}.get(name, (5, 4))
    _train_both(model, stock, (3, 6, *sizes), "cpu")


def test_parameters_and_statistics_stay_the_same_tensors():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    replace_modules_(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name: id(one) for name, one in before.items()} == {
        name: id(one) for name, one in after.items()
    }
    hooked = nn.Sequential(nn.BatchNorm2d(4))
    hooked[0].register_forward_hook(lambda *_: None)
    assert replace_modules_(hooked) == []


def test_swapped_norms_still_fold_into_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model[1].running_var.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    replace_modules_(model)
    fused = fuse_conv_bn_act_(model)
    assert [str(one) for one in fused.meta["fused_convs"]] == ["0 + 1 + relu -> ConvAct2d"]
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


def _count(model: fx.GraphModule, residual: bool, activation: str) -> int:
    return sum(
        one.residual == residual and one.activation == activation
        for one in model.meta["fused_norms"]
    )


#: Of each model the norms with ReLU alone, with a sum, and with neither.
MODELS: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "resnet18": (lambda: torchvision.models.resnet18(), (9, 8, 3)),
    "resnet50": (lambda: torchvision.models.resnet50(), (33, 16, 4)),
    "regnet_y_400mf": (lambda: torchvision.models.regnet_y_400mf(), (33, 16, 4)),
    "timm resnet26": (lambda: timm.create_model("resnet26"), (17, 8, 4)),
    "timm regnetx_002": (lambda: timm.create_model("regnetx_002"), (27, 13, 4)),
    "timm efficientnet_b0": (lambda: timm.create_model("efficientnet_b0"), (0, 9, 7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_learn_the_same(name):
    make, (relus, sums, others) = MODELS[name]
    torch.manual_seed(0)
    stock = make().double().train()
    for module in stock.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
        if hasattr(module, "drop_rate"):
            module.drop_rate = 0.0
        if isinstance(module, nn.BatchNorm2d):  # blocks of zeros would hide mistakes
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ours = copy.deepcopy(stock)
    fused = fuse_bn_act_(ours)
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert _count(fused, False, "relu") == relus
    with_sum = _count(fused, True, "relu") + _count(fused, True, "none")
    assert (with_sum, len(fused.meta["fused_norms"])) == (sums, relus + sums + others)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    results = fused(x), stock(x)
    torch.testing.assert_close(*results)
    for out in results:
        out.sin().sum().backward()
    for (name, mine), theirs in zip(fused.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    torch.testing.assert_close(fused.state_dict(), stock.state_dict())
    # The model that it was made of has the same state, and still computes the same.
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())
    torch.testing.assert_close(fused.eval()(x), stock.eval()(x))


def test_shapes_are_learned_without_a_trace():
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.one(x) + x.mean((2, 3), keepdim=True)) + F.relu(self.two(x) + x)

    model = Broadcast().train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(3, 4, 5, 5)
    fused = fuse_bn_act_(model, x)
    found = {one.name: one for one in fused.meta["fused_norms"]}
    assert not found["one"].residual
    assert found["two"].residual
    torch.testing.assert_close(model.state_dict(), before)
    assert fused.training
    torch.testing.assert_close(fused(x), copy.deepcopy(model)(x))


class _Shared(nn.Module):
    """What must not be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.used, self.hooked = (nn.BatchNorm2d(4) for _ in range(3))
        self.silu, self.read = (nn.BatchNorm2d(4) for _ in range(2))
        self.hooked.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.twice(x)) + F.relu(self.twice(x * 2))
        out = self.used(x)
        x = F.relu(out) + out.sin()
        x = F.relu(self.hooked(x))
        x = F.silu(self.silu(x))
        return F.relu(self.read(x)) * self.read.weight.sum()


def test_what_is_not_fused(capsys):
    model = _Shared().double().train()
    stock = copy.deepcopy(model)
    fuse_bn_act_(model, dry_run=True)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"{n} -> BatchNorm2d" for n in ("read", "silu", "twice", "used")]
    fused = fuse_bn_act_(model)
    assert all(one.activation == "none" for one in fused.meta["fused_norms"])
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(fused(x), stock(x))
    torch.testing.assert_close(fused.state_dict(), stock.state_dict())


def test_converted_to_sync():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(BatchNorm1d(4, activation="relu")))
    converted = SyncBatchNorm.convert_sync_batchnorm(model, process_group=None)
    assert [type(one) for one in (converted[0], converted[1][0])] == [SyncBatchNorm] * 2
    assert converted[1][0].activation == "relu"
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2))) is SyncBatchNorm
    with pytest.raises(ValueError, match="expected at least 2D input"):
        SyncBatchNorm(4)(torch.ones(4))


def test_swapped_by_optimize():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    report = cudnn_ops.optimize_(model)
    assert [one.name for one in report.replaced] == ["1"]
