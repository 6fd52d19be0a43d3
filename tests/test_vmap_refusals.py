"""What vmap and derivatives of derivatives refuse, and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jvp, vmap

import cudnn_ops
from tests.cases.vmap import values
from tests.test_vmap import PROBLEMS

attend = cudnn_ops.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("without_vmap_fallback")
_INT = torch.int32


def test_what_writes_in_place_is_refused():
    cache, token = torch.zeros(3, 4, 2, 8), torch.zeros(5, 1, 2, 8)
    slots = torch.tensor([0])
    with pytest.raises(NotImplementedError, match="paged_kv_append_ is not available"):
        vmap(lambda t: cudnn_ops.paged_kv_append_(cache, cache, t, t, slots))(token)
    pages, lengths = torch.zeros(1, 1, dtype=_INT), torch.ones(1, dtype=_INT)
    out = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="call it without out"):
        vmap(lambda q: cudnn_ops.paged_attention(q, cache, cache, pages, lengths, out=out))(
            token[:, None]
        )


def test_a_mistake_is_that_of_a_sample():
    """Its shapes are those that the function in the vmap sees."""
    q = values(3, 2, 4, 5, 8)
    packed = values(5, 2, 8)

    def varlen(starts: Tensor) -> Tensor:
        return cudnn_ops.varlen_attention(packed, packed, packed, starts, starts, 5, 5)

    image_weight = values(4, 5, 1, 1)
    calls: list[tuple[Callable[[Tensor], object], Tensor]] = [
        (lambda q: attend(q, q[:, :3], q[:, :3]), q),
        (lambda q: attend(q, q, q, q[..., :2, :]), q),
        (lambda q: attend(q, q, q, seq_lens_kv=torch.tensor([9, 1])), q),
        (lambda x: cudnn_ops.rms_norm(x, (7,)), q),
        (lambda x: cudnn_ops.rms_norm(q[0], (8,), x), values(3, 7)),
        (lambda x: cudnn_ops.add_rms_norm(q[0], q[0, :1], (8,), x), values(3, 8)),
        (lambda x: cudnn_ops.swiglu(x, x[1:]), q),
        (lambda x: cudnn_ops.rotary_embedding(x, x[0], x[0]), q),
        (lambda x: cudnn_ops.rotary_embedding_qk(x, x[:, :1, 1:], x[:, 0], x[:, 0]), q),
        (varlen, torch.tensor([[0, 2, 4], [0, 1, 5]]).int()),
        (varlen, torch.tensor([[1, 2, 5], [0, 1, 5]]).int()),
        (lambda x: cudnn_ops.conv2d(x, image_weight), q),
        (lambda x: cudnn_ops.conv2d(q[0], x), values(3, 4, 5, 1, 1)),
    ]
    for function, samples in calls:
        with pytest.raises(ValueError, match="cudnn_ops") as of_one:
            function(samples[0])
        with pytest.raises(ValueError, match=re.escape(str(of_one.value))):
            vmap(function)(samples)


def _calls_with_tangents() -> list[Any]:
    """Each floating-point argument of each operator."""
    calls = []
    for problem in PROBLEMS:
        for name, tensor in problem.tensors(torch.float64, "cpu", 0).items():
            if tensor.is_floating_point():
                calls.append(pytest.param(problem, name, id=f"{problem}-{name}"))
    return calls


@pytest.mark.parametrize(("problem", "name"), _calls_with_tangents())
def test_forward_mode_is_refused(problem, name):
    tensors = problem.tensors(torch.float64, "cpu", 0)
    one = tensors.pop(name)

    def function(one: Tensor) -> object:
        return problem.ours(**{name: one}, **tensors)

    with pytest.raises(NotImplementedError, match=r"cudnn_ops\..*forward-mode derivatives"):
        jvp(function, (one,), (one,))
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        vmap(lambda tangent: jvp(function, (one,), (tangent,)))(torch.stack([one, one]))


@pytest.mark.parametrize("problem", [problem for problem in PROBLEMS if problem.wanted], ids=str)
def test_forward_mode_of_a_backward_is_refused(problem):
    """Of the gradient of the results alone, in which it is linear."""
    tensors = problem.tensors(torch.float64, "cpu", 0)
    wanted = {name: tensors.pop(name) for name in problem.wanted}
    results, pull = torch.func.vjp(lambda wanted: problem.ours(**wanted, **tensors), wanted)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        jvp(pull, (results,), (results,))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: attend(x, x, x), (1, 2, 5, 8)),
        (lambda x: cudnn_ops.rms_norm(x, (8,)), (5, 8)),
        (lambda x: cudnn_ops.swiglu(x, x), (5, 8)),
        (lambda x: cudnn_ops.conv1d(x, x[:, :, :2]), (2, 2, 5)),
    ],
    ids=["sdpa", "rms_norm", "swiglu", "conv1d"],
)
def test_second_derivatives_are_refused(function, shape):
    x = values(3, *shape)

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    with pytest.raises(RuntimeError, match=r"cudnn_ops.*double backward"):
        vmap(grad(lambda x: grad(loss)(x).square().sum()))(x)
    for second in (hessian(loss), jacfwd(grad(loss))):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            second(x[0])


def test_a_rotation_is_differentiable_twice():
    x, cos, sin = values(3, 1, 2, 5, 8), values(1, 5, 8), values(1, 5, 8).neg()

    def loss(x: Tensor) -> Tensor:
        return cudnn_ops.rotary_embedding(x, cos, sin).pow(3).sum()

    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).pow(3).sum()

    found, expected = (
        vmap(grad(lambda x, f=function: grad(f)(x).square().sum()))(x)
        for function in (loss, formula)
    )
    torch.testing.assert_close(found, expected)
