"""Depthwise convolutions, forward and backward: GPU time beside that of a copy.

bf16, channels last, with a bias. The backward computes the gradients of input, weight and bias. A
copy reads a tensor like the input and writes it, as a forward of stride 1 must.

`--only steps` measures each step alone, without a bias: "kernel" is ours, whether or not it is what
a call runs, and "torch" is torch's bare one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_norms import verify
from benchmarks.harness import OURS, Rows, gpu_ms, main

_ops = torch.ops.cudnn_ops
#: csrc's ConvStep, in its order, and how its DepthwiseUse is counted.
STEPS = ("forward", "gradient of the input", "gradient of the weight")
MEASURED, ALWAYS = 0, 2


class Case(NamedTuple):
    group: str
    batch: int
    channels: int
    size: tuple[int, ...]
    kernel: int
    stride: int = 1
    dilation: int = 1
    is_causal: bool = False
    """Of one dimension, with all zeros before the input."""

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        taps = "x".join([str(self.kernel)] * len(self.size))
        parts = [self.group, f"{self.batch},{self.channels},{size}", f"k{taps}"]
        parts += [f"s{self.stride}"] * (self.stride > 1) + [f"d{self.dilation}"] * (
            self.dilation > 1
        )
        return " ".join(parts + ["causal"] * self.is_causal)

    @property
    def options(self) -> tuple[int, int, int, int]:
        """Stride, padding, dilation and groups."""
        reach = self.dilation * (self.kernel - 1)
        padding = reach if self.is_causal else reach // 2
        return self.stride, padding, self.dilation, self.channels

    @property
    def function(self) -> str:
        return f"conv{len(self.size)}d"


def images(group: str, batch: int, *shapes: tuple[int, ...]) -> tuple[Case, ...]:
    """Square ones, by channels, pixels to a side, the kernel's size, and stride and dilation."""
    cases = []
    for channels, side, kernel, *rest in shapes:
        stride, dilation = (*rest, 1, 1)[:2]
        cases.append(Case(group, batch, channels, (side, side), kernel, stride, dilation))
    return tuple(cases)


CASES = (
    # Tiny, base and large, each at its four resolutions.
    *images("ConvNeXt", 64, (96, 56, 7), (192, 28, 7), (384, 14, 7), (768, 7, 7)),
    *images("ConvNeXt", 64, (128, 56, 7), (256, 28, 7), (512, 14, 7), (1024, 7, 7)),
    *images("ConvNeXt", 1, (128, 56, 7), (512, 14, 7)),
    *images("EfficientNet", 32, (32, 112, 3), (96, 112, 3, 2), (144, 56, 3), (144, 56, 5, 2)),
    *images("EfficientNet", 32, (240, 28, 5), (240, 28, 3, 2), (480, 14, 3), (480, 14, 5)),
    *images("EfficientNet", 32, (672, 14, 5), (672, 14, 5, 2), (1152, 7, 5), (1152, 7, 3)),
    *images("MobileNet", 64, (32, 112, 3), (96, 112, 3, 2), (144, 56, 3), (144, 56, 3, 2)),
    *images("MobileNet", 64, (192, 28, 3), (192, 28, 3, 2), (384, 14, 3), (576, 14, 3, 2)),
    *images("MobileNet", 64, (960, 7, 3), (72, 56, 5, 2), (120, 28, 5), (960, 7, 5)),
    *images("other", 32, (128, 56, 31), (384, 14, 13), (256, 28, 9)),
    *images("other", 8, (256, 64, 3, 1, 2), (33, 40, 3), (64, 64, 7, 2)),
    Case("volumes", 2, 64, (16, 28, 28), 3),
    Case("volumes", 2, 64, (16, 28, 28), 3, 2),
    Case("rows", 8, 2048, (2048,), 4, is_causal=True),
    Case("rows", 1, 4096, (8192,), 4, is_causal=True),
)
MODELS = tuple(dict.fromkeys(case.group for case in CASES))
PARTS = (*MODELS, "steps")


def run(rows: Rows, rounds: int) -> None:
    for part in MODELS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    rounds = max(rounds // 5, 1)
    torch.manual_seed(0)
    if part == "steps":
        for case in CASES:
            if len(case.size) > 1:
                measure_steps(case, rows, rounds)
        return
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for case in CASES:
            if case.group == part:
                measure(case, rows, rounds)


def random_last(*sizes: int) -> Tensor:
    """With the channels last in memory."""
    batch, channels, *size = sizes
    values = torch.randn(batch, *size, channels, dtype=torch.bfloat16, device="cuda")
    return values.movedim(-1, 1)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias."""
    taps = (case.kernel,) * len(case.size)
    weight = torch.randn(case.channels, 1, *taps, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(case.channels, dtype=torch.bfloat16, device="cuda")
    leaves = random_last(case.batch, case.channels, *case.size), weight, bias
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    return x, weight, bias


def convolve(case: Case, module: object, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By torch's function, or by ours of the same name."""
    out: Tensor = getattr(module, case.function)(x, weight, bias, *case.options)
    return out[..., : x.shape[-1]] if case.is_causal else out


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    leaves = tensors(case)
    # One function's shapes would run into dynamo's limit of recompilations.
    torch._dynamo.reset()
    eager = partial(convolve, case, F)
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: partial(convolve, case, cudnn_ops),
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
    }
    forward: dict[str, Callable[[], object]] = {
        name: partial(f, *leaves) for name, f in functions.items()
    }
    backward: dict[str, Callable[[], object]] = {}
    expected: tuple[Tensor, ...] = ()
    grad_out = random_last(*eager(*leaves).shape)
    for name, function in functions.items():
        out = function(*leaves)
        grad = partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
        results = (out, *grad())
        expected = expected or results
        verify(f"{case}: {name}", results, expected)
        backward[name] = grad
    data, target = leaves[0].detach(), torch.empty_like(leaves[0])
    for which, timed in (("fwd", forward), ("bwd", backward)):
        timed["copy"] = partial(target.copy_, data)
        for name, ms in gpu_ms(timed, rounds=rounds).items():
            rows.add(f"{case} {which}", name, "gpu_ms", ms)


@contextmanager
def our_kernels() -> Iterator[None]:
    """For every step of depthwise convolutions."""
    for step in range(len(STEPS)):
        _ops._conv_use_depthwise(step, ALWAYS)
    try:
        yield
    finally:
        for step in range(len(STEPS)):
            _ops._conv_use_depthwise(step, MEASURED)


def measure_steps(case: Case, rows: Rows, rounds: int) -> None:
    """Our kernel of each step and torch's, whatever the choice is between them."""
    x, weight, _ = tensors(case)
    data = x.detach(), weight.detach(), None
    modules = {"kernel": cudnn_ops, "torch": F}
    with our_kernels():
        outs = {name: convolve(case, module, x, weight, None) for name, module in modules.items()}
        grad_out = random_last(*outs["torch"].shape)
        steps: dict[str, dict[str, Callable[[], object]]] = {
            STEPS[0]: {
                name: partial(convolve, case, module, *data) for name, module in modules.items()
            }
        }
        for step, leaf in zip(STEPS[1:], (x, weight), strict=True):
            steps[step] = {
                name: partial(torch.autograd.grad, out, leaf, grad_out, retain_graph=True)
                for name, out in outs.items()
            }
        for step, functions in steps.items():
            for name, ms in gpu_ms(functions, rounds=rounds).items():
                rows.add(f"{case} {step}", name, "gpu_ms", ms)


if __name__ == "__main__":
    main("depthwise", run, run_part, PARTS)
