"""The table of what cuDNN computes wrongly: a rule refuses what it is about, nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnn_ops
from cudnn_ops import _C, support
from cudnn_ops.known_bad import KnownBad, set_known_bad, version_number

SHAPE = ((2, 4, 70, 64), torch.bfloat16)
ONE_QUERY = ((2, 4, 1, 64), torch.bfloat16)
MASK = ((2, 4, 70, 70), torch.bfloat16)

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
    "slopes-for-a-single-query": (
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE, "alibi_slopes": True},
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE},
    ),
    "dropout-for-a-single-query": (
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE, "dropout_p": 0.1},
        {"op": "sdpa", "q": ONE_QUERY, "k": SHAPE},
    ),
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
    "slopes-for-a-single-query",
    "dropout-for-a-single-query",
    "slopes-from-the-end-of-told-lengths",
}
RULES = {rule.id: rule for rule in cudnn_ops.known_bad()}


@pytest.fixture
def rules_back() -> Iterator[None]:
    yield
    set_known_bad(cudnn_ops.known_bad())


def words(op: str, q=SHAPE, k=None, **options: Any) -> list[int]:
    found, refusal = support.plan_key(op, q, k, None, with_lse=True, polymorphic=False, **options)
    assert not refusal
    return list(found)


def verdict(rule: KnownBad, call: dict[str, Any], version: str, sm: int = 90) -> str:
    return _C.known_bad(words(**call), sm, version_number(version))


def test_every_rule_has_a_test():
    assert set(CALLS) == set(RULES)
    assert len(RULES) == len(cudnn_ops.known_bad())
    for rule in RULES.values():
        assert rule.source
        assert rule.cudnn[0] <= rule.cudnn[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_meets_what_it_is_about(name):
    rule = RULES[name]
    bad, good = CALLS[name]
    for version in rule.cudnn:
        assert (name in verdict(rule, bad, version)) == (name not in EVADED)
        assert verdict(rule, good, version) == ""
    assert verdict(rule, bad, "9.99.0") == ""
    assert verdict(rule, bad, rule.cudnn[0], sm=130) == ""


@pytest.mark.parametrize("name", sorted(EVADED))
def test_a_rule_that_the_operators_evade_guards_all_the_same(name, rules_back):
    """What they ask for in its place meets some of the conditions, and not all."""
    rule, (bad, _) = RULES[name], CALLS[name]
    set_known_bad((rule,))
    assert verdict(rule, bad, rule.cudnn[0]) == ""
    loosened = [
        replace(rule, when=some)
        for count in range(1, len(rule.when))
        for some in itertools.combinations(rule.when, count)
    ]
    set_known_bad(tuple(loosened))
    assert name in verdict(rule, bad, rule.cudnn[0])


ASKED_FOR = [name for name in CALLS if name not in EVADED and "9.19.0" in RULES[name].cudnn]


@pytest.mark.parametrize("name", ASKED_FOR)
def test_explain_says_why(name):
    for call, supported in zip(CALLS[name], (False, True), strict=True):
        options = {"q": SHAPE, **call}
        answer = support.explain(options.pop("op"), options.pop("q"), device="h200", **options)
        assert answer.supported == supported, answer.reason
        assert supported or f"known to {RULES[name].reason}" in answer.reason


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"plan": "rms_norm"}, "there are no plans of rms_norm"),
        ({"when": ("query.size9 == 1",)}, "has no query.size9"),
        ({"when": ("query.size2 = 1",)}, "is not a fact, a comparison and a number"),
        ({"when": ("query.size2 == one",)}, "is not a fact, a comparison and a number"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(change, match, rules_back):
    with pytest.raises(ValueError, match=match):
        set_known_bad((replace(next(iter(RULES.values())), **change),))
