"""Launches our kernels on GPUs that are not there, and holds every launch against their limits.

    LD_PRELOAD=fake_runtime.so python -m tests.deviceless.launches fake_runtime.so

Runs the operators as they are on tensors that have addresses and no memory (fake_runtime.c), on
every GPU that the package describes, and prints as JSON which kernels were launched and what went
over a limit.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops import _C
from tests.deviceless.kernel_images import KernelFacts, image_at, images_of_library

_ops = torch.ops.cudnn_ops
DESCRIPTIONS = Path(cudnn_ops.__file__).parent / "support" / "devices"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = (
    *(1, 2, 3, 7, 8, 16, 31, 64, 65, 100, 127, 128, 256, 500, 512, 768, 1000, 1023, 1024, 1025),
    *(
        1152,
        1280,
        1536,
        2048,
        2056,
        3072,
        4095,
        4096,
        4100,
        5120,
        8191,
        8192,
        8200,
        9000,
        10240,
        12288,
        13312,
        13320,
    ),
    *(16383, 16384, 16392, 20480, 24576, 24584, 28672, 32760, 32768, 32776, 40000, 65536, 65537),
    *(100_000, 262_144, 999_999, 1_000_000),
)
ROWS = (1, 2, 33, 257, 1000, 4097, 70_001, 1_000_003)
#: One kernel of each activation's.
BACKWARD_EPILOGUE = r"conv_epilogue_(?!forward_|slope_)\w+_half_1$"
SIZES = [(rows, width) for rows in ROWS for width in WIDTHS if rows * width < 1 << 37]


class _Kernel(ctypes.Structure):
    """As in fake_runtime.c."""

    _fields_ = (("image", ctypes.c_void_p), ("name", ctypes.c_char * 128))


_Pointer = ctypes.POINTER(_Kernel)
_Numbers = ctypes.POINTER(ctypes.c_uint)
_OnLaunch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _Pointer, _Numbers, ctypes.c_void_p)
_OnOccupancy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _Pointer, ctypes.c_int, ctypes.c_int)
_OnAllow = ctypes.CFUNCTYPE(None, ctypes.c_int, _Pointer, ctypes.c_int)


def describe_gpus() -> list[dict[str, Any]]:
    """Those of the package, and one of compute capability 8.6, with what an L40S has."""
    gpus = [json.loads(path.read_text()) for path in sorted(DESCRIPTIONS.glob("*.json"))]
    like = next(gpu for gpu in gpus if gpu["deviceVer"] == 890)
    older = {"deviceName": "GeForce RTX 3090", "deviceVer": 860, "multiProcessorCount": 82}
    return [*gpus, like | older]


class Recorder:
    """Holds what is launched against the limits of the GPU that it is launched on."""

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self.gpus = gpus
        self.launched: list[set[str]] = [set() for _ in gpus]
        self.wrong: set[str] = set()
        self.call = ""
        """What the operator is called with, for messages."""
        self._allowed: dict[tuple[int, int], int] = {}
        self.callbacks = (
            _OnLaunch(self._on_launch),
            _OnOccupancy(self._on_occupancy),
            _OnAllow(self._on_allow),
        )

    def listen(self, library: str) -> None:
        """Makes its GPUs those of the process, whose runtime the library (fake_runtime.c) is."""
        runtime = ctypes.CDLL(library)
        runtime.fake_callbacks(*self.callbacks)
        for gpu in self.gpus:
            runtime.fake_device(
                gpu["deviceName"].encode(),
                gpu["deviceVer"] // 10,
                gpu["multiProcessorCount"],
                gpu["maxSharedMemoryPerBlockOptin"],
            )

    def _facts(self, device: int, image: int, name: str) -> KernelFacts:
        found = image_at(image)
        version = self.gpus[device]["deviceVer"] // 10
        # Machine code runs on later ones of its major version, PTX on all later ones.
        major = found.architecture // 10 * 10
        runs = found.architecture <= version and (found.is_ptx or version < major + 10)
        if not runs:
            self.wrong.add(f"{name}: code for {found.architecture} on a GPU of {version}")
        return found.kernels[name]

    def _facts_of(self, device: int, kernel: Any) -> tuple[str, KernelFacts]:
        name = kernel.contents.name.decode()
        return name, self._facts(device, kernel.contents.image, name)

    def _on_allow(self, device: int, kernel: Any, shared: int) -> None:
        address = ctypes.addressof(kernel.contents)
        self._allowed[device, address] = max(shared, self._allowed.get((device, address), 0))
        name, facts = self._facts_of(device, kernel)
        if facts.shared + shared > self.gpus[device]["maxSharedMemoryPerBlockOptin"]:
            self._report(device, name, f"asks for {facts.shared} + {shared} bytes of shared memory")

    def _on_occupancy(self, device: int, kernel: Any, threads: int, shared: int) -> int:
        _, facts = self._facts_of(device, kernel)
        gpu = self.gpus[device]
        reserved = gpu["reservedSharedMemoryPerBlock"]
        all_shared = gpu["maxSharedMemoryPerBlockOptin"] + reserved
        registers = -(-facts.registers // 8) * 8 * threads
        return int(
            min(
                gpu["maxThreadsPerSM"] // threads,
                gpu["maxRegistersPerSM"] // registers,
                all_shared // (facts.shared + shared + reserved),
                gpu["maxCtasPerSM"],
            )
        )

    def _on_launch(self, device: int, kernel: Any, numbers: Any, argument: int) -> int:
        blocks, rows, threads, shared, is_cooperative, cluster = numbers[:6]
        name, facts = self._facts_of(device, kernel)
        gpu = self.gpus[device]
        self.launched[device].add(name)
        if not 1 <= blocks <= gpu["maxGridSize"][0] or not 1 <= rows <= gpu["maxGridSize"][1]:
            self._report(device, name, f"a grid of {blocks} x {rows} blocks")
        most_threads = facts.most_threads or gpu["maxThreadsPerBlock"]
        if not 1 <= threads <= min(most_threads, gpu["maxThreadsPerBlock"]):
            self._report(device, name, f"{threads} threads where {most_threads} are declared")
        registers = -(-facts.registers // 8) * 8 * threads
        if registers > gpu["regsPerBlock"]:
            self._report(device, name, f"{registers} registers")
        if is_cooperative:
            resident = self._on_occupancy(device, kernel, threads, shared)
            if blocks * rows > resident * gpu["multiProcessorCount"]:
                self._report(device, name, f"{blocks} x {rows} blocks that are to run at once")
        # Without asking for more, as every GPU has that has clusters.
        if cluster > 1 and (cluster > 8 or blocks % cluster != 0 or gpu["deviceVer"] < 900):
            self._report(device, name, f"{blocks} blocks in clusters of {cluster}")
        all_shared = facts.shared + shared
        if all_shared > gpu["maxSharedMemoryPerBlockOptin"]:
            self._report(device, name, f"{all_shared} bytes of shared memory")
        elif all_shared > gpu["maxSharedMemoryPerBlock"]:
            allowed = self._allowed.get((device, ctypes.addressof(kernel.contents)), 0)
            if allowed < shared:
                self._report(device, name, f"{all_shared} bytes of shared memory, not asked for")
        return 0

    def _report(self, device: int, name: str, what: str) -> None:
        self.wrong.add(f"{self.gpus[device]['deviceName']}: {name}: {what} ({self.call})")

    @contextmanager
    def calling(self, *words: object) -> Iterator[None]:
        """Names the call that is made in it; what it raises is reported."""
        self.call = " ".join(map(str, words))
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.wrong.add(f"{self.call}: {error}")


def memory(device: torch.device, dtype: torch.dtype, *sizes: int, start: int = 0) -> Tensor:
    """A dense tensor that starts that many numbers behind an aligned address."""
    return buffer(device, dtype).as_strided(sizes, contiguous_strides(sizes), start)


@cache
def buffer(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(1 << 41, dtype=dtype, device=device)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes[:0:-1], lambda x, y: x * y, initial=1))[::-1]


def run_norms(recorder: Recorder, device: torch.device) -> None:
    for dtype, (rows, width), is_layer in itertools.product(DTYPES, SIZES, (False, True)):
        # Aligned, and rows that start anywhere in a flat buffer; those take the same ways
        # at any number of rows beyond a few.
        for start in (0, 1) if rows in (1, 4097) else (0,):
            x = memory(device, dtype, rows, width, start=start)
            weight = memory(device, dtype, width, start=start)
            bias = weight if is_layer else None
            stats = memory(device, torch.float32, rows)
            words = (dtype, rows, width, "layer" if is_layer else "rms", start)
            with recorder.calling(*words):
                _ops._norm.default(x, None, (width,), weight, bias, 1e-5, is_layer, False, True)
            for mask in ((True, True, is_layer), (True, False, False), (False, True, False)):
                with recorder.calling(*words, mask):
                    _ops._norm_backward.default(
                        x, None, x, (width,), weight, stats, stats, is_layer, False, mask
                    )


def run_group_norms(recorder: Recorder, device: torch.device) -> None:
    """Few groups and many, of all sizes, in both memory orders."""
    shapes = itertools.product(
        (1, 3, 256, 65_536),
        ((1, 2), (1, 3), (1, 4096), (1, 8192), (32, 10), (32, 16), (32, 60), (7, 9), (512, 1)),
        (1, 2, 7, 49, 64, 256, 1000, 4096, 4097, 65_536, 65_538, 65_540, 1 << 20, (1 << 24) + 1),
        (False, True),
        (0, 1),
    )
    for (batch, (groups, of_group), size, is_last, start), dtype in itertools.product(
        shapes, DTYPES
    ):
        channels = groups * of_group
        if batch * channels * size >= 1 << 36 or (start == 1 and batch > 1):
            continue
        if batch * of_group * size == 1:
            continue
        sizes = (batch, size, channels) if is_last else (batch, channels, size)
        x = memory(device, dtype, *sizes, start=start)
        x = x.transpose(1, 2) if is_last else x
        weight = memory(device, dtype, channels)
        stats = memory(device, torch.float32, batch, groups)
        words = ("group norm", dtype, batch, groups, of_group, size, is_last, start)
        for residual, with_stats in ((None, False), (x, True)):
            with recorder.calling(*words, with_stats):
                _ops._group_norm.default(x, residual, groups, weight, weight, 1e-5, 2, with_stats)
        for mask in ((True, True, True), (True, False, False), (False, True, False)):
            with recorder.calling(*words, mask):
                _ops._group_norm_backward.default(
                    x, None, x, groups, weight, weight, stats, stats, 2, mask
                )


def run_batch_norms(recorder: Recorder, device: torch.device) -> None:
    """By running statistics, whose gradients have sums, and by those of the batch."""
    sizes = (1, 2, 7, 49, 64, 256, 1000, 4096, 4097, 65_540, 1 << 20, (1 << 24) + 1)
    channels = (1, 3, 7, 8, 64, 96, 1000, 4096, 8192, 65_544)
    orders = itertools.product((1, 3, 256, 65_536), channels, sizes, (False, True), (0, 1))
    for (batch, count, size, is_last, start), dtype in itertools.product(orders, DTYPES):
        if batch * count * size >= 1 << 36 or (start == 1 and batch > 1):
            continue
        shape = (batch, size, count) if is_last else (batch, count, size)
        x = memory(device, dtype, *shape, start=start)
        x = x.transpose(1, 2) if is_last else x
        vector, wide = memory(device, dtype, count), memory(device, torch.float32, count)
        with recorder.calling("batch norm", dtype, batch, count, size, is_last, start):
            statistics = (wide, wide, vector, wide)
            _ops._batch_norm_inference.default(x, *statistics, x, 0.1, 1e-5, 1)
            if is_last and batch * size > 1 and count * x.element_size() % 16 == 0:
                for residual in (None, x):
                    _ops._batch_norm_training.default(
                        x, wide, wide, vector, wide, residual, 0.1, 1e-5, 1
                    )
                for out in (None, x):
                    of_relu = (x, vector, wide, out, wide, wide, True, 1)
                    for mask in ((True,) * 3 + (out is not None,), (True, True, True, False)):
                        _ops._batch_norm_backward.default(x, *of_relu, mask, True)
                        _ops._batch_norm_backward.default(x, *of_relu, mask, True, x)
                _ops._batch_norm_training.default(x, None, None, None, None, x, 0.1, 1e-5, 0)
                of_sum = (x, None, None, None, wide, wide, True, 0)
                _ops._batch_norm_backward.default(x, *of_sum, (True,) * 4, True)
            if not is_last:
                mask = (False, False, True, False)
                saved = (x, None, None, None, wide, wide, False, 0)
                _ops._batch_norm_backward.default(x, *saved, mask, True)


def run_max_pools(recorder: Recorder, device: torch.device) -> None:
    shapes = itertools.product((1, 3, 64, 100, 520, 4096), (1, 7, 56, 225, 5000), (1, 256, 65_536))
    windows = itertools.product((1, 2, 3, 13), (1, 2, 3))
    orders = itertools.product(shapes, windows, DTYPES, (False, True))
    for (channels, size, batch), (kernel, stride), dtype, is_last in orders:
        padding = kernel // 2
        pooled = (size + 2 * padding - kernel) // stride + 1
        if pooled < 1 or channels * size * size * batch >= 1 << 38:
            continue

        order = (0, 3, 1, 2) if is_last else (0, 1, 2, 3)
        x, out, offsets = (
            memory(device, kind, *((batch, n, n, channels) if is_last else (batch, channels, n, n)))
            for kind, n in ((dtype, size), (dtype, pooled), (torch.uint8, pooled))
        )
        x, out, offsets = (image.permute(order) for image in (x, out, offsets))
        numbers = [[one] * 2 for one in (kernel, stride, padding, 1)]
        with recorder.calling("max pool", dtype, batch, channels, size, kernel, stride, is_last):
            _ops._max_pool2d.default(x, *numbers, False, True)
            _ops._max_pool2d_backward.default(out, offsets, out, [size, size], *numbers)


def run_adaptive_norms(recorder: Recorder, device: torch.device) -> None:
    """One sample and many, of few tokens and many, and numbers of each token."""
    for dtype, (rows, width) in itertools.product(DTYPES, SIZES):
        for start in (0, 1) if rows in (1, 4097) else (0,):
            x = memory(device, dtype, rows, width, start=start)
            stats = memory(device, torch.float32, 1, rows)
            weight = memory(device, torch.float32, width)
            for samples, modulation in (
                (x[None], memory(device, dtype, 1, width)),
                (x[:, None], memory(device, torch.float32, rows, width)),
            ):
                words = ("adaptive norm", dtype, rows, width, start, len(modulation))
                alone = (None, None, 1e-6, True, True)
                options = (weight, weight, 1e-6, True, True)
                stats = stats.view(samples.shape[:2])
                for update in (None, samples):
                    gate = None if update is None else modulation
                    tensors = (samples, update, gate, modulation, modulation)
                    with recorder.calling(*words):
                        _ops._adaptive_norm.default(*tensors, *options)
                        _ops._adaptive_norm.default(*tensors, *alone)
                    is_gated = update is not None
                    for mask in (
                        (True, is_gated, is_gated, True, True, True, True),
                        (True, is_gated, is_gated, True, True, False, False),
                        (True, False, False, True, True, False, False),
                    ):
                        with recorder.calling(*words, mask):
                            _ops._adaptive_norm_backward.default(
                                samples, update, *tensors, weight, weight, stats, stats, True, mask
                            )


def run_gated(recorder: Recorder, device: torch.device) -> None:
    for dtype, (rows, width), start in itertools.product(DTYPES, SIZES, (0, 1)):
        x = memory(device, dtype, rows, width, start=start)
        for activation in range(3):
            with recorder.calling("gated", dtype, rows, width, start):
                _ops._gated.default(x, x, activation)
                _ops._gated_backward.default(x, x, x, activation)


def run_rotary(recorder: Recorder, device: torch.device) -> None:
    sizes = itertools.product((1, 7, 100_000), (1, 32), (2, 6, 64, 128, 256), (0, 1))
    for (tokens, heads, size, start), dtype in itertools.product(sizes, DTYPES):
        x = memory(device, dtype, 3, heads, tokens, size, start=start)
        key = memory(device, dtype, 3, 1, tokens, size, start=start)
        positions = memory(device, torch.int32, 1, tokens)
        for angles in {dtype, torch.float32}:
            cos = memory(device, angles, 1, tokens, size)
            for is_interleaved in (False, True):
                for other in (None, key):
                    layout = [int(is_interleaved), 0]
                    words = ("rotary", dtype, tokens, heads, size, start, layout)
                    with recorder.calling(*words, "queries" if other is None else "both"):
                        _ops._rotary.default(x, other, cos, cos, None, layout, False)
                turned = (size + 3) // 4 * 2
                table = memory(device, angles, 10, turned // 2)
                layout = [int(is_interleaved), turned, turned // 2]
                with recorder.calling(*words, "part by positions"):
                    arguments = (x, None, table, table, positions[None], layout)
                    _ops._rotary.default(*arguments, True)


def run_epilogues(recorder: Recorder, device: torch.device) -> None:
    """The backward's, of which no gradient is asked that a plan of cuDNN's computes."""
    names = {name for image in images_of_library() for name in image.kernels}
    activations = sum(re.match(BACKWARD_EPILOGUE, name) is not None for name in names)
    geometry = [1, 1, 0, 0, 0, 0, 1, 1, 1]
    shapes = itertools.product((1, 3, 64, 100, 1000, 2048, 100_000), (1, 7, 56, 1024), (1, 256))
    for (channels, size, batch), dtype in itertools.product(shapes, DTYPES):
        if channels * size * size * batch >= 1 << 40:
            continue
        x = memory(device, dtype, batch, size, size, channels).permute(0, 3, 1, 2)
        weight = memory(device, dtype, channels, channels, 1, 1)
        for activation in range(activations):
            saved = x if activation > 0 else None
            with recorder.calling("conv", dtype, batch, channels, size, activation):
                _ops._conv_backward.default(
                    x, x, weight, saved, geometry, activation, (False, False, True, False)
                )


def run_rows(recorder: Recorder, device: torch.device) -> None:
    """Depthwise convolutions of one dimension."""
    shapes = itertools.product(
        (2, 3, 64, 100, 2048, 100_000), (1, 7, 1000, 1 << 20), (1, 300), (1, 4, 129), (1, 3)
    )
    for (channels, length, batch, taps, stride), dtype in itertools.product(shapes, DTYPES):
        if channels * length >= 1 << 32:  # more than our kernels count
            continue
        weight = memory(device, dtype, channels, 1, taps)
        bias = memory(device, dtype, channels)
        geometry = [stride, taps, taps, 1, channels]
        out_length = (length + taps) // stride + 1
        for is_last in (False, True):
            x, out = (
                memory(device, dtype, batch, n, channels).permute(0, 2, 1)
                if is_last
                else memory(device, dtype, batch, channels, n)
                for n in (length, out_length)
            )
            with recorder.calling("conv1d", dtype, batch, channels, length, taps, stride, is_last):
                _ops._conv.default(x, weight, bias, out, geometry, 2, True)
                for mask in ((True, False, False, False), (False, True, False, False)):
                    _ops._conv_backward.default(out, x, weight, None, geometry, 0, mask)


def run_images(recorder: Recorder, device: torch.device) -> None:
    """Depthwise convolutions of images and volumes, by our kernels wherever they can."""
    shapes = itertools.product(
        (2, 3, 64, 72, 100, 2048, 65_536), (1, 7, 56, 1024), (1, 300), (2, 3, 5, 7, 31), (1, 2)
    )
    #: Of widths that there are kernels of whole images for, and of parts.
    whole = itertools.product(
        (8, 64, 104, 2048), (7, 14, 56), (1, 30, 1000), (3, 5, 7), (1, 2), (1, 14, 56, 1000)
    )
    for step in range(3):
        _ops._conv_use_depthwise(step, 2)
    for (channels, size, batch, kernel, stride), dtype in itertools.product(shapes, DTYPES):
        if channels * size * size * batch < 1 << 36:
            image = batch, channels, (size, size), kernel, stride, (kernel, kernel)
            run_image(recorder, device, dtype, *image)
    for (channels, columns, batch, kernel, stride, height), dtype in itertools.product(
        whole, DTYPES
    ):
        padding = kernel, kernel // 2
        image = batch, channels, (height, stride * columns), kernel, stride, padding
        run_image(recorder, device, dtype, *image)
    for step in range(3):
        _ops._conv_use_depthwise(step, 0)


def run_image(
    recorder: Recorder,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    channels: int,
    size: tuple[int, int],
    kernel: int,
    stride: int,
    padding: tuple[int, int],
) -> None:
    """A depthwise convolution of images, and each of its gradients."""
    weight = memory(device, dtype, channels, 1, kernel, kernel)
    bias = memory(device, dtype, channels)
    geometry = [stride, stride, *padding, *padding, 1, 1, channels]
    out_size = [(n + 2 * pad - kernel) // stride + 1 for n, pad in zip(size, padding, strict=True)]
    x, out = (
        memory(device, dtype, batch, *pixels, channels).permute(0, 3, 1, 2)
        for pixels in (size, out_size)
    )
    with recorder.calling("conv2d", dtype, batch, channels, size, kernel, stride):
        _ops._conv.default(x, weight, bias, out, geometry, 2, True)
        for mask in ((True, False, False, False), (False, True, False, False)):
            _ops._conv_backward.default(out, x, weight, None, geometry, 0, mask)


def run_grouped_images(recorder: Recorder, device: torch.device) -> None:
    """Convolutions in groups, by our kernel wherever it can."""
    shapes = itertools.product(
        ((2, 8, 8), (3, 24, 40), (3, 40, 24), (4, 56, 56), (2, 232, 136), (1000, 8, 72)),
        *((1, 7, 224), (1, 300), (1, 3, 7), (1, 2)),
    )
    _ops._conv_use_grouped(2)
    for ((groups, inputs, outputs), size, batch, kernel, stride), dtype in itertools.product(
        shapes, DTYPES[:2]
    ):
        weight = memory(device, dtype, groups * outputs, kernel, kernel, inputs)
        bias = memory(device, dtype, groups * outputs)
        geometry = [stride, stride, *[kernel] * 4, 1, 1, groups]
        out_size = (size + kernel) // stride + 1
        x, out = (
            memory(device, dtype, batch, n, n, channels).permute(0, 3, 1, 2)
            for n, channels in ((size, groups * inputs), (out_size, groups * outputs))
        )
        by_taps = weight.permute(0, 3, 1, 2)
        with recorder.calling("conv2d", dtype, batch, groups, inputs, outputs, size, kernel):
            _ops._conv.default(x, by_taps, bias, out, geometry, 2, True)
    _ops._conv_use_grouped(0)


def run_transposed_rows(recorder: Recorder, device: torch.device) -> None:
    """Transposed ones of these; their epilogue is a pass of its own."""
    shapes = itertools.product((2, 3, 64, 2048), (2, 7, 1000), (1, 300), (2, 4, 129), (1, 3))
    for (channels, length, batch, taps, stride), dtype in itertools.product(shapes, DTYPES):
        weight = memory(device, dtype, channels, 1, taps)
        # Output padding, stride, padding on either side, dilation, groups.
        geometry = [0, stride, 0, 0, 1, channels]
        x, out = (
            memory(device, dtype, batch, n, channels).permute(0, 2, 1)
            for n in (length, (length - 1) * stride + taps)
        )
        with recorder.calling("conv_transpose1d", dtype, batch, channels, length, taps, stride):
            _ops._conv.default(x, weight, None, None, geometry, 0, False)
            for mask in ((True, False, False, False), (False, True, False, False)):
                _ops._conv_backward.default(out, x, weight, None, geometry, 0, mask)


def run_linear(recorder: Recorder, device: torch.device) -> None:
    """The gradient of a bias through an activation, without the products of torch."""
    for dtype, (rows, width), start in itertools.product(DTYPES, SIZES, (0, 1)):
        x = memory(device, dtype, rows, width, start=start)
        of_layer = memory(device, dtype, rows, 1), memory(device, dtype, width, 1)
        with recorder.calling("linear", dtype, rows, width, start):
            _ops._linear_backward.default(x, *of_layer, x, 4, (False, False, True))


def run_append(recorder: Recorder, device: torch.device) -> None:
    dtypes = (*DTYPES, torch.float8_e4m3fn)
    for dtype, tokens, size in itertools.product(dtypes, (1, 1000, 1_000_003), (1, 4, 6, 8, 128)):
        cache = memory(device, dtype, 100, 16, 8, size)
        key = memory(device, dtype, tokens, 8, size)
        slots = memory(device, torch.int64, tokens)
        with recorder.calling("append", dtype, tokens, size):
            _ops.paged_kv_append_.default(cache, cache.clone(), key, key, slots, False)

    for dtype, tokens, size in itertools.product(DTYPES, (1, 1_000_003), (1, 8, 128)):
        cache = memory(device, torch.float8_e4m3fn, 100, 16, 8, size)
        key = memory(device, dtype, tokens, 8, size)
        slots = memory(device, torch.int64, tokens)
        with recorder.calling("append", "rounded", dtype, tokens, size):
            for descale in (None, memory(device, torch.float32, 8)):
                descales = (False, descale, descale)
                _ops.paged_kv_append_.default(cache, cache.clone(), key, key, slots, *descales)


def run_paged(recorder: Recorder, device: torch.device) -> None:
    """Our kernel of attention over pages, for one query and many, in few sequences and many."""
    _ops._paged_use_kernel(2)
    shapes = itertools.product((64, 128), (1, 4, 16), (1, 2, 8, 1000), (1, 32, 64, 70_001))
    for (size, group, queries, batch), dtype in itertools.product(shapes, DTYPES[:2]):
        if queries * batch > 1 << 20:
            continue
        query = memory(device, dtype, batch, queries, 2 * group, size)
        table = memory(device, torch.int32, batch, 100)
        lengths = memory(device, torch.int32, batch)
        for cache_dtype in (dtype, torch.float8_e4m3fn):
            cache = memory(device, cache_dtype, 100, 16, 2, size)
            with recorder.calling("paged", dtype, cache_dtype, size, group, queries, batch):
                arguments = (query, cache, cache, table, lengths)
                _ops.paged_attention_with_lse.default(*arguments, is_causal=True)
                plan = cudnn_ops.paged_plan(query, cache, lengths)
                _ops.paged_attention.default(*arguments, plan=plan)
    _ops._paged_use_kernel(0)


def run_moe(recorder: Recorder, device: torch.device) -> None:
    """Few tokens and many, of few experts and the most; of all widths, in few of their rows."""
    few = itertools.product((1, 300, 70_001, 1_000_003), (1, 8, 60), (1, 128, 2048), (3, 16))
    wide = itertools.product((1, 4097), (8,), (128,), WIDTHS)
    for (tokens, count, experts, width), dtype, start in itertools.product(
        (*few, *wide), DTYPES, (0, 1)
    ):
        x = memory(device, dtype, tokens, width, start=start)
        rows = memory(device, dtype, tokens * count, width, start=start)
        positions = memory(device, torch.int32, tokens, count)
        words = ("moe", dtype, tokens, count, experts, width, start)
        for index in (torch.int32, torch.int64):
            chosen = memory(device, index, tokens, count)
            with recorder.calling(*words, index):
                _ops._moe_permute.default(x, chosen, experts)
        for weights in (memory(device, torch.float32, tokens, count), None):
            with recorder.calling(*words, weights is None):
                _ops._moe_combine.default(rows, positions, weights)
            for mask in ((True, weights is not None), (True, False)):
                with recorder.calling(*words, mask):
                    _ops._moe_combine_backward.default(x, rows, positions, weights, mask)


def run_merge(recorder: Recorder, device: torch.device) -> None:
    """Into what is of the parts' numbers, and of float32; of heads that pieces fill or not."""
    sizes = itertools.product((1, 1000, 1_000_003), (1, 32), (1, 64, 100, 128, 512), (0, 1))
    for (tokens, heads, size, start), dtype in itertools.product(sizes, DTYPES[:2]):
        part = memory(device, dtype, 1, heads, tokens, size, start=start)
        lse = memory(device, torch.float32, 1, heads, tokens)
        for wide in (dtype, torch.float32):
            out = memory(device, wide, 1, heads, tokens, size)
            with recorder.calling("merge", dtype, wide, tokens, heads, size, start):
                _ops._merge_attention_state_.default(out, lse, part, lse)


def run_folds(recorder: Recorder, device: torch.device) -> None:
    """As many convolutions as a kernel has room for, and more; of rows short and long."""
    shapes = ((1, 1, 1, 1), (512, 512, 3, 3), (70_001, 1, 3, 3), (4096, 8192, 1, 1))
    for shape, dtype, count in itertools.product(shapes, DTYPES, (1, 48, 100)):
        weights = [memory(device, dtype, *shape)] * count
        rows = [memory(device, dtype, shape[0])] * count
        with recorder.calling("fold", dtype, shape, count):
            _ops._fold_batch_norms.default(weights, *([rows] * 5), [1e-5] * count)


def run_rotary_fp8(recorder: Recorder, device: torch.device) -> None:
    """With norms and scales or without, of whole heads and of parts."""
    sizes = itertools.product((1, 1000, 1_000_003), (1, 32), (2, 6, 64, 128, 192, 256), (0, 1))
    for (tokens, heads, size, start), dtype in itertools.product(sizes, DTYPES):
        query, key, value = (
            memory(device, dtype, 2, count, tokens, size, start=start) for count in (heads, 8, 8)
        )
        weight = memory(device, dtype, size)
        for angles, is_interleaved in itertools.product({dtype, torch.float32}, (0, 1)):
            cos = memory(device, angles, 1, tokens, size)
            tensors = (query, key, value, cos, cos, None, [is_interleaved, 0])
            words = ("rotary fp8", dtype, tokens, heads, size, start, angles, is_interleaved)
            for scales, fp8 in (
                (None, torch.float8_e4m3fn),
                (memory(device, torch.float32, 10), torch.float8_e5m2),
            ):
                norms = (None, None) if scales is None else (weight, weight)
                with recorder.calling(*words, scales is None):
                    _ops._rotary_fp8.default(
                        *tensors, scales, *norms, 1e-6, False, scales is not None, fp8
                    )


def run_rows_fp8(recorder: Recorder, device: torch.device) -> None:
    """Plain, normed and gated rows of all widths, under scales of their own and under one."""
    for dtype, (rows, width), start in itertools.product(DTYPES, SIZES, (0, 1)):
        if rows not in (1, 33, 70_001) or rows * width >= 1 << 33:
            continue
        x = memory(device, dtype, rows, width, start=start)
        scale = memory(device, torch.float32, 1)
        for kind, given in ((0, None), (1, scale), (2, None)):
            other = None if kind == 0 else x
            with recorder.calling("rows fp8", dtype, rows, width, start, kind):
                arguments = (x, other, None, given, kind, 1e-5, False, torch.float8_e4m3fn)
                _ops._rows_fp8.default(*arguments)


def run_fp8(recorder: Recorder, device: torch.device) -> None:
    """Rounding and back, under one scale and one for each head."""
    shapes = itertools.product((1, 1000, 1_000_003), (1, 3, 65_535), (7, 16, 128), (0, 1))
    for (tokens, heads, size, start), dtype in itertools.product(shapes, DTYPES):
        if tokens * heads * size >= 1 << 37:
            continue
        x = memory(device, dtype, tokens, heads, size, start=start)
        joined = memory(device, dtype, tokens, heads, 3 * size, start=start)[..., size : 2 * size]
        for fp8, dim in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), (None, 1)):
            scale = memory(device, torch.float32, 1 if dim is None else heads)
            with recorder.calling("fp8", dtype, tokens, heads, size, start, fp8, dim):
                for input in (x, joined):
                    for given in (None, scale):
                        _ops._quantize_fp8.default(input, given, dim, fp8, True)
                narrow = memory(device, fp8, tokens, heads, size, start=start)
                _ops._dequantize_fp8.default(narrow, scale, dim, dtype)


RUNS = (
    run_norms,
    run_group_norms,
    run_batch_norms,
    run_max_pools,
    run_folds,
    run_adaptive_norms,
    run_gated,
    run_rotary,
    run_rotary_fp8,
    run_epilogues,
    run_rows,
    run_images,
    run_grouped_images,
    run_transposed_rows,
    run_linear,
    run_append,
    run_paged,
    run_moe,
    run_merge,
    run_rows_fp8,
    run_fp8,
)


def main() -> None:
    gpus = describe_gpus()
    recorder = Recorder(gpus)
    recorder.listen(sys.argv[1])
    for gpu in gpus:
        # Nowhere a plan of cuDNN's.
        _C.set_norm_table(gpu["deviceVer"] // 10, 0, [])
    for index in range(len(gpus)):
        device = torch.device("cuda", index)
        for run in RUNS:
            run(recorder, device)
    launched = [sorted(names) for names in recorder.launched]
    print(json.dumps({"launched": launched, "wrong": sorted(recorder.wrong)}))


if __name__ == "__main__":
    main()
