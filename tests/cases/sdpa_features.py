"""Attention with everything between its products: the cases, their tensors, the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.sdpa import empty_like_order
from tests.cases import sdpa
from tests.cases.sdpa import Case

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class Features(Case):
    """A problem with features; those that are tensors are made by :func:`make_extras`."""

    mask: str = ""
    """Sizes of attn_mask, one letter a dimension: "b", "h", "q", "k", or "1"."""
    mask_dtype: str = "same"
    """"bool", "float32", "other" (the 16 bits that the query has not) or "same" as the query."""
    hides: str = ""
    """Of what a mask hides: "some" keys, or all keys of some "rows"."""
    window_size: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lengths: str = ""
    """Which sequence lengths are given: "", "q", "kv" or "both"."""
    dropout_p: float = 0.0
    deterministic: bool | None = None
    grad_mask: bool = True
    """Whether a mask that is a bias wants its gradient."""

    def __str__(self) -> str:
        base = super().__str__()
        parts = [
            f"mask-{self.mask}-{self.mask_dtype}{self.hides}" if self.mask else "",
            f"window{self.window_size}" if self.window_size != (-1, -1) else "",
            "br" if self.bottom_right else "",
            "softcap" if self.softcap else "",
            "alibi" if self.alibi else "",
            "sinks" if self.sinks else "",
            f"lengths-{self.lengths}" if self.lengths else "",
            f"dropout{self.dropout_p}" if self.dropout_p else "",
            "deterministic" if self.deterministic else "",
        ]
        return "-".join([base, *(part for part in parts if part)])

    def kwargs(self) -> dict[str, Any]:
        return {
            **super().kwargs(),
            "window_size": self.window_size,
            "bottom_right": self.bottom_right,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "deterministic": self.deterministic,
        }

    @property
    def wants_grad_mask(self) -> bool:
        return bool(self.mask) and self.mask_dtype != "bool" and self.grad_mask


_BASE = Features(2, 4, 2, 48, 70, 64, 64)
#: Each feature once, for tests of what surrounds an operator.
SOME: list[Features] = [
    replace(_BASE, mask="b1qk", mask_dtype="bool", hides="rows"),
    replace(_BASE, mask="1hqk", is_causal=True, bottom_right=True),
    replace(_BASE, window_size=(17, 3), softcap=5.0, sinks=True),
    replace(_BASE, is_causal=True, bottom_right=True, alibi=True),
    replace(_BASE, dropout_p=0.3, deterministic=True),
    replace(_BASE, lengths="both", is_causal=True, bottom_right=True, sinks=True),
]


def make_extras(case: Features, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """The tensors among the options, by the names of the arguments."""
    generator = torch.Generator().manual_seed(seed + 77)
    extras = {}
    if case.mask:
        extras["attn_mask"] = _mask(case, dtype, generator)
    if case.alibi:
        extras["alibi_slopes"] = torch.rand(case.heads, generator=generator) * 0.3
    if case.sinks:
        extras["sinks"] = torch.randn(case.heads, generator=generator)
    for name, size in (("q", case.length), ("kv", case.length_kv)):
        if case.lengths in (name, "both"):
            lengths = torch.randint(0, size + 1, (case.batch,), generator=generator)
            extras[f"seq_lens_{name}"] = lengths.int()
    if case.dropout_p:
        extras["rng_state"] = torch.tensor([seed + 1, 8 * seed])
    return {name: tensor.to(device) for name, tensor in extras.items()}


def _mask(case: Features, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    sizes = {"b": case.batch, "h": case.heads, "q": case.length, "k": case.length_kv, "1": 1}
    shape = [sizes[letter] for letter in case.mask]
    hidden = torch.zeros(shape, dtype=torch.bool)
    if case.hides:
        hidden = torch.rand(shape, generator=generator) < 0.3
    if case.hides == "rows":
        hidden |= torch.rand([*shape[:-1], 1], generator=generator) < 0.3
    if case.mask_dtype == "bool":
        return ~hidden
    other = {torch.bfloat16: torch.float16}.get(dtype, torch.bfloat16)
    kind = {"same": dtype, "float32": torch.float32, "other": other}[case.mask_dtype]
    bias = torch.randn(shape, generator=generator).to(kind)
    return bias.masked_fill_(hidden, -math.inf)


def attention(
    case: Features,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extras: dict[str, Tensor],
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The formula of the docstring, in the precision of the query; autograd differentiates it."""
    group = query.shape[1] // max(key.shape[1], 1)
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    factor = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * factor
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    device, dtype = query.device, query.dtype
    full = torch.full((case.batch,), 1, device=device)
    lengths = extras.get("seq_lens_q", full * case.length).view(-1, 1, 1, 1)
    lengths_kv = extras.get("seq_lens_kv", full * case.length_kv).view(-1, 1, 1, 1)
    i = torch.arange(case.length, device=device)[:, None]
    j = torch.arange(case.length_kv, device=device)
    diagonal = i + (lengths_kv - lengths if case.bottom_right else 0)
    if "alibi_slopes" in extras:
        slopes = extras["alibi_slopes"].to(dtype)[:, None, None]
        scores = scores - slopes * (j - diagonal).abs()
    visible = (i < lengths) & (j < lengths_kv)
    left, right = case.window_size
    if left >= 0:
        visible = visible & (j >= diagonal - left)
    if right >= 0:
        visible = visible & (j <= diagonal + right)
    if case.is_causal:
        visible = visible & (j <= diagonal)
    mask = extras.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask.to(dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    if scores.shape[-1] == 0:
        scores = torch.full((*scores.shape[:-1], 1), -math.inf, device=device, dtype=dtype)
        value = value.new_zeros(*value.shape[:2], 1, value.shape[3])
        kept = None
    peak = scores.amax(-1, keepdim=True).detach()
    if "sinks" in extras:
        peak = peak.maximum(extras["sinks"].detach().to(dtype)[:, None, None])
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    if "sinks" in extras:
        sink = (extras["sinks"].to(dtype)[:, None, None] - peak).exp()
        total = total + sink.masked_fill(i >= lengths, 0.0)
    weights = weights / total.masked_fill(total == 0, 1.0)
    if kept is not None:
        weights = weights * kept.to(dtype) / (1 - case.dropout_p)
    out = torch.einsum("bhqk,bhkd->bhqd", weights, value)
    lse = total.masked_fill(total == 0, 1.0).log() + peak  # no gradient where there is no sum
    return out, lse.masked_fill(total == 0, -math.inf).squeeze(-1)


def dropout_mask(case: Features, inputs: tuple[Tensor, ...], extras: dict[str, Tensor]) -> Tensor:
    """Which weights the operator keeps, read off it: with one-hot values a weight is an output."""
    query, key, value = inputs
    kept = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.bool, device=query.device)
    width = value.shape[3]
    for start in range(0, key.shape[2], width):
        some = slice(start, min(start + width, key.shape[2]))
        one_hot = torch.zeros_like(value)
        one_hot[:, :, some, : some.stop - start] = torch.eye(
            some.stop - start, dtype=value.dtype, device=value.device
        )
        out = _ops.sdpa(query, key, one_hot, **case.kwargs(), **extras)
        kept[..., some] = out[..., : some.stop - start] != 0
    return kept


@dataclass(frozen=True)
class Results(sdpa.Results):
    """Those of plain attention, and of the mask and the sinks where they have any."""

    grad_mask: Tensor | None = None
    grad_sinks: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in vars(self).items() if tensor is not None)


def _differentiate(
    case: Features,
    inputs: tuple[Tensor, ...],
    extras: dict[str, Tensor],
    function: Any,
    losses: Any,
) -> Results:
    extras = dict(extras)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    wanted = list(leaves)
    for name, wants in (("attn_mask", case.wants_grad_mask), ("sinks", case.sinks)):
        if wants:
            extras[name] = extras[name].detach().requires_grad_()
            wanted.append(extras[name])
    out, lse = function(*leaves, extras)
    loss = losses(out, lse)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    else:  # nothing to attend to
        found = tuple(torch.zeros_like(leaf) for leaf in wanted)
    grads = iter(found)
    grad_inputs = [next(grads) for _ in range(3)]
    grad_mask = next(grads) if case.wants_grad_mask else None
    grad_sinks = next(grads) if case.sinks else None
    query, key, value = grad_inputs
    return Results(out.detach(), lse.detach(), query, key, value, grad_mask, grad_sinks)


def run(
    case: Features,
    inputs: tuple[Tensor, ...],
    extras: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> Results:
    """What the operators give."""

    def function(query: Tensor, key: Tensor, value: Tensor, extras: dict[str, Tensor]):
        return _ops.sdpa_with_lse(query, key, value, **case.kwargs(), **extras)

    return _differentiate(case, inputs, extras, function, _loss(grad_out, grad_lse))


def _loss(grad_out: Tensor, grad_lse: Tensor | None):
    def loss(out: Tensor, lse: Tensor) -> Tensor:
        total = (out.double() * grad_out.double()).sum()
        if grad_lse is not None:
            finite = lse.masked_fill(lse.isneginf(), 0.0)
            total = total + (finite.double() * grad_lse.double()).sum()
        return total

    return loss


def reference(
    case: Features,
    inputs: tuple[Tensor, ...],
    extras: dict[str, Tensor],
    grad_out: Tensor,
    dtype: torch.dtype,
    kept: Tensor | None,
    grad_lse: Tensor | None = None,
) -> Results:
    """The formula and its gradients in ``dtype``; those of mask and sinks in float64."""

    def function(query: Tensor, key: Tensor, value: Tensor, extras: dict[str, Tensor]):
        return attention(case, query, key, value, extras, kept)

    extras = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in extras.items()
    }
    inputs = tuple(tensor.detach().to(dtype) for tensor in inputs)
    return _differentiate(case, inputs, extras, function, _loss(grad_out, grad_lse))


def fused(
    case: Features,
    inputs: tuple[Tensor, ...],
    extras: dict[str, Tensor],
    grad_out: Tensor,
    stored: Tensor,
    kept: Tensor | None,
    grad_lse: Tensor | None,
) -> dict[str, Tensor]:
    """The gradients as every fused kernel computes them.

    Scores and sums in float32, what enters a product rounded to the inputs' type, and the output
    as the forward ``stored`` it in place of the exact one (Dao et al., "FlashAttention-2",
    algorithm 2): its rounding is one number for all keys of a query, and shows where they are few.
    """
    query, key, value = (tensor.detach().float() for tensor in inputs)
    dtype = inputs[0].dtype
    wide = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in extras.items()
    }
    group = query.shape[1] // key.shape[1]
    many_keys, many_values = (t.repeat_interleave(group, dim=1) for t in (key, value))
    # d out / d value of the formula is the matrix of the weights: with one-hot values it is out.
    eye = torch.eye(key.shape[2], device=key.device).expand(*key.shape[:2], -1, -1)
    probabilities, lse = attention(case, query, key, eye, wide, None)
    scale = torch.ones_like(probabilities)
    if kept is not None:
        scale = kept.float() / (1 - case.dropout_p)

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).float()

    given = rounded(probabilities * scale)
    out = rounded(given @ many_values)
    grad = grad_out.float()
    delta = (grad * stored.float()).sum(-1, keepdim=True)
    grad_scores = rounded(probabilities) * ((grad @ many_values.mT) * scale - delta)
    grads = {}
    if grad_lse is not None:
        live = grad_lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
        grad_scores = grad_scores + probabilities * live
    if case.sinks:
        weight = (wide["sinks"][:, None] - lse).exp().masked_fill(lse.isneginf(), 0.0)
        terms = -weight * delta.squeeze(-1)
        if grad_lse is not None:
            terms = terms + weight * live.squeeze(-1)
        # A sum of so few numbers says little of its own error, but what rounding the output leaves
        # in it is known: twice its standard deviation.
        rounding = torch.finfo(dtype).eps / 2
        noise = (weight.unsqueeze(-1) * grad * out * rounding).square().sum((0, 2, 3)).sqrt()
        grads["grad_sinks"] = terms.sum((0, 2)) + 2 * noise
    if case.wants_grad_mask:
        mask = extras["attn_mask"]
        four = [1] * (4 - mask.dim()) + list(mask.shape)
        grads["grad_mask"] = rounded(grad_scores).sum_to_size(four).view(mask.shape)
    factor = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    if case.softcap:
        tanh = (query @ many_keys.mT * factor / case.softcap).tanh()
        grad_scores = grad_scores * (1 - tanh.square())
    grad_scores = rounded(grad_scores)

    def per_key_head(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (key.shape[1], group)).sum(2)

    grads["grad_query"] = grad_scores @ many_keys * factor
    grads["grad_key"] = per_key_head(grad_scores.mT @ query) * factor
    grads["grad_value"] = per_key_head(given.mT @ grad)
    sinks = {"grad_sinks": grads.pop("grad_sinks")} if case.sinks else {}
    return {"out": out, **sinks, **{name: tensor.to(dtype) for name, tensor in grads.items()}}


def check(
    case: Features,
    inputs: tuple[Tensor, ...],
    extras: dict[str, Tensor],
    grad_out: Tensor,
    actual: Results,
    grad_lse: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """Holds results against the float64 reference, by the rule of ``cases.sdpa.check``.

    Low-precision math is the formula in the inputs' type, and the same as fused kernels order it:
    whichever is farther off.
    """
    if kept is None and case.dropout_p:
        kept = dropout_mask(case, inputs, extras)
    dtype = inputs[0].dtype
    exact = reference(case, inputs, extras, grad_out, torch.float64, kept, grad_lse)
    rough = reference(case, inputs, extras, grad_out, dtype, kept, grad_lse)
    wide = reference(case, inputs, extras, grad_out, sdpa.lse_dtype(dtype), kept, grad_lse)
    low_precision = dict(rough.items()) | {"lse": wide.lse}
    if actual.grad_mask is not None and actual.grad_mask.dtype != torch.float32:
        low_precision["grad_mask"] = low_precision["grad_mask"].to(actual.grad_mask.dtype)
    as_fused = {}
    if dtype in sdpa.LOW_PRECISION and actual.out.numel() and case.length_kv:
        as_fused = fused(case, inputs, extras, grad_out, actual.out, kept, grad_lse)
    expected = dict(exact.items())
    for name, tensor in actual.items():
        rough_one = low_precision[name]
        if name in as_fused and _error(as_fused[name], expected[name]) > _error(
            rough_one, expected[name]
        ):
            wider = torch.float32 if name == "grad_sinks" else rough_one.dtype
            rough_one = as_fused[name].to(wider)
        sdpa.check(tensor, expected[name], rough_one, f"{case} {name}")


def _error(tensor: Tensor, exact: Tensor) -> float:
    return (tensor.double() - exact).abs().max().item() if exact.numel() else 0.0


def make_problem(
    case: Features, dtype: torch.dtype, device: str, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor], Tensor]:
    """Inputs, the tensors among the options, and a gradient of the output."""
    inputs = sdpa.make_inputs(case, dtype, device, seed)
    grad_out = sdpa.make_grad_out(case, dtype, device, seed + 1)
    # In memory as the output, which is how a plan that is built beforehand expects it.
    grad_out = empty_like_order(grad_out.shape, inputs[0]).copy_(grad_out)
    return inputs, make_extras(case, dtype, device, seed), grad_out


def check_all(case: Features, dtype: torch.dtype, device: str, seed: int, with_lse: bool) -> None:
    """Runs a case forward and backward, of its log-sum-exp too or not, and holds it to account."""
    inputs, extras, grad_out = make_problem(case, dtype, device, seed)
    grad_lse = None
    if with_lse:
        shape = (case.batch, case.heads, case.length)
        grad_lse = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    actual = run(case, inputs, extras, grad_out, grad_lse)
    check(case, inputs, extras, grad_out, actual, grad_lse)


def draw(rng: random.Random, *, on_gpu: bool) -> Features:
    """Any combination of features over any geometry."""

    def length() -> int:
        return rng.choice(
            [rng.randint(1, 9), rng.randint(60, 70), rng.randint(120, 140), rng.randint(1, 300)]
        )

    heads_kv = rng.randint(1, 3)
    size = rng.choice([8, 16, 32, 64, 64, 80, 128, 128])
    value_size = size if rng.random() < 0.7 else rng.choice([8, 32, 64, 128])
    if on_gpu and rng.random() < 0.1:
        size, value_size = rng.choice([(192, 128), (192, 192), (256, 256), (136, 136), (224, 224)])
    length_q = length()
    length_kv = length_q if rng.random() < 0.4 else length()

    def maybe(probability: float, value: Any, otherwise: Any) -> Any:
        return value() if rng.random() < probability else otherwise

    mask = maybe(0.3, lambda: "".join(rng.choice(pair) for pair in ("1b", "1h", "1q", "kk")), "")
    if mask and rng.random() < 0.2:
        mask = mask[2:]
    softcap = maybe(0.2, lambda: rng.choice([1.0, 5.0, 30.0]), 0.0)
    return Features(
        batch=rng.randint(1, 3),
        heads=heads_kv * rng.randint(1, 3),
        heads_kv=heads_kv,
        length=length_q,
        length_kv=length_kv,
        head_size=size,
        value_size=value_size,
        is_causal=rng.random() < 0.4,
        scale=maybe(0.2, lambda: rng.uniform(-0.5, 0.5), None),
        layout=rng.choice(["bshd", "bshd", "bshd", "bhsd", "sbhd", "packed", "sliced"]),
        mask=mask,
        mask_dtype=rng.choice(["bool", "same", "float32", "other"]),
        hides=rng.choice(["", "some", "rows"]),
        window_size=maybe(
            0.4,
            lambda: (rng.choice([-1, 0, 1, 17, 100]), rng.choice([-1, 0, 1, 17, 100])),
            (-1, -1),
        ),
        bottom_right=rng.random() < 0.4,
        softcap=softcap,
        alibi=rng.random() < 0.2,
        sinks=rng.random() < 0.2,
        lengths=maybe(0.3, lambda: rng.choice(["q", "kv", "both", "both"]), ""),
        dropout_p=maybe(0.2, lambda: rng.choice([0.1, 0.5]), 0.0),
        deterministic=maybe(0.1, lambda: True, None),
        grad_mask=rng.random() < 0.5 and softcap == 0,
    )
