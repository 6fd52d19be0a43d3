"""The pattern of batch norms in training: every spelling that models have, and what is near."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torchvision.models.regnet import ResBottleneckBlock
from torchvision.models.resnet import BasicBlock, Bottleneck

import cudnn_ops
from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.patterns import batch_norm
from tests.cases.compiler import Rewritten, Timed, check_swap

C = 6


def _norm(kind: type[nn.Module] = nn.BatchNorm2d, *args: Any, **options: Any) -> Any:
    norm = kind(C, *args, **options).double().train()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


def _x(*sizes: int) -> Tensor:
    return torch.randn(3, C, *(sizes or (5, 4)), dtype=torch.float64)


def _check(
    function: Callable[..., Any], norm: nn.Module, *inputs: Any, count: int = 1
) -> Rewritten:
    """Results, gradients and what the norm keeps afterwards."""
    other = copy.deepcopy(norm)
    stock: list[nn.Module] = [norm]

    def call(*given: Any) -> Any:
        return function(stock[0], *given)

    found = check_swap(call, *inputs, expect=["batch_norm"])
    # check_swap called the function as it is, then compiled, on the same statistics.
    for _ in range(2):
        function(other, *inputs)
    for mine, right in zip(norm.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, right)
    assert len(found.ours) == 1
    return found


def _options(found: Rewritten) -> tuple[str, bool]:
    return _of_call(found.ours[-1].kwargs)


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": F.relu,
    "in place": lambda x: F.relu(x, inplace=True),
    "torch": torch.relu,
    "torch in place": torch.relu_,
    "method": torch.Tensor.relu,
    "method in place": lambda x: x.relu_(),
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
}


@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("has_sum", [False, True], ids=["plain", "sum"])
def test_relus(relu, has_sum):
    def block(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        out = norm(x)
        return RELUS[relu](out + residual if has_sum else out)

    found = _check(block, _norm(), _x(), _x())
    assert _options(found) == ("relu", has_sum)


def _augmented(out: Tensor, other: Tensor) -> Tensor:
    out += other
    return out


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "behind": lambda out, other: out + other,
    "before": lambda out, other: other + out,
    "torch": torch.add,
    "method": lambda out, other: out.add(other),
    "in place": lambda out, other: out.add_(other),
    "augmented": _augmented,
}


@pytest.mark.parametrize("add", SUMS)
@pytest.mark.parametrize("ends", [False, True], ids=["plain", "relu"])
def test_sums(add, ends):
    def block(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        out = SUMS[add](norm(x), residual)
        return out.relu() if ends else out

    found = _check(block, _norm(), _x(), _x())
    assert _options(found) == ("relu" if ends else "none", True)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda: _norm(nn.BatchNorm1d), ()),
        (lambda: _norm(nn.BatchNorm1d), (7,)),
        (lambda: _norm(nn.BatchNorm3d), (2, 3, 2)),
        (lambda: _norm(affine=False), (5, 4)),
        (lambda: _norm(track_running_stats=False), (5, 4)),
        (lambda: _norm(eps=1e-3, momentum=0.4), (5, 4)),
        (lambda: _norm(BatchNormAct2d), (5, 4)),
        (lambda: _norm(BatchNormAct2d, apply_act=False), (5, 4)),
    ],
)
def test_modules(make, sizes):
    x = torch.randn(4, C, *sizes, dtype=torch.float64)
    found = _check(lambda norm, x: norm(x).sin(), make(), x)
    assert _options(found)[1] is False


_KEEPING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda out, _: F.silu(out, inplace=True),
    "gelu": lambda out, _: F.gelu(out),
    "hardswish": lambda out, _: F.hardswish(out),
    "relu6": lambda out, _: F.relu6(out),
    "mish": lambda out, _: F.mish(out),
    "mul": lambda out, scale: out * scale,
    "a convolution": lambda out, weight: F.conv2d(out, weight[:2, :, :1, :1]),
}
_OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda out, _: F.relu(out),
    "sum": lambda out, other: out + other,
    "constant": lambda out, _: out * 2,
    "factor": lambda out, scale: scale.detach() * out,
    "frozen convolution": lambda out, _: F.conv2d(out, torch.ones(2, C, 1, 1, dtype=out.dtype)),
}


@pytest.mark.parametrize("name", [*_KEEPING, *_OTHERS])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("swaps_others", [False, True])
def test_a_result_that_a_gradient_needs_is_inductor_s(name, gradients, swaps_others):
    """Which computes it again, where ours would keep it; but not for whoever asks for ours."""
    behind = (_KEEPING | _OTHERS)[name]
    norm, other = _norm(affine=False), _x().requires_grad_(gradients)

    def block(x: Tensor) -> Tensor:
        return behind(norm(x), other)

    def times(pattern: Pattern, _: Found) -> Times:
        return Times(1.0, 2.0 if swaps_others or pattern.name == "batch_norm" else 0.5)

    found = Rewritten(block)
    found.chooser = Timed(found.report, times)
    found(_x().requires_grad_(gradients))
    (candidate,) = (one for one in found.report if one.pattern == "batch_norm")
    is_kept = gradients and name in _KEEPING
    assert candidate.swapped is not is_kept
    assert (f"the gradient of {name}" in candidate.reason) is is_kept
    asked = Rewritten(block, swap=["batch_norm"])
    asked(_x().requires_grad_(gradients))
    assert asked.swapped == ["batch_norm"]


_FACTORS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "convolution": lambda out, weight: F.conv2d(out, weight),
    "transposed convolution": lambda out, weight: F.conv_transpose2d(out, weight),
    "rows of channels": lambda out, weight: F.linear(
        out.permute(0, 2, 3, 1), weight.flatten(1)[:, :C]
    ),
    "returned": lambda out, _: out,
    "returned, and read": lambda out, weight: (out, out * weight[0, 0, 0, 0]),
}
_NO_FACTORS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "gate": lambda out, weight: out * weight[0, 0, 0, 0],
    "mean": lambda out, _: out.mean((2, 3)),
    "cat": lambda out, _: torch.cat([out, out + 1], 1),
    "pooling": lambda out, _: F.max_pool2d(out, 2),
    "frozen convolution": lambda out, weight: F.conv2d(out, weight.detach()),
}


@pytest.mark.parametrize("name", [*_FACTORS, *(f"no {name}" for name in _NO_FACTORS)])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_relu_that_inductor_keeps_is_ours(name, gradients):
    """For a product behind it; another one it computes again, and ours would keep it."""
    behind = {**_FACTORS, **{f"no {name}": one for name, one in _NO_FACTORS.items()}}[name]
    norm, weight = _norm(affine=False), torch.randn(C, C, 2, 1, dtype=torch.float64)
    weight.requires_grad_(gradients)

    def block(x: Tensor) -> object:
        return behind(F.relu(norm(x)), weight)

    found = Rewritten(block)
    found.chooser = Timed(found.report, lambda *_: Times(1.0, 2.0))
    found(_x().requires_grad_(gradients))
    candidates = [one for one in found.report if one.pattern == "batch_norm"]
    is_added = gradients and name.startswith("no ")
    assert [one.swapped for one in candidates] == [not is_added]
    assert ("the gradient of its ReLU" in candidates[0].reason) is is_added


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("name", _NO_FACTORS)
def test_a_relu_that_the_input_tells_keeps_nothing(name, has_residual, monkeypatch):
    """As on a GPU: its result is kept for what reads it alone, as a gate; not so with a sum."""
    monkeypatch.setattr(batch_norm, "_tells_relu_from_input", lambda _: True)
    norm, weight = _norm(affine=False), torch.randn(C, C, 2, 1, dtype=torch.float64)
    weight.requires_grad_()

    def block(x: Tensor) -> object:
        out = norm(x) + x.sin() if has_residual else norm(x)
        return _NO_FACTORS[name](F.relu(out), weight)

    found = Rewritten(block)
    found.chooser = Timed(found.report, lambda *_: Times(1.0, 2.0))
    found(_x().requires_grad_())
    swapped = [one.swapped for one in found.report if one.pattern == "batch_norm"]
    assert swapped == [name != "gate" and not has_residual]


def test_channels_last_and_dropout_that_is_off():
    def block(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        return F.relu(F.dropout(norm(x), 0.0) + residual)

    x = _x().to(memory_format=torch.channels_last)
    assert _options(_check(block, _norm(), x, _x())) == ("relu", True)


def test_any_size():
    norm = _norm()

    def call(x: Tensor, residual: Tensor) -> Tensor:
        return F.relu(norm(x) + residual)

    found = check_swap(call, _x(), _x(), expect=["batch_norm"], dynamic=True)
    for sizes in ((7, 3), (2, 9)):
        x = _x(*sizes)
        torch.testing.assert_close(found(x, x), call(x, x))


NEAR: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "evaluation": (lambda norm, x, y: F.relu(norm.eval()(x) + y), []),
    "its own statistics in evaluation": (
        lambda norm, x, y: F.batch_norm(x, norm.running_mean, norm.running_var).relu(),
        [],
    ),
    "a sum that broadcasts": (lambda norm, x, y: F.relu(norm(x) + y[:1]), ["batch_norm"]),
    "a sum with a factor": (lambda norm, x, y: torch.add(norm(x), y, alpha=2), ["batch_norm"]),
    "a number": (lambda norm, x, y: F.relu(norm(x) + 1.0), ["batch_norm"]),
    "used elsewhere": (lambda norm, x, y: [out := norm(x), F.relu(out)], ["batch_norm"]),
    "a sum that is used elsewhere": (
        lambda norm, x, y: [out := norm(x) + y, F.relu(out)],
        ["batch_norm"],
    ),
    "a clamp, whose gradient at 0 is 1": (lambda norm, x, y: norm(x).clamp(min=0), ["batch_norm"]),
    "another bound": (lambda norm, x, y: norm(x).clamp(min=0.1), ["batch_norm"]),
    "two bounds": (lambda norm, x, y: norm(x).clamp(0, 6), ["batch_norm"]),
    "silu": (lambda norm, x, y: F.silu(norm(x) + y), ["batch_norm"]),
    "a difference": (lambda norm, x, y: F.relu(norm(x) - y), ["batch_norm"]),
    "dropout": (lambda norm, x, y: F.dropout(norm(x), 1.0) + y, ["batch_norm"]),
    "called twice": (lambda norm, x, y: F.relu(norm(norm(x)) + y), []),
    "called for both terms": (lambda norm, x, y: F.relu(norm(x) + norm(y)), []),
    "statistics that are read": (
        lambda norm, x, y: F.relu(norm(x)) * norm.running_mean.sum(),
        [],
    ),
    "statistics that are written": (
        lambda norm, x, y: [norm.running_mean.mul_(0.5), F.relu(norm(x))],
        [],
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    """The norm alone may still be swapped; never what is not its own."""
    function, expect = NEAR[name]
    norm = _norm()

    def call(x: Tensor, y: Tensor) -> Any:
        return function(norm, x, y)

    found = Rewritten(call)
    x, y = _x(), _x()
    state = copy.deepcopy(norm.state_dict())
    results = [found(x, y)]
    after = copy.deepcopy(norm.state_dict())
    norm.load_state_dict(state)
    norm.train()
    results.append(call(x, y))
    assert found.swapped == expect
    torch.testing.assert_close(*results)
    torch.testing.assert_close(after, norm.state_dict())
    if expect and name not in ("used elsewhere",):
        # The sum is its own, whatever follows it.
        wanted = name in ("a sum that is used elsewhere", "silu")
        assert _options(found) == ("none", wanted)


def test_a_norm_that_is_of_another_dtype_than_the_residual():
    norm = _norm().float()

    def call(x: Tensor, y: Tensor) -> Tensor:
        return F.relu(norm(x) + y)

    check_swap(call, _x().float(), _x(), expect=["batch_norm"])


BLOCKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "basic": (lambda: BasicBlock(8, 8), 2),
    "bottleneck": (lambda: Bottleneck(32, 8), 3),
    "bottleneck with its own shortcut": (
        lambda: Bottleneck(
            16, 8, downsample=nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32))
        ),
        4,
    ),
    "regnet": (
        lambda: ResBottleneckBlock(16, 32, 1, nn.BatchNorm2d, nn.ReLU, group_width=8),
        4,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    """Of torchvision's: each of their norms, with all that follows it."""
    make, count = BLOCKS[name]
    torch.manual_seed(0)
    block = make().double().train()
    stock = copy.deepcopy(block)
    channels = next(m for m in block.modules() if isinstance(m, nn.Conv2d)).in_channels
    x = torch.randn(2, channels, 7, 6, dtype=torch.float64)
    found = Rewritten(block, swap=["batch_norm"])
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    results = found(mine), stock(theirs)
    assert found.swapped == ["batch_norm"] * count
    torch.testing.assert_close(*results)
    grads = [
        torch.autograd.grad(out.sin().sum(), [leaf, *module.parameters()])
        for out, leaf, module in zip(results, (mine, theirs), (block, stock), strict=True)
    ]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(block.state_dict(), stock.state_dict())
    behind = [_of_call(node.kwargs) for node in found.ours]
    assert ("relu", True) in behind
    assert len([one for one in behind if one[0] == "relu"]) == count - ("shortcut" in name) - (
        name == "regnet"
    )


def _of_call(kwargs: Any) -> tuple[str, bool]:
    return kwargs["activation"], kwargs["residual"] is not None


def test_by_inductor():
    """Through the whole backend: the statistics are changed in place there too."""
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    norm = nn.BatchNorm2d(C).train()
    stock = copy.deepcopy(norm)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return F.relu(module(x) + x)

    compiled = torch.compile(
        lambda x: call(norm, x), backend="cudnn_ops", options={"swap": ["batch_norm"]}
    )
    for _ in range(3):
        x = torch.randn(3, C, 5, 4)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = compiled(mine), call(stock, theirs)
        torch.testing.assert_close(*results)
        for out in results:
            out.sin().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(norm.state_dict(), stock.state_dict())
    assert [one.pattern for one in cudnn_ops.compile_report().swapped] == ["batch_norm"]
