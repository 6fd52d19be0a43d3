"""Real cuDNN plans of attention over pages for GPUs that are not there: the top left alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn_ops.plans.warmup import PlanRequest, plan_requests
from cudnn_ops.support import explain

CACHES = [((100, 16, 2, size), torch.bfloat16) for size in (64, 32)]
CAUSAL: dict[str, Any] = {"is_causal": True}
#: The query's shape, and the options.
TOP_LEFT = {
    "few queries": ((5, 4, 4, 64), CAUSAL),
    "few queries, sinks": ((5, 4, 4, 64), CAUSAL | {"sinks": True}),
    "many queries, window": ((5, 33, 4, 64), {"window_size": (20, 3)}),
    "packed": ((70, 4, 64), CAUSAL | {"cu_seqlens_q": True, "max_seqlen_q": 40}),
    "packed, softcap, window": (
        (70, 4, 64),
        {"window_size": (20, 0), "softcap": 5.0, "cu_seqlens_q": True, "max_seqlen_q": 40},
    ),
}


def request(shape: tuple[int, ...], bottom_right: bool, **options: Any) -> PlanRequest:
    options |= {"page_table": (5, 20), "bottom_right": bottom_right}
    return plan_requests("paged_attention", (shape, torch.bfloat16), *CACHES, **options).pop()


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("name", TOP_LEFT)
def test_top_left(name, device):
    shape, options = TOP_LEFT[name]
    answer = explain(
        "paged_attention",
        (shape, torch.bfloat16),
        *CACHES,
        page_table=(5, 20),
        bottom_right=False,
        with_lse=True,
        device=device,
        **options,
    )
    assert answer.supported, answer.reason
    assert request(shape, True, **options) != request(shape, False, **options)


def test_what_has_no_band_needs_one_plan():
    """Nor has a single query one: what bounds it is told by its sequence's length."""
    for shape in ((5, 1, 4, 64), (5, 4, 4, 64)):
        assert request(shape, True) == request(shape, False)
    single = request((5, 1, 4, 64), True)
    for options in (CAUSAL, {"window_size": (20, 3)}):
        assert request((5, 1, 4, 64), False, **options) == single


@pytest.mark.parametrize(
    ("sequences", "queries", "size", "packed", "pages", "ours"),
    [
        *((5, 1, 64, False, 128, True), (5, 2, 64, False, 20, True), (5, 16, 128, False, 20, True)),
        *((5, 17, 64, False, 128, False), (5, 4, 32, False, 128, False)),
        *((5, 1, 32, False, 128, False), (5, 1, 64, False, 127, False)),
        *((5, 1, 64, True, 128, True), (5, 16, 64, True, 20, True), (5, 17, 64, True, 20, False)),
        *((64, 1, 64, False, 128, True), (65, 1, 64, False, 128, False)),
        *((200, 1, 64, True, 128, False), (200, 2, 64, False, 20, True)),
    ],
)
def test_few_queries_are_ours(sequences, queries, size, packed, pages, ours):
    """Up to 32 rows, with the two heads of a group, of head sizes that there are kernels for.

    A single query is, of few sequences whose tables reach 2048 tokens.
    """
    cache = ((100, 16, 2, size), torch.bfloat16)
    shape, options = (sequences, queries, 4, size), dict(CAUSAL)
    if packed:
        shape = (sequences * queries, 4, size)
        options |= {"cu_seqlens_q": True, "max_seqlen_q": queries}
    answer = explain(
        "paged_attention",
        (shape, torch.bfloat16),
        *(cache, cache),
        page_table=(sequences, pages),
        device="h200",
        **options,
    )
    assert answer.supported, answer.reason
    assert (answer.engine == "cudnn_ops") == ours
    assert ("for few queries of a sequence it is faster" in answer.reason) == ours


def test_calls_without_queries_have_no_plan():
    with pytest.raises(ValueError, match="without queries or keys there is no plan"):
        request((5, 0, 4, 64), True)
