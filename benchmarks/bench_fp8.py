"""FP8 attention, forward: GPU time with and without rounding its inputs, beside bfloat16.

`cudnn_ops` takes bf16 and gives bf16: each of query, key and value is read for its scale, rounded,
and attended to. `known scales` does without the first, `kernel alone` without both, and `bf16` is
the same attention in 16 bits. The cases with `turned` begin with rotary embedding, which rounds on
its way in 8 bits. Of decoding over pages, `cudnn_ops` reads caches of 8 bits under a plan that is
made before, and `bf16` those of 16. The last cases are of the rounding alone, beside a copy that
moves as many bytes: an unknown scale takes two passes over what is read.

The cases with `trained` are a forward and a backward: `cudnn_ops` computes the forward in FP8.

`error` is the root mean square of the output's error over that of the output, by float64.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import cudnn_ops
from benchmarks import bench_paged_decode
from benchmarks.bench_sdpa import SHAPES, Shape, checked, tensors
from benchmarks.harness import OURS, Rows, gpu_ms, main

FP8 = torch.float8_e4m3fn
#: Tokens, the model's size and the MLP's: those of Llama 3 8B.
LAYERS = ((8192, 4096, 14336),)
# Of the output, as a share of its norm. Rounding the inputs alone was measured to give 0.043.
TOLERANCE = 0.1


# What decoding is measured at.
DECODED = tuple(bench_paged_decode.Shape(n, 32, 8, 128, "2048") for n in (64, 128))


class Operands(NamedTuple):
    """Query, key and value of 8 bits, and their descales."""

    data: tuple[Tensor, ...]
    descales: tuple[Tensor, ...]


def run(rows: Rows, rounds: int) -> None:
    with torch.no_grad():
        for shape in SHAPES:
            measure(shape, rows, rounds)
            measure_turned(shape, rows, rounds)
            measure_training(shape, rows, rounds)
        for decoded in DECODED:
            measure_decoding(decoded, rows, rounds)
        for shape in SHAPES[:2]:
            measure_rounding(shape, rows, rounds)
            measure_turned_rounding(shape, rows, rounds)
        for sizes in LAYERS:
            measure_layer(sizes, rows, rounds)


def rounded(inputs: tuple[Tensor, ...], scales: tuple[Tensor | None, ...]) -> Operands:
    found = [cudnn_ops.quantize_fp8(x, scale) for x, scale in zip(inputs, scales, strict=True)]
    return Operands(tuple(one.data for one in found), tuple(one.descale for one in found))


def attend(operands: Operands, is_causal: bool) -> Tensor:
    query, key, value = operands.data
    of_query, of_key, of_value = operands.descales
    return cudnn_ops.sdpa_fp8(
        query,
        key,
        value,
        descale_q=of_query,
        descale_k=of_key,
        descale_v=of_value,
        is_causal=is_causal,
    )


def measure(shape: Shape, rows: Rows, rounds: int) -> None:
    """Check each way at the shape, then add its rows."""
    inputs = tensors(shape, "cuda")[:3]
    unknown = (None, None, None)
    operands = rounded(inputs, unknown)
    scales = tuple(1 / descale for descale in operands.descales)
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: attend(rounded(inputs, unknown), shape.causal),
        "known scales": lambda: attend(rounded(inputs, scales), shape.causal),
        "kernel alone": partial(attend, operands, shape.causal),
        "bf16": partial(
            cudnn_ops.scaled_dot_product_attention,
            *inputs,
            is_causal=shape.causal,
            enable_gqa=shape.group > 1,
        ),
    }
    exact = exact_output(shape, *inputs)
    for name, function in functions.items():
        rows.add(str(shape), name, "error", verify(f"{name} at {shape}", shape, function(), exact))
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(str(shape), name, "gpu_ms", ms)


def measure_decoding(shape: bench_paged_decode.Shape, rows: Rows, rounds: int) -> None:
    """One query a sequence, over the same keys and values in 16 and in 8 bits."""
    p = bench_paged_decode.problem(shape)
    float8 = p.in_float8()
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: partial(cudnn_ops.paged_attention, *float8, plan=float8.plan(False)),
        "bf16": partial(cudnn_ops.paged_attention, *p),
    }
    out, wide = (function().float() for function in functions.values())
    error = float((out - wide).norm() / wide.norm())
    if not error <= bench_paged_decode.TOLERANCE:  # written so that NaN fails
        raise RuntimeError(f"decoding at {shape}: 8 bits differ by {error:.2g} of the norm")
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(f"{shape} decoding", name, "gpu_ms", ms)


def angles_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, S, D] in bfloat16, as models of transformers hand them over."""
    frequencies = 10_000.0 ** (-torch.arange(0, shape.dim, 2, device=device) / shape.dim)
    angles = torch.outer(torch.arange(shape.length, device=device), frequencies).repeat(1, 2)
    return angles.cos().bfloat16()[None], angles.sin().bfloat16()[None]


def measure_turned(shape: Shape, rows: Rows, rounds: int) -> None:
    """From projections of 16 bits on: rotary embedding and attention."""
    inputs = tensors(shape, "cuda")[:3]
    angles = angles_of(shape, inputs[0].device)
    scales = 448 / cudnn_ops.rotary_embedding_qkv_fp8(*inputs, *angles).amax

    def in_fp8(scales: Tensor | None) -> Tensor:
        found = cudnn_ops.rotary_embedding_qkv_fp8(*inputs, *angles, scales)
        return attend(Operands(found[:3], found.descale.unbind()), shape.causal)

    def in_bf16() -> Tensor:
        query, key = cudnn_ops.rotary_embedding_qk(*inputs[:2], *angles)
        return cudnn_ops.scaled_dot_product_attention(
            query, key, inputs[2], is_causal=shape.causal, enable_gqa=shape.group > 1
        )

    functions: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: in_fp8(None),
        "known scales": lambda: in_fp8(scales),
        "bf16": in_bf16,
    }
    case = f"{shape} turned"
    wide = cudnn_ops.rotary_embedding_qk(
        *(x.float() for x in inputs[:2]), *map(Tensor.float, angles)
    )
    exact = exact_output(shape, *wide, inputs[2])
    for name, function in functions.items():
        rows.add(case, name, "error", verify(f"{name} at {case}", shape, function(), exact))
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)


def measure_training(shape: Shape, rows: Rows, rounds: int) -> None:
    """Forward and backward: both in 16 bits, and the forward in FP8."""
    *inputs, grad = tensors(shape, "cuda")[:4]
    leaves = [x.detach().requires_grad_() for x in inputs]
    query, key, value = leaves
    attends: dict[str, Callable[[], Tensor]] = {
        OURS: partial(
            cudnn_ops.scaled_dot_product_attention_fp8, query, key, value, is_causal=shape.causal
        ),
        "bf16": partial(
            cudnn_ops.scaled_dot_product_attention,
            query,
            key,
            value,
            is_causal=shape.causal,
            enable_gqa=shape.group > 1,
        ),
    }

    def step(attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(attend(), leaves, grad)

    case = f"{shape} trained"
    found, wide = (step(attend) for attend in attends.values())
    for name, mine, other in zip(("query", "key", "value"), found, wide, strict=True):
        error = float((mine.float() - other.float()).norm() / other.float().norm())
        if not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{case}: the gradient of {name} is {error:.2g} of its norm off")
        rows.add(case, OURS, f"error of the gradient of {name}", error)
    functions = {name: partial(step, attend) for name, attend in attends.items()}
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)


def exact_output(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of what is checked, by float64; a head at a time, for a long one has a gigabyte of scores."""
    q, k, v = (checked(shape, x) for x in (query, key, value))
    heads = []
    for head in q:
        scores = head.double() @ k[0].double().T * shape.dim**-0.5
        if shape.causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        heads.append((scores.softmax(-1) @ v[0].double()).float())
    return torch.stack(heads)


def verify(what: str, shape: Shape, out: Tensor, exact: Tensor) -> float:
    """The error; raises where it is more than rounding can be."""
    error = float((checked(shape, out) - exact).norm() / exact.norm())
    if not error <= TOLERANCE:  # written so that NaN fails
        raise RuntimeError(f"{what}: the output is {error:.2g} of its norm off")
    return error


def measure_rounding(shape: Shape, rows: Rows, rounds: int) -> None:
    x = tensors(shape, "cuda")[0]
    data, descale, _ = cudnn_ops.quantize_fp8(x)
    scale = 1 / descale

    count = x.numel()
    time_beside_copies(
        shape,
        {
            "rounded": (lambda: cudnn_ops.quantize_fp8(x), 5 * count),
            "rounded, known scale": (lambda: cudnn_ops.quantize_fp8(x, scale), 3 * count),
            "widened": (lambda: cudnn_ops.dequantize_fp8(data, descale), 3 * count),
        },
        x.device,
        rows,
        rounds,
    )


def measure_turned_rounding(shape: Shape, rows: Rows, rounds: int) -> None:
    inputs = tensors(shape, "cuda")[:3]
    angles = angles_of(shape, inputs[0].device)
    weight = torch.ones(shape.dim, dtype=inputs[0].dtype, device=inputs[0].device)
    turn = partial(cudnn_ops.rotary_embedding_qkv_fp8, *inputs, *angles)
    norm = partial(turn, query_weight=weight, key_weight=weight)
    scales = 448 / norm().amax
    count = sum(x.numel() for x in inputs)
    time_beside_copies(
        shape,
        {
            "turned and rounded": (turn, 5 * count),
            "turned and rounded, known scales": (partial(turn, scales), 3 * count),
            "normed, turned and rounded": (partial(norm, scales), 3 * count),
        },
        inputs[0].device,
        rows,
        rounds,
    )


def measure_layer(sizes: tuple[int, int, int], rows: Rows, rounds: int) -> None:
    """A norm and an MLP of 8 bits beside the same of 16; and what rounds in it beside copies."""
    tokens, size, hidden = sizes
    device = tensors(SHAPES[0], "cuda")[0].device
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, residual, norm = new(tokens, size), new(tokens, size), new(size)
    gate, up, down = new(hidden, size) * 0.02, new(hidden, size) * 0.02, new(size, hidden) * 0.02
    joined = torch.cat([gate, up])
    weights = [cudnn_ops.quantize_rows_fp8(weight) for weight in (joined, down)]

    def in_fp8() -> Tensor:
        found, _ = cudnn_ops.add_rms_norm_fp8(x, residual, norm, 1e-5)
        both = cudnn_ops.linear_fp8(found, weights[0])
        return cudnn_ops.linear_fp8(cudnn_ops.swiglu_fp8(*both.chunk(2, -1)), weights[1])

    def in_bf16() -> Tensor:
        found, _ = cudnn_ops.add_rms_norm(x, residual, (size,), norm, 1e-5)
        both = torch.nn.functional.linear(found, joined)
        return torch.nn.functional.linear(cudnn_ops.swiglu(*both.chunk(2, -1)), down)

    case = f"{tokens},{size},{hidden} norm and MLP"
    wide = torch.nn.functional.rms_norm((x + residual)[:16].double(), (size,), norm.double(), 1e-5)
    gated = torch.nn.functional.silu(wide @ gate.double().T) * (wide @ up.double().T)
    exact = gated @ down.double().T
    for name, function in {OURS: in_fp8, "bf16": in_bf16}.items():
        error = float((function()[:16] - exact).norm() / exact.norm())
        if not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{name} at {case}: the output is {error:.2g} of its norm off")
        rows.add(case, name, "error", error)
    for name, ms in gpu_ms({OURS: in_fp8, "bf16": in_bf16}, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)
    both = new(tokens, 2 * hidden)
    time_beside_copies(
        f"{tokens},{size},{hidden}",
        {
            "normed rows": (lambda: cudnn_ops.rms_norm_fp8(x, norm), 3 * x.numel()),
            "gated rows": (lambda: cudnn_ops.swiglu_fp8(*both.chunk(2, -1)), 5 * tokens * hidden),
        },
        device,
        rows,
        rounds,
    )


def time_beside_copies(
    shape: object,
    cases: dict[str, tuple[Callable[[], object], int]],
    device: torch.device,
    rows: Rows,
    rounds: int,
) -> None:
    """Each function beside a copy that moves as many bytes."""
    for name, (function, moved) in cases.items():
        memory = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        copy = partial(torch.empty_like(memory).copy_, memory)
        functions: dict[str, Callable[[], object]] = {OURS: function, "copy": copy}
        for impl, ms in gpu_ms(functions, rounds=rounds).items():
            rows.add(f"{shape} {name}", impl, "gpu_ms", ms)


if __name__ == "__main__":
    main("fp8", run)
