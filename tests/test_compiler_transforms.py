"""Graphs with transforms of torch.func: what these compute stays, and what is around them swaps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from cudnn_ops.compiler import rewrite
from cudnn_ops.compiler.pattern import Pattern
from tests.cases.compiler import check_swap


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate * 2) * (up + 1)


def each_sample(x: Tensor, y: Tensor) -> Tensor:
    return vmap(gated)(x, y)


def gradient(x: Tensor, y: Tensor) -> Tensor:
    return grad(lambda x: gated(x, y).sum())(x)


def gradient_of_each_sample(x: Tensor, y: Tensor) -> Tensor:
    return vmap(grad(lambda x, y: gated(x, y).sum()))(x, y)


def tangent(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    result, along, *_ = jvp(lambda x: gated(x, y), (x,), (y,))
    return result, along


@pytest.mark.parametrize(
    "transformed",
    [each_sample, gradient, gradient_of_each_sample, tangent],
    ids=lambda f: f.__name__,
)
def test_what_a_transform_computes_stays(transformed: Callable[..., object]):
    x, y = torch.randn(2, 3, 4, 8).double()
    check_swap(transformed, x, y, expect=[], gradients=False)


def test_what_is_around_is_swapped():
    def block(x: Tensor, y: Tensor) -> Tensor:
        return gated(vmap(gated)(gated(x, y), y), x)

    for gradients in (False, True):
        inputs = torch.randn(2, 3, 4, 8).double()
        check_swap(block, *inputs, expect=["gated"] * 2, gradients=gradients)


def test_what_is_written_within_a_transform():
    """A gate that samples are written to is not read before that."""

    def block(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        gate = x * 1
        before = F.silu(gate) * y
        sums = vmap(lambda sample: sample.mul_(2).sum())(gate)
        return before + F.silu(gate) * y, sums

    inputs = torch.randn(2, 3, 4, 8).double()
    check_swap(block, *inputs, expect=["gated"], gradients=False)


def test_a_mask_by_a_transform():
    """As transformers makes masks of functions of two places."""

    def block(q: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        of_query = vmap(lambda i, j: i >= j, in_dims=(None, 0))
        mask = vmap(of_query, in_dims=(0, None))(places, places)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    check_swap(block, torch.randn(2, 2, 16, 8), expect=["attention"])


def test_a_graph_that_is_not_understood_stays(monkeypatch: pytest.MonkeyPatch):
    def fails(graph: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(rewrite, "GraphFacts", fails)
    with pytest.warns(UserWarning, match="has something unknown in it.*no such thing"):
        check_swap(gated, *torch.randn(2, 3, 8).double(), expect=[])


def test_swaps_that_cannot_be_finished_are_undone(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Pattern, "finish", fails)
    with pytest.warns(UserWarning, match="cannot be finished.*no such thing"):
        check_swap(gated, *torch.randn(2, 3, 8).double(), expect=[])
