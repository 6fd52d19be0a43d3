"""Transposed convolutions with bias and activation, as decoders have them: GPU time.

bf16, channels last, torch.backends.cudnn.benchmark on: torch picks its engines by measuring, and so
do we. The forward without a gradient, beside the bare transposed convolution, and a training step's
backward with all gradients. `--only` measures some groups of cases and adds their rows to the file.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_conv import BARE, GRADIENT_TOLERANCE, add, verify
from benchmarks.harness import OURS, Rows, main
from cudnn_ops.ops.activation import Activation, activate


class Case(NamedTuple):
    group: str
    batch: int
    channels: int
    size: tuple[int, ...]
    out_channels: int
    kernel: int
    stride: int
    padding: int = 0
    activation: Activation = "none"

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        numbers = (self.batch, self.channels, size, self.out_channels)
        steps = (self.kernel, self.stride, self.padding)
        return f"{self.group} {','.join(map(str, (*numbers, *steps)))} {self.activation}"

    @property
    def name(self) -> str:
        return f"conv_transpose{len(self.size)}d"


CASES = (
    # U-Net: each level up, with nothing behind the bias.
    *(
        Case("U-Net", 8, 2 * channels, (size, size), channels, 2, 2)
        for channels, size in ((512, 32), (256, 64), (128, 128), (64, 256))
    ),
    # DCGAN: batch norm folded, then ReLU; the last one gives three channels.
    Case("DCGAN", 128, 100, (1, 1), 1024, 4, 1, 0, "relu"),
    *(
        Case("DCGAN", 128, 2 * channels, (size, size), channels, 4, 2, 1, "relu")
        for channels, size in ((512, 4), (256, 8), (128, 16))
    ),
    Case("DCGAN", 128, 128, (32, 32), 3, 4, 2, 1),
    # Heads of Mask R-CNN and of pose estimation.
    Case("heads", 512, 256, (14, 14), 256, 2, 2, 0, "relu"),
    Case("heads", 32, 256, (32, 24), 256, 4, 2, 1, "relu"),
    # HiFi-GAN's and EnCodec's upsampling of audio; leaky ReLU is before the next one.
    Case("audio", 16, 512, (32,), 256, 16, 8, 4, "leaky_relu"),
    Case("audio", 16, 256, (256,), 128, 16, 8, 4, "leaky_relu"),
    Case("audio", 16, 128, (2048,), 64, 4, 2, 1, "leaky_relu"),
    Case("audio", 16, 512, (150,), 256, 16, 8),
    Case("audio", 16, 64, (12_000,), 32, 4, 2),
    # 3d U-Net.
    Case("volume", 2, 320, (8, 8, 8), 256, 2, 2),
    Case("volume", 2, 128, (32, 32, 32), 64, 2, 2),
    Case("volume", 2, 64, (64, 64, 64), 32, 2, 2, 0, "relu"),
)
PARTS = tuple(dict.fromkeys(case.group for case in CASES))


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    for case in CASES:
        if case.group == part:
            measure(case, rows, max(rounds // 3, 1))


def ours(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    function = getattr(cudnn_ops, case.name)
    out: Tensor = function(x, weight, bias, case.stride, case.padding, activation=case.activation)
    return out


def by_torch(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = getattr(F, case.name)(x, weight, bias, case.stride, case.padding)
    return activate(out, case.activation)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias, images with their channels last."""

    def draw(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")
        # Rows of audio come with the length last.
        if len(sizes) < 4:
            return values
        last = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
        return values.contiguous(memory_format=last)

    kernel = (case.kernel,) * len(case.size)
    x = draw(case.batch, case.channels, *case.size)
    weight = draw(case.channels, case.out_channels, *kernel)
    weight = weight / (weight[:, 0].numel() / case.stride ** len(case.size)) ** 0.5
    return x, weight, draw(case.out_channels)


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    leaves = tensors(case)
    for leaf in leaves:
        leaf.requires_grad_()
    torch._dynamo.reset()  # one function's shapes would run into its limit of recompilations
    eager = partial(by_torch, case)
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: partial(ours, case),
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
    }
    with torch.no_grad():
        verify(str(case), {name: [function(*leaves)] for name, function in functions.items()})
        forward: dict[str, Callable[[], object]] = {
            name: partial(function, *leaves) for name, function in functions.items()
        }
        bare = leaves[0].detach(), leaves[1].detach(), None, case.stride, case.padding
        forward[BARE] = partial(getattr(F, case.name), *bare)
        add(f"{case} fwd", forward, rows, rounds)
    outs = {name: function(*leaves) for name, function in functions.items()}
    grad = torch.randn_like(outs["eager"])
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        name: partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
        for name, out in outs.items()
        if name != "compile"  # which frees what it saved
    }
    gradients = {name: list(function()) for name, function in backward.items()}
    verify(str(case), gradients, GRADIENT_TOLERANCE)
    add(f"{case} bwd", backward, rows, rounds)


if __name__ == "__main__":
    main("conv_transpose", run, run_part, PARTS)
