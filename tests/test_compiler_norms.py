"""The patterns of norms: every spelling that models have, and what only looks like one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_ops.compiler.choice import Times
from tests.cases.compiler import Rewritten, Timed, check_swap
from tests.conftest import DEVICES

EPS = 1e-6


def llama(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return w * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + w.double())).type_as(x)


def squared(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + EPS) * w


def by_itself(x: Tensor, w: Tensor) -> Tensor:
    return x * (x * x).mean(dim=-1, keepdim=True).add(EPS).rsqrt() * w


def power(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * (x**2).mean(dim=[-1], keepdim=True).add(EPS).pow(-0.5))


def root(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / torch.sqrt(torch.mean(x**2, -1, keepdim=True) + EPS))


def reciprocal(x: Tensor, w: Tensor) -> Tensor:
    return x.mul(1 / ((x.square().mean(2, True) + EPS).sqrt())).mul(w)


def in_place(x: Tensor, w: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    normed *= w
    return normed


def function(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def function_no_weight(x: Tensor, w: Tensor) -> Tensor:
    return torch.rms_norm(x, [x.shape[-1]], None, EPS) + w.sum()


def function_and_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS) * w


def function_above_one(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS) * (w + 1)


RMS = [
    function_and_weight,
    function_above_one,
    llama,
    gemma,
    squared,
    by_itself,
    power,
    root,
    reciprocal,
    in_place,
    function,
    function_no_weight,
]


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def layer_no_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, [x.shape[-1]], weight=w, eps=EPS) + b.sum()


def layer_written_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(variance + EPS)) + b


def layer_shared(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - torch.mean(x, dim=-1, keepdim=True)
    scale = torch.rsqrt((centered * centered).mean(dim=-1, keepdim=True) + EPS)
    return centered * scale * w + b


def layer_by_var(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + EPS) * w + b


def layer_by_correction(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = torch.var(x, dim=-1, correction=0, keepdim=True)
    return b + w * ((x - x.mean(-1, True)) * (variance + EPS) ** -0.5)


def cohere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (w.to(torch.float64) * ((wide - mean) * torch.rsqrt(variance + EPS))).to(x.dtype) + b


def chameleon(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The function, with weight and bias behind it."""
    return F.layer_norm(x, (x.shape[-1],), None, None, eps=EPS) * w + b


def moonshine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=EPS) * (w + 1.0) + b.sum()


LAYER = [
    chameleon,
    moonshine,
    layer,
    layer_no_bias,
    layer_written_out,
    layer_shared,
    layer_by_var,
    layer_by_correction,
    cohere,
]


def _inputs(*weights: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x = torch.randn(3, 5, 24, dtype=dtype) + 0.3
    return [x, *(torch.randn(n, dtype=dtype) for n in weights)]


@pytest.mark.parametrize("norm", RMS, ids=lambda f: f.__name__)
def test_rms_norm(norm):
    check_swap(norm, *_inputs(24), expect=["rms_norm"])


@pytest.mark.parametrize("norm", LAYER, ids=lambda f: f.__name__)
def test_layer_norm(norm):
    check_swap(norm, *_inputs(24, 24), expect=["layer_norm"])


@pytest.mark.parametrize("norm", RMS, ids=lambda f: f.__name__)
def test_rms_norm_of_a_sum(norm):
    def block(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = x + y
        return norm(x, w), x * 2

    x, w = _inputs(24)
    found = check_swap(block, x, torch.randn_like(x), w, expect=["rms_norm"])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.add_rms_norm.default"]


def test_layer_norm_of_a_sum():
    def block(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = x.add(y)
        return layer(x, w, b), x.relu()

    x, w, b = _inputs(24, 24)
    found = check_swap(block, x, torch.randn_like(x), w, b, expect=["layer_norm"])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.add_layer_norm.default"]


def test_a_sum_that_is_used_before_its_norm_can_be_computed():
    """The weight is computed of the sum."""

    def block(x: Tensor, y: Tensor) -> Tensor:
        x = x + y
        return function(x, x.sum((0, 1)).sin())

    x = _inputs()[0]
    found = check_swap(block, x, torch.randn_like(x), expect=["rms_norm"])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.rms_norm.default"]


def test_sums_that_broadcast_or_are_scaled_stay_alone():
    def broadcast(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return function(x + y, w)

    def scaled(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return function(torch.add(x, y, alpha=2), w)

    x, y, w = _inputs(24, 24)
    for block, other in ((broadcast, y), (scaled, torch.randn_like(x))):
        found = check_swap(block, x, other, w, expect=["rms_norm"])
        assert [str(node.target) for node in found.ours] == ["cudnn_ops.rms_norm.default"]


@pytest.mark.parametrize(
    ("norm", "weights"),
    [(function_and_weight, 1), (function_above_one, 1), (chameleon, 2), (moonshine, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_weights_behind_the_function(norm, weights):
    found = check_swap(
        norm, *_inputs(*[24] * weights), expect=["rms_norm" if norm in RMS else "layer_norm"]
    )
    (call,) = found.ours
    assert len(call.all_input_nodes) == (3 if norm is chameleon else 2)

    def used_elsewhere(x: Tensor, w: Tensor) -> Tensor:
        normed = F.layer_norm(x, (x.shape[-1],), eps=EPS)
        return normed * w + normed.relu()

    (call,) = check_swap(used_elsewhere, *_inputs(24), expect=["layer_norm"]).ours
    assert len(call.all_input_nodes) == 1


def deepseek_v4(x: Tensor, w: Tensor) -> Tensor:
    """The root alone in another precision."""
    return w * (x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).to(x.dtype))


def root_in_double(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS).to(x.dtype) * w


def rms_in_double(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x.double(), (x.shape[-1],), w.double(), EPS).to(x.dtype)


def rms_in_double_no_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x.double(), (x.shape[-1],), eps=EPS).type_as(x) * w


def olmo(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(dtype=torch.float64)
    return F.layer_norm(wide, (x.shape[-1],), None, None, eps=EPS).to(x.dtype) * w


def wan(x: Tensor, w: Tensor) -> Tensor:
    wide = F.layer_norm(x.double(), (x.shape[-1],), w.double(), w.double(), EPS)
    return wide.to(x.dtype)


def wan_no_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x.double(), (x.shape[-1],), w.double(), None, EPS).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "pattern"),
    [
        *((norm, "rms_norm") for norm in (deepseek_v4, root_in_double)),
        *((norm, "rms_norm") for norm in (rms_in_double, rms_in_double_no_weight)),
        *((norm, "layer_norm") for norm in (olmo, wan, wan_no_bias)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_computed_in_another_precision(norm, pattern):
    """The operator reads and writes what the model has, and nothing is left beside it."""
    found = check_swap(norm, *_inputs(24, dtype=torch.float32), expect=[pattern])
    calls = [node for node in found.graphs[0].graph.nodes if node.op.startswith("call_")]
    assert [node.target for node in calls] == [getattr(torch.ops.cudnn_ops, pattern).default]
    assert calls[0].meta["example_value"].dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_eps(dtype, device):
    """It is that of the dtype that PyTorch computes in; in rows so small it counts."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w)

    x, w = (torch.randn(shape).to(device, dtype) for shape in ((3, 5, 24), (24,)))
    # Of gradients of a thousand and more.
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-3
    check_swap(norm, 1e-3 * x, w, expect=["rms_norm"], tolerance=tolerance)


def _function_of_two_dimensions(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x.double(), x.shape[1:], eps=EPS).to(x.dtype) * w


def _function_without_eps(x: Tensor, w: Tensor) -> Tensor:
    """That of float64, which is not that of the input."""
    return F.rms_norm(x.double(), (x.shape[-1],)).to(x.dtype) * w


@pytest.mark.parametrize(
    "near_miss", [_function_of_two_dimensions, _function_without_eps], ids=lambda f: f.__name__
)
def test_what_is_no_norm_of_the_input_itself(near_miss):
    alone = ["rms_norm"] if near_miss is _function_without_eps else []
    found = check_swap(near_miss, *_inputs(24, dtype=torch.float32), expect=alone)
    assert all(node.meta["example_value"].dtype == torch.float64 for node in found.ours)


def _wrong_axis(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS))


def _all_axes(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS))


def _cube(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS))


def _other_power(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.25))


def _of_another(x: Tensor, w: Tensor) -> Tensor:
    return w * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def _scaled_eps(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), EPS, alpha=3)))


def _used_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + EPS)) + variance


def _changed(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.5
    variance = y.pow(2).mean(-1, keepdim=True)
    y.mul_(2)
    return w * (y * torch.rsqrt(variance + EPS))


def _sum(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS))


@pytest.mark.parametrize(
    "near_miss",
    [
        _wrong_axis,
        _all_axes,
        _cube,
        _other_power,
        _of_another,
        _scaled_eps,
        _used_elsewhere,
        _changed,
        _sum,
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_an_rms_norm(near_miss):
    gradients = near_miss is not _changed  # which autograd refuses
    check_swap(near_miss, *_inputs(24), expect=[], gradients=gradients)


def test_a_weight_that_is_no_row_stays_outside():
    """The norm is ours, and what it is multiplied with is not its weight."""
    for weight in (torch.randn(5, 1), torch.randn(1), torch.randn(3, 5, 24)):
        found = check_swap(llama, _inputs()[0], weight.double(), expect=["rms_norm"])
        assert len(found.ours[0].args) < 3 or found.ours[0].args[2] is None


def _unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + EPS) * w + b


def _not_centered(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return x * torch.rsqrt(variance + EPS) * w + b


def _other_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-2, True)) * torch.rsqrt(variance + EPS) * w + b


def _subtracted_twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return torch.sub(x, x.mean(-1, True), alpha=2) * torch.rsqrt(variance + EPS) * w + b


@pytest.mark.parametrize(
    "near_miss",
    [_unbiased, _not_centered, _other_mean, _subtracted_twice],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_a_layer_norm(near_miss):
    check_swap(near_miss, *_inputs(24, 24), expect=[])


def test_layer_norm_over_two_dimensions_is_torch_s():
    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-2:])

    check_swap(norm, *_inputs(), expect=[])


def test_a_norm_across_a_change_of_gradients():
    def half(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * scale * w

    found = check_swap(half, *_inputs(24), expect=[])
    assert "switched on or off" in found.report.candidates[0].reason


def test_dynamic_sizes():
    check_swap(llama, *_inputs(24), expect=["rms_norm"], dynamic=True)
    check_swap(layer_written_out, *_inputs(24, 24), expect=["layer_norm"], dynamic=True)


def test_a_weight_that_widens_the_result_stays_outside():
    """A weight in float32 makes the stock result one, and ours has the input's dtype."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

    x = torch.randn(3, 24, dtype=torch.bfloat16)
    found = check_swap(norm, x, torch.randn(24), expect=["rms_norm"], tolerance=2e-2)
    assert "torch.bfloat16 in place of torch.float32" in found.report.candidates[0].reason
    assert not found.report.candidates[0].swapped
    assert found.ours[0].args[2] is None


def test_large_and_small_numbers():
    for factor in (1e-8, 1e8):
        x, w = _inputs(24)
        check_swap(llama, x * factor, w, expect=["rms_norm"])
    assert math.isfinite(EPS)


def test_a_report_tells_the_times_of_a_reading():
    """Of the whole norm; read from its float32 input, it would have a weight of another dtype."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    found = Rewritten(norm)
    found.chooser = Timed(found.report, Times(2.0, 1.0))
    found(torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16())
    (candidate,) = found.report
    assert not candidate.swapped
    assert (candidate.ours_ms, candidate.stock_ms) == (2.0, 1.0)
    assert candidate.reason == "not faster here"
