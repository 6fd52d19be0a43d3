"""Sums of two gradients: which of them a backward adds up on the way, and its results."""

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
from cudnn_ops.compiler.two_gradients import AddUpGradients
from cudnn_ops.ops.arguments import bind
from tests.conftest import DEVICES

C = 8
_BACKWARD = torch.ops.cudnn_ops._batch_norm_backward.default
_OF_POOL = torch.ops.cudnn_ops._max_pool2d_backward.default
_OF_ROWS = torch.ops.cudnn_ops._norm_backward.default
_OF_GROUPS = torch.ops.cudnn_ops._group_norm_backward.default
#: What each calls the gradient that it adds.
_SECOND = {
    _BACKWARD: "grad_more",
    _OF_POOL: "grad_more",
    _OF_ROWS: "grad_sum",
    _OF_GROUPS: "grad_sum",
}


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
    AddUpGradients()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for mine, right in zip(graph(*inputs), wanted, strict=True):
        torch.testing.assert_close(mine, right)
    return graph, _second_ones(graph.graph)


def _second_ones(graph: fx.Graph) -> list[bool]:
    """Which backwards have a second gradient."""
    return [
        getattr(bind(node.target, node.args, node.kwargs), name) is not None
        for backward, name in _SECOND.items()
        for node in graph.find_nodes(op="call_function", target=backward)
    ]


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


def _rows_backward(
    grad: Tensor, x: Tensor, more: Tensor | None = None, weight: Tensor | None = None
) -> Any:
    """Of a layer norm."""
    stats = torch.ones(x.shape[:-1].numel()), torch.ones(x.shape[:-1].numel())
    mask = [True, weight is not None, False]
    return _OF_ROWS(grad, more, x, [x.shape[-1]], weight, *stats, True, False, mask)


def _groups_backward(grad: Tensor, x: Tensor, more: Tensor | None = None) -> Any:
    """Of a group norm of two groups."""
    stats = torch.ones(x.shape[0], 2), torch.ones(x.shape[0], 2)
    return _OF_GROUPS(grad, more, x, 2, None, None, *stats, 0, [True, False, False])


def _rows() -> Tensor:
    return torch.randn(3, 5, C)


@pytest.mark.parametrize(
    ("drawn", "backward"), [(_rows, _rows_backward), (_image, _groups_backward)]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_added_to_a_norms_gradient_is_gone(drawn, backward, is_first):
    def function(grad: Tensor, x: Tensor, around: Tensor) -> Any:
        mine = backward(grad, x)[0]
        return (mine + around if is_first else around + mine,)

    graph, added = _taken(function, *(drawn() for _ in range(3)))
    assert added == [True]
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)


def test_branches_within_each_other():
    """A gradient that a norm has added is around the next one's branch."""

    def function(grad: Tensor, x: Tensor, around: Tensor) -> Any:
        one = _rows_backward(grad, x)[0] + around
        return (one + _rows_backward(one, x)[0],)

    assert _taken(function, *(_rows() for _ in range(3)))[1] == [True, True]


def test_two_norms_of_one_input():
    """The later one adds the other's, and the third gradient is the earlier one's."""

    def function(grad: Tensor, x: Tensor, around: Tensor) -> Any:
        one, two = _rows_backward(grad, x)[0], _rows_backward(grad, 2 * x)[0]
        return (around + (one + two),)

    graph, added = _taken(function, *(_rows() for _ in range(3)))
    assert added == [False, True]
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) == 1


NEAR_ROWS: dict[str, Callable[..., Any]] = {
    "of two already": lambda a, x, b: (_rows_backward(a, x, b)[0] + b,),
    "a factor": lambda a, x, b: (torch.add(_rows_backward(a, x)[0], b, alpha=2),),
    "a number": lambda a, x, b: (_rows_backward(a, x)[0] + 1.0,),
    "broadcast": lambda a, x, b: (_rows_backward(a, x)[0] + b[:1],),
    "expanded": lambda a, x, b: (b[:1].expand_as(b) + _rows_backward(a, x)[0],),
    "another dtype": lambda a, x, b: (_rows_backward(a, x)[0] + b.half(),),
    "another order": lambda a, x, b: (b.mT.contiguous().mT + _rows_backward(a, x)[0],),
    "read by another": lambda a, x, b: ((mine := _rows_backward(a, x)[0]) + b, mine * 2),
    "to itself": lambda a, x, b: ((mine := _rows_backward(a, x)[0]) + mine,),
    "the weight's": lambda a, x, b: (b[0, 0] + _rows_backward(a, x, weight=x[0, 0])[1],),
    "later": lambda a, x, b: (_rows_backward(a, x)[0] + b.neg(),),
    "a difference": lambda a, x, b: (b - _rows_backward(a, x)[0],),
    "no sum": lambda a, x, b: _rows_backward(a, x)[:1],
    "a product": lambda a, x, b: (_rows_backward(a, x)[0] * b,),
}


@pytest.mark.parametrize("near", NEAR_ROWS)
def test_what_is_near_a_norms_sum_is_left(near):
    has_second = "already" in near
    assert set(_taken(NEAR_ROWS[near], *(_rows() for _ in range(3)))[1]) == {has_second}


class Chain(nn.Module):
    """Residual blocks, whose images are read by the next block's convolution and its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Bottleneck(4 * C, C) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Counting(CustomGraphPass):
    """A user's pass: how many backwards it has seen with a second gradient."""

    def __init__(self, name: str | None = None) -> None:
        self.found, self.name = 0, name

    def __call__(self, graph: fx.Graph) -> None:
        self.found += sum(_second_ones(graph))

    def uuid(self) -> str | None:
        return self.name


class Branches(nn.Module):
    """Residual branches, each behind a norm, whose sums no norm reads directly."""

    def __init__(self, norms: Callable[[], nn.Module], layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms() for _ in range(3))
        self.layers = nn.ModuleList(layers() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.tanh(x + layer(norm(x)))
        return x


def _of_rows(norm: Callable[[int], nn.Module]) -> tuple[nn.Module, Tensor]:
    return Branches(lambda: norm(C), lambda: nn.Linear(C, C)), _rows()


def _of_images() -> tuple[nn.Module, Tensor]:
    model = Branches(lambda: nn.GroupNorm(2, C), lambda: nn.Conv2d(C, C, 3, padding=1))
    return model.to(memory_format=torch.channels_last), _image()  # type: ignore[call-overload]


def _step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    out = call(given)
    grads = torch.autograd.grad(out.square().sum(), [given, *model.parameters()])
    return [out, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_blocks(dtype):
    """Each image between two blocks has two readers; that behind the last one has one."""
    torch.manual_seed(0)
    x = torch.randn(2, 4 * C, 6, 6)
    assert _count_in_model(Chain().to(dtype), x.to(dtype), ["batch_norm"]) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("drawn", "pattern"),
    [
        (lambda: _of_rows(nn.LayerNorm), "layer_norm"),
        (lambda: _of_rows(nn.RMSNorm), "rms_norm"),
        (_of_images, "group_norm"),
    ],
)
def test_a_model_of_branches(drawn, pattern, dtype, device):
    """The input, too, is read by a norm and by the sum around it."""
    torch.manual_seed(0)
    model, x = drawn()
    assert _count_in_model(model.to(device, dtype), x.to(device, dtype), [pattern]) == 3


def test_branches_of_any_batch():
    """What is not known of sizes and strides gets no guards."""
    torch._dynamo.reset()
    counting = Counting()
    options = {"swap": ["layer_norm"], "inductor": {"joint_custom_post_pass": counting}}
    model, _ = _of_rows(nn.LayerNorm)
    compiled = torch.compile(model, backend="cudnn_ops", options=options, dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (7, 5, 24):
        x = torch.randn(rows, 5, C, requires_grad=True)
        (mine,) = torch.autograd.grad(compiled(x).sum(), x)
        (right,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(mine, right)
    assert counting.found == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def _count_in_model(model: nn.Module, x: Tensor, swap: list[str]) -> int:
    """How many backwards of a compiled step add up; its results are held to those in float64."""
    model.train()
    exact_model = copy.deepcopy(model).double()
    exact = _step(exact_model, exact_model, x.double())
    eager_model = copy.deepcopy(model)
    eager = _step(eager_model, eager_model, x)
    counting = Counting()
    torch._dynamo.reset()
    options: Any = {"swap": swap, "inductor": {"joint_custom_post_pass": counting}}
    compiled = torch.compile(model, backend="cudnn_ops", options=options, fullgraph=True)
    found = _step(model, compiled, x)
    for mine, rough, right in zip(found, eager, exact, strict=True):
        allowed = 2 * (rough.double() - right).norm() + 1e-4 * right.norm()
        assert (mine.double() - right).norm() <= allowed
    return counting.found


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
    def fail(self: AddUpGradients, graph: fx.Graph) -> None:
        raise AssertionError

    monkeypatch.setattr(AddUpGradients, "__call__", fail)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.relu(x) + 1, backend="cudnn_ops")
    assert compiled(torch.ones(3, requires_grad=True)).sum() == 6
    assert cudnn_ops.compile_report() is not None


def test_inductors_cache_knows_both_passes():
    assert AddUpGradients().uuid() == sources()
    assert AddUpGradients(Counting("a")).uuid() == (sources(), "a")
    assert AddUpGradients(Counting("a")).uuid() != AddUpGradients(Counting("b")).uuid()
    assert AddUpGradients(Counting()).uuid() is None
    assert AddUpGradients(lambda graph: None).uuid() is None
