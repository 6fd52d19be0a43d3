"""The patterns of linear layers: with an activation, with a sum behind it, and in pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.patterns.gated import Gated
from tests.cases.compiler import Rewritten, Timed, check_swap

ACTIVATIONS: list[Any] = [
    F.relu,
    torch.relu,
    nn.ReLU(inplace=True),
    F.silu,
    nn.SiLU(),
    F.gelu,
    nn.GELU("tanh"),
    F.relu6,
    F.hardswish,
    nn.LeakyReLU(),
]


def _tensors(*more: tuple[int, ...]) -> list[Tensor]:
    sizes = ((3, 5, 12), (20, 12), (20,), *more)
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: getattr(f, "__name__", str(f)))
def test_with_an_activation(activation):
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return activation(F.linear(x, w, b))

    check_swap(layer, *_tensors(), expect=["linear"])


def test_without_a_bias():
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(nn.functional.linear(x, w)) * b

    check_swap(layer, *_tensors(), expect=["linear"])


def test_with_a_sum_behind_it():
    def layer(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.silu(F.linear(x, w, b)) + y

    def other(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        y = y * 2
        y += F.silu(F.linear(x, w, b))
        return y

    for function in (layer, other):
        found = check_swap(function, *_tensors((3, 5, 20)), expect=["linear"])
        assert len(found.ours[0].args) == 5


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_residual_alone(order, dropout):
    def layer(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        out = F.linear(x, w, b)
        one, other = (F.dropout(out, 0.0) if dropout else out, y.sin())[::order]
        return one + other

    def by_matrix(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        one, other = (x @ w.t(), y)[::order]
        return (one + other) * b

    for function in (layer, by_matrix):
        found = check_swap(function, *_tensors((3, 5, 20)), expect=["linear"])
        assert found.ours[0].args[3:4] == ("none",)


def test_two_layers_of_one_sum():
    """The sum is one's, and the other is torch's."""

    def layer(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(x, w, b) + F.linear(x, v)

    check_swap(layer, *_tensors((20, 12)), expect=["linear"])


def _layer_broadcasts(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.linear(x[:1], w, b) + y


def _scaled_sum(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return torch.add(F.linear(x, w, b), y, alpha=2)


def _layer_used(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    out = F.linear(x, w, b)
    return (out + y) * out


def _scaled_layer(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, w, b) * 0.5 + y


@pytest.mark.parametrize(
    "near_miss",
    [_layer_broadcasts, _scaled_sum, _layer_used, _scaled_layer],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_a_residual(near_miss):
    check_swap(near_miss, *_tensors((3, 5, 20)), expect=[])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, F.relu], ids=lambda f: f.__name__)
def test_a_gate_that_a_gradient_needs_is_inductor_s(activation, gradients, monkeypatch):
    """Which keeps what the activation is of alone; but not for whoever asks for ours."""

    def block(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return activation(F.linear(x, w, b)) * F.linear(x, v)

    found = Rewritten(block)
    found.chooser = Timed(found.report, Times(1.0, 2.0))
    tensors = [each.requires_grad_(gradients) for each in _tensors((20, 12))]
    # As where the gated activation itself was not faster.
    monkeypatch.setattr(Gated, "find", lambda *_: iter(()))
    found(*tensors)
    (candidate,) = (one for one in found.report if one.pattern == "linear")
    is_kept = gradients and activation is not F.relu
    assert candidate.swapped is not is_kept
    assert ("kept for the gradient of mul" in candidate.reason) is is_kept
    asked = Rewritten(block, swap=["linear"])
    asked(*tensors)
    assert asked.swapped == ["linear"]


def test_a_sum_that_broadcasts_stays_outside():
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.linear(x, w, b)) + b

    found = check_swap(layer, *_tensors(), expect=["linear"])
    assert found.ours[0].args[4] is None


class Pair(nn.Module):
    def __init__(self, activation: nn.Module, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        first, second = nn.Linear(12, 20, bias), nn.Linear(20, 12, bias)
        self.layers = nn.Sequential(first, activation, nn.Dropout(dropout), second)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU()], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_pairs(activation, bias):
    check_swap(Pair(activation, bias).double(), _tensors()[0], expect=["mlp"])


class Conv1D(nn.Module):
    """GPT-2's in transformers: a product of rows with a weight of [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*x.size()[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(sizes)


def gelu_new(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def test_transposed_layers():
    def pair(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        hidden = gelu_new(torch.addmm(b1, x.view(-1, 12), w1).view(3, 5, 20))
        return torch.addmm(b2, hidden.view(-1, 20), w2).view(3, 5, 12)

    def rows(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return torch.addmm(b2, F.relu(torch.addmm(b1, x[0], w1)), w2)

    def activated(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.silu(torch.addmm(b1, x.reshape(15, 12), w1).reshape(3, 5, 20))

    sizes = ((3, 5, 12), (12, 20), (20,), (20, 12), (12,))
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    for function, name in ((pair, "mlp"), (rows, "mlp"), (activated, "linear")):
        check_swap(function, *tensors, expect=[name])


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w.T)


def product_and_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As in Falcon."""
    return F.silu(torch.matmul(x, w.t()) + b)


def bias_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(b + x.flatten(0, 1).mm(w.transpose(0, 1)))


@pytest.mark.parametrize("layer", [product, product_and_bias, bias_first], ids=lambda f: f.__name__)
def test_matrix_products(layer):
    check_swap(layer, *_tensors(), expect=["linear"])


def test_a_pair_of_matrix_products():
    def pair(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.gelu(x @ w.T + b) @ w2 + b2

    check_swap(pair, *_tensors((20, 6), (6,)), expect=["mlp"])


def _product_of_batches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(x @ w.T.expand(3, 12, 20))


def _product_of_one_row(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(x[0, 0] @ w.T)


def test_gpt_2_s_pair():
    layers = nn.Sequential(Conv1D(20, 12), nn.GELU("tanh"), nn.Dropout(0.0), Conv1D(12, 20))
    found = check_swap(layers, torch.randn(3, 5, 12), expect=["mlp"], tolerance=1e-4)
    assert len(found.ours) == 1


def _scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(torch.addmm(b, x[0], w.t(), alpha=2))


def _part_of_the_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(torch.addmm(b, x[0], w.t(), beta=0.5))


def _full_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(torch.addmm(b * x[0, :, :1], x[0], w.t()))


def _other_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(torch.addmm(b, x.view(-1, 12), w.t()).view(5, 3, 20))


@pytest.mark.parametrize(
    "near_miss",
    [_scaled, _part_of_the_bias, _full_bias, _product_of_batches, _product_of_one_row],
    ids=lambda f: f.__name__,
)
def test_products_that_are_no_layers(near_miss):
    check_swap(near_miss, *_tensors(), expect=[])


def test_rows_in_another_order_are_reshaped_behind_it():
    found = check_swap(_other_rows, *_tensors(), expect=[])
    assert not found.ours


def test_without_gradients_the_first_one_ends_before_the_second():
    pair = Pair(nn.GELU()).double()
    for parameter in pair.parameters():
        parameter.requires_grad_(False)
    check_swap(pair, torch.randn(3, 12).double(), expect=["linear"], gradients=False)
    inference = torch.no_grad()(Pair(nn.GELU()).double().forward)
    check_swap(inference, torch.randn(3, 12).double(), expect=["linear"])


def test_dropout_between_them():
    model = Pair(nn.GELU(), dropout=0.5).double()
    check_swap(model.eval(), _tensors()[0], expect=["mlp"])
    rewritten = Rewritten(model.train())
    rewritten(_tensors()[0])
    assert rewritten.swapped == ["linear"]


def test_a_hidden_layer_that_is_used_elsewhere():
    def layers(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(F.linear(x, w, b))
        return F.linear(hidden, v), hidden

    check_swap(layers, *_tensors((7, 20)), expect=["linear"])


def _without(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).sigmoid()


def _other_slope(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.leaky_relu(F.linear(x, w, b), 0.2)


def _before_activation_used(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    before = F.linear(x, w, b)
    return F.relu(before) * before


def _sum_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b) + 1)


def _overwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """GELU by name; by numbers, the error function is of half as much."""
    before = F.linear(x, w, b)
    return before.mul_(0.5) * (1 + torch.erf(before / math.sqrt(2)))


@pytest.mark.parametrize(
    "near_miss",
    [_without, _other_slope, _before_activation_used, _sum_between, _overwritten],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_it(near_miss):
    gradients = near_miss is not _overwritten  # which autograd refuses
    check_swap(near_miss, *_tensors(), expect=[], gradients=gradients)


def test_mixed_dtypes_stay():
    """Which autocast would mend, and nothing else does."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.gelu(F.linear(x, w, b))

    tensors = [tensor.float() for tensor in _tensors()]
    check_swap(layer, *tensors, expect=["linear"], tolerance=5e-2)
