"""Group norm and batch norm of images: GPU time beside that of a copy.

bf16, with SiLU or ReLU behind the norm where a case's name says so; a training forward, and the
backward with the gradients of weight and bias. A copy reads one tensor and writes one, as a forward
must; a backward must read two and write one.

Batch norms have float32 parameters and running statistics, and where a case's name says "sum" a
residual. Their plans are made before they are timed.

`--only` measures some groups of cases and adds their rows to the file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_norms import random_tensor, verify
from benchmarks.harness import OURS, Rows, gpu_ms, main
from cudnn_ops.ops.batch_norm import BatchNormActivation
from cudnn_ops.ops.group_norm import NormActivation

#: Nothing goes through a ReLU so near to its edge.
_EDGE = 0.05
_ENDINGS: tuple[tuple[bool, BatchNormActivation], ...] = (
    (False, "none"),
    (False, "relu"),
    (True, "relu"),
)


class Case(NamedTuple):
    group: str
    shape: tuple[int, ...]
    groups: int = 32
    is_last: bool = True
    activation: NormActivation = "silu"

    def __str__(self) -> str:
        order = "channels last" if self.is_last else "channels first"
        ending = "" if self.activation == "none" else f" {self.activation}"
        return f"{self.group} {','.join(map(str, self.shape))} by {self.groups} {order}{ending}"


class BatchCase(NamedTuple):
    group: str
    shape: tuple[int, ...]
    is_last: bool = True
    adds: bool = False
    activation: BatchNormActivation = "none"

    def __str__(self) -> str:
        order = "channels last" if self.is_last else "channels first"
        ending = " sum" * self.adds + (" relu" if self.activation == "relu" else "")
        return f"{self.group} {','.join(map(str, self.shape))} {order}{ending}"


def in_both_orders(*cases: Case) -> tuple[Case, ...]:
    return tuple(case._replace(is_last=is_last) for case in cases for is_last in (True, False))


#: U-Nets and decoders of Stable Diffusion 1.5 and XL, other shapes, and the odd ones.
CASES = (
    *in_both_orders(
        Case("U-Net", (8, 320, 64, 64)),
        Case("U-Net", (8, 640, 32, 32)),
        Case("U-Net", (8, 1280, 16, 16)),
        Case("U-Net", (8, 1280, 8, 8)),
        Case("U-Net", (2, 320, 128, 128)),
        Case("U-Net", (2, 960, 64, 64)),
        Case("U-Net", (2, 1920, 32, 32)),
        Case("decoder", (1, 512, 128, 128)),
        Case("decoder", (1, 512, 256, 256)),
        Case("decoder", (1, 256, 512, 512)),
        Case("decoder", (1, 128, 1024, 1024)),
        Case("other", (1, 512, 256, 256), activation="none"),
        Case("other", (1, 64, 32, 128, 128), 8),
        Case("other", (32, 256, 56, 56)),
        Case("other", (4, 64, 256, 256), 64, activation="none"),
        Case("other", (16, 256, 64, 64), 1, activation="none"),
        Case("odd", (256, 256, 7, 7)),
        Case("odd", (2, 36, 251, 333), 9),
    ),
    Case("small", (1, 320, 8, 8)),
    Case("small", (256, 512), is_last=False),
    Case("small", (2, 64, 16, 16), is_last=False, activation="none"),
)
#: ResNet-50's at batch 256, those of RegNet and EfficientNet, other orders and types of models.
BATCH_SHAPES = (
    (256, 64, 112, 112),
    (256, 64, 56, 56),
    (256, 256, 56, 56),
    (256, 128, 28, 28),
    (256, 512, 28, 28),
    (256, 256, 14, 14),
    (256, 1024, 14, 14),
    (256, 512, 7, 7),
    (256, 2048, 7, 7),
    (64, 440, 14, 14),
    (128, 96, 56, 56),
    (32, 64, 56, 56),
)
BATCH_CASES = (
    *(
        BatchCase("batch norm", shape, adds=adds, activation=activation)
        for shape in BATCH_SHAPES
        for adds, activation in _ENDINGS
    ),
    BatchCase("batch norm", (256, 64, 56, 56), is_last=False, adds=True, activation="relu"),
    BatchCase("batch norm", (64, 35, 56, 56), activation="relu"),
    BatchCase("batch norm", (4, 64, 16, 56, 56), activation="relu"),
    BatchCase("batch norm", (8192, 1024), is_last=False, activation="relu"),
)
PARTS = (*dict.fromkeys(case.group for case in CASES), "batch norm")


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    rounds = max(rounds // 5, 1)  # as for the other norms
    torch.manual_seed(0)
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for case in CASES:
            if case.group == part:
                measure(case, rows, rounds)
        for batch_case in BATCH_CASES:
            if batch_case.group == part:
                measure_batch_norm(batch_case, rows, rounds)


def image(case: Case | BatchCase) -> Tensor:
    samples, channels, *size = case.shape
    if not case.is_last:
        return random_tensor(*case.shape)
    return random_tensor(samples, *size, channels).movedim(-1, 1)


def in_torch(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.group_norm(x, case.groups, weight, bias)
    return F.silu(out) if case.activation == "silu" else out


def ours(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return cudnn_ops.group_norm(x, case.groups, weight, bias, activation=case.activation)


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    leaves = [image(case), *(random_tensor(case.shape[1]) for _ in range(2))]
    steps = partial(ours, case), partial(in_torch, case)
    time_steps(case, *steps, leaves, [], image(case), rows, rounds)


def batch_norm_in_torch(case: BatchCase, *tensors: Tensor) -> Tensor:
    x, weight, bias, *residual, mean, var = tensors
    out = F.batch_norm(x, mean, var, weight, bias, True)
    if case.adds:
        out = out + residual[0]
    return out.relu() if case.activation == "relu" else out


def batch_norm_ours(case: BatchCase, *tensors: Tensor) -> Tensor:
    x, weight, bias, *residual, mean, var = tensors
    return cudnn_ops.batch_norm(
        x,
        mean,
        var,
        weight,
        bias,
        training=True,
        residual=residual[0] if case.adds else None,
        activation=case.activation,
    )


def measure_batch_norm(case: BatchCase, rows: Rows, rounds: int) -> None:
    """Likewise, by the plans that a size has that is called often."""
    parameters = [random_tensor(case.shape[1]).float() for _ in range(2)]
    running = [torch.zeros_like(parameters[0]), torch.ones_like(parameters[0])]
    leaves = [image(case), *parameters, *([image(case)] if case.adds else [])]
    grad_out = image(case)
    if case.activation == "relu":
        # Where rounding decides what ReLU lets pass, implementations differ.
        before = batch_norm_in_torch(case._replace(activation="none"), *leaves, *running)
        grad_out[before.abs() < _EDGE] = 0
    steps = partial(batch_norm_ours, case), partial(batch_norm_in_torch, case)
    with cudnn_ops.using_plan_policy("exact"):
        time_steps(case, *steps, leaves, running, grad_out, rows, rounds)


def time_steps(
    case: object,
    of_ours: Callable[..., Tensor],
    of_torch: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    running: Sequence[Tensor],
    grad_out: Tensor,
    rows: Rows,
    rounds: int,
) -> None:
    """Check every implementation against ours, then add the rows of forward and backward.

    They are called with the tensors and what they change, of which each backward has its own.
    """
    leaves = [tensor.requires_grad_() for tensor in tensors]
    # One function's shapes would run into dynamo's limit of recompilations.
    torch._dynamo.reset()
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: of_ours,
        "eager": of_torch,
        "compile": torch.compile(of_torch, dynamic=False),
    }
    forward: dict[str, Callable[[], object]] = {
        name: partial(f, *leaves, *running) for name, f in functions.items()
    }
    backward: dict[str, Callable[[], object]] = {}
    expected: tuple[Tensor, ...] = ()
    for name, function in functions.items():
        out = function(*leaves, *(statistic.clone() for statistic in running))
        grad = partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
        results = (out, *grad())
        expected = expected or results
        verify(f"{case}: {name}", results, expected)
        backward[name] = grad
    data = leaves[0].detach()
    target = torch.empty_like(data)
    for which, timed in (("fwd", forward), ("bwd", backward)):
        timed["copy"] = partial(target.copy_, data)
        for name, ms in gpu_ms(timed, rounds=rounds).items():
            rows.add(f"{case} {which}", name, "gpu_ms", ms)


if __name__ == "__main__":
    main("image_norms", run, run_part, PARTS)
