"""The pattern of max pooling: its spellings, and what is near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_ops
from tests.cases.compiler import check_swap

SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: F.max_pool2d(x, 3, 2, 1),
    "named": lambda x: F.max_pool2d(input=x, kernel_size=3, stride=2, padding=1),
    "pairs": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0)),
    "a list": lambda x: F.max_pool2d(x, [3], [2]),
    "no stride": lambda x: F.max_pool2d(x, 2),
    "dilation": lambda x: F.max_pool2d(x, 3, 1, 1, 2),
    "ceil_mode": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "torch": lambda x: torch.max_pool2d(x, 3, 2, 1),
    "torch, no stride": lambda x: torch.max_pool2d(x, (2, 2)),
    "module": nn.MaxPool2d(3, 2, 1),
    "module, no stride": nn.MaxPool2d(2),
    "without a batch": lambda x: F.max_pool2d(x[0], 3, 2, 1),
    "large": lambda x: F.max_pool2d(x, 15, 1, 7),
}

NEAR: dict[str, Callable[[Tensor], Any]] = {
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "indices of a module": lambda x: nn.MaxPool2d(2, return_indices=True)(x)[0],
    "mean": lambda x: F.avg_pool2d(x, 2),
    "one dimension": lambda x: F.max_pool1d(x.flatten(2), 2),
    "three dimensions": lambda x: F.max_pool3d(x, 2),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 2),
    "fractional": lambda x: F.lp_pool2d(x, 2, 2),
    "too large": lambda x: F.max_pool2d(x, 16, 1, 8),
    "a maximum": lambda x: x.amax((2, 3)),
}


def _x() -> Tensor:
    return torch.randn(2, 8, 9, 12, dtype=torch.float64)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling, dynamic):
    found = check_swap(SPELLINGS[spelling], _x(), expect=["max_pool"], dynamic=dynamic)
    (call,) = found.ours
    assert call.target is torch.ops.cudnn_ops.max_pool2d.default
    check_swap(SPELLINGS[spelling], _x(), expect=["max_pool"], gradients=False)


@pytest.mark.parametrize("near", NEAR)
def test_what_is_near_is_left(near):
    check_swap(NEAR[near], _x(), expect=[])


def test_whole_numbers_are_left():
    check_swap(lambda x: F.max_pool2d(x, 2), torch.arange(32).view(1, 2, 4, 4), expect=[])


def test_memory_order_is_kept():
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = _x().contiguous(memory_format=memory_format)
        found = check_swap(lambda x: F.max_pool2d(x, 3, 2, 1) * 2, x, expect=["max_pool"])
        assert found(x).is_contiguous(memory_format=memory_format)


def test_behind_a_convolution_and_a_norm():
    """As the stem of a ResNet is."""

    def stem(x: Tensor, weight: Tensor) -> Tensor:
        image = F.batch_norm(F.conv2d(x, weight), None, None, training=True)
        return F.max_pool2d(F.relu(image), 3, 2, 1)

    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    weight = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    check_swap(stem, x, weight, expect=["convolution", "batch_norm", "max_pool"])


def test_by_inductor():
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    options = {"swap": ["max_pool"]}

    @torch.compile(backend="cudnn_ops", options=options, fullgraph=True)
    def call(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), 3, 2, 1).cos()

    x = _x().float().requires_grad_()
    (found,) = torch.autograd.grad(call(x).sum(), x)
    assert [one.pattern for one in cudnn_ops.compile_report().swapped] == ["max_pool"]
    (right,) = torch.autograd.grad(F.max_pool2d(x.sin(), 3, 2, 1).cos().sum(), x)
    torch.testing.assert_close(found, right)
