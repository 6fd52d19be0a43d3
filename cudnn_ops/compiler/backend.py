"""``torch.compile(model, backend="cudnn_ops")``: inductor, and our operators where they win.

Dynamo hands over a graph of torch's functions. Patterns swap parts of it for our operators, whose
derivatives are autograd's as any other's, and inductor compiles what comes out.

``torch.compile`` imports this module, and inductor with it, when it is called with the backend's
name, as it imports inductor for its own: the first step has nothing left to import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx

from cudnn_ops.compiler import known_graphs
from cudnn_ops.compiler.caching import marked
from cudnn_ops.compiler.choice import Chooser
from cudnn_ops.compiler.fingerprint import fingerprint, word_of_rewritten
from cudnn_ops.compiler.known_graphs import KnownGraph
from cudnn_ops.compiler.one_call import at_hand, one_call
from cudnn_ops.compiler.options import Settings, settings_of
from cudnn_ops.compiler.report import compile_report, first_line, warn
from cudnn_ops.compiler.rewrite import Swaps
from cudnn_ops.compiler.rounds import rewrite_measured
from cudnn_ops.compiler.two_gradients import AddUpGradients

log = logging.getLogger("cudnn_ops.compiler")

_MARKED, _JOINT_PASS = "unsafe_marked_cacheable_functions", "joint_custom_post_pass"
#: Dynamo begins with the frame again, and the graph comes back, or leaves the frame alone.
_BEGINS_AGAIN = (RestartAnalysis, SkipFrame)


def cudnn_ops(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: ``torch.compile(model, backend="cudnn_ops", mode=..., options=...)``.

    Args:
        module: the captured graph.
        example_inputs: its inputs, without memory.
        mode: inductor's, as in ``torch.compile``: ``"default"``, ``"reduce-overhead"``,
            ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        options: a dict of

            - ``"mode"``: the same, for callers that pass options alone;
            - ``"swap"``: names of patterns, which are then swapped wherever they match, without
              measuring, on a CPU too, and no others are. Without it, every pattern is swapped where
              ours was measured to be faster on this GPU;
            - ``"dry_run"``: True reports what was found, and swaps nothing;
            - ``"inductor"``: a dict of inductor's options.

    Returns:
        what inductor compiles the graph to.

    Raises:
        ValueError: an option, a mode or a pattern that does not exist.
        TypeError: an option of another type.
    """
    settings = settings_of(mode, options)
    return _Compilation(module, list(example_inputs), settings).run()


class _Compilation:
    """Of one graph: as it was compiled before, or else with what is swapped in it now."""

    def __init__(self, module: fx.GraphModule, inputs: list[Any], settings: Settings) -> None:
        self.module, self.inputs = module, inputs
        self.patches = dict(list_mode_options(settings.mode)) | dict(settings.inductor)
        self.report = compile_report()
        self.begun = self.report.begin()
        self.chooser = Chooser(settings, self.report)
        self.fingerprint = None
        if not settings.dry_run:
            with config.patch(self.patches):
                self.fingerprint = fingerprint(module, settings.swap)

    def run(self) -> Callable[..., Any]:
        try:
            return self._as_before() or self._rewritten()
        except _BEGINS_AGAIN:
            self.report.forget(self.begun)
            raise

    def _as_before(self) -> Callable[..., Any] | None:
        """Without rewriting it, by what is on disk; None where that is missing or out of date."""
        known = self.fingerprint and known_graphs.find(self.fingerprint, self.chooser.times_of)
        if not known:
            return None
        candidates = known.candidates_in(self.module.graph)
        compiled = self._found(known.word) if known.word else self._stock()
        if compiled is not None:
            self.report.candidates += candidates
        return compiled

    def _found(self, word: str) -> Callable[..., Any] | None:
        """What was compiled of the graph with this word; None where that is gone or of no use."""
        try:
            return self._called(word)
        except _BEGINS_AGAIN:
            raise
        except Exception as error:  # whatever is on disk, rewriting does without it
            log.info("what an earlier process compiled cannot be used", exc_info=error)
            return None

    def _rewritten(self) -> Callable[..., Any]:
        swaps = rewrite_measured(self.module, self.chooser)
        if not swaps.candidates:
            self._keep("", swaps)
            return self._stock()
        try:
            word = self.fingerprint and word_of_rewritten(self.module, self.fingerprint)
            if not word:
                return self._compiled(self.module, ours=True)
            with at_hand(word, self.module, self.inputs, self.patches):
                compiled = self._called(word)
        except _BEGINS_AGAIN:
            raise
        except Exception as error:
            warn("a graph does not compile with our operators and is compiled without them", error)
            swaps.undo(f"the graph did not compile with it: {first_line(error)}")
            return self._stock()
        self._keep(word, swaps)
        return compiled

    def _called(self, word: str) -> Callable[..., Any]:
        """What inductor makes, or has made, of the graph with this word."""
        return self._compiled(one_call(self.module, word), ours=True)

    def _stock(self) -> Callable[..., Any]:
        return self._compiled(self.module, ours=False)

    def _compiled(self, module: fx.GraphModule, ours: bool) -> Callable[..., Any]:
        patches = self.patches | (_for_swaps(module, self.patches) if ours else {})
        return compile_fx(module, self.inputs, config_patches=patches)  # type: ignore[return-value]

    def _keep(self, word: str, swaps: Swaps) -> None:
        """For later processes, unless something went wrong, which these are to hear of, too."""
        if self.fingerprint and not swaps.failures:
            candidates = self.report.candidates[self.begun :]
            known = KnownGraph(word, self.chooser.decisive, candidates)
            known_graphs.keep(self.fingerprint, known)


def _for_swaps(module: fx.GraphModule, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options for a graph with our operators, beside those that it has."""
    given = patches.get(_JOINT_PASS, config.joint_custom_post_pass)
    return {
        _MARKED: patches.get(_MARKED, {}) | marked(module),
        _JOINT_PASS: AddUpGradients(given),
    }
