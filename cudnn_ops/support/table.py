"""Support tables: each cell is a plan that was built, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.support.attempts import Kind
from cudnn_ops.support.device import prepare, sm_version
from cudnn_ops.support.explanation import first_supported
from cudnn_ops.support.operators import OPERATORS, find_operator
from cudnn_ops.support.specs import TensorSpec

DIRECTIONS = ("forward", "backward")


class Question(NamedTuple):
    """One call: the operator's forward or backward, its tensors and its options."""

    op: str
    operands: tuple[TensorSpec, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows and columns by their names, and the question of each cell."""

    rows: dict[str, Any]
    columns: dict[str, Any]
    ask: Callable[[Any, Any], Question]
    """Of a row and a column, about the forward."""


@dataclass(frozen=True)
class Answer:
    """cuDNN's answer for one cell and direction."""

    row: str
    column: str
    direction: str
    """``"forward"`` or ``"backward"``."""
    supported: bool
    reason: str
    """cuDNN's own where it is not supported, or the known-bad table's. Of a convolution or a linear
    layer that is supported: what runs outside of cuDNN's graph, and why."""


_LENGTH, _LENGTH_KV = 192, 320
_MASK = ((2, 1, _LENGTH, _LENGTH_KV), torch.bfloat16)
_PACKED = {"cu_seqlens_q": 2, "max_seqlen_q": _LENGTH, "causal": True}
_PAGED = {"page_table": (2, 32)}

#: Options of a call by the feature's name, and which operator it is: one with ``cu_seqlens_q`` and
#: no pages is packed, one with pages has so many queries a sequence.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom right": {"is_causal": True, "bottom_right": True},
    "window": {"window_size": (64, 0)},
    "window on both sides": {"window_size": (64, 64)},
    "mask (bool or bias)": {"attn_mask": _MASK},
    "mask with its gradient": {"attn_mask": _MASK, "grad_mask": True},
    "mask, causal": {"attn_mask": _MASK, "is_causal": True},
    "ALiBi": {"alibi_slopes": True, "is_causal": True},
    "softcap": {"softcap": 30.0, "is_causal": True},
    "softcap, mask with its gradient": {"softcap": 30.0, "attn_mask": _MASK, "grad_mask": True},
    "sinks": {"sinks": True, "is_causal": True},
    "dropout": {"dropout_p": 0.1, "is_causal": True},
    "deterministic": {"deterministic": True, "is_causal": True},
    "padding": {"seq_lens_q": True, "seq_lens_kv": True, "is_causal": True},
    "packed": _PACKED,
    "packed, deterministic": {**_PACKED, "deterministic": True},
    "paged, one query": {**_PAGED, "queries": 1},
    "paged, one query, window": {**_PAGED, "queries": 1, "window_size": (64, 0)},
    "paged, few queries": {**_PAGED, "queries": 4, "is_causal": True},
    "paged, packed": {**_PAGED, "queries": 100, "cu_seqlens_q": True, "is_causal": True},
}
#: Of the query and key, and of the value.
HEAD_SIZES: dict[str, tuple[int, int]] = {
    "64": (64, 64),
    "128": (128, 128),
    "192/128": (192, 128),
    "192": (192, 192),
    "256": (256, 256),
    "512": (512, 512),
}


def _attention(feature: dict[str, Any], sizes: tuple[int, int]) -> Question:
    size, value_size = sizes
    if "queries" in feature:
        return _paged_attention(feature, sizes)
    if "cu_seqlens_q" in feature:
        shapes = [(2 * _LENGTH, 4, one) for one in (size, size, value_size)]
        return Question("varlen_attention", _bf16(*shapes), feature)
    memory = [(_LENGTH, size), (_LENGTH_KV, size), (_LENGTH_KV, value_size)]
    tensors = (
        torch.empty(2, length, 4, one, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for length, one in memory
    )
    return Question("sdpa", tuple(tensors), feature)


def _paged_attention(feature: dict[str, Any], sizes: tuple[int, int]) -> Question:
    """A batch of two, over pages of 16 tokens."""
    options = dict(feature)
    queries = options.pop("queries")
    # Over fewer key heads a rule of known_bad.json refuses a single query on a B200.
    shape: tuple[int, ...] = (2, queries, 8, sizes[0])
    if "cu_seqlens_q" in options:
        shape = (2 * queries, 8, sizes[0])
        options["max_seqlen_q"] = queries
    pages = ((100, 16, 8, size) for size in sizes)
    return Question("paged_attention", _bf16(shape, *pages), options)


def _bf16(*shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return tuple((shape, torch.bfloat16) for shape in shapes)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Options of a call by the feature's name; ``dtype``, ``lengths`` and ``heads_kv`` are of its
#: tensors.
FP8_FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom right": {"is_causal": True, "bottom_right": True},
    "window": {"window_size": (64, 0)},
    "window on both sides": {"window_size": (64, 64)},
    "grouped heads": {"heads_kv": 2, "is_causal": True},
    "one query": {"lengths": (1, _LENGTH_KV)},
    "padding": {"seq_lens_q": True, "seq_lens_kv": True},
    "padding, causal": {"seq_lens_q": True, "seq_lens_kv": True, "is_causal": True},
    "padding, causal, bottom right": {
        "seq_lens_q": True,
        "seq_lens_kv": True,
        "is_causal": True,
        "bottom_right": True,
    },
    "padding, window": {"seq_lens_q": True, "seq_lens_kv": True, "window_size": (64, 0)},
    "E5M2": {"dtype": _E5M2, "is_causal": True},
    "E4M3 output": {"out_dtype": _E4M3, "is_causal": True},
    "E5M2 output": {"out_dtype": _E5M2, "is_causal": True},
}
FP8_HEAD_SIZES = {
    name: HEAD_SIZES.get(name, (int(name.partition("/")[0]),) * 2)
    for name in ("16", "32", "64", "80", "128", "192/128", "192", "256")
}


def _attention_fp8(feature: dict[str, Any], sizes: tuple[int, int]) -> Question:
    options = dict(feature)
    dtype, heads_kv = options.pop("dtype", _E4M3), options.pop("heads_kv", 4)
    length, length_kv = options.pop("lengths", (_LENGTH, _LENGTH_KV))
    size, value_size = sizes
    memory = [(length, 4, size), (length_kv, heads_kv, size), (length_kv, heads_kv, value_size)]
    tensors = (torch.empty(2, *one, dtype=dtype, device="meta").transpose(1, 2) for one in memory)
    return Question("sdpa_fp8", tuple(tensors), options)


_NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms_norm": ("rms_norm", {}),
    "rms_norm, no weight": ("rms_norm", {"weight": None}),
    "rms_norm, zero-centered": ("rms_norm", {"zero_centered": True}),
    "rms_norm, float32 weight": ("rms_norm", {"weight": torch.float32}),
    "layer_norm": ("layer_norm", {"bias": True}),
    "layer_norm, no bias": ("layer_norm", {}),
    "layer_norm, zero-centered": ("layer_norm", {"bias": True, "zero_centered": True}),
    "layer_norm, float32 weight": (
        "layer_norm",
        {"weight": torch.float32, "bias": torch.float32},
    ),
}
_ROW_SIZES = {str(size): size for size in (100, 4096, 32768)}


def _norm(row: tuple[str, dict[str, Any]], size: int) -> Question:
    op, options = row
    return Question(op, _bf16((4096, size)), options)


_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_IMAGES = (32, 64, 28, 28)
_BATCH_NORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "batch_norm": (_IMAGES, {}),
    "batch_norm, line": ((8, 64, 3000), {}),
    "batch_norm, volume": ((8, 64, 8, 14, 14), {}),
}


def _batch_norm(row: tuple[tuple[int, ...], dict[str, Any]], dtype: torch.dtype) -> Question:
    shape, options = row
    return Question("batch_norm", ((shape, dtype),), options | {"channels_last": True})


_CONVS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "conv1d": ("conv1d", (8, 64, 1000), (128, 64, 3), {"padding": 1}),
    "conv2d": ("conv2d", (8, 64, 28, 28), (128, 64, 3, 3), {"padding": 1}),
    "conv2d, 1 x 1": ("conv2d", (8, 64, 28, 28), (128, 64, 1, 1), {}),
    "conv2d, stride 2": ("conv2d", (8, 64, 28, 28), (128, 64, 3, 3), {"stride": 2}),
    "conv2d, dilation 2": ("conv2d", (8, 64, 28, 28), (128, 64, 3, 3), {"dilation": 2}),
    "conv2d, 4 groups": ("conv2d", (8, 128, 28, 28), (128, 32, 3, 3), {"groups": 4}),
    "conv2d, depthwise": ("conv2d", (8, 64, 28, 28), (64, 1, 3, 3), {"groups": 64}),
    "conv2d, 3 channels": ("conv2d", (8, 3, 28, 28), (64, 3, 7, 7), {"stride": 2}),
    "conv3d": ("conv3d", (2, 64, 8, 28, 28), (128, 64, 3, 3, 3), {"padding": 1}),
    "conv_transpose1d": ("conv_transpose1d", (8, 64, 500), (64, 32, 4), {"stride": 2}),
    "conv_transpose2d": ("conv_transpose2d", (8, 64, 28, 28), (64, 32, 2, 2), {"stride": 2}),
    "conv_transpose3d": ("conv_transpose3d", (2, 64, 8, 9, 9), (64, 32, 2, 2, 2), {"stride": 2}),
}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _conv(
    row: tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], dtype: torch.dtype
) -> Question:
    op, input, weight, options = row
    return Question(op, ((input, dtype), (weight, dtype)), options)


_ROWS, _INPUTS, _HIDDEN = 512, 256, 1024
_MLP = ((_ROWS, _INPUTS), (_HIDDEN, _INPUTS), (_INPUTS, _HIDDEN))
_LINEARS: dict[str, tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "linear": ("linear", _MLP[:2], {}),
    "linear, bias": ("linear", _MLP[:2], {"bias": True}),
    "linear, bias, residual": ("linear", _MLP[:2], {"bias": True, "residual": True}),
} | {
    f"mlp, {activation}": ("mlp", _MLP, {"b1": True, "b2": True, "activation": activation})
    for activation in ACTIVATIONS[1:]
}


def _linear(
    row: tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]], dtype: torch.dtype
) -> Question:
    op, shapes, options = row
    return Question(op, tuple((shape, dtype) for shape in shapes), options | {"graph": True})


TABLES = {
    "attention": Table(FEATURES, HEAD_SIZES, _attention),
    "fp8": Table(FP8_FEATURES, FP8_HEAD_SIZES, _attention_fp8),
    "norms": Table(_NORMS, _ROW_SIZES, _norm),
    "batch_norms": Table(_BATCH_NORMS, _HALVES, _batch_norm),
    "convolutions": Table(_CONVS, _DTYPES, _conv),
    "linear": Table(_LINEARS, _HALVES, _linear),
}


def _answer(table: Table, description: str, row: str, column: str, direction: str) -> Answer:
    op, operands, options = table.ask(table.rows[row], table.columns[column])
    options = dict(options)
    operator = find_operator(op)
    if direction == "forward":
        options.pop("grad_mask", None)
    elif f"{op}_backward" not in OPERATORS:
        return Answer(row, column, direction, False, "it is for inference")
    else:
        options.pop("out_dtype", None)
        operator = find_operator(f"{op}_backward")
    kind = Kind(training=operator.has_backward, sm=sm_version(description))
    answers = [
        first_supported(attempts, description)
        for attempts in operator.parts(kind, operands, options)
    ]
    reasons = dict.fromkeys(reason for _, reason, *_ in answers if reason)
    return Answer(row, column, direction, all(answer[0] for answer in answers), "; ".join(reasons))


def support_table(
    device: str | Path = "current",
    table: Table = TABLES["attention"],
    *,
    progress: bool = False,
    threads: int | None = None,
) -> Iterator[Answer]:
    """Asks about every cell, forward and backward.

    The answers come as they are known, row by row.

    Args:
        device: as :func:`cudnn_ops.support.explain` accepts it.
        table: one of :data:`TABLES`.
        progress: whether to show a bar on the terminal.
        threads: how many plans are built at once; None stands for the number of CPUs.

    Raises:
        ValueError: an unknown device.
    """
    from tqdm.auto import tqdm  # here: importing the package must be quick

    description = prepare(device)

    cells = list(product(table.rows, table.columns, DIRECTIONS))
    bar = {"total": len(cells), "desc": "cuDNN plans", "disable": not progress, "leave": False}

    def answers() -> Iterator[Answer]:
        with ThreadPoolExecutor(threads or cpu_count() or 1) as pool:
            found = pool.map(lambda cell: _answer(table, description, *cell), cells)
            yield from tqdm(found, **bar)

    return answers()


def as_lines(answers: Iterable[Answer], table: Table = TABLES["attention"]) -> Iterator[list[str]]:
    """A line a row, header first; a cell is "yes", "forward" for no backward, or "no"."""
    yield ["", *table.columns]
    answers = iter(answers)
    while of_row := list(islice(answers, len(table.columns) * len(DIRECTIONS))):
        found = {(answer.column, answer.direction): answer.supported for answer in of_row}
        cells = []
        for column in table.columns:
            forward, backward = (found[column, direction] for direction in DIRECTIONS)
            cells.append("yes" if forward and backward else "forward" if forward else "no")
        yield [of_row[0].row, *cells]


def as_markdown(lines: Iterable[list[str]]) -> Iterator[str]:
    """A table in Markdown, row by row."""
    for number, line in enumerate(lines):
        yield f"| {' | '.join(line)} |"
        if number == 0:
            yield f"| --- |{' :---: |' * (len(line) - 1)}"


def as_text(lines: Iterable[list[str]], table: Table = TABLES["attention"]) -> Iterator[str]:
    """A table for a terminal, row by row."""
    width = max(map(len, table.rows))
    cell_width = max(map(len, ["forward", *table.columns]))
    for name, *cells in lines:
        yield "  ".join([name.ljust(width), *(cell.ljust(cell_width) for cell in cells)]).rstrip()
