"""A small call of every kernel of ours, and of attention over pages, for compute-sanitizer.

    make sanitize

All types, and the odd paths: one row, widths and addresses that no vector fits, heads of any size.
A line for each, before it runs, so that what the sanitizer says stands behind its name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops.ops.activation import ACTIVATIONS, SLOPE
from cudnn_ops.ops.linear import KEEP_SLOPE
from cudnn_ops.plans.policy import Policy
from tests.cases import paged as paged_cases
from tests.test_paged import DECODE, ONE, PREFILL, SPECULATE

_ops = torch.ops.cudnn_ops

#: What is run, and what it is called: a kernel's name where that and its backward are all.
Sample = tuple[str, Callable[[], None]]

TYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}


#: Numbers behind a tensor that a norm's backward reads: it copies up to 16 bytes of a row's end by
#: one cp.async that fills up with zeros, which memcheck takes for a read of all 16.
_SPARE = 8


def _tensor(*shape: int, dtype: torch.dtype, shift: int = 0, spare: int = 0) -> Tensor:
    """Random, made on the CPU; `shift` numbers behind an address that a vector fits."""
    count = math.prod(shape)
    numbers = torch.randn(shift + count + spare, generator=torch.Generator().manual_seed(1))
    return numbers.to(dtype).to("cuda")[shift : shift + count].view(shape).detach()


def _backward(out: Tensor | tuple[Tensor, ...], spare: int = 0) -> None:
    outs = (out,) if isinstance(out, Tensor) else out
    grads = [_tensor(*one.shape, dtype=one.dtype, spare=spare) for one in outs]
    torch.autograd.backward(outs, grads)


def gated() -> Iterator[Sample]:
    def run(function: Callable[..., Tensor], dtype: torch.dtype, shape: list[int], shift: int):
        gate, up = (_tensor(*shape, dtype=dtype, shift=shift).requires_grad_() for _ in range(2))
        _backward(function(gate, up))

    functions: dict[str, Callable[..., Tensor]] = {
        "silu": cudnn_ops.swiglu,
        "gelu": cudnn_ops.geglu,
        "gelu_tanh": partial(cudnn_ops.geglu, approximate="tanh"),
    }
    for activation, function in functions.items():
        for name, dtype in TYPES.items():
            wide = 16 // dtype.itemsize
            for width, shapes, shift in ((wide, ([3, 48], [80]), 0), (1, ([3, 7], [16]), 1)):
                for shape in shapes:
                    call = partial(run, function, dtype, shape, shift)
                    yield f"gated_{activation}_{name}_{width}", call


def rotary() -> Iterator[Sample]:
    def run(dtype: torch.dtype, angle: torch.dtype, size: int, batch: int) -> None:
        x = _tensor(batch, 5, 3, size, dtype=dtype).transpose(1, 2).requires_grad_()
        cos, sin = (_tensor(1, 5, size, dtype=angle) for _ in range(2))
        _backward(cudnn_ops.rotary_embedding(x, cos, sin))

    def run_both(dtype: torch.dtype, angle: torch.dtype, size: int, is_interleaved: bool) -> None:
        """Of two axes, by positions that are outside of the table too."""
        query, key = (
            _tensor(2, 5, heads, 2 * size, dtype=dtype).transpose(1, 2).requires_grad_()
            for heads in (3, 1)
        )
        positions = torch.tensor([[[0, 1, 2, 9, -1]], [[3, 2**40, 1, 0, 2]]], device="cuda")
        options: dict[str, Any] = {
            "interleaved": is_interleaved,
            "rotary_dim": size,
            "positions": positions,
            "sections": (size // 4, size // 2 - size // 4),
        }
        for columns in (size, size // 2):
            cos, sin = (_tensor(4, columns, dtype=angle) for _ in range(2))
            both = query, key, cos, sin
            _backward(cudnn_ops.rotary_embedding_qk(*both, **options))

    for name, dtype in TYPES.items():
        for suffix, angle in {"": dtype, "_float": torch.float32}.items():
            if suffix and dtype == torch.float32:
                continue
            for width, size in ((16 // dtype.itemsize, 64), (1, 6)):
                for batch in (1, 2):
                    yield f"rotary_{name}{suffix}_{width}", partial(run, dtype, angle, size, batch)
                for is_interleaved in (False, True):
                    kind = "pairs" if is_interleaved and width > 1 else "any"
                    call = partial(run_both, dtype, angle, size, is_interleaved)
                    yield f"rotary_{kind}_{name}{suffix}_{width}", call


#: In pieces of a vector, of 8 bytes and in numbers: by which kernels rows are computed.
_VECTORS, _HALVES, _NUMBERS = (
    (5, 50, 100, 300, 1500, 3000, 5000),
    (5, 101, 1001),
    (7, 201, 1001, 9001),
)
#: Vectors of which a thread of an adaptive norm's backward has three, and five, of so many rows.
_UNEVEN, _UNEVEN_ROWS = (90, 150), 1500


#: Numbers of a row that no shared memory holds those of.
_LONG = 17_001


#: Rows enough for kernels that few have no use for, and the vectors that these have.
_MANY, _OF_MANY = 513, (150, 180)


def norms() -> Iterator[Sample]:
    def run(layer: bool, dtype: torch.dtype, columns: int, shift: int) -> None:
        norm: Callable[..., Tensor] = cudnn_ops.layer_norm if layer else cudnn_ops.rms_norm

        def parameters(kind: torch.dtype) -> list[Tensor]:
            return [_tensor(columns, dtype=kind).requires_grad_() for _ in range(1 + layer)]

        for rows in (1, 3):
            x = _tensor(rows, columns, dtype=dtype, shift=shift, spare=_SPARE).requires_grad_()
            _backward(norm(x, [columns], *parameters(dtype)), _SPARE)
        _backward(norm(x, [columns]), _SPARE)
        x = _tensor(20, columns, dtype=dtype, shift=shift, spare=_SPARE)
        _backward(norm(x, [columns], *parameters(torch.float32), zero_centered=True), _SPARE)

    def run_add(layer: bool, dtype: torch.dtype, columns: int) -> None:
        norm: Any = cudnn_ops.add_layer_norm if layer else cudnn_ops.add_rms_norm
        # Rows in groups, that no single stride tells apart; eight, so that all end at 16 bytes.
        inputs = [
            _tensor(2, 4, columns, dtype=dtype).transpose(0, 1).requires_grad_() for _ in range(2)
        ]
        weight = _tensor(columns, dtype=dtype).requires_grad_()
        _backward(norm(*inputs, [columns], weight))

    def run_many(layer: bool, dtype: torch.dtype, columns: int) -> None:
        norm: Callable[..., Tensor] = cudnn_ops.layer_norm if layer else cudnn_ops.rms_norm
        norm(_tensor(_MANY, columns, dtype=dtype), [columns], _tensor(columns, dtype=dtype))

    for name, dtype in TYPES.items():
        size = dtype.itemsize
        widths = [16 // size * count for count in _VECTORS]
        widths += [*(8 // size * count for count in _HALVES), *_NUMBERS]
        for layer in (False, True):
            kind = "layer_norm" if layer else "rms_norm"
            for columns in (16 // size * count for count in _OF_MANY):
                call = partial(run_many, layer, dtype, columns)
                yield f"{kind}_forward of {_MANY} rows, {name}, {columns} columns", call
            for columns in widths:
                call = partial(run, layer, dtype, columns, columns % 2)
                yield f"{kind}_forward and {kind}_backward, {name}, {columns} columns", call
                if columns in (widths[0], widths[3], widths[6], _NUMBERS[0]):
                    yield (
                        f"{kind}_forward and {kind}_backward, {name}, {columns} columns, added",
                        partial(run_add, layer, dtype, columns),
                    )


#: Channels, positions and which come last: in pieces of 16, 8 and 4 bytes and of one number of 16
#: bits. Groups that threads hold, few pieces each and many; that shared memory holds, of a block
#: and of clusters; and others.
_HELD = (
    *((16, 40, False), (6, 4, False), (6, 2, False), (6, 7, False)),
    *((16, 35, True), (8, 35, True), (12, 35, True), (9, 35, True)),
    *((6, 8000, False), (6, 1804, False), (6, 866, False), (6, 435, False)),
    *((16, 2100, True), (8, 1300, True), (4, 1300, True), (6, 435, True)),
)
_WHOLE = (
    *((8208, 8, False), (8208, 4, False), (8208, 2, False), (8208, 3, False)),
    *((8208, 3, True), (8212, 3, True), (8210, 3, True), (12297, 3, True)),
)
_CLUSTERS = ((16, 4000, False), (16, 5000, True))
_RESIDENT = (
    *((16, 90_000, False), (16, 90_004, False), (16, 90_002, False)),
    *((16, 90_000, True), (12, 120_000, True), (10, 140_000, True), (16, 500_000, True)),
)
_IN_PARTS = (
    *((16, 10, False), (16, 20, False), (16, 35, False), (16, 40, False)),
    *((16, 35, True), (12, 35, True), (10, 35, True), (9, 35, True)),
)


def group_norms() -> Iterator[Sample]:
    def run(
        dtype: torch.dtype, channels: int, size: int, is_last: bool, shared: int, adds: bool
    ) -> None:
        x, residual = (_tensor(2, channels, size, 1, dtype=dtype) for _ in range(2))
        if is_last:
            x = x.contiguous(memory_format=torch.channels_last)
        weight, bias = (_tensor(channels, dtype=dtype).requires_grad_() for _ in range(2))
        rest = (2 if channels % 2 == 0 else 3, weight, bias)
        _ops._norm_limit_shared_memory(shared)
        try:
            x, residual = x.requires_grad_(), residual.requires_grad_()
            if adds:
                _backward(cudnn_ops.add_group_norm(x, residual, *rest, activation="silu"))
            else:
                _backward(cudnn_ops.group_norm(x, *rest))
        finally:
            _ops._norm_limit_shared_memory(0)

    forward = "group_norm_held, group_norm_cluster, group_norm_resident, group_norm_forward"
    resident = "group_norm_resident_first, group_norm_resident_last"
    stems = f"{forward}, group_norm_held_backward, {resident} and group_norm_backward"
    for name, dtype in TYPES.items():
        large = (*_HELD, *_WHOLE, *_CLUSTERS, *_RESIDENT)
        for sizes, shared in ((large, 0), (_IN_PARTS, 1 << 10)):
            for (channels, size, is_last), adds in itertools.product(sizes, (False, True)):
                order = "last" if is_last else "first"
                yield (
                    f"one of {stems}: {name}, {channels} channels {order}, {size}, {shared}",
                    partial(run, dtype, channels, size, is_last, shared, adds),
                )


def batch_norms() -> Iterator[Sample]:
    """By plans, and by kernels of ours and torch's; by running statistics."""

    def run(
        dtype: torch.dtype, channels: int, is_last: bool, kind: str, policy: Policy, training: bool
    ) -> None:
        x, residual = (_tensor(3, channels, 7, 5, dtype=dtype) for _ in range(2))
        if is_last:
            x, residual = (t.contiguous(memory_format=torch.channels_last) for t in (x, residual))
        weight, bias, mean, var = (_tensor(channels, dtype=torch.float32) for _ in range(4))
        weight, bias, var = weight.requires_grad_(), bias.requires_grad_(), var.square() + 1
        activation: Any = "none" if kind == "plain" else "relu"
        added = residual.requires_grad_(kind == "sum") if "sum" in kind else None
        with cudnn_ops.using_plan_policy(policy):
            given = (x.requires_grad_(), mean, var, weight, bias, training)
            _backward(cudnn_ops.batch_norm(*given, residual=added, activation=activation))

    def of_two(dtype: torch.dtype) -> None:
        image = _tensor(3, 24, 7, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
        rows = _tensor(24, dtype=torch.float32)
        saved = (image, None, None, image, rows, rows, True, 1)
        _ops._batch_norm_backward.default(image, *saved, (True,) * 4, False, image)

    kinds = ("plain", "relu", "sum", "frozen sum")
    for name, dtype in TYPES.items():
        for channels, is_last in ((64, True), (24, True), (7, True), (64, False), (7, False)):
            images = "batch_norm_pixels" if is_last else "planes"
            for kind, policy in itertools.product(kinds, get_args(Policy)[:2]):
                for training in (False, True):
                    words = f"{channels} channels, {kind}, {policy}, {training}"
                    yield (
                        f"batch_norm of {images}, {name}, {words}",
                        partial(run, dtype, channels, is_last, kind, policy, training),
                    )
        yield f"batch_norm of batch_norm_pixels, {name}, two gradients", partial(of_two, dtype)


def max_pools() -> Iterator[Sample]:
    """Windows that reach into the padding, of odd images; with one gradient and with two."""

    def run(dtype: torch.dtype, channels: int, kernel: int, stride: int) -> None:
        x = _tensor(3, channels, 11, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
        _backward(cudnn_ops.max_pool2d(x.requires_grad_(), kernel, stride, 1))
        numbers = [[one] * 2 for one in (kernel, stride, 1, 1)]
        out, offsets = _ops._max_pool2d.default(x.detach(), *numbers, False, True)
        _ops._max_pool2d_backward.default(out, offsets, out, [11, 8], *numbers)

    for name, dtype in TYPES.items():
        for width, channels in ((16 // dtype.itemsize, 24), (1, 7)):
            for windows, kernel, stride in (("any", 3, 1), ("2x2", 2, 2), ("3x3", 3, 2)):
                kernel_name = f"max_pool_{windows}_{name}_{width}"
                yield kernel_name, partial(run, dtype, channels, kernel, stride)


def folded_norms() -> Iterator[Sample]:
    def run(dtype: torch.dtype) -> None:
        weights = [_tensor(5, 7, 3, 3, dtype=dtype), _tensor(6, 1, 5, dtype=dtype)]
        rows = [_tensor(size, dtype=dtype) for size in (5, 6)]
        _ops._fold_batch_norms.default(weights, *([rows] * 5), [1e-5, 1e-3])

    for name, dtype in TYPES.items():
        yield f"batch_norm_fold_{name}", partial(run, dtype)


def adaptive_norms() -> Iterator[Sample]:
    """Of few rows of each width, as parts of some samples and as numbers of each token."""

    def run(dtype: torch.dtype, columns: int, shift: int, is_gated: bool) -> None:
        # Of odd rows as many as end at a multiple of 16 bytes, as the sum does.
        samples = 8 if shift else 2

        def rows(tokens: int) -> Tensor:
            shape = (samples, tokens, columns)
            return _tensor(*shape, dtype=dtype, shift=shift, spare=_SPARE).requires_grad_()

        for tokens, counted in ((11, 1), (3, 3)):
            scale, offset, gate = (rows(counted) for _ in range(3))
            # Samples of a row have kernels of their own where nothing is added up over these.
            has_weight = tokens != counted
            weight, bias = (
                _tensor(columns, dtype=dtype).requires_grad_() if has_weight else None
                for _ in range(2)
            )
            out: Tensor | tuple[Tensor, ...]
            if is_gated:
                out = cudnn_ops.gate_add_adaptive_layer_norm(
                    rows(tokens), rows(tokens), gate, scale, offset, weight=weight, bias=bias
                )
            else:
                out = cudnn_ops.adaptive_rms_norm(rows(tokens), scale, offset, weight=weight)
            _backward(out, spare=_SPARE)

    def run_many(dtype: torch.dtype, columns: int, tokens: int) -> None:
        """Operands of one type, as models have them, and with a weight."""
        x, update = (_tensor(1, tokens, columns, dtype=dtype) for _ in range(2))
        gate, scale, offset = (_tensor(1, columns, dtype=dtype) for _ in range(3))
        for weight in (None, gate[0]):
            cudnn_ops.adaptive_rms_norm(x, scale, offset, weight=weight)
        cudnn_ops.gate_add_adaptive_layer_norm(x, update, gate, scale, offset)

    def run_uneven(dtype: torch.dtype, columns: int) -> None:
        """With the weight's gradient, which blocks that are workers do not add up."""
        x = _tensor(1, _UNEVEN_ROWS, columns, dtype=dtype).requires_grad_()
        scale, offset, weight = (_tensor(1, columns, dtype=dtype) for _ in range(3))
        weight = weight[0].requires_grad_()
        _backward(cudnn_ops.adaptive_rms_norm(x, scale, offset, weight=weight), spare=_SPARE)

    def run_blocks(dtype: torch.dtype, columns: int, is_gated: bool) -> None:
        shape = (2, _UNEVEN_ROWS, columns)
        x, update = (_tensor(*shape, dtype=dtype).requires_grad_() for _ in range(2))
        three = (_tensor(2, columns, dtype=dtype).requires_grad_() for _ in range(3))
        gate, scale, offset = three
        if is_gated:
            out = cudnn_ops.gate_add_adaptive_layer_norm(x, update, gate, scale, offset)
            _backward(out, spare=_SPARE)
        else:
            _backward(cudnn_ops.adaptive_rms_norm(x, scale, offset), spare=_SPARE)

    for name, dtype in TYPES.items():
        widths = [16 // dtype.itemsize * count for count in (*_VECTORS, *_UNEVEN)]
        for columns in (*widths, *_NUMBERS, _LONG):
            for is_gated in (False, True):
                yield (
                    f"adaptive_norm_forward and adaptive_norm_backward, {name}, {columns} columns",
                    partial(run, dtype, columns, columns % 2, is_gated),
                )
        for count in _UNEVEN:
            columns = 16 // dtype.itemsize * count
            call = partial(run_uneven, dtype, columns)
            yield f"adaptive_norm_backward of {_UNEVEN_ROWS} rows, {name}, {columns} columns", call
            for is_gated in (False, True):
                call = partial(run_blocks, dtype, columns, is_gated)
                yield f"adaptive_norm_backward by blocks, {name}, {columns} columns", call
        for count, tokens in (
            (50, 3),
            (50, 40),
            (300, 3),
            (2100, 3),
            *((n, _MANY) for n in _OF_MANY),
        ):
            columns = 16 // dtype.itemsize * count
            call = partial(run_many, dtype, columns, tokens)
            yield f"adaptive_norm_forward of {tokens} rows, {name}, {columns} columns", call


def convolutions() -> Iterator[Sample]:
    def run(activation: int, dtype: torch.dtype, channels: int, pixels: int) -> None:
        """The epilogue's gradients alone, which need no plan."""
        weight = _tensor(channels, 1, 1, 1, dtype=dtype)
        geometry = _ops._conv_geometry(2, weight, [1], [0], [1], 1)
        out = _tensor(1, channels, pixels, 1, dtype=dtype).to(memory_format=torch.channels_last)
        x = out[:, :1].contiguous(memory_format=torch.channels_last)
        saved = None if ACTIVATIONS[activation] == "none" else out
        wanted = [False, False, True, True]
        _ops._conv_backward(out, x, weight, saved, geometry, activation, wanted)

    for name, dtype in TYPES.items():
        wide = 16 // dtype.itemsize
        for index, activation in enumerate(ACTIVATIONS):
            for width, channels, pixels in ((wide, 48, 300), (1, 7, 300), (1, 601, 1)):
                call = partial(run, index, dtype, channels, pixels)
                yield f"conv_epilogue_{activation}_{name}_{width}", call

    def run_slope(dtype: torch.dtype, columns: int) -> None:
        """A pair of layers that keeps its activation's slope, and the gradient through that."""
        x, w1, w2 = (_tensor(*size, dtype=dtype) for size in ((300, 8), (columns, 8), (8, columns)))
        for number in (1, 2, 3, 4):
            _, hidden, kept = _ops._mlp(x, w1, None, w2, None, number, False, KEEP_SLOPE)
            if kept.numel():
                wanted = [False, False, True, False, False]
                _ops._mlp_backward(x, x, w1, w2, hidden, kept, SLOPE, False, wanted)

    for name, dtype in TYPES.items():
        for width, columns in ((16 // dtype.itemsize, 48), (1, 7)):
            yield f"conv_epilogue_slope_{name}_{width}", partial(run_slope, dtype, columns)

    def run_depthwise(dtype: torch.dtype) -> None:
        channels = 16
        x = _tensor(2, channels, 6, 5, dtype=dtype).to(memory_format=torch.channels_last)
        weight = _tensor(channels, 1, 3, 3, dtype=dtype).requires_grad_()
        bias = _tensor(channels, dtype=dtype).requires_grad_()
        call = partial(cudnn_ops.conv2d, x.requires_grad_(), weight, bias, padding=1)
        _backward(call(groups=channels, activation="silu", residual=x.detach()))

    def run_row(dtype: torch.dtype, channels: int, stride: int, is_last: bool = True) -> None:
        x = _tensor(3, 77, channels, dtype=dtype).transpose(1, 2)
        x = (x if is_last else x.contiguous()).requires_grad_()
        weight = _tensor(channels, 1, 9, dtype=dtype).requires_grad_()
        bias = _tensor(channels, dtype=dtype).requires_grad_()
        call = partial(cudnn_ops.conv1d, x, weight, bias, stride, padding=5, groups=channels)
        _backward(call(activation="silu"))

    for name, dtype in TYPES.items():
        yield f"depthwise convolution, {name}", partial(run_depthwise, dtype)
        wide = 8 // dtype.itemsize
        for width, channels in ((wide, 36), (1, 35), (wide, 132)):
            for stride in (1, 2):
                call = partial(run_row, dtype, channels, stride)
                yield f"depthwise_conv1d_{name}_{width}, stride {stride}", call
        for stride, rows in ((1, "rows"), (2, "strided_rows")):
            call = partial(run_row, dtype, 35, stride, is_last=False)
            yield f"depthwise_conv1d_{rows}_{name}, stride {stride}", call


def depthwise_images() -> Iterator[Sample]:
    """Our kernels for every step, whether or not they are the faster ones."""

    def run(
        dtype: torch.dtype, channels: int, kernel: int, stride: int, depth: int, size: int = 11
    ) -> None:
        shape = (3, channels, *[depth] * (depth > 0), size - 1, size)
        format = torch.channels_last_3d if depth else torch.channels_last
        x = _tensor(*shape, dtype=dtype).to(memory_format=format).requires_grad_()
        taps = [kernel] * (len(shape) - 2)
        weight = _tensor(channels, 1, *taps, dtype=dtype).requires_grad_()
        bias = _tensor(channels, dtype=dtype).requires_grad_()
        function = cudnn_ops.conv3d if depth else cudnn_ops.conv2d
        for step in range(3):
            _ops._conv_use_depthwise(step, 2)
        try:
            call = partial(function, x, weight, bias, stride, kernel // 2, 1, channels)
            out = call()
            _backward(out)
            _backward(call(activation="silu", residual=out.detach()))
        finally:
            for step in range(3):
                _ops._conv_use_depthwise(step, 0)

    for name, dtype in TYPES.items():
        for kernel in (3, 5, 7):
            for stride in (1, 2):
                call = partial(run, dtype, 70, kernel, stride, 0)
                step = f"rolling_{kernel}" if stride == 1 else f"forward_{kernel}_{stride}"
                yield f"depthwise_conv_{step}, {name}", call
        for kernel, stride, columns in itertools.product((3, 5, 7), (1, 2), (7, 14)):
            call = partial(run, dtype, 72, kernel, stride, 0, stride * columns)
            step = "whole" if columns == 7 else "whole_weight"
            yield f"depthwise_conv_{step}_{kernel}_{stride}_{columns}, {name}", call
        for kernel in (5, 7):
            call = partial(run, dtype, 72, kernel, 1, 0, 28)
            yield f"depthwise_conv_parts_{kernel}, {name}", call
        if dtype.itemsize == 2:
            yield f"depthwise_conv_rolling_3_wide, {name}", partial(run, dtype, 72, 3, 1, 0)
        for kind, channels in (("pairs", 66), ("singles", 5)):
            call = partial(run, dtype, channels, 3, 2, 4)
            yield f"depthwise_conv_forward_{kind}, {name}", call
            yield (
                f"depthwise_conv_weight_{kind}, {name}, 9 taps",
                partial(run, dtype, channels, 9, 1, 0),
            )
            yield (
                f"depthwise_conv_input_{kind}, {name}, stride 3",
                partial(run, dtype, channels, 4, 3, 0),
            )


def grouped_images() -> Iterator[Sample]:
    """Our kernel, whether or not it is the faster one; its parts of a stage, and more than one."""

    def run(dtype: torch.dtype, width: int, outputs: int, stride: int) -> None:
        format = torch.channels_last
        x = _tensor(3, 2 * width, 10, 11, dtype=dtype).to(memory_format=format).requires_grad_()
        weight = _tensor(2 * outputs, width, 3, 3, dtype=dtype).to(memory_format=format)
        bias = _tensor(2 * outputs, dtype=dtype).requires_grad_()
        _ops._conv_use_grouped(2)
        try:
            call = partial(cudnn_ops.conv2d, x, weight.requires_grad_(), bias, stride, 1, 1, 2)
            out = call()
            _backward(out)
            _backward(call(activation="silu", residual=out.detach()))
        finally:
            _ops._conv_use_grouped(0)

    for name in ("half", "bfloat16"):
        for steps, width, outputs in ((1, 8, 72), (2, 24, 24), (3, 40, 56), (4, 120, 8)):
            for stride in (1, 2):
                yield (
                    f"grouped_conv_{name}_{steps}, stride {stride}",
                    partial(run, TYPES[name], width, outputs, stride),
                )


def mixtures() -> Iterator[Sample]:
    """Of one block of pairs and of several, with pairs that have no expert."""

    def permute(tokens: int, index: torch.dtype, dtype: torch.dtype, columns: int) -> None:
        x = _tensor(tokens, columns, dtype=dtype).requires_grad_()
        experts = torch.arange(tokens * 3, device="cuda").remainder(7).sub(1).view(tokens, 3)
        rows, _, _ = cudnn_ops.moe_permute(x, experts.to(index), 6)
        _backward(rows)

    def combine(dtype: torch.dtype, weight: torch.dtype, columns: int, shift: int) -> None:
        experts = torch.arange(33, device="cuda").remainder(5).sub(1).view(11, 3)
        x = torch.zeros(11, 1, device="cuda")
        positions = cudnn_ops.moe_permute(x, experts, 4)[2]
        rows = _tensor(33, columns, dtype=dtype, shift=shift).requires_grad_()
        weights = _tensor(11, 3, dtype=weight).requires_grad_()
        _backward(cudnn_ops.moe_combine(rows, positions, weights))
        _backward(cudnn_ops.moe_combine(rows, positions))

    for name, index in {"int": torch.int32, "long": torch.int64}.items():
        for tokens in (5, 3000):
            call = partial(permute, tokens, index, torch.float16, 8)
            yield f"moe_place_{name}, {tokens} tokens", call
        yield f"moe_count_{name}, moe_order", partial(permute, 3000, index, torch.float16, 8)
    for unit, (dtype, columns) in {
        **{16: (torch.float32, 12), 8: (torch.float16, 12)},
        **{4: (torch.float32, 3), 2: (torch.bfloat16, 7)},
    }.items():
        yield f"moe_scatter_{unit}", partial(permute, 40, torch.int64, dtype, columns)
    for name, dtype in TYPES.items():
        for weight in {dtype, torch.float32}:
            for width, columns, shift in ((16 // dtype.itemsize, 48, 0), (1, 7, 1)):
                call = partial(combine, dtype, weight, columns, shift)
                yield f"moe_combine_{name}_{width}", call


def appending() -> Iterator[Sample]:
    def run(dtype: torch.dtype, size: int, head_major: bool) -> None:
        pages, page_size, heads = 4, 8, 3
        inside = (heads, page_size) if head_major else (page_size, heads)
        caches = [torch.zeros(pages, *inside, size, dtype=dtype, device="cuda") for _ in range(2)]
        tokens = [_tensor(5, heads, size, dtype=dtype) for _ in range(2)]
        slots = torch.tensor([31, -1, 0, pages * page_size, 9], device="cuda")
        _ops.paged_kv_append_(*caches, *tokens, slots, head_major)

    def rounded(dtype: torch.dtype, size: int) -> None:
        caches = [torch.zeros(4, 8, 3, size, device="cuda").to(torch.float8_e4m3fn) for _ in "kv"]
        tokens = [_tensor(5, 3, size, dtype=dtype) for _ in range(2)]
        slots = torch.tensor([31, -1, 0, 32, 9], device="cuda")
        descale = torch.full((3,), 0.5, device="cuda")
        _ops.paged_kv_append_(*caches, *tokens, slots, False, None, descale)

    for name, dtype in TYPES.items():
        for width, size in ((16 // dtype.itemsize, 32), (1, 7)):
            yield f"paged_append_{name}_{width}", partial(rounded, dtype, size)
    kinds = {16: (torch.float32, 12), 8: (torch.float16, 4), 4: (torch.float16, 2)}
    kinds |= {2: (torch.bfloat16, 3), 1: (torch.int8, 3)}
    for unit, (dtype, size) in kinds.items():
        for head_major in (False, True):
            yield f"paged_append_{unit}", partial(run, dtype, size, head_major)


def rounding_rows() -> Iterator[Sample]:
    def run(dtype: torch.dtype, size: int) -> None:
        x, other = (_tensor(3, size, dtype=dtype) for _ in range(2))
        scale = torch.full((1,), 2.0, device="cuda")
        for given in (None, scale):
            cudnn_ops.quantize_rows_fp8(x, given)
            cudnn_ops.add_rms_norm_fp8(x, other, _tensor(size, dtype=dtype), scale=given)
            for activation in ("silu", "gelu", "gelu_tanh"):
                cudnn_ops.swiglu_fp8(x, other, given, activation=activation)

    for dtype in TYPES.values():
        longest = 2048 * 16 // dtype.itemsize
        yield "rows_fp8_16_4", partial(run, dtype, 64)
        yield "rows_fp8_16_any", partial(run, dtype, longest + 16)
        yield "rows_fp8_n_4", partial(run, dtype, 33)
        yield "rows_fp8_n_any", partial(run, dtype, 2049)


def turned_rounding() -> Iterator[Sample]:
    def run(dtype: torch.dtype, angle: torch.dtype, size: int, interleaved: bool) -> None:
        query, key, value = (_tensor(2, h, 5, size, dtype=dtype) for h in (3, 2, 2))
        cos, sin = (_tensor(1, 5, size, dtype=angle) for _ in range(2))
        weight, scales = _tensor(size, dtype=dtype), torch.full((4,), 2.0, device="cuda")
        for given in (None, scales):
            cudnn_ops.rotary_embedding_qkv_fp8(
                *(query, key, value, cos, sin, given),
                query_weight=weight,
                per_head=True,
                interleaved=interleaved,
                dtype=torch.float8_e4m3fn if given is None else torch.float8_e5m2,
            )

    for name, dtype in TYPES.items():
        for suffix, angle in {"": dtype, "_float": torch.float32}.items():
            if suffix and dtype == torch.float32:
                continue
            width, types = 16 // dtype.itemsize, f"{name}{suffix}"
            yield f"rotary_fp8_{types}_{width}", partial(run, dtype, angle, 64, False)
            yield f"rotary_fp8_pairs_{types}_{width}", partial(run, dtype, angle, 64, True)
            yield f"rotary_fp8_{types}_1", partial(run, dtype, angle, 6, False)


def rounding() -> Iterator[Sample]:
    def draw(dtype: torch.dtype, size: int) -> Tensor:
        return _tensor(3, 5, size, dtype=dtype)

    def amax(dtype: torch.dtype, size: int) -> None:
        for dim in (None, 1):
            cudnn_ops.quantize_fp8(draw(dtype, size), dim=dim, power_of_two=True)

    def cast(dtype: torch.dtype, size: int, fp8: torch.dtype) -> None:
        for dim, count in ((None, 1), (1, 5)):
            scale = torch.full((count,), 2.0, device="cuda")
            cudnn_ops.quantize_fp8(draw(dtype, size), scale, dim=dim, dtype=fp8)

    def uncast(dtype: torch.dtype, size: int, fp8: torch.dtype) -> None:
        for dim, count in ((None, 1), (1, 5)):
            descale = torch.full((count,), 0.5, device="cuda")
            cudnn_ops.dequantize_fp8(draw(dtype, size).to(fp8), descale, dim=dim, dtype=dtype)

    def attend() -> None:
        query, key, value = (
            _tensor(2, 4, 40, 64, dtype=torch.half).to(torch.float8_e4m3fn) for _ in range(3)
        )
        one = torch.ones(1, device="cuda")
        cudnn_ops.sdpa_fp8(
            query, key, value, descale_q=one, descale_k=one, descale_v=one, is_causal=True
        )

    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    for name, dtype in TYPES.items():
        for width, size in ((16 // dtype.itemsize, 32), (1, 7)):
            yield f"fp8_amax_{name}_{width}", partial(amax, dtype, size)
            for word, fp8 in formats.items():
                yield f"fp8_cast_{name}_{word}_{width}", partial(cast, dtype, size, fp8)
                yield f"fp8_uncast_{word}_{name}_{width}", partial(uncast, dtype, size, fp8)
    yield "fp8_numbers", attend


def decoding() -> Iterator[Sample]:
    """Kernels of cuDNN, with what ours do before and behind them; and ours alone."""

    def run(case: paged_cases.PagedCase, dtype: torch.dtype) -> None:
        t = paged_cases.make(case, dtype, "cuda", seed=1)
        out, lse = _ops.paged_attention_with_lse(*t.arguments, **t.options)
        on_cpu = paged_cases.make(case, dtype, "cpu", seed=1)
        paged_cases.check(case, on_cpu, out.cpu(), lse.cpu())

    def run_ours(
        size: int, rows: int, dtype: torch.dtype, is_fp8: bool, is_planned: bool = False
    ) -> None:
        # With a window there are no clusters.
        one = replace(ONE, head_size=size, value_size=size, window_size=(600, 0))
        queries = rows // 2  # times a group of two heads
        case = replace(SPECULATE, lengths=(queries,) * 5, lengths_kv=(700, 2, 33, 0, 16), one=one)
        check_ours(case, dtype, is_fp8, is_planned)

    def check_ours(
        case: paged_cases.PagedCase, dtype: torch.dtype, is_fp8: bool, is_planned: bool = False
    ) -> None:
        on_cpu = paged_cases.make(case, dtype, "cpu", seed=1)
        t = paged_cases.make(case, dtype, "cuda", seed=1)
        if is_fp8:
            descales = torch.tensor([[0.02], [0.02]])
            on_cpu, t = (paged_cases.in_fp8(each, *descales) for each in (on_cpu, t))
        queries, group = case.lengths[0], case.one.heads // case.one.heads_kv
        words = (
            t.seq_lens_kv,
            None,
            queries,
            group,
            case.one.is_causal,
            case.one.window_size,
            True,
        )
        plan = _ops._paged_plan(*words) if is_planned else None
        _ops._paged_use_kernel(2)
        try:
            out, lse = _ops.paged_attention_with_lse(*t.arguments, **t.options, plan=plan)
        finally:
            _ops._paged_use_kernel(0)
        paged_cases.check(case, on_cpu, out.cpu(), lse.cpu())

    def run_even(size: int, rows: int, warps: int, dtype: torch.dtype, is_fp8: bool) -> None:
        """As many sequences, of two heads of keys, as have clusters of blocks of so many warps."""
        processors = torch.cuda.get_device_properties().multi_processor_count
        is_light = rows == 8 and not is_fp8
        # Few, one for each multiprocessor, and two on some.
        share = (8 if warps == 4 else 4) if is_light else 3 if warps == 4 else 8
        one = replace(ONE, head_size=size, value_size=size, is_causal=True)
        queries, count = rows // 2, processors // share
        case = replace(SPECULATE, lengths=(queries,) * count, lengths_kv=(300,) * count, one=one)
        check_ours(case, dtype, is_fp8)

    for name, dtype in TYPES.items():
        if dtype == torch.float32:
            continue
        for cache, size, rows in itertools.product((name, "e4m3"), (64, 128), (8, 16, 32)):
            call = partial(run_ours, size, rows, dtype, cache == "e4m3")
            yield f"paged_decode_{name}_{cache}_{size}_{rows}", call
            for warps in (4, 8):
                call = partial(run_even, size, rows, warps, dtype, cache == "e4m3")
                yield f"paged_decode_even_{name}_{cache}_{size}_{rows}_{warps}", call
    yield "paged_plan", partial(run_ours, 64, 8, torch.bfloat16, True, is_planned=True)
    causal = replace(ONE, is_causal=True)
    full = replace(DECODE, lengths=(1,) * 4, lengths_kv=(70, 1, 33, 128))  # nothing to pad
    yield "paged decoding", partial(run, full, torch.bfloat16)
    yield "paged_pad", partial(run, DECODE, torch.bfloat16)
    yield (
        "paged_pad, top left",
        partial(run, replace(DECODE, one=causal, top_left=True), TYPES["half"]),
    )
    yield "paged_pad, packed prompts", partial(run, PREFILL, torch.bfloat16)
    for name, dtype in TYPES.items():
        if dtype == torch.float32:
            continue
        for suffix, size, value_size in (("128", 64, 128), ("256", 200, 256), ("any", 264, 520)):
            one = replace(causal, head_size=size, value_size=value_size)
            folded = replace(SPECULATE, lengths_kv=(70, 2, 33, 0, 16), one=one)
            yield f"paged_merge_{name}_{suffix}", partial(run, folded, dtype)
            single = replace(DECODE, one=replace(one, sinks=True))
            yield f"paged_merge_{name}_{suffix}, sinks", partial(run, single, dtype)


def merging() -> Iterator[Sample]:
    def run(dtype: torch.dtype, wide: torch.dtype, size: int, shift: int) -> None:
        out = _tensor(2, 3, 5, size, dtype=wide, shift=shift)
        part = _tensor(2, 3, 5, size, dtype=dtype, shift=shift)
        lse, part_lse = (_tensor(2, 3, 5, dtype=torch.float32) for _ in range(2))
        _ops._merge_attention_state_.default(out, lse, part, part_lse)

    for name in ("half", "bfloat16"):
        for suffix, wide in (("", TYPES[name]), ("_float", torch.float32)):
            for width, size, shift in ((8, 136, 0), (1, 7, 1)):
                call = partial(run, TYPES[name], wide, size, shift)
                yield f"attention_merge_{name}{suffix}_{width}", call


FAMILIES = (
    *(
        gated,
        rotary,
        norms,
        group_norms,
        batch_norms,
        max_pools,
        folded_norms,
        adaptive_norms,
        convolutions,
    ),
    *(depthwise_images, grouped_images, mixtures, appending),
    *(rounding, turned_rounding, rounding_rows, decoding, merging),
)


def samples() -> Iterator[Sample]:
    """All of them; nothing is computed until it is called."""
    for family in FAMILIES:
        yield from family()


def main() -> None:
    for name, call in samples():
        print(name, flush=True)
        call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
