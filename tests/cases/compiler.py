"""Functions compiled by the patterns alone: what was swapped, and whether results are the same.

Inductor is left out, which makes a case a matter of milliseconds; tests/test_compiler_backend.py
has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from cudnn_ops.compiler.choice import Chooser, Times
from cudnn_ops.compiler.measuring import Question
from cudnn_ops.compiler.options import settings_of
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.patterns import PATTERNS
from cudnn_ops.compiler.report import Candidate, CompileReport
from cudnn_ops.compiler.rewrite import rewrite

NAMES = [pattern.name for pattern in PATTERNS]


class Asked(Chooser):
    """Swaps what is asked for, if it could be measured where nothing is asked for."""

    tries = False
    """Whether it swaps what is for some shapes only, too."""

    def __call__(self, pattern: Pattern, found: Found, candidate: Candidate) -> bool:
        if not self._unmeasurable(found):
            Question.of(pattern, found)
        if found.only_measured and self.tries:
            return True
        return super().__call__(pattern, found, candidate)


class Timed(Chooser):
    """Knows how long each match takes.

    Attributes:
        times: of a pattern and a match.
    """

    def __init__(
        self, report: CompileReport, times: Callable[[Pattern, Found], Times] | Times
    ) -> None:
        super().__init__(settings_of(None, None), report, lambda _: {})
        self.times = times

    def __call__(self, pattern: Pattern, found: Found, candidate: Candidate) -> bool:
        if not self._unmeasurable(found):
            times = self.times if isinstance(self.times, Times) else self.times(pattern, found)
            self._known[Question.of(pattern, found).key] = times
        return super().__call__(pattern, found, candidate)


class Rewritten:
    """A function whose graph went through the patterns.

    Attributes:
        report: what was found.
        graphs: Dynamo's, rewritten.
        chooser: decides what is swapped; by default all that is asked for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        swap: Sequence[str] | None = None,
        dynamic: bool = False,
    ) -> None:
        self.report = CompileReport()
        self.graphs: list[fx.GraphModule] = []
        settings = settings_of(None, {"swap": NAMES if swap is None else list(swap)})
        self.chooser: Chooser = Asked(settings, self.report, lambda _: {})

        def backend(module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            rewrite(module, PATTERNS, self.chooser, self.report)
            self.graphs.append(module)
            return module.forward

        torch._dynamo.reset()
        self._compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @property
    def swapped(self) -> list[str]:
        """The patterns of what was swapped."""
        return [candidate.pattern for candidate in self.report.swapped]

    @property
    def ours(self) -> list[fx.Node]:
        """The calls of our operators."""
        return [
            node
            for graph in self.graphs
            for node in graph.graph.nodes
            if str(node.target).startswith("cudnn_ops.")
        ]


def check_swap(
    function: Callable[..., Any],
    *inputs: Any,
    expect: Sequence[str],
    swap: Sequence[str] | None = None,
    gradients: bool = True,
    dynamic: bool = False,
    tolerance: float = 1e-5,
    tries: bool = False,
) -> Rewritten:
    """Asserts which patterns fired, and that results and gradients are those of the function.

    Inputs are float64 or float32 tensors on a CPU, or anything else that the function accepts.
    """
    rewritten = Rewritten(function, swap, dynamic)
    if tries:
        assert isinstance(rewritten.chooser, Asked)
        rewritten.chooser.tries = True
    plain, plain_grads = _run(function, inputs, gradients)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, our_grads = _run(rewritten, inputs, gradients)
    for one in caught:
        # What must not match must not fail to be swapped either.
        assert "the pattern" not in str(one.message), one.message
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    assert rewritten.swapped == list(expect), f"{rewritten.swapped}\n{rewritten.report}"
    for expected, actual in zip([*plain, *plain_grads], [*ours, *our_grads], strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return rewritten


def _run(
    function: Callable[..., Any], inputs: Sequence[Any], gradients: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and gradients of all inputs that can have one."""
    copies = [
        x.detach().clone().requires_grad_(gradients and x.is_floating_point())
        if isinstance(x, Tensor)
        else x
        for x in inputs
    ]
    results = function(*copies)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    leaves = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
    roots = [result for result in results if result.requires_grad]
    if not leaves or not roots:
        return results, []
    generator = torch.Generator().manual_seed(7)
    grads = [
        torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)
        for result in roots
    ]
    return results, list(torch.autograd.grad(roots, leaves, grads, allow_unused=True))
