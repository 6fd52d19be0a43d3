"""Rounds in which a graph is rewritten: all that one asks is measured before the next one begins.

What is not known is first taken to be faster. Where that was right, as it is of most, the second
round knows everything. Where it was not, another reading of the same nodes may be asked for, or
what one larger replacement was in the way of.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from cudnn_ops.compiler.choice import Chooser
from cudnn_ops.compiler.pattern import Pattern
from cudnn_ops.compiler.patterns import PATTERNS
from cudnn_ops.compiler.rewrite import Swaps, rewrite

#: There are no more readings of one place than this; what is then left is measured one by one.
_MOST_ROUNDS = 8


def rewrite_measured(
    module: fx.GraphModule, chooser: Chooser, patterns: Sequence[Pattern] = PATTERNS
) -> Swaps:
    """As :func:`cudnn_ops.compiler.rewrite.rewrite`, by what was measured."""
    report = chooser.report
    begun = len(report.candidates)
    for _ in range(_MOST_ROUNDS):
        with chooser.asking() as questions:
            # Questions that come after the first graph of several is finished undo that, too.
            swaps = rewrite(module, patterns, chooser, report, lambda: not questions)
        if not questions:
            return swaps
        swaps.undo("not measured yet")
        del report.candidates[begun:]
        chooser.answer(questions)
    return rewrite(module, patterns, chooser, report)
