"""FP8 attention and rounding: inputs, float64 references and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)

#: What numbers are drawn from: with outliers the largest is 100 times what all others are like.
DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "uniform": lambda x: torch.special.erf(x),
    "outliers": lambda x: x.where(torch.rand_like(x) > 1e-3, 100 * x),
}


@dataclass(frozen=True)
class Case:
    """One problem; the options are those of ``sdpa_fp8``, lengths as lists."""

    batch: int = 2
    heads: int = 4
    heads_kv: int = 4
    length: int = 96
    length_kv: int = 96
    head_size: int = 64
    value_size: int = 64
    layout: str = "bshd"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = f"h{self.heads}x{self.heads_kv}-s{self.length}x{self.length_kv}"
        options = "-".join(f"{name}={value}" for name, value in self.options.items())
        return f"{sizes}-d{self.head_size}x{self.value_size}-{self.layout}-{options}"

    @property
    def is_padded(self) -> bool:
        return "seq_lens_q" in self.options or "seq_lens_kv" in self.options


def _case(
    length: int = 96,
    length_kv: int = 96,
    head_size: int = 64,
    value_size: int = 64,
    **options: Any,
) -> Case:
    sizes = (length, length_kv, head_size, value_size)
    return Case(2, 4, 4, *sizes, options=options)


CASES = [
    _case(),
    _case(is_causal=True),
    Case(heads=6, heads_kv=2, length=33, length_kv=33, options={"is_causal": True}),
    Case(heads_kv=1, layout="bhsd"),
    _case(17, 77, is_causal=True, bottom_right=True),
    _case(77, 17, is_causal=True),
    _case(77, 17, is_causal=True, bottom_right=True),  # the first queries see nothing
    _case(1, 130),
    _case(1, 130, is_causal=True),
    _case(130, 1),
    _case(130, 130, window_size=(16, 0)),
    _case(100, 130, window_size=(20, 7), bottom_right=True),
    _case(200, 60, window_size=(20, 0)),  # the last queries see nothing
    _case(65, 65, 16, 16, is_causal=True),
    _case(65, 65, 80, 80),
    _case(65, 65, 128, 128, is_causal=True, scale=0.3),
    _case(65, 65, 192, 128, is_causal=True),
    _case(70, 90, seq_lens_q=[70, 0], seq_lens_kv=[90, 90]),
    _case(70, 90, seq_lens_q=[64, 33], seq_lens_kv=[80, 17], is_causal=True),
    _case(70, 90, seq_lens_kv=[0, 41]),
    _case(70, 90, seq_lens_kv=[0, 0], is_causal=True),
    _case(1, 90, seq_lens_kv=[90, 3]),
    _case(0, 16),
    _case(16, 0),
]


def draw(case: Case, device: str, seed: int = 0, distribution: str = "normal") -> list[Tensor]:
    """Query, key and value in float32."""
    torch.manual_seed(seed)
    shapes = [
        (case.heads, case.length, case.head_size),
        (case.heads_kv, case.length_kv, case.head_size),
        (case.heads_kv, case.length_kv, case.value_size),
    ]
    tensors = []
    for heads, length, size in shapes:
        x = DISTRIBUTIONS[distribution](torch.randn(case.batch, heads, length, size))
        if case.layout == "bshd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        tensors.append(x.to(device))
    return tensors


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By torch: the tensor under the scale of its largest number, and its descale."""
    most = torch.finfo(dtype).max
    amax = x.abs().max() if x.numel() else x.new_tensor(0.0)
    scale = most / amax if amax > 0 else torch.ones_like(amax)
    data = torch.empty_like(x, dtype=dtype).copy_((x * scale).clamp(-most, most))
    return data, (1 / scale).reshape(1)


def inputs(tensors: list[Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The operands of a call and its descales."""
    data, descales = zip(*(rounded(x, dtype) for x in tensors), strict=True)
    return data, dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))


def options_of(case: Case, device: str) -> dict[str, Any]:
    """Those of a case, with its lengths as tensors."""
    return {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        if name.startswith("seq_lens")
        else value
        for name, value in case.options.items()
    }


@dataclass
class Reference:
    """In float64."""

    out: Tensor
    lse: Tensor
    amax_s: Tensor
    amax_o: Tensor


def visible_pairs(case: Case) -> Tensor:
    """Whether a query sees a key; broadcasts to [batch, heads, length, length_kv]."""
    options = case.options
    length, length_kv = case.length, case.length_kv
    lengths = torch.tensor(options.get("seq_lens_q", [length] * case.batch)).view(-1, 1, 1, 1)
    lengths_kv = torch.tensor(options.get("seq_lens_kv", [length_kv] * case.batch))
    lengths_kv = lengths_kv.view(-1, 1, 1, 1)
    rows = torch.arange(length).unsqueeze(-1)
    columns = torch.arange(length_kv)
    distance = columns - rows
    if options.get("bottom_right"):
        distance = distance - (lengths_kv - lengths)
    left, right = options.get("window_size", (-1, -1))
    if options.get("is_causal"):
        right = 0
    visible = (rows < lengths) & (columns < lengths_kv)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible


def reference(case: Case, tensors: list[Tensor]) -> Reference:
    """Attention on numbers as they are."""
    query, key, value = (x.double() for x in tensors)
    visible = visible_pairs(case).to(query.device)
    group = case.heads // case.heads_kv
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = case.options.get("scale", case.head_size**-0.5)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = weights @ value
    lse = scores.logsumexp(-1)
    amax_s, amax_o = (x.abs().max() if x.numel() else x.new_tensor(0.0) for x in (weights, out))
    return Reference(out, lse, amax_s, amax_o)


def rounding_of_scores(case: Case, tensors: list[Tensor]) -> float:
    """What the score of products of 8 bits may be off by on a GPU.

    Hopper's tensor cores add up what an instruction takes with 14 significant bits, and cut off
    the rest (DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.5.2): a unit in the last place
    of the largest sum of magnitudes.
    """
    query, key = (x.double().abs() for x in tensors[:2])
    if query.numel() == 0 or key.numel() == 0:
        return 0.0
    sums = query @ key.repeat_interleave(case.heads // case.heads_kv, 1).transpose(-1, -2)
    scale = case.options.get("scale", case.head_size**-0.5)
    return 2.0**-13 * float(sums.max()) * scale


def root_mean_square(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def check_error(
    case: Case,
    actual: Tensor,
    tensors: list[Tensor],
    data: tuple[Tensor, ...],
    descales: dict[str, Tensor],
    written: torch.dtype,
    scale_o: float | None = None,
    most: float = 1.15,
) -> None:
    """At most ``most`` times the error of exact attention on the rounded inputs.

    Args:
        case: the problem.
        actual: the output, in the units of the inputs.
        tensors: the inputs before they were rounded.
        data: the inputs.
        descales: theirs.
        written: the type that the output was rounded to on the way: this rounding is part of what
            is allowed.
        scale_o: what the output was multiplied with before that; None stands for 1 / descale_v.
        most: how many times.
    """
    exact = reference(case, tensors).out
    wide = [x.double() * d.double() for x, d in zip(data, descales.values(), strict=True)]
    best = reference(case, wide).out
    if written.itemsize == 1:
        factor = (1 / descales["descale_v"]).double().item() if scale_o is None else scale_o
        best = rounded_to(best * factor, written) / factor
    else:
        best = best.to(written).double()
    floor = 1e-3 * root_mean_square(exact)
    error = root_mean_square(actual.double() - exact)
    allowed = most * root_mean_square(best - exact) + floor
    assert error <= allowed, f"{case}: error {error:.4g} exceeds {allowed:.4g}"  # NaN fails too


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).double()
