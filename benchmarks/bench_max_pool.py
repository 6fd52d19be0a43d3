"""Max pooling of images, forward and backward: GPU time beside that of a copy.

A copy reads a tensor like the input and writes it. A forward in training reads the input and writes
the output and a byte for each of its numbers; the backward reads these and writes the input's
gradient.

`--only` measures some groups of cases and adds their rows to the file.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_image_norms import time_steps
from benchmarks.harness import Rows, main


class Case(NamedTuple):
    group: str
    shape: tuple[int, int, int, int]
    kernel: int
    stride: int
    padding: int = 0
    dtype: torch.dtype = torch.bfloat16
    is_last: bool = True

    def __str__(self) -> str:
        order = "channels last" if self.is_last else "channels first"
        ending = " float32" if self.dtype == torch.float32 else ""
        windows = f"{self.kernel}x{self.kernel} s{self.stride}"
        return f"{self.group} {','.join(map(str, self.shape))} {windows} {order}{ending}"


CASES = (
    Case("ResNet", (256, 64, 112, 112), 3, 2, 1),
    Case("ResNet", (64, 64, 112, 112), 3, 2, 1),
    Case("VGG", (32, 64, 224, 224), 2, 2),
    Case("VGG", (32, 512, 28, 28), 2, 2),
    Case("Inception", (8, 192, 28, 28), 3, 1, 1),
    Case("SPP", (1, 256, 64, 64), 13, 1, 6),
    Case("other", (64, 64, 112, 112), 3, 2, 1, torch.float32),
    Case("other", (64, 35, 112, 112), 3, 2, 1),
    Case("other", (64, 64, 112, 112), 3, 2, 1, is_last=False),
)
PARTS = tuple(dict.fromkeys(case.group for case in CASES))


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    rounds = max(rounds // 5, 1)
    torch.manual_seed(0)
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for case in CASES:
            if case.group == part:
                measure(case, rows, rounds)


def image(case: Case) -> Tensor:
    samples, channels, *size = case.shape
    if not case.is_last:
        return torch.randn(case.shape, dtype=case.dtype, device="cuda")
    values = torch.randn(samples, *size, channels, dtype=case.dtype, device="cuda")
    return values.movedim(-1, 1)


def pool(case: Case, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x, case.kernel, case.stride, case.padding)


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    x = image(case)
    steps = partial(pool, case, cudnn_ops.max_pool2d), partial(pool, case, F.max_pool2d)
    grad_out = torch.randn_like(pool(case, F.max_pool2d, x))
    time_steps(case, *steps, [x], [], grad_out, rows, rounds)


if __name__ == "__main__":
    main("max_pool", run, run_part, PARTS)
