"""What the passes look up once, so that a compilation waits for them as little as it can."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from cudnn_ops.compiler import masks, nodes
from cudnn_ops.compiler.masks import Visible
from cudnn_ops.compiler.nodes import call_of
from tests.cases.compiler import NAMES, Rewritten


def test_what_a_node_computes_is_looked_up_once(monkeypatch):
    looked_up: Counter[fx.Node] = Counter()
    look_up = nodes._call_of

    def counted(node: fx.Node) -> nodes.Call | None:
        looked_up[node] += 1
        return look_up(node)

    def norms(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() + x.sin()
        return x

    monkeypatch.setattr(nodes, "_call_of", counted)
    rewritten = Rewritten(norms, swap=[name for name in NAMES if name != "rms_norm"])
    rewritten(torch.randn(2, 8))
    assert rewritten.swapped == []
    assert len(looked_up) > 15
    assert set(looked_up.values()) == {1}


def test_a_node_that_changed_is_looked_up_again():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(torch.add, (x, x))
    call = call_of(node)
    assert call is not None
    assert call is call_of(node)
    node.replace_input_with(x, y)
    call = call_of(node)
    assert call is not None
    assert call["other"] is y
    node.kwargs = {"alpha": 2}
    call = call_of(node)
    assert call is not None
    assert call["alpha"] == 2
    node.target = operator.truediv
    assert call_of(node) is None  # that has no alpha
    node.kwargs = {}
    call = call_of(node)
    assert call is not None
    assert call.name == "div"


def test_a_cast_is_known_once_its_dtype_is():
    """Of a node that was put in, the value comes after the node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2)
    node = graph.call_method("to", (x, torch.float64))
    assert call_of(node) is None
    node.meta["example_value"] = torch.empty(2, dtype=torch.float64)
    call = call_of(node)
    assert call is not None
    assert (call.name, call["dtype"]) == ("cast", torch.float64)


def _rows(*first_and_last: tuple[int, int]) -> Tensor:
    columns = torch.arange(4)
    return torch.stack([(columns >= first) & (columns <= last) for first, last in first_and_last])


CAUSAL = [(0, 0), (0, 1), (0, 2), (0, 3)]
WINDOW = [(0, 0), (0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (_rows(*CAUSAL), Visible(True)),
        (_rows(*WINDOW), Visible(True, (1, -1))),
        (_rows(*[(0, 3)] * 4), Visible()),
        (_rows(*CAUSAL).expand(2, 3, 4, 4), Visible(True)),
        (_rows(*WINDOW).repeat(2, 3, 1, 1), Visible(True, (1, -1))),
        (_rows(*CAUSAL).t().contiguous().t(), Visible(True)),
        (_rows((0, 3)).expand(4, 4), Visible()),
        # A row that sees nothing, one with a gap, and as many numbers as without them.
        (_rows((0, 0), (0, 1), (0, 2), (4, 3)), None),
        (_rows(*CAUSAL) & ~torch.eye(4, dtype=torch.bool).roll(-2, 0), None),
        (torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]]).bool(), None),
        (_rows((0, 0), (0, 1), (0, 0), (0, 3)), None),
        # Of batches, a later one is another.
        (torch.stack([_rows(*CAUSAL), _rows(*CAUSAL), _rows(*WINDOW)]), None),
        (torch.stack([_rows(*CAUSAL), _rows(*CAUSAL).t()])[:, None], None),
        (torch.zeros(4, 4, dtype=torch.bool), None),
        (torch.zeros(0, 4, 4, dtype=torch.bool), None),
    ],
)
def test_what_a_mask_is(mask, visible):
    assert masks._classify(mask) == visible


def test_masks_whose_batches_differ_until_they_are_joined():
    """Each of the two parts differs from batch to batch, and what they leave does not."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(5)
        causal = places[:, None] >= places
        batch = torch.arange(2)[:, None, None, None]
        first, second = ((batch == one) | causal for one in (0, 1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=first & second)

    inputs = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    rewritten = Rewritten(attend)
    torch.testing.assert_close(rewritten(*inputs), attend(*inputs))
    (candidate,) = rewritten.report.swapped
    assert candidate.note == "its mask became causal"
