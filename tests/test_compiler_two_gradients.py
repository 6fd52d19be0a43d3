"""Sums of two gradients: which of them a backward takes as two, and its results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx
from torchvision.models import resnet18
from torchvision.models.resnet import Bottleneck

import cudnn_ops
from cudnn_ops.compiler.caching import sources
from cudnn_ops.compiler.two_gradients import TakeTwoGradients
from cudnn_ops.ops.arguments import bind

C = 8
_BACKWARD = torch.ops.cudnn_ops._batch_norm_backward.default
_OF_POOL = torch.ops.cudnn_ops._max_pool2d_backward.default


def _image() -> Tensor:
    return torch.randn(3, C, 5, 4).contiguous(memory_format=torch.channels_last)


def _norm_backward(grad: Tensor, x: Tensor, out: Tensor | None, *, residual: bool = True) -> Any:
    rows = torch.ones(C)
    activation = int(out is not None)
    mask = (True, True, True, residual)
    return _BACKWARD(grad, x, None, None, out, rows, rows, True, activation, mask, False)


def _taken(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, list[bool]]:
    """The graph after the pass, whose results are the same, and which backwards take two."""
    graph = make_fx(function)(*inputs)
    wanted = graph(*inputs)
    TakeTwoGradients()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for mine, right in zip(graph(*inputs), wanted, strict=True):
        torch.testing.assert_close(mine, right)
    calls = [
        bind(backward, node.args, node.kwargs)
        for backward in (_BACKWARD, _OF_POOL)
        for node in graph.graph.find_nodes(op="call_function", target=backward)
    ]
    return graph, [call.grad_more is not None for call in calls]


def test_a_sum_of_two_is_taken_and_gone():
    def function(a: Tensor, b: Tensor, x: Tensor, out: Tensor) -> Any:
        return _norm_backward(a + b, x, out)

    graph, taken = _taken(function, *(_image() for _ in range(4)))
    assert taken == [True]
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)


def test_of_three_the_last_sum_is_taken():
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Any:
        return _norm_backward(a + b + c, x, x)

    graph, taken = _taken(function, *(_image() for _ in range(4)))
    assert taken == [True]
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) == 1


def test_blocks_behind_each_other():
    def function(a: Tensor, b: Tensor, x: Tensor) -> Any:
        one = _norm_backward(a + b, x, x)
        return (*one, *_norm_backward(one[0] + one[3], x, x))

    assert _taken(function, *(_image() for _ in range(3)))[1] == [True, True]


NEAR: dict[str, Callable[..., Any]] = {
    "without a residual": lambda a, b, x: _norm_backward(a + b, x, x, residual=False),
    "without a ReLU": lambda a, b, x: _norm_backward(a + b, x, None),
    "a factor": lambda a, b, x: _norm_backward(torch.add(a, b, alpha=2), x, x),
    "a number": lambda a, b, x: _norm_backward(a + 1.0, x, x),
    "broadcast": lambda a, b, x: _norm_backward(a + b[:1], x, x),
    "another dtype": lambda a, b, x: _norm_backward(a + b.half(), x, x),
    "read by another": lambda a, b, x: (*_norm_backward(total := a + b, x, x), total * 2),
    "read twice": lambda a, b, x: _norm_backward(total := a + b, x, total),
    "a difference": lambda a, b, x: _norm_backward(a - b, x, x),
    "no sum": lambda a, b, x: _norm_backward(a, x, x),
}


@pytest.mark.parametrize("near", NEAR)
def test_what_is_near_is_left(near):
    assert _taken(NEAR[near], *(_image() for _ in range(3)))[1] == [False]


def _pool_backward(grad: Tensor, more: Tensor | None = None) -> Any:
    """Of an image twice as large."""
    offsets = torch.zeros(grad.shape, dtype=torch.uint8)
    pairs = [[3, 3], [2, 2], [1, 1], [1, 1]]
    size = [2 * n for n in grad.shape[2:]]
    return (_OF_POOL(grad, offsets, more, size, *pairs),)


def test_max_pooling_takes_a_sum_of_two():
    graph, taken = _taken(lambda a, b: _pool_backward(a + b), _image(), _image())
    assert taken == [True]
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)


NEAR_POOL: dict[str, Callable[..., Any]] = {
    "of two already": lambda a, b: _pool_backward(a + b, a),
    "a factor": lambda a, b: _pool_backward(torch.add(a, b, alpha=2)),
    "a number": lambda a, b: _pool_backward(a + 1.0),
    "broadcast": lambda a, b: _pool_backward(a + b[:1]),
    "another dtype": lambda a, b: _pool_backward(a + b.half()),
    "read by another": lambda a, b: (*_pool_backward(total := a + b), total * 2),
    "a difference": lambda a, b: _pool_backward(a - b),
    "no sum": lambda a, b: _pool_backward(a),
}


@pytest.mark.parametrize("near", NEAR_POOL)
def test_what_is_near_max_pooling_is_left(near):
    taken = _taken(NEAR_POOL[near], _image(), _image())[1]
    assert taken == [near == "of two already"]


class Chain(nn.Module):
    """Residual blocks, whose images are read by the next block's convolution and its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Bottleneck(4 * C, C) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Counting(CustomGraphPass):
    """A user's pass: how many backwards it has seen take two gradients."""

    def __init__(self, name: str | None = None) -> None:
        self.found, self.name = 0, name

    def __call__(self, graph: fx.Graph) -> None:
        for backward in (_BACKWARD, _OF_POOL):
            for node in graph.find_nodes(op="call_function", target=backward):
                call = bind(backward, node.args, node.kwargs)
                self.found += call.grad_more is not None

    def uuid(self) -> str | None:
        return self.name


def _step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    out = call(given)
    grads = torch.autograd.grad(out.square().sum(), [given, *model.parameters()])
    return [out, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_blocks(dtype):
    """Each image between two blocks has two readers; that behind the last one has one."""
    torch.manual_seed(0)
    model = Chain().to(dtype).train()
    x = torch.randn(2, 4 * C, 6, 6, dtype=dtype)
    exact_model = copy.deepcopy(model).double()
    exact = _step(exact_model, exact_model, x.double())
    eager_model = copy.deepcopy(model)
    eager = _step(eager_model, eager_model, x)
    counting = Counting()
    torch._dynamo.reset()
    options = {"swap": ["batch_norm"], "inductor": {"joint_custom_post_pass": counting}}
    compiled = torch.compile(model, backend="cudnn_ops", options=options, fullgraph=True)
    found = _step(model, compiled, x)
    assert counting.found == 2
    for mine, rough, right in zip(found, eager, exact, strict=True):
        allowed = 2 * (rough.double() - right).norm() + 1e-4 * right.norm()
        assert (mine.double() - right).norm() <= allowed


def test_resnet_has_one_for_each_block_but_the_last():
    """The stem's image has two readers as well, and no residual."""
    counting = Counting()
    torch._dynamo.reset()
    options = {"swap": ["batch_norm"], "inductor": {"joint_custom_post_pass": counting}}
    model = resnet18().train()
    compiled = torch.compile(model, backend="cudnn_ops", options=options, fullgraph=True)
    compiled(torch.randn(2, 3, 32, 32)).sum().backward()
    assert counting.found == 7


def test_resnets_pooled_image_has_two_readers():
    """So has that of each block but the last."""
    counting = Counting()
    torch._dynamo.reset()
    options = {
        "swap": ["batch_norm", "max_pool"],
        "inductor": {"joint_custom_post_pass": counting},
    }
    model = resnet18().train()
    compiled = torch.compile(model, backend="cudnn_ops", options=options, fullgraph=True)
    compiled(torch.randn(2, 3, 32, 32)).sum().backward()
    assert counting.found == 8


def test_a_graph_without_our_operators_has_no_pass(monkeypatch):
    def fail(self: TakeTwoGradients, graph: fx.Graph) -> None:
        raise AssertionError

    monkeypatch.setattr(TakeTwoGradients, "__call__", fail)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.relu(x) + 1, backend="cudnn_ops")
    assert compiled(torch.ones(3, requires_grad=True)).sum() == 6
    assert cudnn_ops.compile_report() is not None


def test_inductors_cache_knows_both_passes():
    assert TakeTwoGradients().uuid() == sources()
    assert TakeTwoGradients(Counting("a")).uuid() == (sources(), "a")
    assert TakeTwoGradients(Counting("a")).uuid() != TakeTwoGradients(Counting("b")).uuid()
    assert TakeTwoGradients(Counting()).uuid() is None
    assert TakeTwoGradients(lambda graph: None).uuid() is None
