"""Linear layers with their epilogues, and pairs of them, beside torch's: GPU time.

bf16. Of a layer: the forward without a gradient, the forward that keeps what a gradient needs, and
of an MLP's hidden layer the gradient through the activation and of the bias, with the product that
it comes from, and these with the weight's gradient, in whose product the bias's can be. The bare
products, alone, are what an epilogue costs nothing beside. Of a pair (the MLPs of models by their
shapes): forward and backward together, as one function. Ours runs as for sizes that a process has
called often: with the plans that it builds for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from benchmarks.bench_conv import verify
from benchmarks.harness import OURS, QUICK_ROUNDS, Functions, Rows, gpu_ms, host_us, main
from cudnn_ops.ops.activation import ACTIVATIONS, Activation

_ops = torch.ops.cudnn_ops
_aten = torch.ops.aten
BARE, ADDMM = "bare product", "addmm_activation"
# Of two results, as a share of the first one's norm.
TOLERANCE = 2e-2


class Shape(NamedTuple):
    """A layer: rows, outputs and inputs."""

    rows: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Mlp(NamedTuple):
    """The MLP of a model, for so many tokens."""

    name: str
    rows: int
    width: int
    hidden: int
    activation: Activation
    gated: bool = False


SHAPES = (
    Shape(8192, 16384, 4096),
    Shape(16384, 8192, 2048),
    Shape(4096, 4096, 1024),
)
FORWARD: tuple[Activation, ...] = ("gelu_tanh", "relu", "gelu", "silu")
BACKWARD: tuple[Activation, ...] = ("gelu_tanh", "gelu")
MLPS = (
    Mlp("GPT-2", 16384, 768, 3072, "gelu_tanh"),
    Mlp("GPT-2 XL", 8192, 1600, 6400, "gelu_tanh"),
    Mlp("ViT-B", 12608, 768, 3072, "gelu"),
    Mlp("ViT-L", 12608, 1024, 4096, "gelu"),
    Mlp("BERT base", 16384, 768, 3072, "gelu"),
    Mlp("BERT large", 16384, 1024, 4096, "gelu"),
    Mlp("DiT-XL", 16384, 1152, 4608, "gelu_tanh"),
    Mlp("8192 x 16384 x 4096", 8192, 4096, 16384, "gelu_tanh"),
    Mlp("Llama 3 8B", 8192, 4096, 14336, "silu", gated=True),
    Mlp("Llama 3.2 1B", 8192, 2048, 8192, "silu", gated=True),
)
PARTS = (
    *(f"{shape} {way}" for shape in SHAPES for way in ("fwd", "bwd")),
    *(mlp.name for mlp in MLPS),
    "host",
)


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    """One of SHAPES, forward or backward, one of MLPS by its name, or the host time."""
    with cudnn_ops.using_plan_policy("exact"):
        _run_part(part, rows, rounds)


def _run_part(part: str, rows: Rows, rounds: int) -> None:
    torch.manual_seed(0)
    # Compiling takes most of the time, and shows nothing of ours.
    modes = () if rounds <= QUICK_ROUNDS else (None, "max-autotune-no-cudagraphs")
    rounds = max(rounds // 3, 1)
    for shape in SHAPES:
        if part == f"{shape} fwd":
            for activation in FORWARD:
                forward(shape, activation, modes, rows, rounds)
        if part == f"{shape} bwd":
            for activation in BACKWARD:
                backward(shape, activation, modes, rows, rounds)
    for mlp in MLPS:
        if mlp.name == part:
            pair(mlp, modes, rows, rounds)
    if part == "host":
        host(rows, rounds)


def compiled(
    function: Callable[..., object], modes: tuple[str | None, ...]
) -> dict[str, Callable[..., Any]]:
    """The function by torch.compile in each mode, by the name that its rows carry."""
    torch._dynamo.reset()  # one function's shapes would run into its limit of recompilations
    names = {None: "compile", "max-autotune-no-cudagraphs": "compile max-autotune"}
    return {names[mode]: torch.compile(function, dynamic=False, mode=mode) for mode in modes}


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale


def activate(before: Tensor, activation: Activation) -> Tensor:
    if activation.startswith("gelu"):
        return F.gelu(before, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.relu(before) if activation == "relu" else F.silu(before)


def by_torch(activation: Activation, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return activate(F.linear(x, weight, bias), activation)


def forward(
    shape: Shape, activation: Activation, modes: tuple[str | None, ...], rows: Rows, rounds: int
) -> None:
    """For inference; and with what a gradient needs, which torch keeps in eager mode alone."""
    tensors = draw(shape.rows, shape.inputs), draw(shape.outputs, shape.inputs), draw(shape.outputs)
    tensors[1].div_(shape.inputs**0.5)
    x, weight, bias = tensors
    eager = partial(by_torch, activation)
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: partial(cudnn_ops.linear, x, weight, bias, activation=activation),
        "eager": partial(eager, *tensors),
    }
    functions |= {name: partial(f, *tensors) for name, f in compiled(eager, modes).items()}
    if activation in ("relu", "gelu_tanh"):
        is_gelu = activation != "relu"
        functions[ADDMM] = lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=is_gelu)
    with torch.no_grad():
        case = f"{shape} {activation} fwd"
        verify(case, {name: [function()] for name, function in functions.items()}, TOLERANCE)
        add(case, functions | {BARE: partial(F.linear, x, weight)}, rows, rounds)
        if activation != "relu":  # which keeps its result alone
            number = ACTIVATIONS.index(activation)
            functions = {
                OURS: partial(_ops._linear.default, x, weight, bias, None, number, True),
                "eager": partial(eager, *tensors),
                BARE: partial(F.linear, x, weight),
            }
            add(f"{shape} {activation}, kept, fwd", functions, rows, rounds)


def backward(
    shape: Shape, activation: Activation, modes: tuple[str | None, ...], rows: Rows, rounds: int
) -> None:
    """Of a hidden layer that is an MLP's, from what its forward has kept: its bias's gradient.

    Then that of its weight, too, as a step asks for both.
    """
    x, grad = draw(shape.rows, shape.inputs), draw(shape.rows, shape.inputs)
    first = draw(shape.outputs, shape.inputs, scale=shape.inputs**-0.5).requires_grad_()
    second = draw(shape.inputs, shape.outputs, scale=shape.outputs**-0.5)
    bias, hidden = draw(shape.outputs).requires_grad_(), draw(shape.rows, shape.outputs)
    out = cudnn_ops.mlp(x, first, bias, second, None, activation)
    by_eager = F.linear(by_torch(activation, x, first, bias), second)
    before = F.linear(x, first, bias).detach()
    approximate = "tanh" if activation == "gelu_tanh" else "none"

    def of_bias(grad: Tensor, second: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        inner = _aten.gelu_backward(grad @ second, before, approximate=approximate)
        return inner, inner.sum(0)  # of the first one a step makes the weight's and the input's

    def gradients(out: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor]:
        return list(torch.autograd.grad(out, wanted, grad, retain_graph=True))

    functions: dict[str, Callable[[], list[Tensor]]] = {
        OURS: partial(gradients, out, (bias,)),
        "eager": partial(gradients, by_eager, (bias,)),
    }
    for name, function in compiled(of_bias, modes).items():
        functions[name] = partial(lambda both: [both(grad, second, before)[1]], function)
    case = f"{shape} {activation} with the bias's bwd"
    verify(case, {name: function() for name, function in functions.items()}, TOLERANCE)
    add(case, functions | {BARE: lambda: [grad @ second]}, rows, rounds)
    functions = {
        OURS: partial(gradients, out, (first, bias)),
        "eager": partial(gradients, by_eager, (first, bias)),
    }
    case = f"{shape} {activation} with the bias's and the weight's bwd"
    verify(case, {name: function() for name, function in functions.items()}, TOLERANCE)
    add(case, functions | {BARE: lambda: [grad @ second, hidden.t() @ x]}, rows, rounds)


def pair(mlp: Mlp, modes: tuple[str | None, ...], rows: Rows, rounds: int) -> None:
    """Forward and backward, with a gradient for everything."""
    first = (1 + mlp.gated) * mlp.hidden
    has_bias = not mlp.gated
    leaves = [
        draw(mlp.rows, mlp.width),
        draw(first, mlp.width, scale=mlp.width**-0.5),
        draw(first) if has_bias else None,
        draw(mlp.width, mlp.hidden, scale=mlp.hidden**-0.5),
        draw(mlp.width) if has_bias else None,
    ]
    wanted = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
    grad = draw(mlp.rows, mlp.width)

    def eager(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        before = F.linear(x, w1, b1)
        if mlp.gated:
            gate, up = before.chunk(2, -1)
            return F.linear(activate(gate, mlp.activation) * up, w2, b2)
        return F.linear(activate(before, mlp.activation), w2, b2)

    def ours(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        return cudnn_ops.mlp(x, w1, b1, w2, b2, mlp.activation, gated=mlp.gated)

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, wanted, grad)]

    every: dict[str, Callable[..., Tensor]]
    every = {OURS: ours, "eager": eager, **compiled(eager, modes)}
    functions: dict[str, Callable[[], list[Tensor]]]
    functions = {name: partial(step, function) for name, function in every.items()}
    size = f"{mlp.rows},{mlp.width},{mlp.hidden} {mlp.activation}"
    case = f"MLP {mlp.name} {size} fwd + bwd"
    verify(case, {name: function() for name, function in functions.items()}, TOLERANCE)
    x, w1, w2 = (leaf.detach() for leaf in wanted if leaf.dim() == 2)
    inner, hidden = draw(mlp.rows, first), draw(mlp.rows, mlp.hidden)

    def products() -> list[Tensor]:
        """Of which two are the forward's: what is the least that any step takes."""
        forward = [F.linear(x, w1), F.linear(hidden, w2)]
        return [*forward, grad @ w2, grad.t() @ hidden, inner @ w1, inner.t() @ x]

    add(case, functions | {BARE: products}, rows, rounds)


def host(rows: Rows, rounds: int) -> None:
    """Of a layer that the GPU is done with before the host."""
    x, weight, bias = draw(8, 64), draw(64, 64), draw(64)
    for activation in ("gelu_tanh", "gelu"):
        functions: Functions = {
            OURS: partial(cudnn_ops.linear, x, weight, bias, activation=activation),
            "eager": partial(by_torch, activation, x, weight, bias),
        }
        for which, context in (("no grad", torch.no_grad), ("grad", torch.enable_grad)):
            weight.requires_grad_(which == "grad")
            with context():
                for name, us in host_us(functions, rounds=rounds).items():
                    rows.add(f"linear 8,64,64 {activation} {which} fwd", name, "host_us", us)


def add(case: str, functions: Functions, rows: Rows, rounds: int) -> None:
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)


if __name__ == "__main__":
    main("linear", run, run_part, PARTS)
