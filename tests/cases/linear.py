"""Linear layers and pairs of them: the cases, their tensors, torch in float64 as the reference."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from tests.cases import sdpa
from tests.cases.conv import ACTIVATIONS as ACTIVATIONS
from tests.cases.conv import activate as activate

GATED = ("silu", "gelu", "gelu_tanh")
LAYOUTS = ("dense", "wide", "transposed", "expanded", "misaligned")


@dataclass(frozen=True)
class LinearCase:
    """Sizes and options of one call; ``leading`` is what the input has before its columns."""

    leading: tuple[int, ...]
    inputs: int
    outputs: int
    activation: str = "none"
    bias: bool = True
    residual: bool = False
    layout: str = "dense"
    """Of input, residual and gradient: see :func:`lay_out`. Weights can be transposed with them."""

    def __str__(self) -> str:
        options = "b" * self.bias + "r" * self.residual
        size = "x".join(map(str, self.leading))
        return f"{size}-{self.inputs}->{self.outputs}-{self.activation}-{options}-{self.layout}"


@dataclass(frozen=True)
class MlpCase:
    """Likewise of two layers."""

    leading: tuple[int, ...]
    inputs: int
    hidden: int
    outputs: int
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    layout: str = "dense"

    def __str__(self) -> str:
        size = "x".join(map(str, self.leading))
        name = f"gated_{self.activation}" if self.gated else self.activation
        options = "b" * self.bias
        sizes = f"{self.inputs}->{self.hidden}->{self.outputs}"
        return f"{size}-{sizes}-{name}-{options}-{self.layout}"


CASES = [
    LinearCase((33,), 64, 96),
    LinearCase((2, 7), 40, 24, "relu"),
    LinearCase((3, 5), 72, 128, "gelu_tanh"),
    LinearCase((5, 1, 13), 64, 64, "gelu"),
    LinearCase((130,), 128, 256, "silu"),
    LinearCase((), 32, 16, "gelu"),
    LinearCase((1,), 8, 8, "gelu_tanh", bias=False),
    LinearCase((17,), 33, 7, "gelu_tanh"),  # nothing is a multiple of 8
    LinearCase((9,), 16, 1, "silu"),
    LinearCase((9,), 1, 16, "relu", bias=False),
    LinearCase((65,), 48, 80, "none", residual=True),
    LinearCase((65,), 48, 80, "relu", residual=True),
    LinearCase((65,), 48, 80, "gelu_tanh", residual=True, bias=False),
    LinearCase((2, 3, 4), 48, 80, "gelu", residual=True),
    LinearCase((4, 6), 24, 40, "relu6"),
    LinearCase((4, 6), 24, 40, "hardswish"),
    LinearCase((4, 6), 24, 40, "leaky_relu"),
    *(LinearCase((6, 10), 40, 56, "gelu_tanh", layout=layout) for layout in LAYOUTS[1:]),
    *(LinearCase((6, 10), 40, 56, "silu", residual=True, layout=layout) for layout in LAYOUTS[1:]),
    # Without rows, outputs or inputs.
    LinearCase((0,), 16, 24, "gelu_tanh"),
    LinearCase((2, 0), 16, 24, "silu", residual=True),
    LinearCase((5,), 0, 24, "relu"),
    LinearCase((5,), 16, 0, "gelu"),
]
MLP_CASES = [
    *(MlpCase((2, 17), 24, 64, 40, activation) for activation in ACTIVATIONS),
    *(MlpCase((2, 17), 24, 64, 40, activation, gated=True) for activation in GATED),
    MlpCase((129,), 72, 136, 72, "gelu_tanh", bias=False),
    MlpCase((33,), 30, 17, 9, "gelu_tanh"),
    MlpCase((33,), 30, 17, 9, "silu", gated=True),
    MlpCase((), 16, 32, 8, "gelu"),
    *(MlpCase((3, 8), 16, 32, 8, "gelu_tanh", layout=layout) for layout in LAYOUTS[1:]),
    MlpCase((3, 8), 16, 32, 8, "silu", gated=True, layout="transposed"),
    MlpCase((0,), 16, 32, 8, "gelu_tanh"),
    MlpCase((4,), 0, 32, 8, "gelu_tanh"),
    MlpCase((4,), 16, 0, 8, "silu"),
    MlpCase((4,), 16, 32, 0, "silu", gated=True),
]

Case = LinearCase | MlpCase


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers, otherwise in memory.

    "wide" rows are a part of longer ones, "expanded" ones are one row, "misaligned" ones start at
    an address that is no multiple of 16 bytes.
    """
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "wide":
        beside = torch.full((*values.shape[:-1], 8), torch.nan).to(values)
        return torch.cat([values, beside], -1)[..., : values.shape[-1]]
    if layout == "expanded" and values.dim() > 1 and values.numel() > 0:
        return values.flatten(0, -2)[:1].expand(values[..., 0].numel(), -1).reshape(values.shape)
    if layout == "misaligned":
        memory = values.new_full((values.numel() + 1,), torch.nan)[1:]
        return memory.view(values.shape).copy_(values)
    return values


class Draw:
    """Random tensors, the same for a seed on every device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, layout: str = "dense", scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return lay_out(values.to(self.dtype).to(self.device), layout)

    def weight(self, outputs: int, inputs: int, layout: str = "dense") -> Tensor:
        layout = layout if layout == "transposed" else "dense"
        return self(outputs, inputs, layout=layout, scale=max(inputs, 1) ** -0.5)


def make(
    case: Case, dtype: torch.dtype, device: str, seed: int
) -> tuple[dict[str, Tensor | None], Tensor]:
    """The tensors of a call by their names, leaves that want a gradient; and the output's."""
    draw = Draw(dtype, device, seed)
    x = draw(*case.leading, case.inputs, layout=case.layout)
    tensors: dict[str, Tensor | None]
    if isinstance(case, LinearCase):
        out = (*case.leading, case.outputs)
        tensors = {
            "input": x,
            "weight": draw.weight(case.outputs, case.inputs, case.layout),
            "bias": draw(case.outputs) if case.bias else None,
            "residual": draw(*out, layout=case.layout) if case.residual else None,
        }
    else:
        out, rows = (*case.leading, case.outputs), (1 + case.gated) * case.hidden
        tensors = {
            "x": x,
            "w1": draw.weight(rows, case.inputs, case.layout),
            "b1": draw(rows) if case.bias else None,
            "w2": draw.weight(case.outputs, case.hidden, case.layout),
            "b2": draw(case.outputs) if case.bias else None,
        }
    leaves = {
        name: None if tensor is None else tensor.requires_grad_()
        for name, tensor in tensors.items()
    }
    return leaves, draw(*out, layout=case.layout)


def run(case: Case, t: dict[str, Any]) -> Tensor:
    activation: Any = case.activation
    if isinstance(case, LinearCase):
        return cudnn_ops.linear(**t, activation=activation)
    return cudnn_ops.mlp(**t, activation=activation, gated=case.gated)


def formula(case: Case, t: dict[str, Any]) -> Tensor:
    """By torch's functions."""
    if isinstance(case, LinearCase):
        out = activate(F.linear(t["input"], t["weight"], t["bias"]), case.activation)
        return out if t["residual"] is None else out + t["residual"]
    before = F.linear(t["x"], t["w1"], t["b1"])
    if case.gated:
        gate, up = before.chunk(2, -1)
        hidden = activate(gate, case.activation) * up
    else:
        hidden = activate(before, case.activation)
    return F.linear(hidden, t["w2"], t["b2"])


def reference(
    case: Case, tensors: dict[str, Tensor | None], grad_out: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients, computed in ``dtype`` by torch."""
    leaves = {
        name: None if tensor is None else tensor.detach().to(dtype).requires_grad_()
        for name, tensor in tensors.items()
    }
    out = formula(case, leaves)
    wanted = [leaf for leaf in leaves.values() if leaf is not None]
    return [out, *torch.autograd.grad(out, wanted, grad_out.to(dtype))]


def check(
    case: Case,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    within: AbstractContextManager[object] | None = None,
) -> None:
    """Output and gradients against float64; torch's own in the dtype is the yardstick.

    They are computed within a context, if there is one.
    """
    tensors, grad_out = make(case, dtype, device, seed)
    leaves = {name: leaf for name, leaf in tensors.items() if leaf is not None}
    with torch.no_grad():
        inference = run(case, tensors)
    with within or nullcontext():
        out = run(case, tensors)
        found = [out, *torch.autograd.grad(out, list(leaves.values()), grad_out)]
    assert out.is_contiguous()
    assert out.dtype == dtype
    exact = reference(case, tensors, grad_out, torch.float64)
    rough = reference(case, tensors, grad_out, dtype)
    sdpa.check(inference, exact[0], rough[0], f"{case} inference")
    for name, mine, right, other in zip(["out", *leaves], found, exact, rough, strict=True):
        sdpa.check(mine, right, other, f"{case} {name}")


def draw(rng: random.Random) -> Case:
    """Any sizes and options."""
    leading = tuple(rng.randint(1, 20) for _ in range(rng.choice([0, 1, 1, 2, 3])))
    inputs, hidden, outputs = (
        rng.choice([1, 8, 16, 24, 40, 64, 100, rng.randint(2, 150)]) for _ in range(3)
    )
    layout, bias = rng.choice(LAYOUTS), rng.random() < 0.7
    activation = rng.choice(ACTIVATIONS[:5])
    if rng.random() < 0.6:
        residual = rng.random() < 0.4
        return LinearCase(leading, inputs, outputs, activation, bias, residual, layout)
    gated = rng.random() < 0.4
    activation = rng.choice(GATED) if gated else activation
    return MlpCase(leading, inputs, hidden, outputs, activation, gated, bias, layout)


class Sums(TorchDispatchMode):
    """Inside it, how many products add a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.in_products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.cudnn_ops._linear.default:
            self.in_products += args[3] is not None
        return func(*args, **(kwargs or {}))
