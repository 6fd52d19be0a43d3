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
    # Gradients are written whole, whatever part of the keys is seen.
    return tensors, heads_first, dtype, is_causal, backward, backward or with_lse


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
    if backward and case.length == 1:
        return  # one query more: see below
    text = cudnn_ops._C.describe_plan(key(case, dtype, with_lse, backward))
    name = "sdpa_backward" if backward else "sdpa"
    short = "bf16" if dtype == torch.bfloat16 else "fp16"
    assert text.startswith(f"{name}(query={short}{[*case_sizes(case)[0]]}:")
    for field, sizes in zip(("key", "value"), case_sizes(case)[1:], strict=True):
        assert f", {field}={short}{[*sizes]}:" in text
    is_bounded = case.is_causal and case.length_kv > 1
    assert f"left=-1, right={0 if is_bounded else -1}, bottom_right=0, " in text
    told = backward and sees_behind_keys(case)
    assert f"has_softcap=0, has_alibi=0, has_sinks=0, sequences={int(told)}, " in text


def sees_behind_keys(case: Case) -> bool:
    """Whether cuDNN's backward would take for keys what lies behind the last one."""
    return case.length_kv % 128 == 64 and not (case.is_causal and case.length <= case.length_kv)


@pytest.mark.parametrize("length_kv", [1, 64, 128, 300])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_backward_is_never_of_a_single_query(length_kv, is_causal):
    """It gives NaN for some, and newer versions of cuDNN kill the process while they plan one."""
    case = Case(1, 1, 1, 1, length_kv, 64, 64, is_causal=is_causal)
    text = cudnn_ops._C.describe_plan(key(case, torch.bfloat16, with_lse=True, backward=True))
    for name in ("query", "out", "grad_out", "grad_query"):
        assert f"{name}=bf16[1, 1, 2, 64]:" in text
    forward = cudnn_ops._C.describe_plan(key(case, torch.bfloat16, with_lse=True, backward=False))
    assert "query=bf16[1, 1, 1, 64]:" in forward


@pytest.mark.parametrize(("length", "length_kv"), [(192, 192), (320, 192), (128, 448), (2, 64)])
@pytest.mark.parametrize(
    ("options", "hides"),
    [
        ({}, "never"),
        ({"window_size": (40, -1)}, "never"),
        ({"window_size": (-1, 0)}, "up to as many queries as keys"),
        ({"window_size": (-1, 40)}, "fewer queries than keys"),
        ({"window_size": (-1, 0), "bottom_right": True}, "always"),
        ({"attn_mask": True}, "never"),
    ],
)
def test_a_backward_is_told_where_keys_end_unless_the_band_says_it(
    length, length_kv, options, hides
):
    tensors = meta_inputs(Case(1, 2, 2, length, length_kv, 64, 64), torch.bfloat16)
    if options.get("attn_mask"):
        mask = torch.empty(length, length_kv, dtype=torch.bool, device="meta")
        options = {"attn_mask": mask}
    words, _ = torch.ops.cudnn_ops._sdpa_plan_key(*tensors, backward=True, **options)
    is_told = "sequences=1" in cudnn_ops._C.describe_plan(words)
    is_hidden = {
        "never": False,
        "always": True,
        "up to as many queries as keys": length <= length_kv,
        "fewer queries than keys": length + 40 <= length_kv,
    }[hides]
    assert is_told == (not is_hidden)


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
