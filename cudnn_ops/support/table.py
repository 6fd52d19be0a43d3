"""What cuDNN takes, feature by feature: each answer is a plan that was built, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from os import cpu_count
from pathlib import Path
from typing import Any

import torch

from cudnn_ops import _C, support

_LENGTH, _LENGTH_KV = 192, 320
_MASK = ((2, 1, _LENGTH, _LENGTH_KV), torch.bfloat16)

#: Options of a call by the feature's name; "polymorphic" asks for the plan of other lengths, which
#: is that of packed sequences too.
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
    "packed": {"polymorphic": True, "is_causal": True},
    "packed, deterministic": {"polymorphic": True, "is_causal": True, "deterministic": True},
    "paged, one query": {"queries": 1},
    "paged, one query, window": {"queries": 1, "window_size": (64, 0)},
    "paged, few queries": {"queries": 4, "is_causal": True},
    "paged, packed": {"queries": 100, "cu_seqlens_q": True, "is_causal": True},
}
#: Of the query and key, and of the value.
HEAD_SIZES: tuple[tuple[int, int], ...] = (
    (64, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (512, 512),
)
DIRECTIONS = ("sdpa", "sdpa_backward")


@dataclass(frozen=True)
class Answer:
    """cuDNN's answer for one feature, head size and direction."""

    feature: str
    head_sizes: tuple[int, int]
    direction: str
    """``"sdpa"`` or ``"sdpa_backward"``."""
    supported: bool
    reason: str
    """cuDNN's own where it is not supported, or the known-bad table's."""


def support_table(
    device: str | Path = "current", *, progress: bool = False, threads: int | None = None
) -> Iterator[Answer]:
    """Asks for every feature of attention at every head size, forward and backward.

    The answers come as they are known, feature by feature in the order of :data:`FEATURES`.

    Args:
        device: as :func:`cudnn_ops.support.explain` takes it.
        progress: whether to show a bar on the terminal.
        threads: how many plans are built at once; None stands for the number of CPUs.
    """
    from tqdm.auto import tqdm  # here: importing the package must be quick

    description = support.prepare(device)

    def ask_about_pages(feature: str, sizes: tuple[int, int], direction: str) -> Answer:
        """Of a batch of two, over pages of 16 tokens."""
        if direction != "sdpa":
            return Answer(feature, sizes, direction, False, "it is for inference")
        options = dict(FEATURES[feature])
        queries = options.pop("queries")
        # Over fewer key heads a rule of known_bad.json refuses a single query on a B200.
        shape: tuple[int, ...] = (2, queries, 8, sizes[0])
        if "cu_seqlens_q" in options:
            shape = (2 * queries, 8, sizes[0])
            options["max_seqlen_q"] = queries
        tensors = (shape, *((100, 16, 8, size) for size in sizes))
        words, _ = support.plan_key(
            "paged_attention",
            *((tensor, torch.bfloat16) for tensor in tensors),
            page_table=(2, 32),
            with_lse=False,
            polymorphic=True,
            **options,
        )
        supported, reason, *_ = _C.make_plan(words, description)
        return Answer(feature, sizes, direction, supported, reason)

    def ask(feature: str, sizes: tuple[int, int], direction: str) -> Answer:
        options = {"polymorphic": False, **FEATURES[feature]}
        if "queries" in options:
            return ask_about_pages(feature, sizes, direction)
        if direction == "sdpa":
            options.pop("grad_mask", None)
        words, refusal = support.plan_key(
            direction,
            _spec(_LENGTH, sizes[0]),
            _spec(_LENGTH_KV, sizes[0]),
            _spec(_LENGTH_KV, sizes[1]),
            with_lse=True,
            **options,
        )
        if refusal:
            return Answer(feature, sizes, direction, False, refusal)
        supported, reason, *_ = _C.make_plan(words, description)
        return Answer(feature, sizes, direction, supported, reason)

    def answers() -> Iterator[Answer]:
        questions = [(f, s, d) for f in FEATURES for s in HEAD_SIZES for d in DIRECTIONS]
        with (
            ThreadPoolExecutor(threads or cpu_count() or 1) as pool,
            tqdm(
                total=len(questions), desc="cuDNN plans", disable=not progress, leave=False
            ) as bar,
        ):
            for answer in pool.map(lambda question: ask(*question), questions):
                bar.update()
                yield answer

    return answers()


def _spec(length: int, size: int) -> torch.Tensor:
    memory = torch.empty(2, length, 4, size, dtype=torch.bfloat16, device="meta")
    return memory.transpose(1, 2)


def as_lines(answers: Iterable[Answer]) -> Iterator[list[str]]:
    """A line a feature, a column a head size, header first: "yes", "forward" alone, or "no"."""
    yield ["", *(str(d) if d == dv else f"{d}/{dv}" for d, dv in HEAD_SIZES)]
    answers = iter(answers)
    while of_feature := list(islice(answers, len(HEAD_SIZES) * len(DIRECTIONS))):
        found = {(a.head_sizes, a.direction): a.supported for a in of_feature}
        cells = []
        for sizes in HEAD_SIZES:
            forward, backward = (found[sizes, direction] for direction in DIRECTIONS)
            cells.append("yes" if forward and backward else "forward" if forward else "no")
        yield [of_feature[0].feature, *cells]


def as_markdown(lines: Iterable[list[str]]) -> Iterator[str]:
    """A table for a README, row by row."""
    for number, line in enumerate(lines):
        yield f"| {' | '.join(line)} |"
        if number == 0:
            yield f"| --- |{' :---: |' * (len(line) - 1)}"


def as_text(lines: Iterable[list[str]]) -> Iterator[str]:
    """A table for a terminal, row by row."""
    widths = [max(map(len, FEATURES)), *(len("forward") for _ in HEAD_SIZES)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
