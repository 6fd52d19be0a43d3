"""Strides of a rewritten graph: what needs the stock ones has them, and nothing else is copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cudnn_ops.compiler import rewrite as rewriting
from tests.cases.compiler import Rewritten, check_swap

C, K = 4, 6


@torch.library.custom_op("compiler_strides::first_column", mutates_args=())
def first_column(x: Tensor) -> Tensor:
    """Reads memory as if dimensions were in their order."""
    return x.as_strided((x.shape[0], x.shape[1]), (x[0].numel(), x[0, 0].numel())).clone()


@first_column.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2])


def _conv(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, C, 5, 7).double(), torch.randn(K, C, 3, 3).double()


def _copies(found: Rewritten) -> int:
    """The nodes that make a tensor contiguous, but for those of our convolutions' inputs."""
    return sum(
        node.target == "contiguous" and "memory_format" not in node.kwargs
        for node in found.graphs[0].graph.nodes
    )


def _check(block: Callable[..., Any], copies: int, **kwargs: Any) -> Rewritten:
    """Results, gradients, and the strides of the results."""
    found = check_swap(block, *_inputs(), **{"expect": ["convolution"], **kwargs})
    inputs = _inputs()
    stock, ours = block(*inputs), found(*inputs)
    if isinstance(stock, Tensor):
        stock, ours = [stock], [ours]
    assert [x.stride() for x in ours] == [x.stride() for x in stock]
    assert _copies(found) == copies
    return found


def _view(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight).view(2, -1).sin()


def _view_further_on(x: Tensor, weight: Tensor) -> Tensor:
    out = _conv(x, weight)
    out = F.avg_pool2d(out.sin() * 2 + out, 2)
    return torch.cat([out, out], 1).view(2, -1).sin()


def _view_of_a_view(x: Tensor, weight: Tensor) -> Tensor:
    out = _conv(x, weight).permute(0, 2, 1, 3)
    return out[:, 1:].transpose(1, 2).contiguous().view(2, -1) * 2


def _part(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight)[:, 1:3].view(2, 2, -1).sin()


def _half(x: Tensor, weight: Tensor) -> Tensor:
    first, second = _conv(x, weight).chunk(2, 1)
    return first.view(2, 3, -1).sin() + second.reshape(2, 3, -1)


def _flat(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight).unflatten(1, (2, 3)).flatten(3).sum(3)


def _result(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight)


def _result_part(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight)[:, 1:].sin()[:, :, ::2]


def _results(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    out = _conv(x, weight)
    return out, out.transpose(1, 2)


def _result_of_several(x: Tensor, weight: Tensor) -> Tensor:
    return torch.max(_conv(x, weight), 1)[0].unsqueeze(1) + torch.sort(_conv(x, weight), 1)[0]


def _strided(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight).as_strided((K, 5), (35, 7)) * 2


def _own_operator(x: Tensor, weight: Tensor) -> Tensor:
    return first_column(_conv(x, weight) * 2)


def _read_twice(x: Tensor, weight: Tensor) -> Tensor:
    out = _conv(x, weight)
    return out.view(2, -1).sum(1) + out.view(-1).view(2, -1).sum(1)


def _changed_behind(x: Tensor, weight: Tensor) -> Tensor:
    out = _conv(x, weight)
    out += 1
    return out.view(2, -1)


def _not_needed(x: Tensor, weight: Tensor) -> Tensor:
    return _conv(x, weight).relu().flatten(2).transpose(1, 2).mean((1, 2))


def _without_gradients(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        out = _conv(x, weight).view(2, -1)
    return out * x.sum()


BLOCKS: dict[Callable[..., Any], int] = {
    **dict.fromkeys((_view, _view_further_on, _part, _half, _result, _results, _strided), 1),
    **dict.fromkeys((_read_twice, _changed_behind, _without_gradients), 1),
    **dict.fromkeys((_flat, _not_needed), 0),
    _view_of_a_view: 1,
    _result_part: 1,
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
def test_one_copy_where_strides_matter(block):
    _check(block, BLOCKS[block])


def test_dynamic_sizes():
    for block in (_view, _result, _part):
        check_swap(block, *_inputs(), expect=["convolution"], dynamic=True)


def test_several_results():
    _check(_result_of_several, 1, expect=["convolution"] * 2)


def test_an_operator_of_another_library():
    _check(_own_operator, 1, gradients=False)


def test_autocast():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.conv2d(x, weight, padding=1).view(2, -1)
            return out @ torch.ones(out.shape[1], 3)

    x, weight = (one.float() for one in _inputs())
    check_swap(block, x, weight, expect=["convolution"], tolerance=5e-2)


def test_a_graph_within_the_graph():
    """It was captured for the stock strides, and its own results have them."""

    def inner(x: Tensor, weight: Tensor) -> Tensor:
        return _conv(x.view(2, K, 5, 7)[:, :C], weight)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        x = _conv(x, weight).sin()
        return checkpoint(inner, x, weight, use_reentrant=False).view(2, -1)

    check_swap(block, *_inputs(), expect=["convolution"] * 2)


def test_results_of_the_stock_strides_are_followed_no_further():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (7,), weight[0, 0, 0].new_ones(7)).view(-1)

    x, weight = _inputs()
    found = check_swap(block, x, weight, expect=["rms_norm"])
    assert _copies(found) == 0


def _changed_through_a_view(x: Tensor, weight: Tensor) -> Tensor:
    """Of a copy, the change would not be seen."""
    out = _conv(x, weight) * 3
    out.view(-1)[0] = 0.0
    return out * 2


def test_a_graph_that_no_copy_helps_stays_as_it_is():
    with pytest.warns(
        UserWarning, match="stays as it is, because it depends on the strides"
    ) as seen:
        found = check_swap(_changed_through_a_view, *_inputs(), expect=[], gradients=False)
    assert len(seen) == 1
    assert "out is changed in place" in found.report.candidates[0].reason
    assert found.ours == []


def test_a_failure_leaves_the_stock_graph(monkeypatch):
    def settle(_: Any) -> int:
        raise ZeroDivisionError("of strides")

    monkeypatch.setattr(rewriting.Strides, "settle", settle)
    with pytest.warns(UserWarning, match="ZeroDivisionError: of strides"):
        found = check_swap(_view, *_inputs(), expect=[])
    assert [candidate.swapped for candidate in found.report.candidates] == [False]


def test_nothing_is_settled_where_nothing_is_swapped(monkeypatch):
    monkeypatch.setattr(rewriting, "Strides", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_swap(_view, *_inputs(), expect=[], swap=["gated"])


KEEP_ORDER: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm with statistics": lambda x: F.batch_norm(
        x, x.new_zeros(K), x.new_ones(K), x.new_ones(K), x.new_ones(K)
    ),
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "dropout": F.dropout,
    "alone": lambda x: x[:1].relu(),
    "a part": lambda x: x[:, 1:].relu(),
    "pixels": lambda x: x[..., 1:, :].relu(),
}


@pytest.mark.parametrize("name", KEEP_ORDER)
def test_strides_of_what_reads_images_are_torch_s(name):
    """Of most it is known, and torch is not asked."""
    function = KEEP_ORDER[name]
    found = Rewritten(lambda x, weight: function(_conv(x, weight)), swap=["convolution"])
    found(*_inputs())
    (output,) = found.graphs[0].graph.output_node().args[0]
    node = output
    while node.target in ("permute", "contiguous"):  # the stock strides, for who called
        node = node.args[0]
    image = _conv(*_inputs()).contiguous(memory_format=torch.channels_last)
    value = node.meta["example_value"]
    assert (value.shape, value.stride()) == (function(image).shape, function(image).stride())
    assert value.dtype == torch.float64
