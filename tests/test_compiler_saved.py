"""What training saves between forward and backward: no more than without our operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.lowering  # decompositions look into it
import torchvision
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from cudnn_ops.compiler.choice import Chooser, Times
from cudnn_ops.compiler.options import settings_of
from cudnn_ops.compiler.patterns import PATTERNS
from cudnn_ops.compiler.report import CompileReport
from cudnn_ops.compiler.rewrite import rewrite
from tests.cases.compiler import Asked, Timed

#: Numbers of a tensor, from which on it is none of a model's weights here.
LARGE = 5000


class Partitioned:
    """A model whose graph is divided as inductor divides it, and then run as it is.

    What is swapped are the patterns of these names, or whatever is, where all of it is faster.

    Attributes:
        report: of what was swapped.
        saved: the tensors that the forward saves beside its inputs.
    """

    def __init__(self, model: nn.Module, swap: Sequence[str] | None) -> None:
        self.report = CompileReport()
        self.saved: list[Tensor] = []
        chooser: Chooser = Timed(self.report, Times(1.0, 2.0))
        if swap is not None:
            chooser = Asked(settings_of(None, {"swap": swap}), self.report, lambda _: {})
        compile_both = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=self._divide,
            decompositions=select_decomp_table(),
        )

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            rewrite(module, PATTERNS, chooser, self.report)
            return compile_both(module, inputs)

        torch._dynamo.reset()
        self._compiled = torch.compile(model, backend=backend, fullgraph=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compiled(x)

    @property
    def saved_bytes(self) -> int:
        """Those of large tensors, and no copies of weights; several may have one memory."""
        large = [one for one in self.saved if one.numel() > LARGE]
        memory = {one.untyped_storage()._cdata: one.untyped_storage() for one in large}
        return sum(one.nbytes() for one in memory.values())

    def _divide(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        given = {node.name for node in forward.graph.find_nodes(op="placeholder")}
        for node in backward.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            is_saved = not node.name.startswith("tangents") and node.name not in given
            if is_saved and isinstance(value, Tensor):
                self.saved.append(value)
        return forward, backward


def _beginning(kernel: int, padding: int) -> Callable[[], nn.Module]:
    """Of a network for images: a convolution in steps of two, and one behind it."""
    return lambda: nn.Sequential(
        nn.Conv2d(3, 16, kernel, 2, padding, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 8, 3, padding=1, bias=False),
    )


BEGINNINGS: dict[str, Callable[[], nn.Module]] = {
    "ResNet's": _beginning(7, 3),
    "EfficientNet's": _beginning(3, 1),
    "even kernel": _beginning(4, 1),
}


def _compared(
    make: Callable[[], nn.Module], x: Tensor, swap: Sequence[str] | None = None
) -> list[Partitioned]:
    """With our operators and without; both give the same."""
    torch.manual_seed(0)
    stock = make().double().train()
    model = copy.deepcopy(stock)
    both = Partitioned(model, swap), Partitioned(stock, [])
    results = [one(x.double()) for one in both]
    torch.testing.assert_close(*results)
    for out in results:
        out.sin().sum().backward()
    for mine, right in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    return list(both)


@pytest.mark.parametrize("name", BEGINNINGS)
def test_squares_of_images_are_computed_again(name):
    """An image is an input, and its squares, with zeros around them, are larger than it is."""
    ours, stock = _compared(BEGINNINGS[name], torch.randn(5, 3, 32, 24), ["convolution"])
    assert [one.note for one in ours.report.swapped][-1] == "by squares of 2 x 2 pixels"
    assert ours.saved_bytes == stock.saved_bytes


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("size", "again"), [(8, True), (96, False)])
def test_copies_of_weights_are_computed_again_where_they_are_many(size, again, groups):
    """Those with channels last, and with zeros between groups; beside large images they are few."""

    def make() -> nn.Module:
        convs = [nn.Conv2d(32, 32, 3, groups=groups, bias=False) for _ in range(3)]
        return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.Softsign())))

    x = torch.randn(4, 32, size, size).to(memory_format=torch.channels_last)
    ours, stock = _compared(make, x)
    assert {one.pattern for one in ours.report.swapped} == {"convolution"}
    assert (ours.saved_bytes == stock.saved_bytes) is again


def _of_resnet() -> nn.Module:
    """Up to the convolution that keeps what its first stage gives."""
    model = torchvision.models.resnet50()
    first = model.conv1, model.bn1, model.relu, model.maxpool, model.layer1
    return nn.Sequential(*first, model.layer2[0].conv1)


def _of_regnet() -> nn.Module:
    """Up to the convolution that keeps what its first stage gives."""
    model = torchvision.models.regnet_y_400mf()
    return nn.Sequential(model.stem, model.trunk_output[0], model.trunk_output[1][0].proj[0])


PARTS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": _of_resnet,
    "EfficientNet-B0": lambda: torchvision.models.efficientnet_b0().features[:3],
    "ConvNeXt-T": lambda: torchvision.models.convnext_tiny().features[:2],
    "RegNetY-400MF": _of_regnet,
}


@pytest.mark.parametrize("name", PARTS)
def test_models_save_no_more(name):
    """Up to the copies of weights, which are large here."""
    ours, stock = _compared(PARTS[name], torch.randn(8, 3, 64, 64))
    assert ours.report.swapped
    assert ours.saved_bytes <= 1.02 * stock.saved_bytes
