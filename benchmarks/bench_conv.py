"""Convolutions with their epilogue fused, beside the bare convolution: GPU time.

bf16, channels last, torch.backends.cudnn.benchmark on: torch picks its engines by measuring, and so
do we. The forward without a gradient, and a training step's backward; then patch embedding. Then
geometries of every kind beside eager, each by the engine that cuDNN's heuristics name first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from benchmarks.conv_geometries import IMAGES, ROWS, Geometry, is_slower, steps
from benchmarks.harness import OURS, Functions, Rows, gpu_ms, main
from cudnn_ops.ops.activation import Activation

# Of two results, as a share of the first one's norm. A ReLU of what rounds to another sign passes
# on another gradient, whole or not at all.
TOLERANCE, GRADIENT_TOLERANCE = 2e-2, 1e-1
BARE = "conv alone"


class Shape(NamedTuple):
    batch: int
    channels: int
    size: int
    out_channels: int
    kernel: int
    stride: int
    padding: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Epilogue(NamedTuple):
    name: str
    activation: Activation
    has_residual: bool = False


SHAPES = (
    Shape(32, 64, 56, 64, 3, 1, 1),
    Shape(32, 256, 56, 64, 1, 1, 0),
    Shape(32, 128, 28, 128, 3, 1, 1),
    Shape(32, 512, 7, 512, 3, 1, 1),
    Shape(32, 256, 14, 1024, 1, 1, 0),
)
EPILOGUES = (
    Epilogue("bias + relu", "relu"),
    Epilogue("bias + silu", "silu"),
    Epilogue("bias + residual + relu", "relu", has_residual=True),
)
PATCHES = Shape(64, 3, 224, 768, 16, 16, 0)


PARTS = ("epilogues", "rows", "images")


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    torch.manual_seed(0)
    rounds = max(rounds // 3, 1)
    if part == "epilogues":
        measure_epilogues(rows, rounds)
    else:
        measure_geometries(ROWS if part == "rows" else IMAGES, rows, rounds)


def measure_epilogues(rows: Rows, rounds: int) -> None:
    torch.backends.cudnn.benchmark = True
    for shape in SHAPES:
        for epilogue in EPILOGUES:
            measure(f"{shape} {epilogue.name}", shape, epilogue, rows, rounds)
    measure(f"{PATCHES} patches", PATCHES, Epilogue("bias", "none"), rows, rounds)


def measure_geometries(geometries: Sequence[Geometry], rows: Rows, rounds: int) -> None:
    torch.backends.cudnn.benchmark = False
    for geometry in geometries:
        for step, functions in steps(geometry).items():
            verify(f"{geometry}: {step}", results(functions), GRADIENT_TOLERANCE)
            for more in (1, 3, 9):  # what is slower by chance is so for once
                ms = gpu_ms(functions, rounds=more * rounds)
                if not is_slower(ms):
                    break
            for name, value in ms.items():
                rows.add(f"{geometry}: {step}", name, "gpu_ms", value)
            if is_slower(ms):
                print(f"slower than torch's: {geometry}: {step}: {ms}")


def results(functions: Functions) -> dict[str, list[Tensor]]:
    """What each returns, a tensor or several."""
    found = {name: function() for name, function in functions.items()}
    return {
        name: [value] if isinstance(value, Tensor) else list(cast(tuple[Tensor, ...], value))
        for name, value in found.items()
    }


def measure(case: str, shape: Shape, epilogue: Epilogue, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    leaves, bare = tensors(shape, epilogue.has_residual)
    geometry = {"stride": shape.stride, "padding": shape.padding}
    eager = partial(by_torch, epilogue.activation, geometry)
    torch._dynamo.reset()  # one function's shapes would run into its limit of recompilations
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: partial(ours, epilogue.activation, geometry),
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
    }
    with torch.no_grad():
        forward: dict[str, Callable[[], object]] = {
            name: partial(function, *leaves) for name, function in functions.items()
        }
        verify(case, {name: [function(*leaves)] for name, function in functions.items()})
        forward[BARE] = partial(F.conv2d, *bare, **geometry)
        add(f"{case} fwd", forward, rows, rounds)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    outs = {name: function(*leaves) for name, function in functions.items()}
    grad = torch.randn_like(outs["eager"])
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        name: partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)
        for name, out in outs.items()
        if name != "compile"  # which frees what it saved
    }
    gradients = {name: list(function()) for name, function in backward.items()}
    verify(case, gradients, GRADIENT_TOLERANCE)
    add(f"{case} bwd", backward, rows, rounds)


def tensors(
    shape: Shape, has_residual: bool
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor]]:
    """Input, weight, bias and residual, all with their channels last; and the first two alone."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")

    def image(*sizes: int) -> Tensor:
        return draw(*sizes).contiguous(memory_format=torch.channels_last)

    x = image(shape.batch, shape.channels, shape.size, shape.size)
    weight = image(shape.out_channels, shape.channels, shape.kernel, shape.kernel)
    weight = weight / (weight[0].numel() ** 0.5)
    size = (shape.size + 2 * shape.padding - shape.kernel) // shape.stride + 1
    residual = image(shape.batch, shape.out_channels, size, size) if has_residual else None
    leaves = (x, weight, draw(shape.out_channels), residual)
    for leaf in leaves:
        # Of an image in a batch no gradient is wanted.
        if leaf is not None and not (leaf is x and shape.channels == 3):
            leaf.requires_grad_()
    return leaves, (x.detach(), weight.detach())


def ours(
    activation: Activation,
    geometry: dict[str, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
) -> Tensor:
    return cudnn_ops.conv2d(
        x,
        weight,
        bias,
        geometry["stride"],
        geometry["padding"],
        activation=activation,
        residual=residual,
    )


def by_torch(
    activation: Activation,
    geometry: dict[str, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
) -> Tensor:
    out = F.conv2d(x, weight, bias, **geometry)
    if residual is not None:
        out = out + residual
    if activation == "none":
        return out
    return F.relu(out) if activation == "relu" else F.silu(out)


def verify(case: str, results: dict[str, list[Tensor]], tolerance: float = TOLERANCE) -> None:
    """Raise unless all results are those of ours."""
    for name, found in results.items():
        for place, (result, wanted) in enumerate(zip(found, results[OURS], strict=True)):
            error = float((result.float() - wanted.float()).norm())
            allowed = tolerance * float(wanted.float().norm())
            if not error <= allowed:  # written so that NaN fails
                raise RuntimeError(f"{case}: {name} differs in result {place}: {error:.2g}")


def add(case: str, functions: Functions, rows: Rows, rounds: int) -> None:
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)


if __name__ == "__main__":
    main("conv", run, run_part, PARTS)
