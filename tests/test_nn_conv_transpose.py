"""Modules of transposed convolutions against torch's, and in the place of those of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnn_ops.nn
from cudnn_ops.nn import replace_modules_
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
NAMES = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
#: Channels in and out, kernel, stride, padding, output padding, groups, bias, dilation.
ARGUMENTS = (8, 16, 3, 2, 1, 1, 2, True, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_they_take_each_others_state(name, device):
    torch.manual_seed(0)
    theirs = getattr(nn, name)(*ARGUMENTS, device=device)
    ours = getattr(cudnn_ops.nn, name)(*ARGUMENTS, activation="silu", device=device)
    assert isinstance(ours, getattr(nn, name))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, *[5] * int(name[-2]), device=device)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), F.silu(expected), rtol=1e-4, atol=1e-5)
    residual = torch.randn_like(expected)
    out = ours(x, residual=residual)
    torch.testing.assert_close(out, F.silu(expected + residual), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x[0]), F.silu(expected[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_an_output_size(name, device):
    theirs = getattr(nn, name)(8, 4, 3, 2, 1, device=device)
    ours = getattr(cudnn_ops.nn, name).of(theirs)
    dims = int(name[-2])
    x = torch.randn(2, 8, *[5] * dims, device=device)
    for size in ([9] * dims, [10] * dims, [2, 4, *[10] * dims]):
        torch.testing.assert_close(ours(x, size), theirs(x, size), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="requested an output size"):
        ours(x, [11] * dims)


def test_of_shares_the_parameters_and_the_mode():
    theirs = nn.ConvTranspose2d(8, 4, 2, 2, bias=False).eval()
    ours = cudnn_ops.nn.ConvTranspose2d.of(theirs, "relu")
    assert ours.weight is theirs.weight
    assert ours.bias is None
    assert not ours.training
    assert "activation=relu" in repr(ours)
    copied = copy.deepcopy(ours)
    assert copied.activation == "relu"


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match=r"ConvTranspose2d: activation must be one of .*'tanh'"):
        cudnn_ops.nn.ConvTranspose2d(8, 8, 2, activation="tanh")


class _Other(nn.ConvTranspose2d):
    def forward(self, x, output_size=None):
        return super().forward(x, output_size).tanh()


def test_replaced_in_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), _Other(6, 4, 2, 2), nn.Conv2d(4, 2, 3)
    )
    x = torch.randn(2, 8, 5, 4)
    expected, keys = model(x), list(model.state_dict())
    done = replace_modules_(model)
    assert [str(one) for one in done] == ["0: ConvTranspose2d -> ConvTranspose2d"]
    assert type(model[0]) is cudnn_ops.nn.ConvTranspose2d
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert not replace_modules_(model)


def test_with_hooks_it_is_left_alone(capsys):
    model = nn.Sequential(nn.ConvTranspose1d(8, 6, 4))
    model[0].register_forward_hook(lambda *_: None)
    assert not replace_modules_(model, dry_run=True)
    assert "0: ConvTranspose1d is left alone: it has hooks" in capsys.readouterr().out
