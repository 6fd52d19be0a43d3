"""Rotary embedding into 8 bits: cases, inputs, and a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops.ops.rotary_fp8 import RotaryFp8
from tests.cases import rotary
from tests.cases.rotary import RotaryCase


@dataclass(frozen=True)
class RotaryFp8Case:
    """A call.

    Attributes:
        turn: what turns by what; it has keys.
        value_size: of a head.
        norms: of "query" and "key", which have one.
        zero_centered: as in the call, and so is ``per_head``.
        is_wide: whether the weights are float32.
        of_32_bits: whether cosines and sines are.
        is_known: whether scales are given.
        layout: of heads in memory.
    """

    turn: RotaryCase
    value_size: int = 64
    norms: tuple[str, ...] = ()
    zero_centered: bool = False
    per_head: bool = False
    is_wide: bool = False
    of_32_bits: bool = True
    is_known: bool = False
    layout: str = "BSHD"

    def __str__(self) -> str:
        norms = "-".join(self.norms)
        return f"{self.turn.name}-{norms}-{self.per_head}-{self.is_known}-{self.layout}"


def _turn(name: str, **options: Any) -> RotaryCase:
    return RotaryCase(name, **{"kv_heads": 2, **options})


BOTH = ("query", "key")
CASES = [
    RotaryFp8Case(_turn("plain")),
    RotaryFp8Case(_turn("plain"), is_known=True, of_32_bits=False),
    RotaryFp8Case(_turn("large", size=128), 128, BOTH, is_known=True, of_32_bits=False),
    RotaryFp8Case(_turn("large", size=128), 128, BOTH, True, True, True),
    RotaryFp8Case(_turn("largest", size=256), 256, BOTH),
    RotaryFp8Case(_turn("latent", size=192), 128, ("key",), is_known=True),
    RotaryFp8Case(_turn("neighbours", interleaved=True, batch=2), 64, ("query",)),
    RotaryFp8Case(_turn("neighbours_of_pairs", rotary_dim=64, of_pairs=True, interleaved=True)),
    RotaryFp8Case(_turn("odd", size=10, kv_heads=5), 7, BOTH, per_head=True),
    RotaryFp8Case(_turn("odd_neighbours", size=130, interleaved=True), 250, BOTH, is_known=True),
    RotaryFp8Case(_turn("odd_part", size=30, rotary_dim=6), 33, BOTH, zero_centered=True),
    RotaryFp8Case(_turn("part", size=80, rotary_dim=32), 80, BOTH, is_wide=True),
    RotaryFp8Case(_turn("odd_copies", size=72, rotary_dim=16), 8, is_known=True, per_head=True),
    # More than the threads that run at the same time have rows.
    RotaryFp8Case(_turn("many_heads", size=10, kv_heads=300), 7, BOTH),
    RotaryFp8Case(_turn("many_rounds", kv_heads=41), 64, BOTH, per_head=True),
    RotaryFp8Case(_turn("many_known_rounds", kv_heads=41, batch=2), 48, is_known=True),
    RotaryFp8Case(_turn("positions", rows=40, batch=2), layout="sliced"),
    RotaryFp8Case(_turn("sections", sections=(16, 8, 8), rows=9, batch=2), 64, BOTH),
    RotaryFp8Case(
        _turn("everything", interleaved=True, rotary_dim=32, of_pairs=True, sections=(4, 8, 4)),
        96,
        BOTH,
        True,
        True,
        True,
        is_known=True,
        layout="sliced",
    ),
]


@dataclass
class Inputs:
    """Of a call, on the CPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    scales: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def call(
        self, case: RotaryFp8Case, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
    ) -> RotaryFp8:
        """The public function's results, of inputs that were put somewhere."""

        def placed(value: Any) -> Any:
            return place(value) if isinstance(value, Tensor) else value

        tensors = {name: value for name, value in vars(self).items() if name != "options"}
        placed_ones = {name: placed(value) for name, value in {**tensors, **self.options}.items()}
        return cudnn_ops.rotary_embedding_qkv_fp8(**placed_ones, **case.turn.options, dtype=dtype)


def draw(case: RotaryFp8Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    torch.manual_seed(seed + case.turn.size + case.value_size)
    angles = torch.float32 if case.of_32_bits else dtype
    t = rotary.draw(case.turn, dtype, angles, "cpu", case.layout)
    query, key, cos, sin = (
        x for x in (t[name] for name in ("input", "key", "cos", "sin")) if x is not None
    )
    heads = key.shape[1]
    if case.layout == "BSHD":
        value = torch.randn(rotary.B, rotary.S, heads, case.value_size).transpose(1, 2)
    else:
        value = torch.randn(rotary.B, heads, rotary.S, case.value_size + 8)[..., 8:]
    weights = {
        f"{name}_weight": torch.randn(case.turn.size).to(torch.float32 if case.is_wide else dtype)
        for name in case.norms
    }
    count = 2 + (heads if case.per_head else 1)
    return Inputs(
        query.detach(),
        key.detach(),
        # Heads that are far apart.
        (value * torch.logspace(-2, 2, heads).view(-1, 1, 1)).to(dtype),
        cos,
        sin,
        torch.rand(count) * 90 + 10 if case.is_known else None,
        {
            **weights,
            "eps": 1e-6,
            "zero_centered": case.zero_centered,
            "per_head": case.per_head,
            "positions": t["positions"],
        },
    )


def exact(case: RotaryFp8Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """What is rounded, in float64."""
    results = []
    for name in BOTH:
        x = getattr(inputs, name).double()
        weight = inputs.options.get(f"{name}_weight")
        if weight is not None:
            factor = weight.double() + (1 if case.zero_centered else 0)
            x = x / (x.square().mean(-1, keepdim=True) + inputs.options["eps"]).sqrt() * factor
        cos, sin = inputs.cos.double(), inputs.sin.double()
        results.append(rotary.turned(case.turn, x, cos, sin, inputs.options["positions"]))
    return results[0], results[1], inputs.value.double()


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far apart the numbers of 8 bits lie there."""
    info = torch.finfo(dtype)
    exponent = x.abs().clamp(min=info.tiny, max=info.max).log2().floor()
    return 2**exponent * info.eps


def check(
    case: RotaryFp8Case,
    inputs: Inputs,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor] = lambda x: x,
    fetch: Callable[[Tensor], Tensor] = lambda x: x.cpu(),
) -> None:
    """Each number is the nearest one, or as near as float32 lets it be."""
    found = RotaryFp8(*map(fetch, inputs.call(case, dtype, place)))
    wanted = exact(case, inputs)
    most = torch.finfo(dtype).max
    groups = (*wanted[:2], *(wanted[2].unbind(1) if case.per_head else wanted[2:]))
    amax = torch.stack([group.abs().max() for group in groups])
    scales = most / amax if inputs.scales is None else inputs.scales.double()
    words = f"{case} of {inputs.query.dtype} to {dtype}"
    for name, one, other in (("amax", found.amax, amax), ("descale", found.descale, 1 / scales)):
        off = ((one.double() - other) / other).abs().max().item()
        assert off <= 3e-6, f"{words}, {name}: {off} off"
    for index, name in enumerate(("query", "key", "value")):
        data = getattr(found, name)
        assert data.transpose(1, 2).is_contiguous(), f"{words}, {name}: {data.stride()}"
        scale = scales[index] if index < 2 else scales[2:].view(-1, 1, 1)
        scaled = wanted[index] * scale
        error = (data.double() - scaled.clamp(-most, most)).abs()
        # Pairs may cancel each other, so float32 is off by a part of what the largest is.
        allowed = 0.5 * spacing(scaled, dtype) + 3e-6 * scaled.abs().amax(-1, keepdim=True)
        worst = (error - allowed).max().item()
        assert worst <= 0, f"{words}, {name}: off by {worst} more than rounding is"
