"""FP8 attention, forward: GPU time with and without rounding its inputs, beside bfloat16.

`cudnn_ops` takes bf16 and gives bf16: each of query, key and value is read for its scale, rounded,
and attended to. `known scales` does without the first, `kernel alone` without both, and `bf16` is
the same attention in 16 bits. Of decoding over pages, `cudnn_ops` reads caches of 8 bits under a
plan that is made before, and `bf16` those of 16. The last cases are of the rounding alone, beside a
copy that moves as many bytes: an unknown scale takes two passes over what is read.

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
        for decoded in DECODED:
            measure_decoding(decoded, rows, rounds)
        for shape in SHAPES[:2]:
            measure_rounding(shape, rows, rounds)


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

    def copy(quarters: int) -> Callable[[], Tensor]:
        """Moves so many bytes for each number: a copied one takes four."""
        memory = torch.empty(x.numel() * quarters // 4, dtype=x.dtype, device=x.device)
        return partial(torch.empty_like(memory).copy_, memory)

    cases: dict[str, dict[str, Callable[[], object]]] = {
        "rounded": {OURS: lambda: cudnn_ops.quantize_fp8(x), "copy": copy(5)},
        "rounded, known scale": {OURS: lambda: cudnn_ops.quantize_fp8(x, scale), "copy": copy(3)},
        "widened": {OURS: lambda: cudnn_ops.dequantize_fp8(data, descale), "copy": copy(3)},
    }
    for name, functions in cases.items():
        for impl, ms in gpu_ms(functions, rounds=rounds).items():
            rows.add(f"{shape} {name}", impl, "gpu_ms", ms)


if __name__ == "__main__":
    main("fp8", run)
