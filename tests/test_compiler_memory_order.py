"""Memory as inductor lays it out: convolutions that stay torch's, sums of columns and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_ops.compiler.measuring import Question
from cudnn_ops.compiler.strides import Strides, Unsettled
from tests.cases.compiler import Rewritten, check_swap

C = 4


def _block(x: Tensor, weight: Tensor) -> Tensor:
    first = F.conv2d(x, weight, padding=1)
    return F.conv2d(F.group_norm(first, 2).sin(), weight, padding=1) + first


def _volumes(x: Tensor, weight: Tensor) -> Tensor:
    first = F.conv3d(x, weight, padding=1)
    return F.conv3d(F.group_norm(first, 2).sin(), weight, padding=1) + first


def _inputs(dims: int = 2) -> tuple[Tensor, Tensor]:
    sizes = (5, 7, 6)[:dims]
    return torch.randn(2, C, *sizes).double(), torch.randn(C, C, *[3] * dims).double()


def _orders(found: Rewritten, memory_format: torch.memory_format) -> list[bool]:
    """Of what each convolution and norm reads: whether it has its channels last."""
    orders = []
    for node in found.graphs[0].graph.nodes:
        if "conv" in str(node.target) or "group_norm" in str(node.target):
            value = node.args[0].meta["example_value"]
            orders.append(value.is_contiguous(memory_format=memory_format))
    return orders


def test_images_have_their_channels_last_from_the_first_convolution_on():
    found = check_swap(_block, *_inputs(), expect=["group_norm"], swap=["group_norm"])
    assert _orders(found, torch.channels_last) == [True] * 3
    volumes = check_swap(_volumes, *_inputs(3), expect=["group_norm"], swap=["group_norm"])
    # What a convolution of volumes gives for them is torch's matter, another one on a CPU.
    assert _orders(volumes, torch.channels_last_3d)[::2] == [True] * 2
    stock, ours = _block(*_inputs()), found(*_inputs())
    assert ours.stride() == stock.stride()


def test_without_an_operator_of_images_nothing_is_converted():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        out = F.conv2d(x, weight, padding=1)
        return F.rms_norm(out, (7,), weight[0, 0, 0].new_ones(7))

    found = check_swap(block, *_inputs(), expect=["rms_norm"], swap=["rms_norm"])
    assert _orders(found, torch.channels_last) == [False]


def test_images_without_a_batch_or_of_unknown_sizes_stay():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x[0], weight, padding=1)[None], 2)

    check_swap(block, *_inputs(), expect=["group_norm"], swap=["group_norm"])
    options = {"expect": ["group_norm"], "swap": ["group_norm"], "dynamic": True}
    check_swap(_block, *_inputs(), **options)


def test_autocast_and_gradients_of_some():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.conv2d(x, weight.detach(), padding=1)
        return F.group_norm(out.float(), 2)

    x, weight = (one.float() for one in _inputs())
    found = check_swap(block, x, weight, expect=["group_norm"], swap=["group_norm"], tolerance=5e-2)
    assert all(_orders(found, torch.channels_last))


def _copied(x: Tensor, weight: Tensor) -> Tensor:
    """As a transformer of diffusers ends: its rows are an image, copied before a convolution."""
    rows = F.group_norm(x, 2).permute(0, 2, 3, 1).sin()
    return F.conv2d(rows.permute(0, 3, 1, 2).contiguous(), weight, padding=1)


def _copies(found: Rewritten) -> int:
    """Of those that are converted next; a copy of a result, for the stock strides, is not."""
    copies = [node for node in found.graphs[0].graph.nodes if node.target == "contiguous"]
    return sum(not node.kwargs and any(user in copies for user in node.users) for node in copies)


@pytest.mark.parametrize("swap", [["group_norm"], ["convolution"]])
def test_what_a_model_copied_for_a_convolution_is_read_as_it_was(swap: list[str]):
    found = check_swap(_copied, *_inputs(), expect=swap, swap=swap)
    assert _copies(found) == 0


def test_a_copy_that_something_else_needs_stays():
    def is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        copy = F.group_norm(x, 2).permute(0, 2, 3, 1).sin().permute(0, 3, 1, 2).contiguous()
        return F.conv2d(copy, weight, padding=1), copy

    def is_changed(x: Tensor, weight: Tensor) -> Tensor:
        image = F.group_norm(x, 2).sin()
        copy = image.contiguous(memory_format=torch.channels_last).contiguous()
        image.add_(1)
        return F.conv2d(copy, weight, padding=1) + image

    def is_given(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.contiguous().contiguous(memory_format=torch.channels_last)
        return F.group_norm(F.conv2d(x, weight, padding=1), 2), copy

    for function in (is_returned, is_changed, is_given):
        check_swap(
            function, *_inputs(), expect=["group_norm"], swap=["group_norm"], gradients=False
        )
    found = Rewritten(is_returned, ["group_norm"])
    assert found(*_inputs())[1].is_contiguous()
    x, weight = (one.contiguous(memory_format=torch.channels_last) for one in _inputs())
    _, copy = Rewritten(is_given, ["group_norm"])(x, weight)
    assert copy.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_stay_as_they_are_and_may_change(mode: type[torch.no_grad]):
    """Neither in another order, in which ``view`` would fail, nor copied, of another time."""
    first, second = (nn.Conv2d(C, C, 3) for _ in range(2))
    model = nn.Sequential(first, second, nn.GroupNorm(2, C)).double()
    vector = nn.utils.parameters_to_vector(model.parameters())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    options: dict[str, Any] = {"swap": ["convolution", "group_norm"]}
    compiled = torch.compile(model, backend="cudnn_ops", options=options)
    x, weight = _inputs()
    with mode():
        compiled(x)
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        first.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        second.weight.data = weight
        torch.testing.assert_close(compiled(x), model(x))


T, R = 6, 8  # tokens, and the length of their rows


def _tokens(x: Tensor, weight: Tensor) -> Tensor:
    """Columns of what a convolution gives, as an encoder of sound or images begins."""
    return F.gelu(F.conv1d(x, weight, padding=1)).permute(0, 2, 1)


def _layers(x: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    tokens = _tokens(x, weight) + positions
    for _ in range(2):
        tokens = tokens + F.layer_norm(tokens, (R,)) @ weight[..., 0]
    return F.layer_norm(tokens, (R,)), tokens


def _sound(positions: tuple[int, ...] = (T, R)) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, R, T).double(), torch.randn(R, R, 3).double(), torch.randn(positions)


def _read_by_norms(found: Rewritten) -> list[bool]:
    """Of what our norms read: whether it is contiguous."""
    return [
        node.all_input_nodes[0].meta["example_value"].is_contiguous()
        for node in found.ours
        if "norm" in str(node.target)
    ]


@pytest.mark.parametrize("positions", [(T, R), (1, T, R), (2, T, R)])
@pytest.mark.parametrize("gradients", [False, True])
def test_sums_with_rows_are_rows_in_all_layers(positions, gradients):
    """For whoever called, results have the strides that they had."""
    inputs = _sound(positions)
    options: Any = {"swap": ["layer_norm"], "gradients": gradients}
    found = check_swap(_layers, *inputs, expect=["layer_norm"] * 3, **options)
    assert _read_by_norms(found) == [True] * 3
    strides = [[one.stride() for one in results(*inputs)] for results in (_layers, found)]
    assert strides[0] == strides[1] == [(T * R, R, 1), (T * R, 1, T)]


def test_trials_are_of_rows(monkeypatch):
    """Which the model has when it runs; torch's strides are those of columns."""
    strides: list[tuple[int, ...]] = []

    def of(*args: Any) -> Question:
        question = ask(*args)
        if "layer_norm" in question.graphs["ours"].code:
            strides.extend(one.strides for one in question.inputs if one is not None)
        return question

    ask = Question.of
    monkeypatch.setattr(Question, "of", of)
    Rewritten(_layers, ["layer_norm"])(*_sound())
    assert strides == [(T * R, R, 1)] * 5  # of two sums and the first layer's input


def _written(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    tokens = _tokens(x, weight) + positions
    before = tokens * 2
    tokens += 1
    return F.layer_norm(tokens, (R,)) + before


COLUMNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "written to later": _written,
    "in place": lambda x, weight, rows: F.layer_norm(_tokens(x, weight).add_(rows), (R,)),
    "given": lambda x, _, rows: F.layer_norm(x.permute(0, 2, 1) + rows, (R,)),
    "a bias": lambda x, weight, rows: F.layer_norm(_tokens(x, weight) + rows[0], (R,)),
    "columns": lambda x, weight, _: F.layer_norm(_tokens(x, weight) + x.mT, (R,)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_inductor_leaves_stay(name):
    found = check_swap(COLUMNS[name], *_sound(), expect=["layer_norm"], swap=["layer_norm"])
    assert not [node for node in found.graphs[0].graph.nodes if node.target == "contiguous"]


@pytest.mark.parametrize("of_two", [torch.mul, torch.sub, lambda x, rows: rows * x])
def test_products_and_differences_of_columns_and_rows_are_rows(of_two):
    def block(x: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        return F.layer_norm(of_two(_tokens(x, weight), rows), (R,))

    found = check_swap(block, *_sound(), expect=["layer_norm"], swap=["layer_norm"])
    assert _read_by_norms(found) == [True]


def test_how_many_sequences_there_are_may_be_unknown():
    x, weight, positions = _sound()
    found = Rewritten(_layers, ["layer_norm"], dynamic=True)
    for tensor, dims in ((x, (1, 2)), (weight, (0, 1, 2)), (positions, (0, 1))):
        for dim in dims:
            torch._dynamo.mark_static(tensor, dim)
    assert found(x, weight, positions)[1].stride() == (T * R, 1, T)
    assert _read_by_norms(found) == [True] * 3
    assert isinstance(found.ours[0].meta["example_value"].shape[0], torch.SymInt)


def test_strides_that_are_unknown_get_no_guards():
    """Else a graph would be compiled once more where a length happens to be that of the rows."""

    def block(x: Tensor, rows: Tensor) -> Tensor:
        return F.layer_norm(x.relu()[..., :T].permute(0, 2, 1) + rows, (R,))

    x, rows = torch.randn(2, R, T + 3), torch.randn(T, R)
    found = Rewritten(block, ["layer_norm"], dynamic=True)
    for tensor, dim in ((x, 1), (rows, 0), (rows, 1)):
        torch._dynamo.mark_static(tensor, dim)
    found(x, rows)
    exact = torch.randn(2, R, T)
    torch.testing.assert_close(found(exact, rows), block(exact, rows))
    assert len(found.graphs) == 1


@pytest.mark.parametrize("error", [Unsettled("it is changed in place"), AssertionError("unknown")])
def test_where_strides_cannot_be_settled_sums_keep_them(error, monkeypatch):
    def settle(_: Any) -> int:
        monkeypatch.undo()  # the next ones are of swaps
        raise error

    monkeypatch.setattr(Strides, "settle", settle)
    found = check_swap(_layers, *_sound(), expect=["layer_norm"] * 3, swap=["layer_norm"])
    assert not _read_by_norms(found)[0]
