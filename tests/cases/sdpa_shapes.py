"""What torch's F.scaled_dot_product_attention takes beyond the shapes that kernels are made for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Shapes of a call; ``layout`` says how query, key and value lie in memory."""

    query: Shape
    key: Shape
    value: Shape
    mask: Shape | None = None
    mask_dtype: str = "bool"
    """Or "bias", in the query's type."""
    is_causal: bool = False
    enable_gqa: bool = False
    scale: float | None = None
    layout: str = "dense"

    def __str__(self) -> str:
        def text(shape: Shape) -> str:
            return "x".join(map(str, shape))

        parts = [text(self.query), text(self.key), text(self.value)]
        if self.mask is not None:
            parts.append(f"{self.mask_dtype}{text(self.mask)}")
        parts += [name for name in ("is_causal", "enable_gqa") if getattr(self, name)]
        parts += [f"scale{self.scale}"] * (self.scale is not None)
        parts += [self.layout] * (self.layout != "dense")
        return "-".join(parts)

    def kwargs(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "enable_gqa": self.enable_gqa, "scale": self.scale}


def of(query: Shape, key: Shape, value: Shape | None = None, **options: Any) -> Call:
    return Call(query, key, key if value is None else value, **options)


#: Those of torch's own OpInfo for the function (common_methods_invocations.py), without dropout.
OPINFO = [
    *(
        of(query, key, is_causal=is_causal)
        for query, key in (
            ((4, 3, 8), (4, 6, 8)),
            ((4, 4, 3, 8), (4, 4, 6, 8)),
            ((4, 3, 8), (4, 4, 6, 8)),
        )
        for is_causal in (True, False)
    ),
    of((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 16)),
    of((4, 4, 3, 8), (4, 4, 6, 8), mask=(3, 6), mask_dtype="bias"),
]

#: One of each kind, for tests of what surrounds the operators.
SOME = [
    of((5, 17, 20), (5, 24, 20), (5, 24, 12), is_causal=True),
    of((17, 64), (24, 64), mask=(17, 24), mask_dtype="bias"),
    of((2, 1, 4, 17, 8), (3, 1, 24, 8), mask=(2, 1, 1, 17, 24), mask_dtype="bias"),
    of((2, 4, 17, 20), (1, 2, 24, 20), (2, 1, 24, 7), enable_gqa=True),
    of((2, 4, 17, 32), (2, 4, 24, 32), layout="strided"),
]

CALLS = [
    *SOME,
    # ranks
    of((3, 8), (6, 8), (6, 5)),
    of((5, 17, 64), (5, 24, 64), mask=(5, 17, 24)),
    of((2, 3, 4, 3, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 7), is_causal=True),
    of((2, 3, 4, 3, 8), (2, 3, 4, 6, 8), mask=(3, 1, 3, 6), mask_dtype="bias"),
    of((2, 3, 4, 3, 8), (2, 3, 4, 6, 8), mask=(1, 1, 4, 3, 6), mask_dtype="bias"),
    of((2, 3, 4, 3, 8), (2, 3, 4, 6, 8), mask=(3, 6), mask_dtype="bias"),
    of((2, 1, 2, 4, 17, 64), (1, 3, 1, 4, 24, 64)),
    # what broadcasts
    of((2, 4, 3, 8), (4, 6, 8)),
    of((2, 4, 3, 8), (6, 8)),
    of((2, 4, 3, 8), (2, 4, 6, 8), (6, 8)),
    of((2, 4, 17, 64), (2, 1, 24, 64)),
    of((2, 1, 17, 64), (2, 4, 24, 64)),
    of((1, 4, 17, 64), (2, 4, 24, 64), mask=(2, 1, 1, 24)),
    of((2, 4, 17, 64), (1, 4, 24, 64), (2, 4, 24, 64)),
    of((2, 4, 17, 64), (2, 4, 24, 64), (2, 1, 24, 32)),
    of((1, 4, 17, 64), (1, 4, 24, 64), (5, 4, 24, 64)),
    of((1, 4, 3, 8), (1, 4, 6, 8), (5, 1, 4, 6, 8)),
    # groups of heads
    of((2, 4, 17, 64), (2, 2, 24, 64), (2, 4, 24, 64), enable_gqa=True),
    of((4, 17, 64), (2, 24, 64), enable_gqa=True, is_causal=True),
    of((2, 2, 4, 3, 8), (2, 2, 2, 6, 8), enable_gqa=True),
    of((2, 4, 17, 64), (2, 24, 64), enable_gqa=True),
    of((2, 4, 17, 64), (1, 2, 24, 64), enable_gqa=True),
    # head sizes
    *(of((2, 4, 17, d), (2, 4, 24, d), is_causal=True) for d in (1, 7, 20, 60, 100)),
    of((2, 4, 17, 20), (2, 2, 24, 20), (2, 2, 24, 64), enable_gqa=True, scale=0.3),
    of((2, 4, 17, 64), (2, 4, 24, 64), (2, 4, 24, 3)),
    of((2, 4, 3, 0), (2, 4, 6, 0), (2, 4, 6, 8)),
    of((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 0)),
    # memory
    *(
        of((2, 4, 17, d), (2, 4, 24, d), layout=layout)
        for layout in ("strided", "transposed", "expanded", "tokens")
        for d in (64, 20)
    ),
    # nothing there
    of((0, 2, 3, 8), (1, 2, 6, 8)),
    of((0, 4, 3, 64), (0, 4, 6, 64), layout="transposed"),
    of((2, 4, 0, 7), (2, 4, 6, 7)),
    of((4, 3, 8), (4, 0, 8)),
]


def _lay_out(values: Tensor, layout: str) -> Tensor:
    if layout == "dense":
        return values
    if layout == "strided":
        return values.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed":  # the lengths lie innermost
        return values.mT.contiguous().mT
    if layout == "tokens":  # [batch, length, heads, head size]
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":  # one number a row
        return values[..., :1].expand(values.shape)
    raise ValueError(layout)


def make(call: Call, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a call, by the names of the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    shapes = {"query": call.query, "key": call.key, "value": call.value}
    made = {name: _lay_out(random(shape), call.layout) for name, shape in shapes.items()}
    if call.mask is not None:
        mask = random(call.mask)
        made["attn_mask"] = mask > -0.5 if call.mask_dtype == "bool" else mask
    return made


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """The formula by products that broadcast: output and log-sum-exp, in the inputs' precision."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    scores = query @ key.mT * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if scores.shape[-1] == 0:
        out = scores @ value
        return out, out.new_full(out.shape[:-1], -math.inf)
    peak = scores.amax(-1, keepdim=True).detach()
    weights = (scores - peak.masked_fill(peak.isneginf(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights / total.masked_fill(total == 0, 1.0) @ value
    lse = (total.log() + peak).squeeze(-1)
    return out, lse.expand(out.shape[:-1])


def differentiate(call: Call, tensors: dict[str, Tensor], function: Any) -> dict[str, Tensor]:
    """Output, log-sum-exp and the gradients of a loss of both, by name."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
    }
    out, lse = function(**leaves, **call.kwargs())
    generator = torch.Generator().manual_seed(7)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    given = [grad_out.to(out), grad_lse.to(lse)]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if call.key[-2] == 0:  # nothing to attend to: the log-sum-exp is a constant
        given[1] = torch.zeros_like(given[1])
    results = {"out": out.detach(), "lse": lse.detach()}
    if not out.requires_grad:
        return results
    sources = [result for result in (out, lse) if result.requires_grad]
    grads = torch.autograd.grad(
        sources,
        list(wanted.values()),
        given[: len(sources)],
        allow_unused=True,
        materialize_grads=True,
    )
    return results | {f"grad_{name}": g for name, g in zip(wanted, grads, strict=True)}


def in_precision(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values, in ``dtype`` where they are numbers."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
