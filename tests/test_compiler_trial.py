"""What is timed for a match: with what inductor would make one kernel of with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cudnn_ops.compiler import trial
from cudnn_ops.compiler.nodes import value_of
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.patterns.folding import folded
from cudnn_ops.compiler.report import Candidate, CompileReport
from cudnn_ops.compiler.trial import Trial, trial_of
from tests.cases.compiler import Asked, Rewritten

C = 4


class Recording(Asked):
    """Keeps the trials of what it is asked about, and runs them."""

    trials: list[Trial]

    def __call__(self, pattern: Pattern, found: Found, candidate: Candidate) -> bool:
        if pattern.name not in (self.settings.swap or ()):
            return super().__call__(pattern, found, candidate)
        self.trials.append(tried := trial_of(found))
        values = [value_of(node) for node in tried.inputs]
        if any(not isinstance(size, int) for v in values if v is not None for size in v.shape):
            return super().__call__(pattern, found, candidate)
        with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
            torch.manual_seed(0)
            inputs = [torch.rand(v.shape).to(v.dtype) for v in values if v is not None]
            more = fx.GraphModule({}, tried.beforehand)(*inputs) if tried.beforehand else ()
            ours = fx.GraphModule({}, tried.ours)(*inputs, *more)
            stock = fx.GraphModule({}, tried.stock)(*inputs)
        assert len(ours) == len(stock) > 0
        for one, other in zip(ours, stock, strict=True):
            torch.testing.assert_close(one, other)
        return super().__call__(pattern, found, candidate)


def _trials(
    function: Callable[..., Any],
    *inputs: Tensor,
    dynamic: bool = False,
    pattern: str = "convolution",
) -> list[Trial]:
    found = Rewritten(function, [pattern], dynamic)
    chooser = found.chooser = Recording(found.chooser.settings, CompileReport(), lambda _: {})
    chooser.trials = []
    torch.testing.assert_close(found(*inputs), function(*inputs))
    return chooser.trials


def _followers(one: Trial) -> list[str]:
    return [str(n.target) for n in one.stock.nodes if n.name.startswith("follower")]


def _leaders(one: Trial) -> list[str]:
    stock, ours = (
        [str(n.target) for n in graph.nodes if n.name.startswith("leader")]
        for graph in (one.stock, one.ours)
    )
    assert stock == ours
    return ours


def _x() -> Tensor:
    return torch.randn(2, C, 6, 5, dtype=torch.float64)


def _w() -> Tensor:
    return torch.randn(C, C, 3, 3, dtype=torch.float64)


def _results(one: Trial) -> int:
    (output,) = one.stock.find_nodes(op="output")
    return len(output.args[0])


def test_squeezing():
    """The mean of what a convolution gives, which is read again: two results."""

    def function(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        x = F.conv2d(x, w).relu()
        return x @ (F.adaptive_avg_pool2d(x, 1) * scale).expand(-1, -1, 3, 3)

    scale = torch.rand(C, 1, 1, dtype=torch.float64)
    (one,) = _trials(function, torch.randn(2, C, 5, 5).double(), _w(), scale)
    assert len(_followers(one)) == 3
    assert len(one.inputs) == 3
    assert _results(one) == 2


def test_what_nothing_else_reads_is_no_result():
    (one,) = _trials(lambda x, w: F.conv2d(x, w).flatten(2).mean(2).sigmoid(), _x(), _w())
    assert len(_followers(one)) == 3
    assert _results(one) == 1


def test_what_is_added_later():
    """A shortcut is read from memory, whatever computed it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        first = F.conv2d(x, w, padding=1)
        return first * torch.matmul(first, torch.ones(5, 5, dtype=first.dtype))

    (one,) = _trials(function, _x(), _w())
    assert _followers(one) == []
    assert _results(one) == 1


def test_what_was_there_before_is_an_input():
    def function(x: Tensor, w: Tensor) -> Tensor:
        before = torch.matmul(x, torch.ones(5, 5, dtype=x.dtype)) * 2
        return torch.cat([before, F.conv2d(x, w, padding=1)], 1)

    (one,) = _trials(function, _x(), _w())
    assert len(_followers(one)) == 1
    assert len(one.inputs) == 3


def test_no_more_than_a_few(monkeypatch):
    monkeypatch.setattr(trial, "_MOST_FOLLOWERS", 2)
    (one,) = _trials(lambda x, w: F.conv2d(x, w).exp().sqrt().neg().tanh(), _x(), _w())
    assert len(_followers(one)) == 2
    assert _results(one) == 1


@pytest.mark.parametrize(
    "behind",
    [
        lambda x: x.mul_(2),
        lambda x: x @ x.transpose(2, 3),
        lambda x: x.cumsum(1),
        lambda x: x[:, torch.tensor([1, 1])],
        lambda x: x.chunk(2, 1)[0],
    ],
    ids=["in place", "product", "another function", "places", "several"],
)
def test_what_is_no_part_of_a_kernel(behind):
    (one,) = _trials(lambda x, w: behind(F.conv2d(x, w)), _x(), _w())
    assert not set(_followers(one)) - {"transpose"}


def test_a_size_that_is_dynamic():
    trials = _trials(lambda x, w: F.conv2d(x, w).exp(), _x(), _w(), dynamic=True)
    assert [_followers(one) for one in trials] == [[]]


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _masked_halves(x: Tensor) -> Tensor:
    """As transformers' experts do, which give rows to nobody."""
    gate, up = (x @ x.mT).masked_fill(x[:, :1] > 5, 0).chunk(2, -1)
    return _gated(gate, up)


def _rows() -> Tensor:
    return torch.randn(6, 6, dtype=torch.float64)


def test_what_inductor_computes_with_what_reads_it():
    (one,) = _trials(_masked_halves, _rows(), pattern="gated")
    assert len(_leaders(one)) == 4  # the halves are one each
    assert [tuple(value_of(node).shape) for node in one.inputs] == [(6, 6), (6, 1)]


def test_what_comes_from_a_chain():
    (one,) = _trials(lambda x: _gated((x @ x) * 2 + 1, x @ x), _rows(), pattern="gated")
    assert len(_leaders(one)) == 2
    assert len(one.inputs) == 2


def test_no_more_than_a_few_before_it(monkeypatch):
    """Nor halves of something that does not belong to it."""
    monkeypatch.setattr(trial, "_MOST_LEADERS", 2)
    (one,) = _trials(_masked_halves, _rows(), pattern="gated")
    assert _leaders(one) == []
    (one,) = _trials(lambda x: _gated((x @ x).exp().sin().cos(), x), _rows(), pattern="gated")
    assert len(_leaders(one)) == 0  # torch's sine and cosine are not among what is known
    (one,) = _trials(lambda x: _gated((x @ x).exp().neg() * 2, x), _rows(), pattern="gated")
    assert len(_leaders(one)) == 2


def _read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = x * 2
    return _gated(gate, x), gate + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _gated(x @ x, x),
        _read_twice,
        lambda x: _gated((x @ x).cumsum(0), x),
        lambda x: _gated((x @ x).mul_(2), x),
        lambda x: _gated(F.layer_norm(x @ x, (6,)), x),
        lambda x: _gated(x[torch.tensor([0, 1, 2, 0, 1, 2])], x),
    ],
    ids=["product", "read twice", "another function", "in place", "sums", "places"],
)
def test_what_is_written_to_memory_is_an_input(function):
    (one,) = _trials(function, _rows(), pattern="gated")
    assert _leaders(one) == []


@pytest.mark.parametrize("most", [trial._MOST_LEADERS, 1])
def test_the_end_of_a_norm_is_no_part_of_a_trial(most, monkeypatch):
    """It may be one operator, whether it is written as one function or not, however long it is."""
    monkeypatch.setattr(trial, "_MOST_LEADERS", most)

    def normed(x: Tensor) -> Tensor:
        wide = (x @ x).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    (one,) = _trials(lambda x: _gated(normed(x), x), _rows(), pattern="gated")
    assert _leaders(one) == []
    assert [value_of(node).dtype for node in one.inputs] == [torch.float64] * 2
    # What has nothing to do with it is.
    (one,) = _trials(lambda x: _gated(normed(x), (x @ x) * 2), _rows(), pattern="gated")
    assert len(_leaders(one)) == 1


def test_what_a_product_reads_is_an_input():
    """Inductor writes it to memory whatever computes the product."""
    (one,) = _trials(lambda x, w: F.conv2d(x * 2, w), _x(), _w())
    assert _leaders(one) == []
    residual = torch.randn(2, C, 4, 3, dtype=torch.float64)
    (one,) = _trials(lambda x, w, r: F.conv2d(x, w) + r * 2, _x(), _w(), residual)
    assert len(_leaders(one)) == 1


def _normed(x: Tensor, w: Tensor, *norm: Any) -> Tensor:
    return F.batch_norm(F.conv2d(x, w), *norm).relu()


def _norm() -> list[Tensor]:
    return [torch.rand(C, dtype=torch.float64) + 1 for _ in range(4)]


def test_what_is_folded_for_all_convolutions_at_once_is_there_from_the_start():
    with torch.no_grad():
        (one,) = _trials(_normed, _x(), _w(), *_norm())
    assert one.beforehand is not None
    assert [node.target for node in one.beforehand.nodes].count(folded) == 1
    assert folded not in [node.target for node in one.ours.nodes]
    inputs = [len(graph.find_nodes(op="placeholder")) for graph in (one.stock, one.ours)]
    assert inputs == [6, 8]


def test_what_is_folded_by_itself_is_timed():
    with torch.no_grad():
        (one,) = _trials(lambda x, w, *norm: _normed(x, w * 2, *norm), _x(), _w(), *_norm())
    assert one.beforehand is None
    assert folded in [node.target for node in one.ours.nodes]


def test_what_is_folded_with_gradients_is_timed():
    (one,) = _trials(_normed, _x(), _w().requires_grad_(), *_norm())
    assert one.beforehand is None


def test_a_view_beside_what_it_is_of_is_no_result():
    # Both would come back with gradients of their own, the view's through all of the memory.
    w = _w()
    (one,) = _trials(lambda x: (y := F.conv2d(x, w, padding=1).relu(), y.flatten(1)), _x())
    assert _followers(one) == ["flatten"]
    assert _results(one) == 1
    (one,) = _trials(lambda x: (y := F.conv2d(x, w, padding=1).relu(), y * 2), _x())
    assert _results(one) == 2


def test_an_image_is_channels_last_already():
    w = _w()

    def function(x: Tensor) -> Tensor:
        y = F.conv2d(x, w, padding=1).relu()
        return y + y.contiguous(memory_format=torch.channels_last).sin()

    (one,) = _trials(function, _x())
    assert _followers(one) == []
    (one,) = _trials(lambda x: F.conv2d(x, w, padding=1).relu().contiguous().sin(), _x())
    assert _followers(one) == ["contiguous"]
