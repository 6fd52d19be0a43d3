"""Divisions and products by one: patterns look through them where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.compiler import Rewritten, check_swap

GROUPS = 2


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, 3, 5).double(), torch.randn(2, 4, 3, 5).double()


def _divided(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm((x + y) / 1.0, GROUPS)


def _divided_by_function(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm(torch.true_divide(x + y, 1), GROUPS)


def _multiplied(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm(1.0 * (x + y), GROUPS)


def _twice(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm((x + y) / 1.0 * 1, GROUPS)


@pytest.mark.parametrize(
    "block", [_divided, _divided_by_function, _multiplied, _twice], ids=lambda f: f.__name__
)
def test_a_sum_behind_an_identity_is_the_norm_s(block: Callable[..., Tensor]) -> None:
    found = check_swap(block, *_inputs(), expect=["group_norm"])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.add_group_norm.default"]


def _by_two(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm((x + y) / 2.0, GROUPS)


def _rounded(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm(torch.div(x + y, 1.0, rounding_mode="floor"), GROUPS)


def _of_another_dtype(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm((x + y).round().long() / 1.0, GROUPS)


def _of_other_strides(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm((x + y)[:1].expand(2, 4, 3, 5) / 1.0, GROUPS)


def _changed_in_place(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    copy = total / 1.0
    total.add_(1)
    return F.group_norm(copy, GROUPS) + total


def _without_gradients(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    with torch.no_grad():
        copy = total / 1.0
    return F.group_norm(copy, GROUPS) * total


@pytest.mark.parametrize(
    "block",
    [
        _by_two,
        _rounded,
        _of_another_dtype,
        _of_other_strides,
        _changed_in_place,
        _without_gradients,
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_one(block: Callable[..., Tensor]) -> None:
    found = check_swap(block, *_inputs(), expect=["group_norm"])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.group_norm.default"]


def test_results_and_inputs_stay_tensors_of_their_own():
    """Whoever called it can write to them."""

    def block(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x + y
        return x / 1.0, (total / 1.0).view(-1), F.group_norm(total, GROUPS)

    x, y = _inputs()
    found = Rewritten(block)
    one, flat, norm = found(x, y)
    expected = norm.clone(), x.clone()
    one.zero_()
    flat.zero_()
    torch.testing.assert_close((norm, x), expected)
    assert found.swapped == ["group_norm"]


def test_a_graph_with_nothing_to_swap_has_them():
    def block(x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) / 1.0).sin()

    found = check_swap(block, *_inputs(), expect=[])
    names = [str(node.target) for node in found.graphs[0].graph.nodes]
    assert any("truediv" in name for name in names), names
