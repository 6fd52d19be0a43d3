"""One call for eager users: all that swaps a model's parts for this package's, and one report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.fuse import FusedConv, fuse_conv_bn_act_
from cudnn_ops.nn.replace import Replacement, replace_modules_

_IMPLEMENTATION = "cudnn_ops"


@dataclass
class OptimizeReport:
    """What :func:`cudnn_ops.optimize_` did to a model. Printed, it is a list.

    Attributes:
        model: the optimized model: the same object, unless its convolutions were fused.
        replaced: modules that were replaced.
        rotary: names of the modules whose rotary embedding is one kernel now.
        attention: whether transformers' attention is this package's now.
        fused: convolutions with what follows them.
        notes: what was left alone, and why.
    """

    model: nn.Module
    replaced: list[Replacement] = field(default_factory=list)
    rotary: list[str] = field(default_factory=list)
    attention: bool = False
    fused: list[FusedConv] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [str(one) for one in (*self.replaced, *self.fused)]
        lines += [f"{name}: rotary embedding" for name in self.rotary]
        lines += ["attention: cudnn_ops"] if self.attention else []
        return "\n".join([*lines, *(f"not done: {note}" for note in self.notes)])


def optimize_(
    model: nn.Module,
    example: Tensor | Sequence[object] | None = None,
    *,
    dry_run: bool = False,
) -> OptimizeReport:
    """Swaps what this package has for the parts of a model, for running it without torch.compile.

    All of :func:`cudnn_ops.nn.replace_modules_`, of the adapter for transformers (attention and
    :func:`~cudnn_ops.integrations.transformers.fuse_rotary_`) and of
    :func:`cudnn_ops.nn.fuse_conv_bn_act_`, each as far as the model allows it. With
    ``torch.compile(model, backend="cudnn_ops")`` none of it is needed.

    Args:
        model: changed in place. Convolutions are fused only in eval mode, and in a new module.
        example: the model's input, or a sequence of its inputs, as for ``fuse_conv_bn_act_``.
        dry_run: change nothing and say what would be replaced and fused.

    Returns:
        The report; its ``model`` is the one to use.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import torch, cudnn_ops
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        >>> report = cudnn_ops.optimize_(torch.nn.Sequential(*layers).eval())
        >>> len(report.fused)
        1
        >>> report.model(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 8, 6, 6])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize_: model must be a torch.nn.Module, got {type(model).__name__}")
    report = OptimizeReport(model)
    report.replaced = replace_modules_(model, dry_run=dry_run)
    _adapt_transformers(model, report, dry_run)
    _fuse_convolutions(model, example, report, dry_run)
    return report


def _adapt_transformers(model: nn.Module, report: OptimizeReport, dry_run: bool) -> None:
    # A model of transformers has imported it; other users may not have it.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    if dry_run:
        report.notes.append("attention and rotary embedding: a dry run does not try them")
        return
    adapter = import_module("cudnn_ops.integrations.transformers")
    report.rotary = adapter.fuse_rotary_(model)
    adapter.register(_IMPLEMENTATION)
    try:
        model.set_attn_implementation(_IMPLEMENTATION)
    except (ValueError, ImportError) as error:
        report.notes.append(f"attention: {error}")
        return
    report.attention = True


def _fuse_convolutions(
    model: nn.Module,
    example: Tensor | Sequence[object] | None,
    report: OptimizeReport,
    dry_run: bool,
) -> None:
    if not any(isinstance(module, _ConvNd) for module in model.modules()):
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if any(norm.training for norm in norms):
        report.notes.append(
            "convolutions: a batch norm is in training mode, and its statistics change; "
            "model.eval() allows fusing them"
        )
        return
    try:
        fused = fuse_conv_bn_act_(model, example, dry_run=dry_run)
    except (fx.proxy.TraceError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        report.notes.append(f"convolutions: torch.fx cannot trace the model: {reason}")
        return
    report.fused = fused.meta["fused_convs"]
    if report.fused and not dry_run:
        report.model = fused
