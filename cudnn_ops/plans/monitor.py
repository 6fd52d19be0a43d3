"""``cudnn_ops.profile``: what the operators of a program cost, by operator and shape."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cudnn_ops.plans.cache import cache_info
from cudnn_ops.plans.figure import figure_class
from cudnn_ops.plans.profile import profile_names

_PREFIX = "cudnn_ops::"
#: As csrc/graph/profile_names.cpp writes it.
_PLAN = re.compile(r"cuDNN (\S+) of .* \((\d+) bytes of workspace\)")
#: What a profile calls the dtypes that a GPU computes in.
_DTYPES = {"c10::Half": "float16", "c10::BFloat16": "bfloat16", "float": "float32"}
_HALVES = ("float16", "bfloat16")
#: Dense float16 and bfloat16 with float32 sums, in TFLOP/s: NVIDIA's data sheets.
_PEAK_TFLOPS = {
    **{"H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "B300": 2250, "A100": 312},
    **{"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835},
    **{"L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 5090": 210},
}
#: Columns of the table that are no numbers.
_WORDS = ("operator", "shapes", "engine")
_DPI = 150


@dataclass
class OperatorProfile:
    """All calls of one operator with the same shapes."""

    op: str
    """The operator; derivatives end in ``_backward``."""
    shapes: str
    """Those of its tensors, in the order of its arguments."""
    dtype: str
    """That of its first tensor; empty where the profile does not say."""
    calls: int = 0
    ms: float = 0.0
    """All calls together: time of their kernels on the GPU, or of the CPU where there is none."""
    flops: int | None = None
    """Multiplications and additions of one call, as ``torch.utils.flop_counter`` counts them; None
    where there is no formula. Lengths that lie on a device count as the longest."""
    engines: list[str] = field(default_factory=list)
    """cuDNN's engines that ran; none where a kernel of this package or torch's did."""
    workspace_bytes: int = 0
    """The largest workspace of their plans."""

    @property
    def tflops(self) -> float | None:
        """TFLOP/s."""
        if not self.flops or not self.ms:
            return None
        return self.flops * self.calls / self.ms / 1e9


@dataclass
class Profile:
    """What :func:`cudnn_ops.profile` has found; filled when its context ends."""

    device: str
    """The GPU's name, or ``"cpu"``."""
    rows: list[OperatorProfile] = field(default_factory=list)
    """What took the longest first."""
    plans_built: int = 0
    plans_loaded: int = 0
    """From the store or a bundle."""

    def share_of_peak(self, row: OperatorProfile) -> float | None:
        """TFLOP/s over what the GPU's data sheet says for float16 and bfloat16.

        None for other dtypes, unknown GPUs, and operators without a formula.
        """
        peaks = [(len(name), peak) for name, peak in _PEAK_TFLOPS.items() if name in self.device]
        if not peaks or row.tflops is None or row.dtype not in _HALVES:
            return None
        return row.tflops / max(peaks)[1]

    def __str__(self) -> str:
        titles = ("operator", "shapes", "calls", "ms", "TFLOP/s", "of peak", "workspace", "engine")
        lines = [titles, *map(self._cells, self.rows)]
        # On a CPU there is no peak, and no plan.
        filled = [any(cells) for cells in zip(*lines[1:], strict=True)] or [True] * len(titles)
        lines = [tuple(itertools.compress(line, filled)) for line in lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if title in _WORDS else cell.rjust(width)
                for title, cell, width in zip(lines[0], line, widths, strict=True)
            ).rstrip()
            for line in lines
        ]
        total = sum(row.ms for row in self.rows)
        plans = f"plans built: {self.plans_built}, loaded: {self.plans_loaded}"
        return "\n".join([*text, f"{self.device}: {total:.4g} ms; {plans}"])

    def _cells(self, row: OperatorProfile) -> tuple[str, ...]:
        share = self.share_of_peak(row)
        return (
            row.op,
            " ".join(part for part in (row.shapes, row.dtype) if part),
            str(row.calls),
            f"{row.ms:.4g}",
            "" if row.tflops is None else f"{row.tflops:.4g}",
            "" if share is None else f"{share:.0%}",
            f"{row.workspace_bytes:,}" if row.engines else "",
            ", ".join(row.engines),
        )

    def save(self, path: str | Path) -> None:
        """Writes it as JSON: the fields, and for each row TFLOP/s and the share of the peak."""
        rows = [
            asdict(row) | {"tflops": row.tflops, "share_of_peak": self.share_of_peak(row)}
            for row in self.rows
        ]
        Path(path).write_text(json.dumps(asdict(self) | {"rows": rows}, indent=1) + "\n")

    def plot(self, path: str | Path, most: int = 20) -> None:
        """Draws a bar a row, the longest first; the file's name says its format.

        Args:
            path: where to.
            most: rows.

        Raises:
            RuntimeError: matplotlib is not installed.
            ValueError: there is nothing to draw.
        """
        rows = self.rows[:most]
        if not rows:
            raise ValueError("cudnn_ops.profile: no operator of cudnn_ops was called")
        drawing = figure_class("Profile.plot")(
            figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained"
        )
        axes = drawing.subplots()
        bars = axes.barh(range(len(rows)), [row.ms for row in rows])
        labels = [
            f"{row.ms:.4g} ms" + ("" if row.tflops is None else f", {row.tflops:.4g} TFLOP/s")
            for row in rows
        ]
        axes.bar_label(bars, labels, padding=3, fontsize="small")
        names = [f"{row.op} x {row.calls}\n{row.shapes}" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize="x-small")
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xlabel("ms, all calls")
        axes.set_title(self.device, fontsize="small")
        drawing.savefig(path, dpi=_DPI)


@contextmanager
def profile() -> Iterator[Profile]:
    """A context that measures the operators called in it, by operator and shape.

    Calls, GPU time, plans built, workspace, TFLOP/s and share of the GPU's peak: in eager mode and
    under ``torch.compile``, of derivatives too. Built on ``torch.profiler``, which runs meanwhile
    and costs host time: a step should have run before, so that nothing is compiled in the context.

    Yields:
        A :class:`Profile`, filled when the context ends: ``print`` shows a table, ``save`` writes
        JSON and ``plot`` draws bars.

    Raises:
        RuntimeError: a profiler is running already.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 4, 64, 32, requires_grad=True)
        >>> with cudnn_ops.profile() as found:
        ...     cudnn_ops.scaled_dot_product_attention(x, x, x).sum().backward()
        >>> [(row.op, row.calls, row.flops) for row in sorted(found.rows, key=lambda row: row.op)]
        [('sdpa', 1, 4194304), ('sdpa_backward', 1, 10485760)]
    """
    on_gpu = torch.cuda.is_available()
    found = Profile(torch.cuda.get_device_name() if on_gpu else "cpu")
    before = cache_info()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()  # what was launched before is not part of it
    recorder = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    with profile_names(), recorder:
        yield found
        if on_gpu:
            torch.cuda.synchronize()
    after = cache_info()
    found.plans_built = after.builds - before.builds
    found.plans_loaded = after.loads - before.loads
    found.rows = _rows(recorder, on_gpu)


def _rows(recorder: Any, on_gpu: bool) -> list[OperatorProfile]:
    dtypes = {
        event.correlation_id(): event.dtypes()
        for event in recorder.profiler.kineto_results.events()
        if event.name().startswith(_PREFIX)
    }
    rows: dict[tuple[str, str, str], OperatorProfile] = {}
    for event in recorder.events():
        if not event.name.startswith(_PREFIX) or _is_inner(event):
            continue
        shapes = ", ".join(str(shape) for shape in event.input_shapes if shape)
        dtype = _DTYPES.get(next(iter(dtypes.get(event.id, ())), ""), "")
        op = event.name.removeprefix(_PREFIX).removeprefix("_")
        row = rows.setdefault((op, shapes, dtype), OperatorProfile(op, shapes, dtype))
        row.calls += 1
        row.ms += (event.device_time_total if on_gpu else event.cpu_time_total) / 1e3
        if row.flops is None:
            row.flops = _flops(event)
        for inner in _within(event):
            if plan := _PLAN.match(inner.name):
                if plan[1] not in row.engines:
                    row.engines.append(plan[1])
                row.workspace_bytes = max(row.workspace_bytes, int(plan[2]))
    return sorted(rows.values(), key=lambda row: -row.ms)


def _is_inner(event: Any) -> bool:
    """Whether another operator of this package called it."""
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith(_PREFIX) or _is_inner(parent))


def _within(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from _within(child)


def _flops(event: Any) -> int | None:
    """Of one call; None where neither it nor what it calls has a formula."""
    from torch.utils.flop_counter import flop_registry

    if event.name.startswith(_PREFIX):
        packet = getattr(torch.ops.cudnn_ops, event.name.removeprefix(_PREFIX))
        if formula := flop_registry.get(packet):
            return _count(packet, formula, event)
    parts = [count for child in event.cpu_children if (count := _flops(child)) is not None]
    return sum(parts) if parts else None


def _count(packet: Any, formula: Callable[..., int], event: Any) -> int | None:
    """By the formula, with tensors that have no memory in the place of the call's."""
    values: dict[str, Any] = {}
    for argument, shape, number in zip(
        packet.default._schema.arguments, event.input_shapes, event.concrete_inputs, strict=False
    ):
        is_tensor = "Tensor" in str(argument.type)
        given = torch.empty(shape, device="meta") if shape else None
        values[argument.name] = given if is_tensor else number
    try:
        return formula(**values, out_val=_result(packet, values))
    except (RuntimeError, TypeError, AttributeError):
        return None  # the profile has not kept all that the formula reads


def _result(packet: Any, values: dict[str, Any]) -> Any:
    """What the formulas of forwards read the shape of."""
    if packet is torch.ops.cudnn_ops._conv:
        return packet(**values)
    return values.get("query")  # which has the sizes of attention's result, but for the last
