"""``torch.compile(model, backend="cudnn_ops")``: inductor, and our operators where they win.

Dynamo hands over a graph of torch's functions. Patterns swap parts of it for our operators, whose
derivatives are autograd's as any other's, and inductor compiles what comes out.

``torch.compile`` imports this module, and inductor with it, when it is called with the backend's
name, as it imports inductor for its own: the first step has nothing left to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx

from cudnn_ops.compiler.caching import marked
from cudnn_ops.compiler.choice import Chooser
from cudnn_ops.compiler.options import settings_of
from cudnn_ops.compiler.report import compile_report, first_line, warn
from cudnn_ops.compiler.rounds import rewrite_measured
from cudnn_ops.compiler.two_gradients import TakeTwoGradients

_MARKED, _JOINT_PASS = "unsafe_marked_cacheable_functions", "joint_custom_post_pass"


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
    report = compile_report()
    begun = report.begin()
    patches = dict(list_mode_options(settings.mode)) | dict(settings.inductor)
    swaps = rewrite_measured(module, Chooser(settings, report))
    ours = _for_swaps(module, patches) if swaps.candidates else {}
    try:
        return compile_fx(module, list(example_inputs), config_patches=patches | ours)  # type: ignore[return-value]
    except (RestartAnalysis, SkipFrame):
        # Dynamo begins again, and the graph comes back.
        report.forget(begun)
        raise
    except Exception as error:
        if not swaps.candidates:
            raise
        warn("a graph does not compile with our operators and is compiled without them", error)
        swaps.undo(f"the graph did not compile with it: {first_line(error)}")
        return compile_fx(module, list(example_inputs), config_patches=patches)  # type: ignore[return-value]


def _for_swaps(module: fx.GraphModule, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options for a graph with our operators, beside those that it has."""
    given = patches.get(_JOINT_PASS, config.joint_custom_post_pass)
    return {
        _MARKED: patches.get(_MARKED, {}) | marked(module),
        _JOINT_PASS: TakeTwoGradients(given),
    }
