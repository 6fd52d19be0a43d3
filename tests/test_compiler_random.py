"""All patterns at once, on functions that were put together at random from what they look for."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.compiler import Rewritten, check_swap

#: [batch, channels or heads, rows or tokens, columns or head size]
SIZES = B, C, S, D = 2, 4, 6, 8
SEEDS = range(40)

Step = Callable[[Tensor, Tensor], Tensor]


def _row(rng: random.Random, size: int) -> Tensor:
    return torch.tensor([rng.uniform(0.5, 1.5) for _ in range(size)], dtype=torch.float64)


def _convolution(rng: random.Random) -> Step:
    groups = rng.choice((1, 2, C))
    kernel = rng.choice((1, 3))
    weight = torch.stack([_row(rng, kernel) for _ in range(C * C // groups * kernel)]) - 1
    weight = weight.reshape(C, C // groups, kernel, kernel)
    bias = rng.choice((None, _row(rng, C)))
    mean, variance, gamma, beta = (_row(rng, C) for _ in range(4))
    has_norm = rng.choice((None, "batch_norm", "written out"))
    is_behind = rng.random() < 0.5
    activation = rng.choice((F.relu, F.silu, F.gelu, F.hardswish, torch.tanh, lambda x: x))

    def step(x: Tensor, other: Tensor) -> Tensor:
        out = F.conv2d(x, weight, bias, padding="same", groups=groups)
        if has_norm == "batch_norm":
            out = F.batch_norm(out, mean, variance, gamma, beta)
        elif has_norm is not None:
            scale, shift = gamma.reshape(1, -1, 1, 1), beta.reshape(1, -1, 1, 1)
            out = out * scale + shift
        if is_behind:
            out += other
        return activation(out)

    return step


def _rotary(rng: random.Random) -> Step:
    angles = torch.tensor([rng.uniform(0, 7) for _ in range(S * D)], dtype=torch.float64)
    cos, sin = angles.cos().view(1, 1, S, D), angles.sin().view(1, 1, S, D)
    spelling = rng.randrange(6)

    def step(x: Tensor, other: Tensor) -> Tensor:
        if spelling == 4:
            return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
        if spelling == 5:
            (first, second), c, s = (
                x.unflatten(-1, (-1, 2)).unbind(-1),
                cos[..., ::2],
                sin[..., ::2],
            )
            return torch.stack((first * c - second * s, first * s + second * c), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        if spelling == 0:
            return x * cos + torch.cat((-second, first), -1) * sin
        if spelling == 1:
            c, s = cos[..., : D // 2], sin[..., : D // 2]
            return torch.cat((first * c - second * s, second * c + first * s), -1)
        if spelling == 2:
            x, c, s = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
            out = x * c + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * s
            return out.transpose(1, 2)
        part = x[..., : D // 2]
        turned = torch.cat((-part[..., D // 4 :], part[..., : D // 4]), -1)
        out = part * cos[..., : D // 2] + turned * sin[..., : D // 2]
        return torch.cat((out, x[..., D // 2 :]), -1)

    if rng.random() < 0.5:
        return step
    return lambda x, other: step(x, other) * step(other.sin(), x)


def _gated(rng: random.Random) -> Step:
    spelling = rng.randrange(5)

    def step(x: Tensor, other: Tensor) -> Tensor:
        if spelling == 0:
            return F.silu(x) * other
        if spelling == 1:
            return other * F.gelu(x, approximate="tanh")
        if spelling == 2:
            return x * torch.sigmoid(x) * other
        if spelling == 3:
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) * other
        gate, up = torch.cat([x, other], 1).chunk(2, 1)
        return F.silu(gate) * up

    return step


def _norm(rng: random.Random) -> Step:
    weight, spelling = _row(rng, D), rng.randrange(4)

    def step(x: Tensor, other: Tensor) -> Tensor:
        if rng_sum:
            x = x + other
        if spelling == 0:
            return F.layer_norm(x, (D,), weight)
        if spelling == 1:
            centered = x - x.mean(-1, keepdim=True)
            return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        if spelling == 2:
            return F.rms_norm(x, (D,), weight, 1e-5)
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    rng_sum = rng.random() < 0.5
    return step


def _group_norm(rng: random.Random) -> Step:
    weight, bias, groups = _row(rng, C), _row(rng, C), rng.choice((1, 2, C))
    activation = rng.choice((F.silu, lambda x: x * x.sigmoid(), F.relu, lambda x: x))
    is_sum = rng.random() < 0.5

    def step(x: Tensor, other: Tensor) -> Tensor:
        if is_sum:
            x = x + other
        return activation(F.group_norm(x, groups, weight, bias))

    return step


def _adaptive_norm(rng: random.Random) -> Step:
    scale, shift, gate = (_row(rng, B * D).view(B, 1, 1, D) for _ in range(3))
    is_rms, is_gated = rng.random() < 0.5, rng.random() < 0.5
    norm = F.rms_norm if is_rms else F.layer_norm

    def step(x: Tensor, other: Tensor) -> Tensor:
        if is_gated:
            x = x + gate * other
        return norm(x, (D,), eps=1e-5) * (1 + scale) + shift

    return step


def _attention(rng: random.Random) -> Step:
    is_causal, is_written_out = rng.random() < 0.5, rng.random() < 0.5

    def step(x: Tensor, other: Tensor) -> Tensor:
        if not is_written_out:
            return F.scaled_dot_product_attention(x, other, x, is_causal=is_causal)
        return (x @ other.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ x

    return step


def _layout(rng: random.Random) -> Step:
    """What stands between them in models, and what depends on strides."""
    steps: list[Step] = [
        lambda x, other: x.contiguous().view(B, C * S, D).reshape(B, C, S, D),
        lambda x, other: (
            x.transpose(1, 2).contiguous().view(B, S, -1).view(B, S, C, D).mT.mT.transpose(1, 2)
        ),
        lambda x, other: (x * 2).reshape(B, -1).view(B, C, S, D),
        lambda x, other: torch.cat(x.split(2, 1), 1).sin(),
        lambda x, other: x.to(memory_format=torch.channels_last) + other,
        lambda x, other: torch.stack(x.unbind(1), 1) - other * 0.5,
        lambda x, other: (x * 1.5).mul_(other),
        lambda x, other: F.dropout(x, 0.5, False).flip(2),
    ]
    return rng.choice(steps)


PARTS = (*(_convolution, _rotary, _gated, _norm, _group_norm, _adaptive_norm, _attention, _layout),)


def _function(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    """A chain; some steps read an earlier result than the last, some results are returned."""
    rng = random.Random(seed)
    steps = [rng.choice(PARTS)(rng) for _ in range(rng.randrange(3, 8))]
    sources = [rng.randrange(-2, 1) for _ in steps]
    is_returned = [rng.random() < 0.2 for _ in steps]

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        results, returned = [x, y], []
        for step, source, kept in zip(steps, sources, is_returned, strict=True):
            result = step(results[-1].tanh(), results[source])
            results.append(result)
            if kept:
                returned.append(result)
        return (*returned, results[-1])

    return function


def _inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(SIZES, generator=generator, dtype=torch.float64) for _ in "xy")
    return first, second


@pytest.mark.parametrize("seed", SEEDS)
def test_all_patterns_at_once(seed):
    function, inputs = _function(seed), _inputs(seed)
    rewritten = Rewritten(function)
    ours, stock = rewritten(*inputs), function(*inputs)
    assert [x.stride() for x in ours] == [x.stride() for x in stock]
    check_swap(function, *inputs, expect=rewritten.swapped)


def test_these_functions_have_every_pattern():
    """The property above is one of swaps only where there are some."""
    found: Counter[str] = Counter()
    for seed in SEEDS:
        rewritten = Rewritten(_function(seed))
        rewritten(*_inputs(seed))
        found.update(rewritten.swapped)
    norms = {"adaptive_norm", "group_norm", "layer_norm", "rms_norm"}
    assert set(found) >= {"attention", "convolution", "gated", "rotary", "rotary_qk", *norms}
    assert found.total() > 2 * len(SEEDS)
