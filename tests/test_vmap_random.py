"""Random numbers under vmap: what its ``randomness`` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import cudnn_ops
from tests.cases.vmap import values
from tests.conftest import DEVICES

attend = cudnn_ops.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("without_vmap_fallback")
_INT = torch.int32


def _dropping(q: Tensor, **options: Any) -> Tensor:
    return attend(q, q, q, dropout_p=0.5, **options)


def _dropping_packed(q: Tensor, **options: Any) -> Tensor:
    tokens = q[0].transpose(0, 1)
    offsets = torch.tensor([0, 5, tokens.shape[0]], dtype=_INT, device=q.device)
    longest = tokens.shape[0]
    return cudnn_ops.varlen_attention(
        tokens, tokens, tokens, offsets, offsets, longest, longest, 0.5, **options
    )


def _dropping_with_lse(q: Tensor, **options: Any) -> Tensor:
    return cudnn_ops.scaled_dot_product_attention_with_lse(q, q, q, dropout_p=0.5, **options)[0]


DROPPING = [_dropping, _dropping_with_lse, _dropping_packed]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
def test_random_numbers_are_refused_by_default(drop, device):
    q = values(1, 2, 16, 8, device=device)
    for samples in (q.expand(3, -1, -1, -1, -1), torch.zeros(3, device=device)):

        def one(sample: Tensor) -> Tensor:
            return drop(sample) if sample.dim() else drop(q) + sample

        for function in (one, grad(lambda sample, one=one: one(sample).sum())):
            with pytest.raises(RuntimeError, match="randomness error mode"):
                vmap(function)(samples)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
@pytest.mark.parametrize("is_batched", [True, False])
def test_randomness(drop, is_batched, device):
    q = values(1, 2, 16, 8, device=device)
    samples = q.expand(3, -1, -1, -1, -1) if is_batched else torch.zeros(3, device=device)

    def one(sample: Tensor) -> Tensor:
        return drop(sample) if is_batched else drop(q) + sample.to(q.dtype)

    first, *others = vmap(one, randomness="same")(samples)
    assert all(torch.equal(other, first) for other in others)
    assert not torch.equal(vmap(one, randomness="same")(samples)[0], first)
    a, b, c = vmap(one, randomness="different")(samples)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("device", DEVICES)
def test_randomness_of_nested_samples(device):
    q = values(1, 2, 16, 8, device=device)
    for outer, inner in (("different", "same"), ("same", "different")):
        found = vmap(
            lambda _, inner=inner: vmap(_dropping, randomness=inner)(q.expand(2, -1, -1, -1, -1)),
            randomness=outer,
        )(torch.zeros(2, device=device))
        assert torch.equal(found[0, 0], found[0, 1]) == (inner == "same")
        assert torch.equal(found[0, 0], found[1, 0]) == (outer == "same")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_drop_what_the_forward_dropped(randomness, device):
    """The output is linear in the values: a gradient times them is the output."""
    q, v = values(3, 1, 2, 16, 8, device=device), values(3, 1, 2, 16, 16, device=device)

    def loss(v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(q, q, v, dropout_p=0.5).double().sum()
        return out, out

    grads, losses = vmap(grad(loss, has_aux=True), randomness=randomness)(v, q)
    found = (grads.double() * v.double()).flatten(1).sum(1)
    tolerance = {"rtol": 2e-2, "atol": 0.5} if device == "cuda" else {}
    torch.testing.assert_close(found, losses, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
def test_a_given_state_is_that_of_a_loop(drop, device):
    q = values(3, 1, 2, 16, 8, device=device)
    states = torch.tensor([[5, 0], [6, 8], [5, 0]], device=device)
    for dims, given in ((0, states), (None, states[0])):
        found = vmap(lambda q, s: drop(q, rng_state=s), in_dims=(0, dims))(q, given)
        for i, sample in enumerate(q):
            assert torch.equal(found[i], drop(sample, rng_state=states[i if dims == 0 else 0]))
