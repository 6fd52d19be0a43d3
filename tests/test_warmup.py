"""Recording what a run asks for, and building plans before they are needed."""

from __future__ import annotations

import json
import threading
from contextlib import suppress

import pytest
import torch

import cudnn_ops
from cudnn_ops import PlanRequest, plan_requests, record_shapes, warmup
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run

pytestmark = pytest.mark.usefixtures("fresh_cache")

SHAPE = ((1, 2, 64, 64), torch.bfloat16)


def ask(length: int, **kwargs):
    return explain("sdpa", ((1, 2, length, 64), torch.bfloat16), device="h200", **kwargs)


def test_a_recording_has_each_plan_once():
    with record_shapes() as shapes:
        ask(64)
        ask(128)
        ask(64)
        thread = threading.Thread(target=ask, args=(192,))
        thread.start()
        thread.join()
    ask(256)
    assert [shape.op for shape in shapes] == ["sdpa"] * 3
    assert [f"[1, 2, {n}, 64]" in str(s) for n, s in zip((64, 128, 192), shapes, strict=True)]


def test_recordings_overlap_and_survive_errors():
    with record_shapes() as outer:
        ask(64)
        with suppress(KeyError), record_shapes() as inner:
            ask(64)
            ask(128)
            raise KeyError
        ask(192)
    assert len(outer) == 3
    assert len(inner) == 2


def test_what_was_recorded_can_be_kept_and_built():
    with record_shapes() as shapes:
        ask(64)
        ask(64, with_lse=True, is_causal=True)
        explain("sdpa_backward", SHAPE, device="h200", polymorphic=True)
    kept = json.dumps([shape.words for shape in shapes])
    cudnn_ops.cache_clear()
    again = [PlanRequest(tuple(words)) for words in json.loads(kept)]
    assert again == shapes
    report = warmup(again, device="h200", progress=False)
    assert (report.built, report.loaded, report.ready, report.refused) == (3, 0, 0, {})
    ask(64)
    explain("sdpa_backward", SHAPE, device="h200", polymorphic=True)
    assert cudnn_ops.cache_info().builds == 3
    assert warmup(again, device="h200", progress=False).ready == 3


@pytest.mark.parametrize(
    ("policy", "training", "plans", "count"),
    [
        ("auto", True, None, 4),
        ("auto", False, None, 2),
        ("exact", True, None, 2),
        ("polymorphic", True, None, 2),
        ("auto", True, "exact", 2),
        ("exact", False, "both", 2),
    ],
)
def test_requests_for_named_shapes(policy, training, plans, count):
    with cudnn_ops.using_plan_policy(policy):
        requests = plan_requests("sdpa", SHAPE, training=training, plans=plans)
    assert len(set(requests)) == count
    assert any(r.op == "sdpa_backward" for r in requests) == training


def test_the_bar_the_store_and_what_is_refused(store, capsys):
    good = plan_requests("sdpa", SHAPE, training=False, plans="exact")
    refused = plan_requests("sdpa", ((1, 2, 64, 512), torch.bfloat16), plans="exact")
    report = warmup([*good, *good, *refused], device="h200", threads=2)
    assert (report.built, len(report.refused)) == (2, 1)
    ((request, reason),) = report.refused.items()
    assert request.op == "sdpa_backward"
    assert "hidden_dim" in reason
    assert "cuDNN plans" in capsys.readouterr().err
    cudnn_ops.cache_clear()
    report = warmup([*good, *refused], device="h200", progress=False)
    assert (report.built, report.loaded, report.ready) == (0, 2, 0)
    assert capsys.readouterr().err == ""


def test_nothing_to_do():
    assert warmup([], device="h200", progress=False) == (0, 0, 0, {})


def test_mistakes():
    with pytest.raises(ValueError, match="op must be one of sdpa, "):
        plan_requests("conv", SHAPE)
    with pytest.raises(ValueError, match="plans must be one of exact, polymorphic, both"):
        plan_requests("sdpa", SHAPE, plans="all")
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        plan_requests("sdpa", ((1, 2, 64, 64), torch.float32))
    with pytest.raises(ValueError, match="no operator of this version"):
        warmup([PlanRequest((1, 2, 3))], device="h200", progress=False)
    with pytest.raises(ValueError, match="not a file"):
        warmup([], device="h2000")
    with pytest.raises(ValueError, match="device must be a CUDA device"):
        warmup([], device=torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch sees none"):
            warmup([])


@pytest.mark.gpu
def test_a_run_on_the_gpu_builds_nothing_after_its_warmup():
    problems = [
        Case(2, 4, 2, 96, 96, 64, 64, is_causal=True),
        Case(2, 4, 2, 100, 77, 64, 64, is_causal=True),
        Case(2, 4, 2, 100, 177, 64, 64, is_causal=True, layout="bhsd"),
        Case(1, 4, 4, 100, 177, 128, 64, layout="packed"),
    ]

    def step():
        for case in problems:
            inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
            run(case, inputs, cases.make_grad_out(case, torch.bfloat16, "cuda"))

    with record_shapes() as shapes:
        step()
    assert {shape.op for shape in shapes} == {"sdpa", "sdpa_backward"}
    cudnn_ops.cache_clear()
    report = warmup(shapes, progress=False)
    assert report.built == len(shapes)
    with record_shapes() as again:
        step()
    assert cudnn_ops.cache_info().builds == len(shapes)
    assert {*again} <= {*shapes}


@pytest.mark.gpu
def test_named_shapes_are_those_that_calls_ask_for():
    for case in (
        Case(2, 4, 2, 96, 80, 64, 128, is_causal=True),
        Case(2, 4, 4, 33, 65, 64, 64, layout="bhsd"),
        Case(2, 4, 1, 1, 65, 64, 64, layout="misaligned"),
        Case(1, 1, 1, 40, 40, 64, 64, layout="packed"),
    ):
        inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
        grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
        for policy in ("exact", "polymorphic"):
            cudnn_ops.cache_clear()
            with cudnn_ops.using_plan_policy(policy):
                requests = plan_requests("sdpa", *inputs, is_causal=case.is_causal)
                warmup(requests, progress=False)
                with record_shapes() as shapes:
                    out = torch.ops.cudnn_ops.sdpa_with_lse(*inputs, **case.kwargs())
                    dense = torch.empty_like(out[0]).copy_(grad_out)
                    torch.ops.cudnn_ops._sdpa_backward(
                        dense, *inputs, *out, is_causal=case.is_causal, scale=case.scale
                    )
            assert shapes == requests, str(case)


def test_plans_over_pages_are_requested_and_explained():
    """One for every length and smaller batch."""
    caches = [((100, 16, 2, size), torch.bfloat16) for size in (64, 32)]
    query = ((13, 1, 4, 64), torch.bfloat16)
    same = {
        plan_requests("paged_attention", query, *caches, page_table=(batch, width)).pop().words
        for batch, width, query in (
            (13, 20, query),
            (16, 32, ((16, 1, 4, 64), torch.bfloat16)),
        )
    }
    assert len(same) == 1
    (request,) = plan_requests(
        "paged_attention",
        ((70, 4, 64), torch.bfloat16),
        *caches,
        page_table=(3, 20),
        cu_seqlens_q=True,
        max_seqlen_q=40,
        is_causal=True,
        with_lse=True,
    )
    assert request.op == "paged_attention"
    assert warmup([request], device="h200", progress=False).refused == {}
    answer = cudnn_ops.support.explain(
        "paged_attention", query, *caches, page_table=(13, 20), device="h200"
    )
    assert answer.supported, answer.reason
    with pytest.raises(ValueError, match="paged_attention needs k, the key_cache"):
        plan_requests("paged_attention", query)
    with pytest.raises(ValueError, match="for 13 sequences"):
        plan_requests("paged_attention", query, *caches, page_table=(12, 20))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (32, 0), "softcap": 20.0},
        {"dropout_p": 0.1, "deterministic": True},
    ],
    ids=str,
)
def test_plans_of_packed_attention_are_those_that_a_call_asks_for(options):
    """In inference and in training, with the same tokens on both sides and with others."""
    q = torch.randn(300, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    for offsets_kv in (offsets, offsets.clone()):
        packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets_kv}
        packing |= {"max_seqlen_q": 200, "max_seqlen_k": 200}
        for training in (False, True):
            with record_shapes() as asked, torch.set_grad_enabled(training):
                out = cudnn_ops.varlen_attention(q, q, q, **packing, **options)
                if training:
                    out.sum().backward()
            named = plan_requests("varlen_attention", q, training=training, **packing, **options)
            assert set(asked) == set(named)
