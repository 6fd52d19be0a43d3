"""The pattern of adaptive norms: every spelling that models have, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.compiler import Rewritten, check_swap

B, S, C, EPS = 3, 5, 8, 1e-6


def _layer(x: Tensor) -> Tensor:
    return F.layer_norm(x, (C,), eps=EPS)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def dit(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """DiT's ``modulate``, HunyuanVideo's."""
    return _layer(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def adaln_zero(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``AdaLayerNormZero`` of diffusers."""
    return _layer(x) * (1 + scale[:, None]) + shift[:, None]


def continuous(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``AdaLayerNormContinuous`` of diffusers."""
    return _layer(x) * (1 + scale)[:, None, :] + shift[:, None, :]


def added_to(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return shift.unsqueeze(1) + (scale + 1.0).unsqueeze(1) * _layer(x)


def flux(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Flux as its authors published it."""
    scale, shift = scale[:, None, :], shift[:, None, :]
    return (1 + scale) * _layer(x) + shift


def methods(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x).mul(scale.unsqueeze(1).add(1)).add(shift.unsqueeze(dim=1))


def fused(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift.unsqueeze(1), _layer(x), 1 + scale.unsqueeze(1))


def in_place(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = _layer(x)
    out *= 1 + scale.unsqueeze(1)
    out += shift.unsqueeze(1)
    return out


def wan(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Wan: all of it in a wider precision."""
    scale, shift = scale.double().unsqueeze(1), shift.double().unsqueeze(1)
    return (F.layer_norm(x.double(), (C,), eps=EPS) * (1 + scale) + shift).type_as(x)


def narrowed_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``FP32LayerNorm`` of diffusers."""
    norm = F.layer_norm(x.double(), (C,), None, None, EPS).to(x.dtype)
    return norm * (1 + scale[:, None]) + shift[:, None]


SPELLINGS = [
    *(dit, adaln_zero, continuous, added_to, flux, methods, fused, in_place, wan, narrowed_norm)
]


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(B, S, C, dtype=dtype) + 0.3
    scale, shift = torch.randn(B, 2 * C, dtype=dtype).chunk(2, 1)
    return x, scale, shift


def _dtype_of(norm: Callable[..., Tensor]) -> torch.dtype:
    return torch.float32 if norm in (wan, narrowed_norm) else torch.float64


def _check_ours(found: Rewritten, name: str) -> None:
    (ours,) = found.ours
    assert str(ours.target) == f"cudnn_ops.{name}.default"


@pytest.mark.parametrize("norm", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(norm):
    found = check_swap(norm, *_inputs(_dtype_of(norm)), expect=["adaptive_norm"])
    _check_ours(found, "adaptive_layer_norm")
    left = {str(node.target) for node in found.graphs[0].graph.nodes if node.op == "call_method"}
    assert left <= {"unsqueeze", "chunk"}


def _gated(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return x + gate.unsqueeze(1) * update


def _gated_by_index(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return update.mul(gate[:, None]).add(x)


def _gated_at_once(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(x, gate[:, None], update)


def _gated_at_once_the_other_way(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return x.addcmul(update, gate[:, None])


def _gated_in_place(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    update = update * 1.5
    update *= gate.unsqueeze(1)
    return x + update


def _gated_wider(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return (x.double() + update * gate.double().unsqueeze(1)).type_as(x)


GATES = [
    _gated,
    _gated_by_index,
    _gated_at_once,
    _gated_at_once_the_other_way,
    _gated_in_place,
    _gated_wider,
]


@pytest.mark.parametrize("gated", GATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("norm", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_of_a_gated_residual(norm, gated):
    def block(x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor):
        x = gated(x, update, gate)
        return norm(x, scale, shift), x

    dtype = torch.float32 if gated is _gated_wider else _dtype_of(norm)
    x, scale, shift = _inputs(dtype)
    gate = torch.randn(B, C, dtype=dtype)
    inputs = x, torch.randn_like(x), gate, scale, shift
    found = check_swap(block, *inputs, expect=["adaptive_norm"])
    _check_ours(found, "gate_add_adaptive_layer_norm")


def test_a_gated_residual_before_a_norm_alone():
    """Wan's cross-attention."""

    def block(x: Tensor, update: Tensor, gate: Tensor, w: Tensor, b: Tensor):
        x = x + gate.unsqueeze(1) * update
        return F.layer_norm(x, (C,), w, b, EPS), x

    x, gate, _ = _inputs()
    w, b = torch.randn(2, C, dtype=x.dtype)
    found = check_swap(block, x, torch.randn_like(x), gate, w, b, expect=["adaptive_norm"])
    _check_ours(found, "gate_add_adaptive_layer_norm")


@pytest.mark.parametrize("has_shift", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_rms(gated, has_shift):
    """Lumina: no shift, and weights of the norm."""

    def block(x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, w: Tensor):
        x = x + gate[:, None] * update if gated else x
        out = w * _rms(x) * (1 + scale.unsqueeze(1))
        return out + shift.unsqueeze(1) if has_shift else out, x * 2

    x, scale, shift = _inputs()
    gate, w = torch.randn(B, C, dtype=x.dtype), torch.randn(C, dtype=x.dtype)
    inputs = x, torch.randn_like(x), gate, scale, shift, w
    found = check_swap(block, *inputs, expect=["adaptive_norm"])
    _check_ours(found, "gate_add_adaptive_rms_norm" if gated else "adaptive_rms_norm")


def test_numbers_of_each_token():
    """PixArt and Wan 2.2: a table of ``[B, S, C]``, or of ``[1, 1, C]``."""

    def block(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return _layer(x) * (1 + scale) + shift

    x, _, _ = _inputs()
    of_tokens = torch.randn(B, S, C, dtype=x.dtype)
    of_all = torch.randn(1, 1, C, dtype=x.dtype)
    of_places = torch.randn(1, S, C, dtype=x.dtype)
    for scale, shift in ((of_tokens, of_tokens), (of_all, of_places)):
        found = check_swap(block, x, scale, shift, expect=["adaptive_norm"])
        _check_ours(found, "adaptive_layer_norm")


def test_modulation_that_is_computed_of_the_gated_residual():
    """The sum must be there before the scale, and the norm after it."""

    def block(x: Tensor, update: Tensor, gate: Tensor, w: Tensor):
        x = x + gate.unsqueeze(1) * update
        scale, shift = (x.mean(1) @ w).chunk(2, 1)
        return dit(x, scale, shift), x

    x, gate, _ = _inputs()
    w = torch.randn(C, 2 * C, dtype=x.dtype)
    found = check_swap(block, x, torch.randn_like(x), gate, w, expect=["adaptive_norm"])
    _check_ours(found, "adaptive_layer_norm")


def test_with_weight_and_bias():
    def block(x: Tensor, scale: Tensor, shift: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), w, b) * (1 + scale[:, None]) + shift[:, None]

    x, scale, shift = _inputs()
    w, b = torch.randn(2, C, dtype=x.dtype)
    _check_ours(
        check_swap(block, x, scale, shift, w, b, expect=["adaptive_norm"]), "adaptive_layer_norm"
    )


def test_dynamic_sizes():
    for norm in (dit, continuous):
        check_swap(norm, *_inputs(), expect=["adaptive_norm"], dynamic=True)


def test_a_block_of_dit():
    """Two modulated norms, each of its own residual."""

    def block(x: Tensor, w: Tensor, *modulation: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate_msa.unsqueeze(1) * (dit(x, scale_msa, shift_msa) @ w)
        return x + gate_mlp.unsqueeze(1) * (dit(x, scale_mlp, shift_mlp) @ w)

    x, _, _ = _inputs()
    modulation = torch.randn(B, 6 * C, dtype=x.dtype).chunk(6, 1)
    w = torch.randn(C, C, dtype=x.dtype)
    found = check_swap(block, x, w, *modulation, expect=["adaptive_norm", "adaptive_norm"])
    names = sorted(str(node.target) for node in found.ours)
    assert names == [
        "cudnn_ops.adaptive_layer_norm.default",
        "cudnn_ops.gate_add_adaptive_layer_norm.default",
    ]


def two(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x) * (2 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def not_above_one(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x) * scale.unsqueeze(1) + shift.unsqueeze(1)


def subtracted(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x) * (1 - scale.unsqueeze(1)) + shift.unsqueeze(1)


def shift_subtracted(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x) * (1 + scale.unsqueeze(1)) - shift.unsqueeze(1)


def shift_times_two(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.add(_layer(x) * (1 + scale.unsqueeze(1)), shift.unsqueeze(1), alpha=2)


def product_times_two(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift.unsqueeze(1), _layer(x), 1 + scale.unsqueeze(1), value=2)


def no_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer(x) * (1 + scale.unsqueeze(1)) * shift.unsqueeze(1)


def factor_used_elsewhere(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    factor = 1 + scale.unsqueeze(1)
    return _layer(x) * factor + shift.unsqueeze(1), factor * 2


def product_used_elsewhere(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    product = _layer(x) * (1 + scale.unsqueeze(1))
    return product + shift.unsqueeze(1), product * 2


def norm_used_elsewhere(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    norm = _layer(x)
    return norm * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1), norm * 2


def of_channels(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A column of each token, which the operator does not have."""
    return _layer(x) * (1 + scale[:, :1].unsqueeze(1)) + shift.unsqueeze(1)


@pytest.mark.parametrize(
    "near_miss",
    [
        *(two, not_above_one, subtracted, shift_subtracted, shift_times_two, product_times_two),
        *(no_shift, factor_used_elsewhere, product_used_elsewhere, norm_used_elsewhere),
        of_channels,
    ],
    ids=lambda f: f.__name__,
)
def test_near_misses(near_miss):
    check_swap(near_miss, *_inputs(), expect=["layer_norm"])


def test_dimensions_that_only_fit():
    """With as many tokens as samples, a matrix is broadcast over samples, not over tokens."""

    def direct(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return _layer(x) * (1 + scale) + shift

    def only_the_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return _layer(x) * (1 + scale.unsqueeze(1)) + shift

    x = torch.randn(B, B, C, dtype=torch.float64)
    scale, shift = torch.randn(2, B, C, dtype=torch.float64)
    for norm in (direct, only_the_shift):
        check_swap(norm, x, scale, shift, expect=["layer_norm"])

    def gated(x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor):
        x = x + gate * update
        return dit(x, scale, shift), x

    inputs = x, torch.randn_like(x), scale * 2, scale, shift
    found = check_swap(gated, *inputs, expect=["adaptive_norm"])
    _check_ours(found, "adaptive_layer_norm")


def test_a_matrix_after_its_dimension_of_samples():
    """``(1 + scale)[:, None]`` of one sample for all, which the operator would refuse."""
    x, _, _ = _inputs()
    scale, shift = torch.randn(2, 1, C, dtype=x.dtype)
    check_swap(continuous, x, scale, shift, expect=["layer_norm"])


def test_a_norm_of_a_vector_has_no_samples():
    def gemma(x: Tensor, w: Tensor) -> Tensor:
        return _rms(x) * (1 + w)

    x, w = torch.randn(2, C, dtype=torch.float64)
    check_swap(gemma, x, w, expect=["rms_norm"])
