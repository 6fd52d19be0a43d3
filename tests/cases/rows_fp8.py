"""Rows rounded to 8 bits: cases, inputs, and float64 references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops.ops.rows_fp8 import RowsFp8
from tests.cases.rotary_fp8 import spacing

KINDS = ("rows", "norm", "sum", "silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class RowsCase:
    """A call.

    Attributes:
        kind: one of ``KINDS``.
        shape: of the input.
        is_known: whether a scale is given.
        weight: "own" for the input's dtype, "float" or "none".
        zero_centered: as in the call.
        layout: of the input in memory, "dense" or "sliced" out of longer rows, from a number on
            that is not at a multiple of 16 bytes.
    """

    kind: str
    shape: tuple[int, ...]
    is_known: bool = False
    weight: str = "own"
    zero_centered: bool = False
    layout: str = "dense"

    def __str__(self) -> str:
        known = "known" if self.is_known else "unknown"
        return f"{self.kind}-{self.shape}-{known}-{self.weight}-{self.layout}"


CASES = [
    *(RowsCase(kind, (3, 7, 64), known) for kind in KINDS for known in (False, True)),
    *(RowsCase(kind, (5, 33), known) for kind in KINDS for known in (False, True)),
    *(RowsCase(kind, (4, 1032)) for kind in KINDS),
    RowsCase("norm", (3, 4096), weight="float", zero_centered=True),
    RowsCase("norm", (2, 3, 128), weight="none", layout="sliced"),
    RowsCase("sum", (6, 264), True, "float", layout="sliced"),
    RowsCase("silu", (2, 5, 72), layout="sliced"),
    RowsCase("rows", (70, 1)),
    RowsCase("rows", (16,)),
    RowsCase("rows", (16,), True),
    *(RowsCase(kind, (2, 16392)) for kind in ("rows", "norm", "sum", "silu")),
    *(RowsCase(kind, (2, 2049), True) for kind in ("rows", "norm", "sum", "gelu")),
]


def draw(case: RowsCase, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor | None]:
    """Input, the other one, weight and scale, on the CPU."""
    torch.manual_seed(seed + case.shape[-1])

    def rows() -> Tensor:
        x = torch.randn(*case.shape[:-1], case.shape[-1] + 3)
        # Rows that are far apart.
        x *= 10 ** torch.linspace(-2, 2, x[..., :1].numel()).view(*case.shape[:-1], 1)
        x = x.to(dtype)
        return x[..., 3:] if case.layout == "sliced" else x[..., 3:].contiguous()

    weight = torch.randn(case.shape[-1]).to(torch.float32 if case.weight == "float" else dtype)
    has_weight = case.kind in ("norm", "sum") and case.weight != "none"
    return {
        "input": rows(),
        "other": None if case.kind in ("rows", "norm") else rows(),
        "weight": weight if has_weight else None,
        "scale": torch.tensor([37.0]) if case.is_known else None,
    }


def call(case: RowsCase, t: dict[str, Any], dtype: torch.dtype) -> tuple[RowsFp8, Tensor | None]:
    """The public function's results, and the sum where there is one."""
    x, other, weight, scale = (t[name] for name in ("input", "other", "weight", "scale"))
    norm: dict[str, Any] = {"eps": 1e-5, "zero_centered": case.zero_centered, "dtype": dtype}
    if case.kind == "rows":
        return cudnn_ops.quantize_rows_fp8(x, scale, dtype=dtype), None
    if case.kind == "norm":
        return cudnn_ops.rms_norm_fp8(x, weight, scale=scale, **norm), None
    if case.kind == "sum":
        return cudnn_ops.add_rms_norm_fp8(x, other, weight, scale=scale, **norm)
    gated: dict[str, Any] = {"activation": case.kind, "dtype": dtype}
    return cudnn_ops.swiglu_fp8(x, other, scale, **gated), None


def exact(case: RowsCase, t: dict[str, Any]) -> Tensor:
    """What is rounded, in float64."""
    x = t["input"].double()
    if case.kind == "sum":
        x = (t["input"] + t["other"]).double()
    if case.kind in ("norm", "sum"):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        if t["weight"] is not None:
            x = x * (t["weight"].double() + (1 if case.zero_centered else 0))
    elif case.kind == "silu":
        x = torch.nn.functional.silu(x) * t["other"].double()
    elif case.kind != "rows":
        approximate = "tanh" if case.kind == "gelu_tanh" else "none"
        x = torch.nn.functional.gelu(x, approximate=approximate) * t["other"].double()
    return x


def check(
    case: RowsCase,
    dtype: torch.dtype,
    fp8: torch.dtype,
    place: Callable[[Tensor], Tensor] = lambda x: x,
    fetch: Callable[[Tensor], Tensor] = lambda x: x.cpu(),
) -> None:
    """Each number is the nearest one, or as near as float32 lets it be."""
    t = draw(case, dtype)
    placed = {name: None if x is None else place(x) for name, x in t.items()}
    rows, total = call(case, placed, fp8)
    found = RowsFp8(*map(fetch, rows))
    words = f"{case} of {dtype} to {fp8}"
    if total is not None:
        assert torch.equal(fetch(total), t["input"] + t["other"]), words  # type: ignore[operator]
    wanted, most = exact(case, t), torch.finfo(fp8).max
    amax = wanted.abs().amax(-1, keepdim=True)
    given = t["scale"]
    scale = most / amax if given is None else given.double()
    amax = amax if given is None else amax.max().reshape(1)
    assert found.data.shape == wanted.shape, words
    assert found.data.is_contiguous(), words
    for name, one, other in (("amax", found.amax, amax), ("descale", found.descale, 1 / scale)):
        assert one.shape == other.shape, f"{words}, {name}: {one.shape}"
        off = ((one.double() - other) / other).abs().max().item()
        assert off <= 3e-6, f"{words}, {name}: {off} off"
    scaled = wanted * scale
    error = (found.data.double() - scaled.clamp(-most, most)).abs()
    worst = (error - 0.5 * spacing(scaled, fp8) - 3e-6 * scaled.abs()).max().item()
    assert worst <= 1e-6, f"{words}: off by {worst} more than rounding is"
