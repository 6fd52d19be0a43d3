"""``python -m cudnn_ops bench``: an operator beside PyTorch's own, at shapes of the user's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops import _C, support
from cudnn_ops.ops.activation import Activation, activate
from cudnn_ops.plans.figure import figure_class
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.plans.timing import Functions, cpu_ms, gpu_ms
from cudnn_ops.plans.tune import random_like
from cudnn_ops.support import command_line

OURS, THEIRS = "cudnn_ops", "torch"
_ROUNDS = {"cuda": 20, "cpu": 5}
_DPI = 150


class Timing(NamedTuple):
    """Median time of one call in milliseconds."""

    case: str
    ours: float
    theirs: float


#: Given the operands, and as keywords the options of the command line.
Call = Callable[..., Tensor]


class Bench(NamedTuple):
    """An operator, PyTorch's own way to compute the same, and the options that both have."""

    ours: Call
    theirs: Call
    options: tuple[str, ...]


def _norm(norm: Call) -> Call:
    """A norm over the last dimension with a weight and, if asked for, a bias."""

    def call(input: Tensor, *parameters: Tensor) -> Tensor:
        return norm(input, input.shape[-1:], *parameters)

    return call


def _conv(conv: Call) -> Call:
    """PyTorch's convolution with the epilogue behind it."""

    def call(
        input: Tensor,
        weight: Tensor,
        *parameters: Tensor,
        activation: Activation = "none",
        residual: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        out = conv(input, weight, *parameters, **options)
        if residual is not None:
            out = out + residual
        return activate(out, activation)

    return call


def _attention(attention: Call) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return attention(query, key, value, enable_gqa=True, **options)

    return call


def _benches() -> dict[str, Bench]:
    functions = {name: operator.function for name, operator in support.OPERATORS.items()}
    epilogue = ("stride", "padding", "dilation", "groups", "activation", "bias", "residual")
    return (
        {
            "sdpa": Bench(
                _attention(functions["sdpa"]),
                _attention(F.scaled_dot_product_attention),
                ("is_causal",),
            ),
            "rms_norm": Bench(_norm(functions["rms_norm"]), _norm(F.rms_norm), ()),
            "layer_norm": Bench(_norm(functions["layer_norm"]), _norm(F.layer_norm), ("bias",)),
        }
        | {
            name: Bench(functions[name], _conv(getattr(F, name)), epilogue)
            for name in ("conv1d", "conv2d", "conv3d")
        }
        | {
            name: Bench(functions[name], _conv(getattr(F, name)), (*epilogue, "output_padding"))
            for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
        }
    )


BENCHES = _benches()


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Adds the command."""
    bench = commands.add_parser(
        "bench",
        help="time an operator beside PyTorch's own, at your shapes",
        description="Times forward and backward beside PyTorch's own operator, in turns, and "
        "prints milliseconds of one call: GPU time without the host's, or on a machine without a "
        "GPU that of the CPU kernels.",
    )
    operators = bench.add_subparsers(dest="op", required=True, metavar="operator")
    for name, entry in BENCHES.items():
        arguments = command_line.arguments_of(support.OPERATORS[name])
        command = operators.add_parser(name, description=bench.description)
        command_line.add_shapes(command, arguments, many=True)
        for option in arguments.options:
            if option.argument in entry.options:
                settings = {"default": argparse.SUPPRESS} | option.settings
                command.add_argument(*option.flags, dest=option.argument, **settings)
        command.add_argument("--inference", action="store_true", help="the forward alone")
        command.add_argument(
            "--device", choices=["cuda", "cpu"], help="(default: cuda where there is a GPU)"
        )
        command.add_argument(
            "--plot", type=Path, metavar="FILE", help="also draw it (needs matplotlib)"
        )
        command.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device cuda needs a GPU, and torch sees none")
    if args.plot:  # said before the measuring, not after
        figure = figure_class("--plot")
        if not args.plot.absolute().parent.is_dir():
            raise ValueError(f"--plot: {args.plot.absolute().parent} is not a folder")
    operator = support.OPERATORS[args.op]
    options = command_line.options(args, operator)
    title = _title(args.op, device)
    print(title)
    timings: list[Timing] = []
    for case, described in command_line.cases(args, command_line.arguments_of(operator)):
        drawn = [random_like(tensor, device) for tensor in _given(described)]
        operands, settings = _complete(args.op, drawn, dict(options))
        timings += measure(args.op, case, operands, settings, training=not args.inference)
    print(as_table(timings))
    if args.plot:
        draw(figure, timings, title, args.plot)
        print(f"plot: {args.plot}")
    return 0


def _given(described: list[Tensor | None]) -> list[Tensor]:
    """Where there is none, it is like the one before."""
    given: list[Tensor] = []
    for tensor in described:
        given.append(given[-1] if tensor is None else tensor)
    return given


def _complete(
    op: str, operands: list[Tensor], options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The operands with weight and bias, and the options with tensors where they were asked for."""
    first = operands[0]
    if op.endswith("_norm"):
        count = 2 if options.pop("bias", False) else 1
        return [first, *(torch.randn_like(first[0]) for _ in range(count))], options
    if op.startswith("conv"):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        memory_format = formats.get(first.dim(), torch.contiguous_format)
        operands = [tensor.contiguous(memory_format=memory_format) for tensor in operands]
        if options.pop("bias", False):
            weight = operands[1]
            channels = weight.shape[0]
            if "transpose" in op:
                channels = weight.shape[1] * options.get("groups", 1)
            operands.append(torch.randn(channels, dtype=first.dtype, device=first.device))
        if options.pop("residual", False):
            options["residual"] = torch.randn_like(BENCHES[op].theirs(*operands, **options))
    return operands, options


def measure(
    op: str, case: str, operands: list[Tensor], options: dict[str, Any], *, training: bool
) -> list[Timing]:
    """The forward alone, or a forward that a gradient follows and the backward."""
    if training:
        operands = [tensor.detach().requires_grad_() for tensor in operands]
    entry = BENCHES[op]
    calls: dict[str, Call] = {OURS: entry.ours, THEIRS: entry.theirs}
    forward = {name: partial(call, *operands, **options) for name, call in calls.items()}
    # Attention's second shape would run on a plan that serves both.
    policy = using_plan_policy("exact") if op == "sdpa" else nullcontext()
    with policy, torch.set_grad_enabled(training):
        timings = [_timing(f"{case} forward", forward, operands[0])]
        if training:
            outs = {name: call() for name, call in forward.items()}
            grad = torch.randn_like(outs[THEIRS])
            backward = {
                name: partial(torch.autograd.grad, out, operands, grad, retain_graph=True)
                for name, out in outs.items()
            }
            timings.append(_timing(f"{case} backward", backward, operands[0]))
    return timings


def _timing(case: str, functions: Functions, tensor: Tensor) -> Timing:
    clock = gpu_ms if tensor.is_cuda else cpu_ms
    ms = clock(functions, rounds=_ROUNDS[tensor.device.type])
    return Timing(case, ms[OURS], ms[THEIRS])


def as_table(timings: list[Timing]) -> str:
    """A line a case: both times, and PyTorch's over ours."""
    lines = [("", OURS, THEIRS, f"{THEIRS}/{OURS}")]
    for case, ours, theirs in timings:
        lines.append((case, f"{ours:#.4g}", f"{theirs:#.4g}", f"{theirs / ours:.2f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{case:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        for case, *cells in lines
    )


def draw(figure: type, timings: list[Timing], title: str, path: Path) -> None:
    """Bars of both beside each other, the first case on top. The file's name says its format."""
    drawing = figure(figsize=(8, 1.2 + 0.6 * len(timings)), layout="constrained")
    axes = drawing.subplots()
    for index, (name, values) in enumerate(
        ((OURS, [t.ours for t in timings]), (THEIRS, [t.theirs for t in timings]))
    ):
        places = [place + 0.4 * index for place in range(len(timings))]
        bars = axes.barh(places, values, height=0.38, label=name)
        axes.bar_label(bars, fmt="%.4g", padding=3)
    axes.set_yticks([place + 0.2 for place in range(len(timings))], [t.case for t in timings])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms of one call")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.legend()
    drawing.savefig(path, dpi=_DPI)


def _title(op: str, device: str) -> str:
    if device == "cpu":
        return (
            f"{op} on the CPU, torch {torch.__version__}: ms of one call. These are the kernels "
            "for tests and laptops; they say nothing about a GPU."
        )
    cudnn = support.format_cudnn_version(_C.cudnn_version())
    gpu = torch.cuda.get_device_name()
    return f"{op} on {gpu}, torch {torch.__version__}, cuDNN {cudnn}: GPU time of one call in ms"
