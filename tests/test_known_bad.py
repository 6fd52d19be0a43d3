"""The table of what cuDNN computes wrongly: a rule refuses what it is about, nothing else."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnn_ops
from cudnn_ops import _C, _library, support
from cudnn_ops.support.known_bad import KnownBad, set_known_bad, version_number

SHAPE = ((2, 4, 70, 64), torch.bfloat16)
ONE_QUERY = ((2, 4, 1, 64), torch.bfloat16)
MASK = ((2, 4, 70, 70), torch.bfloat16)
DECODED = ((2, 4, 300, 128), torch.bfloat16)
#: Of few sequences a kernel of ours decodes.
PAGED_QUERY = ((200, 1, 32, 128), torch.bfloat16)


def pages(heads: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (64, 16, heads, 128), torch.bfloat16


def fp8(length: int, size: int, value_size: int | None = None) -> dict[str, Any]:
    """The operands of FP8 attention."""
    heads = (2, 4, length)
    shapes = ((*heads, size), (*heads, size), (*heads, value_size or size))
    return {"op": "sdpa_fp8"} | {
        name: (shape, torch.float8_e4m3fn) for name, shape in zip("qkv", shapes, strict=True)
    }


#: Of each rule: a call that meets it, and one that is next to it and does not. Where the operators
#: find another way, no call meets it: then the fields of a plan that does are put in by hand.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient-of-a-mask-with-softcap": (
        {"op": "sdpa_backward", "softcap": 5.0, "attn_mask": MASK, "grad_mask": True},
        {"op": "sdpa_backward", "softcap": 5.0, "attn_mask": MASK},
    ),
    "mask-over-a-single-key": (
        {"op": "sdpa_backward", "k": ONE_QUERY, "attn_mask": ((70, 1), torch.bool)},
        {"op": "sdpa_backward", "k": ONE_QUERY},
    ),
    "dropout-in-9.11-to-9.13": ({"op": "sdpa", "dropout_p": 0.1}, {"op": "sdpa"}),
    "window-without-causal-mask-in-9.14.0": (
        {"op": "sdpa", "k": ((2, 4, 1100, 64), torch.bfloat16), "window_size": (8, -1)},
        {"op": "sdpa", "k": ((2, 4, 1100, 64), torch.bfloat16), "window_size": (8, 1)},
    ),
    "mask-told-to-have-one-row": (
        {"op": "sdpa_backward", "attn_mask": ((2, 4, 1, 70), torch.bfloat16)},
        {"op": "sdpa_backward", "attn_mask": MASK},
    ),
    "gradients-beyond-2^31-elements": (
        {"op": "sdpa_backward", "q": ((1, 1024, 33000, 64), torch.bfloat16)},
        {"op": "sdpa_backward", "q": ((1, 1024, 32000, 64), torch.bfloat16)},
    ),
    "backward-over-64-modulo-128-keys": (
        {"op": "sdpa_backward", "q": ((2, 4, 192, 64), torch.bfloat16)},
        {"op": "sdpa_backward", "q": ((2, 4, 192, 64), torch.bfloat16), "is_causal": True},
    ),
    "backward-of-a-single-query": (
        {"op": "sdpa_backward", "q": ONE_QUERY, "k": SHAPE},
        {"op": "sdpa_backward"},
    ),
    "slopes-for-a-single-query": (
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE, "alibi_slopes": True},
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE},
    ),
    "dropout-for-a-single-query": (
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE, "dropout_p": 0.1},
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE},
    ),
    "decoding-with-few-key-heads-on-blackwell": (
        {"op": "sdpa", "q": ((2, 28, 1, 128), torch.bfloat16), "k": DECODED},
        {"op": "sdpa", "q": ((2, 28, 2, 128), torch.bfloat16), "k": DECODED},
    ),
    "paged-decoding-with-few-key-heads-on-blackwell": (
        {"op": "paged_attention", "q": PAGED_QUERY, "k": pages(4), "page_table": (200, 20)},
        {"op": "paged_attention", "q": PAGED_QUERY, "k": pages(8), "page_table": (200, 20)},
    ),
    "fp8-window-over-told-lengths-on-hopper": (
        {**fp8(70, 64), "window_size": (8, 0), "seq_lens_kv": True},
        {**fp8(70, 64), "is_causal": True, "seq_lens_kv": True},
    ),
    "fp8-packed-on-hopper": (
        {
            "op": "varlen_attention_fp8",
            "q": ((300, 4, 64), torch.float8_e4m3fn),
            "cu_seqlens_q": 3,
            "max_seqlen_q": 200,
        },
        fp8(70, 64),
    ),
    "fp8-values-over-128-on-hopper": (fp8(70, 192, 144), fp8(70, 192, 128)),
    "fp8-keys-over-192-on-hopper": (fp8(70, 208, 128), fp8(70, 192, 128)),
    "fp8-few-queries-of-192-on-blackwell": (fp8(15, 192, 128), fp8(16, 192, 128)),
    "fp8-bfloat16-output-in-9.24": (fp8(4096, 64), {**fp8(4096, 64), "is_causal": True}),
    "slopes-from-the-end-of-told-lengths": (
        {
            "op": "sdpa",
            "k": ((2, 4, 90, 64), torch.bfloat16),
            "alibi_slopes": True,
            "bottom_right": True,
            "seq_lens_kv": True,
        },
        {"op": "sdpa", "k": ((2, 4, 90, 64), torch.bfloat16), "alibi_slopes": True},
    ),
}
#: The operators never ask for these plans.
EVADED = {
    "mask-told-to-have-one-row",
    "backward-over-64-modulo-128-keys",
    "backward-of-a-single-query",
    "slopes-for-a-single-query",
    "dropout-for-a-single-query",
    "slopes-from-the-end-of-told-lengths",
}
RULES = {rule.id: rule for rule in cudnn_ops.known_bad()}
#: An open end stands for these: no version is too old or too new.
OLDEST, NEWEST = "9.0.0", "10.99.99"


@pytest.fixture
def rules_back() -> Iterator[None]:
    yield
    set_known_bad(cudnn_ops.known_bad())


def words(op: str, q=SHAPE, k=None, v=None, sm: int = 90, **options: Any) -> list[int]:
    found, refusal = support.plan_key(
        op, q, k, v, with_lse=True, polymorphic=False, sm=sm, **options
    )
    assert not refusal
    return list(found)


def gpu(rule: KnownBad) -> int:
    """An architecture that the rule is about: Hopper where that is one."""
    return max(rule.sm[0], 90)


def versions(rule: KnownBad) -> tuple[str, str]:
    first, last = rule.cudnn
    return first or OLDEST, last or NEWEST


def verdict(rule: KnownBad, call: dict[str, Any], version: str, sm: int | None = None) -> str:
    given = words(**call, sm=gpu(rule))
    return _C.known_bad(given, gpu(rule) if sm is None else sm, version_number(version))


def test_every_rule_has_a_test():
    assert set(CALLS) == set(RULES)
    assert len(RULES) == len(cudnn_ops.known_bad())
    for rule in RULES.values():
        assert rule.source
        first, last = map(version_number, versions(rule))
        assert first <= last


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_meets_what_it_is_about(name):
    rule = RULES[name]
    bad, good = CALLS[name]
    for version in versions(rule):
        assert (name in verdict(rule, bad, version)) == (name not in EVADED)
        assert verdict(rule, good, version) == ""
    first, last = rule.cudnn
    if first is not None:
        assert verdict(rule, bad, OLDEST) == ""
    if last is not None:
        assert verdict(rule, bad, NEWEST) == ""
    for sm in (rule.sm[0] - 1, rule.sm[1] + 1):
        assert verdict(rule, bad, versions(rule)[0], sm) == ""


ALONE = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
for plan in json.load(sys.stdin):
    print(torch.ops.cudnn_ops._known_bad(*plan))
"""


def test_the_rules_are_part_of_the_library():
    """A process that loads it and never imports the package, as one of C++, refuses the same."""
    names = sorted(set(CALLS) - EVADED)
    plans = [
        (
            words(**CALLS[name][0], sm=gpu(RULES[name])),
            gpu(RULES[name]),
            version_number(versions(RULES[name])[0]),
        )
        for name in names
    ]
    command = [sys.executable, "-c", ALONE, str(_library.LIBRARY)]
    done = subprocess.run(
        command, input=json.dumps(plans), capture_output=True, text=True, check=True
    )
    refusals = done.stdout.splitlines()
    assert refusals == [f"{RULES[name].reason} ({name})" for name in names]


def test_what_was_found_with_one_version_holds_for_those_that_nobody_measured():
    """Only what was measured, or stated by NVIDIA, to be right ends a rule."""
    open_ended = {name for name, rule in RULES.items() if rule.cudnn[1] is None}
    assert open_ended >= {
        "gradient-of-a-mask-with-softcap",
        "mask-over-a-single-key",
        "mask-told-to-have-one-row",
        "gradients-beyond-2^31-elements",
        "slopes-for-a-single-query",
        "dropout-for-a-single-query",
        "slopes-from-the-end-of-told-lengths",
        "decoding-with-few-key-heads-on-blackwell",
        "paged-decoding-with-few-key-heads-on-blackwell",
    }
    call = CALLS["mask-over-a-single-key"][0]
    for version in ("9.18.1", "9.19.0", "9.20.0", "9.26.0", "10.1.0"):
        assert "mask-over-a-single-key" in _C.known_bad(words(**call), 90, version_number(version))


@pytest.mark.parametrize("name", sorted(EVADED))
def test_a_rule_that_the_operators_evade_guards_all_the_same(name, rules_back):
    """What they ask for in its place meets some of the conditions, and not all."""
    rule, (bad, _) = RULES[name], CALLS[name]
    set_known_bad((rule,))
    version = versions(rule)[0]
    assert verdict(rule, bad, version) == ""
    loosened = [
        replace(rule, when=some)
        for count in range(1, len(rule.when))
        for some in itertools.combinations(rule.when, count)
    ]
    set_known_bad(tuple(loosened))
    assert name in verdict(rule, bad, version)


def holds_here(rule: KnownBad) -> bool:
    first, last = map(version_number, versions(rule))
    return first <= _C.cudnn_version() <= last


ASKED_FOR = [name for name in CALLS if name not in EVADED and holds_here(RULES[name])]


@pytest.mark.parametrize("name", ASKED_FOR)
def test_explain_says_why(name):
    device = {90: "h200", 100: "b200"}[gpu(RULES[name])]
    for call, supported in zip(CALLS[name], (False, True), strict=True):
        options = {"q": SHAPE, **call}
        answer = support.explain(options.pop("op"), options.pop("q"), device=device, **options)
        assert answer.supported == supported, answer.reason
        assert supported or f"known to {RULES[name].reason}" in answer.reason


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"plan": "rms_norm"}, "there are no plans of rms_norm"),
        ({"when": ("query.size9 == 1",)}, "has no query.size9"),
        ({"when": ("query.size2 = 1",)}, "must be a parameter, a comparison and a number"),
        ({"when": ("query.size2 == one",)}, "must be a parameter, a comparison and a number"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(change, match, rules_back):
    with pytest.raises(ValueError, match=match):
        set_known_bad((replace(next(iter(RULES.values())), **change),))
