"""What is the same plan and what is not, at random, with no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnn_ops
from cudnn_ops.support import explain
from tests.cases.sdpa import Case
from tests.test_sdpa_random import geometries

DTYPES = [torch.float16, torch.bfloat16]


@st.composite
def calls(draw: st.DrawFn) -> tuple:
    """A call, small enough that two of them are often alike."""
    heads_kv = draw(st.integers(1, 2))
    case = Case(
        batch=draw(st.integers(1, 2)),
        heads=heads_kv * draw(st.integers(1, 2)),
        heads_kv=heads_kv,
        length=draw(st.sampled_from([64, 65])),
        length_kv=draw(st.sampled_from([64, 65])),
        head_size=draw(st.sampled_from([64, 128])),
        value_size=draw(st.sampled_from([64, 128])),
        is_causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["bshd", "bhsd", "packed"])),
    )
    return case, draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.booleans())


def meta_inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    def make(heads: int, length: int, size: int) -> torch.Tensor:
        if case.layout == "bhsd":
            return torch.empty(case.batch, heads, length, size, dtype=dtype, device="meta")
        width = 3 if case.layout == "packed" else 1
        memory = torch.empty(case.batch, length, width, heads, size, dtype=dtype, device="meta")
        return memory[:, :, 0].transpose(1, 2)

    return [
        make(case.heads, case.length, case.head_size),
        make(case.heads_kv, case.length_kv, case.head_size),
        make(case.heads_kv, case.length_kv, case.value_size),
    ]


def key(case: Case, dtype: torch.dtype, with_lse: bool, backward: bool, polymorphic=False):
    words, refusal = torch.ops.cudnn_ops._sdpa_plan_key(
        *meta_inputs(case, dtype),
        is_causal=case.is_causal,
        with_lse=with_lse,
        backward=backward,
        polymorphic=polymorphic,
    )
    assert not refusal
    return words


def identity(case: Case, dtype: torch.dtype, with_lse: bool, backward: bool) -> tuple:
    """All that a graph is made of, put together independently: what lies where, and the flags."""

    def description(tensor: torch.Tensor) -> tuple:
        moving = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        return tuple(tensor.shape), tuple(moving)

    query, key, value = meta_inputs(case, dtype)
    if case.is_causal:  # what no query sees is not given to cuDNN
        key, value = (t[:, :, : case.length] for t in (key, value))
    # A single query sees all that is left, and so does any that has a single key.
    is_causal = case.is_causal and key.shape[2] > 1
    tensors = tuple(description(t) for t in (query, key, value))
    heads_first = case.layout == "bhsd" and 1 not in (case.heads, case.length)
    # cuDNN takes no single query with a single key in a backward: it is given one more.
    one_by_one = backward and query.shape[2] == key.shape[2] == 1
    # Gradients are written whole, whatever part of the keys is seen.
    return tensors, heads_first, dtype, is_causal, backward, backward or with_lse, one_by_one


@given(one=calls(), other=calls())
@settings(max_examples=600, deadline=None)
def test_whatever_changes_the_graph_changes_the_key(one, other):
    assert (key(*one) == key(*other)) == (identity(*one) == identity(*other))


@given(case=geometries().filter(lambda c: c.batch * c.length * c.length_kv > 0), call=calls())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_key_says_what_it_is_for(case, call):
    """Back from the key to the parameters: every number of the call stands in the description."""
    case = replace(case, layout="bshd")
    _, dtype, with_lse, backward = call
    if case.is_causal:
        seen = min(case.length, case.length_kv)
        case = replace(case, length_kv=seen)
    if backward and case.length == case.length_kv == 1:
        return  # one query more: see test_sdpa_features.py
    text = cudnn_ops._C.describe_plan(key(case, dtype, with_lse, backward))
    name = "sdpa_backward" if backward else "sdpa"
    short = "bf16" if dtype == torch.bfloat16 else "fp16"
    assert text.startswith(f"{name}(query={short}{[*case_sizes(case)[0]]}:")
    for field, sizes in zip(("key", "value"), case_sizes(case)[1:], strict=True):
        assert f", {field}={short}{[*sizes]}:" in text
    is_bounded = case.is_causal and case.length_kv > 1
    assert f"left=-1, right={0 if is_bounded else -1}, bottom_right=0, " in text
    assert "has_softcap=0, has_alibi=0, has_sinks=0, sequences=0, " in text


def case_sizes(case: Case) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in meta_inputs(case, torch.bfloat16)]


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), cut=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_words_that_are_no_key_are_refused(words, cut):
    with pytest.raises(ValueError, match="cudnn_ops"):
        cudnn_ops._C.describe_plan(words)
    real = key(Case(1, 2, 2, 64, 64, 64, 64), torch.float16, True, False)
    for wrong in (real[: min(cut, len(real) - 1)], [*real, 0], [*real[:1], *words]):
        with pytest.raises(ValueError, match="cudnn_ops"):
            cudnn_ops._C.describe_plan(wrong)


@given(first=calls(), second=calls(), polymorphic=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_then_b_equals_cold_b(first, second, polymorphic):
    """What was asked before changes no answer."""

    def ask(call):
        case, dtype, with_lse, backward = call
        return explain(
            "sdpa_backward" if backward else "sdpa",
            *meta_inputs(case, dtype),
            is_causal=case.is_causal,
            with_lse=with_lse,
            polymorphic=polymorphic,
            device="h200",
        )

    cudnn_ops.cache_clear()
    ask(first)
    after_another = ask(second)
    cudnn_ops.cache_clear()
    assert ask(second) == after_another
