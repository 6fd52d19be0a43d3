"""Runs the kernels of grouped convolutions, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.grouped_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

import cudnn_ops
from cudnn_ops.ops.activation import Activation
from tests.deviceless.cpu_kernels import Kernels, copy_on_the_cpu, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops


class Case(NamedTuple):
    """A convolution: batch and size, groups, channels of one and its outputs, the kernel."""

    sizes: tuple[int, int, int]
    groups: int
    width: int
    outputs: int
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    bias: bool = True
    residual: bool = False
    activation: Activation = "relu"


CASES = (
    Case((2, 9, 7), 2, 56, 56),
    Case((1, 14, 14), 3, 16, 24, stride=(2, 2), activation="none", bias=False),
    Case((2, 8, 8), 2, 8, 8, padding=(2, 2), dilation=(2, 2), residual=True, activation="silu"),
    Case((1, 10, 13), 2, 24, 72, (1, 3), (1, 2), (0, 1), activation="gelu"),
    Case((1, 7, 7), 2, 112, 120, activation="hardswish"),
    Case((3, 5, 6), 2, 232, 64, (2, 2), padding=(0, 0), activation="leaky_relu"),
    Case((1, 12, 12), 4, 32, 32, (5, 5), padding=(2, 2), activation="relu6"),
    Case((1, 12, 12), 2, 48, 40, stride=(2, 1), residual=True, activation="gelu_tanh"),
    Case((1, 1, 1), 2, 64, 64),
    Case((2, 9, 10), 2, 24, 40, stride=(2, 2), bias=False, activation="none"),
    Case((1, 7, 8), 2, 16, 16, (3, 2), (2, 1), (0, 3), bias=False, activation="none"),
    Case((1, 7, 8), 2, 8, 24, (1, 1), (2, 2), (0, 0), bias=False, activation="none"),
    Case((5, 6, 6), 2, 40, 200, (1, 1), padding=(0, 0), bias=False),
)
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
}


def draw(dtype: torch.dtype, *sizes: int) -> Tensor:
    x = torch.randn(sizes, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def check_forward(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the input and the weight."""
    torch.manual_seed(0)
    batch, *size = case.sizes
    x = draw(dtype, batch, case.groups * case.width, *size)
    weight = draw(dtype, case.groups * case.outputs, case.width, *case.kernel)
    bias = draw(dtype, case.groups * case.outputs) if case.bias else None
    geometry = case.stride, case.padding, case.dilation, case.groups
    exact = F.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), *geometry
    )
    residual = draw(dtype, *exact.shape) if case.residual else None
    if residual is not None:
        exact = exact + residual.double()
    exact = ACTIVATIONS[case.activation](exact)
    found = cudnn_ops.conv2d(
        to_gpu(x),
        to_gpu(weight),
        None if bias is None else to_gpu(bias),
        *geometry,
        activation=case.activation,
        residual=None if residual is None else to_gpu(residual),
    )
    epsilon = torch.finfo(dtype).eps
    # Sums in float32 are rounded as well, which shows where results have as many digits.
    sums = F.conv2d(x.double().abs(), weight.double().abs(), None, *geometry).max().item()
    atol = epsilon * (sums if dtype == torch.float32 else 1)
    torch.testing.assert_close(from_gpu(found).double(), exact, rtol=2 * epsilon, atol=atol)
    return x, weight


def check_input_gradient(case: Case, dtype: torch.dtype, x: Tensor, weight: Tensor) -> None:
    geometry = case.stride, case.padding, case.dilation, case.groups
    numbers = _ops._conv_geometry(2, weight, *geometry)
    grad = draw(dtype, *F.conv2d(x, weight, None, *geometry).shape)
    of_input, *_ = _ops._conv_backward.default(
        to_gpu(grad), to_gpu(x), to_gpu(weight), None, numbers, 0, (True, False, False, False)
    )
    exact = conv2d_input(x.shape, weight.double(), grad.double(), *geometry)
    epsilon = torch.finfo(dtype).eps
    sums = conv2d_input(x.shape, weight.double().abs(), grad.double().abs(), *geometry).max().item()
    atol = epsilon * (sums if dtype == torch.float32 else 1)
    torch.testing.assert_close(from_gpu(of_input).double(), exact, rtol=2 * epsilon, atol=atol)


def run(case: Case, dtype: torch.dtype) -> None:
    x, weight = check_forward(case, dtype)
    geometry = case.stride, case.padding, case.dilation, case.groups
    numbers = _ops._conv_geometry(2, weight, *geometry)
    if _ops._conv_other_engine(x, weight, None, None, numbers, 0, 1)[0]:
        check_input_gradient(case, dtype, x, weight)


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("grouped_conv",))
    _ops._conv_use_grouped(2)
    copies = copy_on_the_cpu()
    called = product(CASES, (torch.half, torch.bfloat16))
    print(kernels.checked((one, partial(run, *one)) for one in called))
    del copies


if __name__ == "__main__":
    assert cudnn_ops
    main()
