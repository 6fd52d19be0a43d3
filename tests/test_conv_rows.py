"""Depthwise convolutions of one dimension, by kernels of ours: results, layouts, no plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

import cudnn_ops
from tests.cases import conv as cases
from tests.cases.conv import ConvCase
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
_ops = torch.ops.cudnn_ops


def row(
    batch: int,
    channels: int,
    length: int,
    taps: int,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
) -> ConvCase:
    """Depthwise, of one dimension: by kernels of ours."""
    padded = padding if isinstance(padding, str) else (padding,)
    return ConvCase(
        *(batch, channels, channels, (length,), (taps,), (stride,), padded, (dilation,), channels)
    )


#: Wide and narrow channels; runs of outputs that are whole and that end early; one output; more
#: padding than the kernel reaches; strides and dilations, alone and together; many taps.
ROWS = {
    "causal": row(2, 64, 50, 4, padding=3),
    "unlike padding": row(2, 64, 50, 4, padding="same"),
    "small": row(1, 40, 200, 15, padding="same"),
    "long": row(8, 512, 300, 31, padding=15),
    "whole runs": row(3, 8, 64, 3, padding=1),
    "odd channels": row(2, 33, 77, 5, padding=2),
    "two channels": row(3, 2, 19, 3),
    "six channels": row(2, 6, 100, 9, padding=4),
    "one output": row(5, 12, 7, 7),
    "one input": row(4, 20, 1, 3, padding=1),
    "one tap": row(2, 24, 33, 1),
    "far padding": row(2, 16, 5, 3, padding=9),
    "strided": row(2, 48, 61, 5, stride=2, padding=2),
    "stride beyond the kernel": row(2, 16, 50, 2, stride=5),
    "dilated": row(2, 48, 61, 5, padding=6, dilation=3),
    "strided and dilated": row(3, 28, 90, 4, stride=3, padding=4, dilation=2),
    "many taps": row(2, 36, 400, 129, padding=64),
    "many channels": row(1, 3000, 20, 4, padding=3),
    "many samples": row(300, 4, 9, 3, padding=1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_depthwise_rows(name, is_whole, device, poisoned):
    activation = "silu" if is_whole else "none"
    case = replace(ROWS[name], bias=is_whole, residual=is_whole, activation=activation)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases.check(case, cases.make(case, dtype, device, seed=22))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_depthwise_rows_with_every_activation(activation, device, poisoned):
    case = replace(row(2, 64, 50, 4, padding=3), activation=activation)
    for dtype in (torch.bfloat16, torch.float32):
        cases.check(case, cases.make(case, dtype, device, seed=25))


def first(tensor: torch.Tensor) -> torch.Tensor:
    """The length last in memory."""
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


def last(tensor: torch.Tensor) -> torch.Tensor:
    """The channels last in memory."""
    moved = tensor.detach().movedim(1, -1).contiguous().movedim(-1, 1)
    return moved.requires_grad_(tensor.requires_grad)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """With gaps in memory."""
    parts = tensor.detach().repeat_interleave(2, dim=-1)[..., ::2]
    return parts.requires_grad_(tensor.requires_grad)


def behind(lay_out: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return cases.behind(lay_out(tensor))


LAYOUTS = {
    "first": first,
    "last": last,
    "apart": apart,
    "first, behind": partial(behind, first),
    "last, behind": partial(behind, last),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROWS)
def test_depthwise_rows_keep_a_contiguous_layout(name, layout, device):
    """Any layout is accepted, of each tensor alone; of others the results have channels last."""
    lay_out = LAYOUTS[layout]
    case = replace(ROWS[name], residual=True, activation="silu")
    t = cases.make(case, torch.float32, device, seed=23)
    of_input = cases.Tensors(lay_out(t.input), t.weight, t.bias, last(t.residual), last(t.grad_out))
    of_others = cases.Tensors(
        first(t.input), lay_out(t.weight), t.bias, lay_out(t.residual), lay_out(t.grad_out)
    )
    for tensors in (of_input, of_others):
        cases.check(case, tensors)
        out = cases.run(case, tensors)
        wanted = [tensors.input, tensors.residual]
        kept = "first" if layout.startswith("first") or tensors is of_others else "last"
        for image in (out, *torch.autograd.grad(out, wanted, tensors.grad_out)):
            if 1 in (case.size[0], image.shape[2]):
                continue  # both
            rows = image if kept == "first" else image.movedim(1, -1)
            assert rows.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lay_out", [first, last])
def test_opcheck_of_depthwise_rows(lay_out, device):
    t = cases.make(ROWS["causal"], torch.float32, device, seed=28)
    geometry = _ops._conv_geometry(1, t.weight, [1], [3], [1], 64)
    for index in (0, 1, 2):
        call = (lay_out(t.input), t.weight, t.bias, None, geometry, index, index == 2)
        torch.library.opcheck(_ops._conv.default, call)
    saved = lay_out(t.grad_out)
    for mask in itertools.product([False, True], repeat=4):
        call = (t.grad_out, lay_out(t.input).detach(), t.weight.detach(), saved, geometry, 2)
        torch.library.opcheck(_ops._conv_backward.default, (*call, mask))


@pytest.mark.parametrize("lay_out", [first, last])
def test_compiled_depthwise_rows(lay_out):
    """Of any length, with what reads the results' layout behind them."""

    def block(x, weight):
        out = cudnn_ops.conv1d(x, weight, padding=2, groups=12, activation="silu")
        return out, out.transpose(1, 2).is_contiguous()

    compiled = torch.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    weight = torch.randn(12, 1, 3, requires_grad=True)
    for length in (9, 17):
        x = lay_out(torch.randn(2, 12, length)).requires_grad_()
        (out, is_last), (other, was_last) = compiled(x, weight), block(x, weight)
        assert is_last == was_last == (lay_out is last)
        assert out.stride() == other.stride()
        grads, others = (torch.autograd.grad(y.sin().sum(), (x, weight)) for y in (out, other))
        for grad, one in zip((out, *grads), (other, *others), strict=True):
            torch.testing.assert_close(grad, one)


@pytest.mark.parametrize("lay_out", [first, last])
def test_decomposed_depthwise_rows_lie_as_the_operator_s_do(lay_out):
    decomposed = cudnn_ops.decompositions()[_ops._conv.default]
    t = cases.make(ROWS["causal"], torch.float32, "cpu", seed=29)
    geometry = _ops._conv_geometry(1, t.weight, [1], [3], [1], 64)
    call = (lay_out(t.input), t.weight, t.bias, None, geometry, 2, True)
    for ours, theirs in zip(_ops._conv.default(*call), decomposed(*call), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_depthwise_rows_with_frozen_parts(wanted):
    case = replace(ROWS["causal"], activation="gelu")
    t = cases.make(case, torch.bfloat16, "cuda", seed=26)
    for tensor, is_wanted in zip((t.input, t.weight, t.bias), wanted, strict=True):
        tensor.requires_grad_(is_wanted)
    out = cases.run(case, t)
    exact = cases.reference(case, t, torch.float64)
    rough = cases.reference(case, t, torch.bfloat16)
    leaves = [tensor for tensor in (t.input, t.weight, t.bias) if tensor.requires_grad]
    grads = torch.autograd.grad(out, leaves, t.grad_out) if leaves else ()
    kept = [0, *(index for index, is_wanted in enumerate(wanted, 1) if is_wanted)]
    for index, found in zip(kept, (out, *grads), strict=True):
        cases.sdpa.check(found, exact[index], rough[index], f"{wanted} {index}")


@pytest.mark.gpu
def test_depthwise_rows_carry_no_sums_from_the_padding():
    """Numbers that are not finite stay within the kernel's reach."""
    x = torch.zeros(1, 8, 64, device="cuda")
    x[0, 3, 20] = float("inf")
    weight = torch.ones(8, 1, 5, device="cuda")
    for lay_out in (first, last):
        out = cudnn_ops.conv1d(lay_out(x), weight, padding=2, groups=8)
        infinite = out.isinf().nonzero().tolist()
        assert infinite == [[0, 3, index] for index in range(18, 23)]
        assert out.isnan().sum() == 0


@pytest.mark.gpu
def test_depthwise_rows_are_the_same_every_time():
    case = row(8, 256, 1000, 9, padding=4)
    t = cases.make(case, torch.bfloat16, "cuda", seed=27)
    found = [
        (out, *torch.autograd.grad(out, (t.input, t.weight, t.bias), t.grad_out))
        for out in (cases.run(case, t) for _ in range(3))
    ]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


@pytest.mark.gpu
def test_depthwise_rows_build_no_plan(fresh_cache):
    case = ROWS["causal"]
    t = cases.make(case, torch.bfloat16, "cuda", seed=24)
    before = cudnn_ops.cache_info()
    for within in (None, torch.autocast("cuda", torch.bfloat16)):
        cases.check(case, t, within)
    after = cudnn_ops.cache_info()
    assert (after.builds, after.loads) == (before.builds, before.loads)
