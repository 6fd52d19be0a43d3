"""One call for eager users: all that swaps a model's parts for this package's, and one report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.fuse import FusedConv, fuse_conv_bn_act_
from cudnn_ops.nn.fuse_norm import FusedNorm, depends_on_mode, fuse_bn_act_
from cudnn_ops.nn.replace import Replacement, replace_modules_

_IMPLEMENTATION = "cudnn_ops"


@dataclass
class OptimizeReport:
    """What :func:`cudnn_ops.optimize_` did to a model. Printed, it is a list.

    Attributes:
        model: the optimized model, or pipeline: the same object, unless something was fused.
        replaced: modules that were replaced.
        rotary: names of the modules whose rotary embedding is one kernel now.
        attention: whether transformers' attention is this package's now.
        diffusers: the modules of diffusers that were changed, or would be.
        fused: convolutions with what follows them, or in training mode batch norms.
        notes: what was left alone, and why.
    """

    model: Any
    replaced: list[Replacement] = field(default_factory=list)
    rotary: list[str] = field(default_factory=list)
    attention: bool = False
    diffusers: list[object] = field(default_factory=list)
    fused: list[FusedConv] | list[FusedNorm] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [str(one) for one in (*self.replaced, *self.diffusers, *self.fused)]
        lines += [f"{name}: rotary embedding" for name in self.rotary]
        lines += ["attention: cudnn_ops"] if self.attention else []
        return "\n".join([*lines, *(f"not done: {note}" for note in self.notes)])


def optimize_(
    model: Any,
    example: Tensor | Sequence[object] | None = None,
    *,
    dry_run: bool = False,
) -> OptimizeReport:
    """Swaps what this package has for the parts of a model, for running it without torch.compile.

    All of :func:`cudnn_ops.nn.replace_modules_`, of the adapter for transformers (attention and
    :func:`~cudnn_ops.integrations.transformers.fuse_rotary_`) and of
    :func:`cudnn_ops.nn.fuse_conv_bn_act_`, or for a model in training mode
    :func:`cudnn_ops.nn.fuse_bn_act_`, each as far as the model allows it; for models and
    pipelines of diffusers :func:`cudnn_ops.integrations.diffusers.optimize_`. With
    ``torch.compile(model, backend="cudnn_ops")`` none of it is needed.

    Args:
        model: a module, or a pipeline of diffusers; changed in place. What is fused is in a new
            module with the same parameters: convolutions in eval mode; in training batch norms,
            unless the model has functions that ask for its mode.
        example: the model's input, or a sequence of its inputs, as for ``fuse_conv_bn_act_``.
        dry_run: change nothing and say what would be replaced and fused.

    Returns:
        The report; its ``model`` is the one to use.

    Raises:
        TypeError: ``model`` is neither a module nor a pipeline.

    Example:
        >>> import torch, cudnn_ops
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        >>> report = cudnn_ops.optimize_(torch.nn.Sequential(*layers).eval())
        >>> len(report.fused)
        1
        >>> report.model(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 8, 6, 6])
    """
    diffusers = sys.modules.get("diffusers")
    if diffusers is not None and isinstance(model, diffusers.DiffusionPipeline):
        return _optimize_pipeline(model, diffusers.ModelMixin, dry_run)
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize_: model must be a torch.nn.Module, got {type(model).__name__}")
    report = OptimizeReport(model)
    if diffusers is not None and any(isinstance(m, diffusers.ModelMixin) for m in model.modules()):
        _adapt_diffusers(model, report, dry_run)
        return report
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


def _adapt_diffusers(model: object, report: OptimizeReport, dry_run: bool) -> None:
    # Convolutions are not fused: a traced model would have lost its methods, such as `decode`.
    adapter = import_module("cudnn_ops.integrations.diffusers")
    found = adapter.optimize_(model, dry_run=dry_run)
    report.diffusers = found.changed
    report.notes += map(str, found.left)


def _optimize_pipeline(pipeline: Any, of_diffusers: type, dry_run: bool) -> OptimizeReport:
    """Its models of diffusers, and those of transformers, each by its own adapter."""
    report = OptimizeReport(pipeline)
    _adapt_diffusers(pipeline, report, dry_run)
    for name, part in pipeline.components.items():
        if not isinstance(part, nn.Module) or isinstance(part, of_diffusers):
            continue
        replaced = replace_modules_(part, dry_run=dry_run)
        report.replaced += (replace(one, name=f"{name}.{one.name}") for one in replaced)
        of_part = OptimizeReport(part)
        _adapt_transformers(part, of_part, dry_run)
        report.rotary += (f"{name}.{module}" for module in of_part.rotary)
        report.notes += (f"{name}: {note}" for note in of_part.notes)
        report.attention |= of_part.attention
    return report


def _fuse_convolutions(
    model: nn.Module,
    example: Tensor | Sequence[object] | None,
    report: OptimizeReport,
    dry_run: bool,
) -> None:
    """Convolutions with what follows them; in training batch norms, whose statistics change."""
    if not any(isinstance(module, _ConvNd) for module in model.modules()):
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    trains = any(norm.training for norm in norms)
    if trains:
        report.notes.append(
            "convolutions: a batch norm is in training mode, and its statistics change; "
            "model.eval() allows fusing them"
        )
    try:
        if trains and depends_on_mode(model):
            report.notes.append("batch norms: a function in the model asks for training mode")
            return
        fuse = fuse_bn_act_ if trains else fuse_conv_bn_act_
        fused = fuse(model, example, dry_run=dry_run)
    except (fx.proxy.TraceError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        what = "batch norms" if trains else "convolutions"
        report.notes.append(f"{what}: torch.fx cannot trace the model: {reason}")
        return
    found = fused.meta["fused_norms" if trains else "fused_convs"]
    report.fused = [] if trains and not _compute_more(model, found) else found
    if report.fused and not dry_run:
        report.model = fused


def _compute_more(model: nn.Module, norms: Sequence[FusedNorm]) -> bool:
    """Whether any of a model's batch norms has something fused to it that it had not."""
    return any(
        one.residual
        or one.activation != getattr(model.get_submodule(one.name), "activation", "none")
        for one in norms
    )
