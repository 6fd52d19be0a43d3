"""Convolutions that stay torch's where images have channels first: nothing is copied for ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.compiler import Rewritten, check_swap

C = 4


def _block(x: Tensor, weight: Tensor) -> Tensor:
    first = F.conv2d(x, weight, padding=1)
    return F.conv2d(F.group_norm(first, 2).sin(), weight, padding=1) + first


def _volumes(x: Tensor, weight: Tensor) -> Tensor:
    first = F.conv3d(x, weight, padding=1)
    return F.conv3d(F.group_norm(first, 2).sin(), weight, padding=1) + first


def _inputs(dims: int = 2) -> tuple[Tensor, Tensor]:
    sizes = (5, 7, 6)[:dims]
    return torch.randn(2, C, *sizes).double(), torch.randn(C, C, *[3] * dims).double()


def _orders(found: Rewritten, memory_format: torch.memory_format) -> list[bool]:
    """Of what each convolution and norm reads: whether it has its channels last."""
    orders = []
    for node in found.graphs[0].graph.nodes:
        if "conv" in str(node.target) or "group_norm" in str(node.target):
            value = node.args[0].meta["example_value"]
            orders.append(value.is_contiguous(memory_format=memory_format))
    return orders


def test_images_have_their_channels_last_from_the_first_convolution_on():
    found = check_swap(_block, *_inputs(), expect=["group_norm"], swap=["group_norm"])
    assert _orders(found, torch.channels_last) == [True] * 3
    volumes = check_swap(_volumes, *_inputs(3), expect=["group_norm"], swap=["group_norm"])
    # What a convolution of volumes gives for them is torch's matter, another one on a CPU.
    assert _orders(volumes, torch.channels_last_3d)[::2] == [True] * 2
    stock, ours = _block(*_inputs()), found(*_inputs())
    assert ours.stride() == stock.stride()


def test_without_an_operator_of_images_nothing_is_converted():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        out = F.conv2d(x, weight, padding=1)
        return F.rms_norm(out, (7,), weight[0, 0, 0].new_ones(7))

    found = check_swap(block, *_inputs(), expect=["rms_norm"], swap=["rms_norm"])
    assert _orders(found, torch.channels_last) == [False]


def test_images_without_a_batch_or_of_unknown_sizes_stay():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x[0], weight, padding=1)[None], 2)

    check_swap(block, *_inputs(), expect=["group_norm"], swap=["group_norm"])
    options = {"expect": ["group_norm"], "swap": ["group_norm"], "dynamic": True}
    check_swap(_block, *_inputs(), **options)


def test_autocast_and_gradients_of_some():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.conv2d(x, weight.detach(), padding=1)
        return F.group_norm(out.float(), 2)

    x, weight = (one.float() for one in _inputs())
    found = check_swap(block, x, weight, expect=["group_norm"], swap=["group_norm"], tolerance=5e-2)
    assert all(_orders(found, torch.channels_last))


def _copied(x: Tensor, weight: Tensor) -> Tensor:
    """As a transformer of diffusers ends: its rows are an image, copied before a convolution."""
    rows = F.group_norm(x, 2).permute(0, 2, 3, 1).sin()
    return F.conv2d(rows.permute(0, 3, 1, 2).contiguous(), weight, padding=1)


def _copies(found: Rewritten) -> int:
    """Of those that are converted next; a copy of a result, for the stock strides, is not."""
    copies = [node for node in found.graphs[0].graph.nodes if node.target == "contiguous"]
    return sum(not node.kwargs and any(user in copies for user in node.users) for node in copies)


@pytest.mark.parametrize("swap", [["group_norm"], ["convolution"]])
def test_what_a_model_copied_for_a_convolution_is_read_as_it_was(swap: list[str]):
    found = check_swap(_copied, *_inputs(), expect=swap, swap=swap)
    assert _copies(found) == 0


def test_a_copy_that_something_else_needs_stays():
    def is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        copy = F.group_norm(x, 2).permute(0, 2, 3, 1).sin().permute(0, 3, 1, 2).contiguous()
        return F.conv2d(copy, weight, padding=1), copy

    def is_changed(x: Tensor, weight: Tensor) -> Tensor:
        image = F.group_norm(x, 2).sin()
        copy = image.contiguous(memory_format=torch.channels_last).contiguous()
        image.add_(1)
        return F.conv2d(copy, weight, padding=1) + image

    def is_given(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.contiguous().contiguous(memory_format=torch.channels_last)
        return F.group_norm(F.conv2d(x, weight, padding=1), 2), copy

    for function in (is_returned, is_changed, is_given):
        check_swap(
            function, *_inputs(), expect=["group_norm"], swap=["group_norm"], gradients=False
        )
    found = Rewritten(is_returned, ["group_norm"])
    assert found(*_inputs())[1].is_contiguous()
    x, weight = (one.contiguous(memory_format=torch.channels_last) for one in _inputs())
    _, copy = Rewritten(is_given, ["group_norm"])(x, weight)
    assert copy.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_stay_as_they_are_and_may_change(mode: type[torch.no_grad]):
    """Neither in another order, in which ``view`` would fail, nor copied, of another time."""
    first, second = (nn.Conv2d(C, C, 3) for _ in range(2))
    model = nn.Sequential(first, second, nn.GroupNorm(2, C)).double()
    vector = nn.utils.parameters_to_vector(model.parameters())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    options: dict[str, Any] = {"swap": ["convolution", "group_norm"]}
    compiled = torch.compile(model, backend="cudnn_ops", options=options)
    x, weight = _inputs()
    with mode():
        compiled(x)
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        first.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        second.weight.data = weight
        torch.testing.assert_close(compiled(x), model(x))
