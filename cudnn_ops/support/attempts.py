"""The ways to run a part of a call, in the order in which a call tries them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """Which of the plans of a call is meant."""

    backward: bool = False
    training: bool = False
    """Of a forward: whether it stores what its backward needs."""
    polymorphic: bool = False
    sm: int = 90
    """The GPU's compute capability, 90 for 9.0: packed attention keeps its log-sum-exp by it, and
    tables of measured engines are looked up by it."""


class Attempt(NamedTuple):
    """One way to run a part of a call: by a plan of cuDNN, without one, or not at all."""

    words: Sequence[int] = ()
    """The plan's key."""
    without_plan: str = ""
    """Why something else runs instead."""
    engine: str = "cudnn_ops"
    """What that is: ``"cudnn_ops"`` stands for a kernel of ours."""
    refusal: str = ""
    """Why there is no plan."""
    fused: str = ""
    """What the graph computes, where it may be less than the whole call."""
    not_more: str = ""
    """Why more is not tried."""
    note: str = ""
    """What else there is to say where the plan is supported."""


#: For each part of a call (a convolution's backward has two) the attempts in order: the first that
#: is supported runs.
Parts = list[Iterator[Attempt]]


def one_plan(words: Sequence[int], refusal: str = "") -> Parts:
    """A call of one part, which one plan runs, or none."""
    return [iter([Attempt(words, refusal=refusal)])]
