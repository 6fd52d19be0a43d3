"""The models and pipelines of Hugging Face diffusers on this package's operators.

from cudnn_ops.integrations.diffusers import optimize_

pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=torch.bfloat16).to("cuda")
print(optimize_(pipe))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import nn

from cudnn_ops.nn.norm import GroupNorm
from cudnn_ops.nn.replace import replace_modules_

try:
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.models.activations import GEGLU, SwiGLU
    from diffusers.models.attention import AttentionModuleMixin, FeedForward
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.vae import Decoder, Encoder
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.unets.unet_2d import UNet2DModel
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    from cudnn_ops.integrations.diffusers_attention import adapted_processor
    from cudnn_ops.integrations.diffusers_kinds import (
        KINDS,
        computes_the_same,
        give_forward,
        has_ours,
        is_hooked,
    )
except ImportError as error:
    raise ImportError(
        "cudnn_ops.integrations.diffusers needs Hugging Face diffusers, 0.42.1 or later, "
        f"with which it is tested: {error}; install it with: pip install 'diffusers>=0.42.1'"
    ) from error

__all__ = ["Change", "DiffusersReport", "Left", "optimize_"]

#: What ends with a group norm and SiLU, as modules of their own.
_WITH_LAST_NORM = (Encoder, Decoder, UNet2DModel, UNet2DConditionModel)


@dataclass(frozen=True)
class Change:
    """One module that :func:`optimize_` changed, or would change."""

    name: str
    """Its name in the model, in a pipeline behind the component's: ``"vae.decoder.mid_block"``."""
    kind: str
    """The name of its class."""
    operators: str
    """By which it computes now."""
    undo: Callable[[], None] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} by {self.operators}"


@dataclass(frozen=True)
class Left:
    """A module that :func:`optimize_` left alone."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} is left alone: {self.reason}"


@dataclass
class DiffusersReport:
    """What :func:`optimize_` did. Printed, it is a list.

    Attributes:
        changed: the modules that were changed, or would be.
        left: the modules that look like those and were left alone, and why.
    """

    changed: list[Change] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many modules of each class were changed."""
        return dict(Counter(change.kind for change in self.changed))

    def restore_(self) -> None:
        """Undoes what was changed; what was put there since stays. A second call does nothing."""
        while self.changed:
            self.changed.pop().undo()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.changed, *self.left)))


def optimize_(
    model: nn.Module | DiffusionPipeline, *, channels_last: bool = True, dry_run: bool = False
) -> DiffusersReport:
    """Puts this package's operators under a model of diffusers, or all models of a pipeline.

    - Attention: processors of diffusers that call ``scaled_dot_product_attention`` or
      ``dispatch_attention_fn`` with its native backend use
      :func:`cudnn_ops.scaled_dot_product_attention`. float32 on a GPU, head sizes above 512, and
      above 128 where there are gradients, stay with PyTorch. Rotary embedding that they apply by
      ``apply_rotary_emb`` of real angles (Flux) is one kernel.
    - Group norms and the SiLU behind them in ``ResnetBlock2D`` and at a model's end become one
      :func:`cudnn_ops.group_norm`.
    - Adaptive norms (``AdaLayerNormZero`` and others) become
      :func:`cudnn_ops.adaptive_layer_norm` or :func:`cudnn_ops.adaptive_rms_norm`; in the blocks of
      DiT, PixArt, Stable Diffusion 3 and Flux together with the gated sum before them. A U-Net's
      transformer blocks use :func:`cudnn_ops.add_layer_norm`.
    - Feed-forwards use :func:`cudnn_ops.mlp`, :func:`cudnn_ops.geglu` and
      :func:`cudnn_ops.swiglu`.
    - Other norms are replaced by :func:`cudnn_ops.nn.replace_modules_`.
    - Models of convolutions, which have a ``ResnetBlock2D``, are stored with channels last.

    The ``state_dict`` keeps its keys and values, and parameters stay the same tensors. Modules with
    hooks, with processors of the user's own or of an IP-Adapter, and those of which an adapter such
    as LoRA or a quantizer has replaced a part that would not be called, are left alone; what comes
    later is seen when the module is called, which then computes as in diffusers.

    Args:
        model: a module, usually a ``ModelMixin``, or a pipeline, of which the components of
            diffusers are changed. Changed in place; a second call changes nothing.
        channels_last: False keeps the memory format of convolutions.
        dry_run: change nothing and say what would be changed.

    Returns:
        The report. Its ``restore_()`` makes the model what it was.

    Raises:
        TypeError: ``model`` is neither a module nor a pipeline.
    """
    if isinstance(model, DiffusionPipeline):
        parts = {
            name: part for name, part in model.components.items() if isinstance(part, ModelMixin)
        }
    elif isinstance(model, nn.Module):
        parts = {"": model}
    else:
        raise TypeError(
            "optimize_: model must be a torch.nn.Module or a DiffusionPipeline, got "
            f"{type(model).__name__}"
        )
    report = DiffusersReport()
    for prefix, part in parts.items():
        found = list(_look(part, channels_last))
        for each in found:
            name = ".".join(filter(None, (prefix, each.name)))
            if isinstance(each, Left):
                report.left.append(Left(name, each.kind, each.reason))
                continue
            undo = _nothing if dry_run else each.do()
            report.changed.append(Change(name, each.kind, each.operators, undo))
        report.changed += _replace_norms(part, prefix, dry_run)
    return report


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Plan:
    """A change to be made; making it gives what undoes it."""

    name: str
    kind: str
    operators: str
    do: Callable[[], Callable[[], None]]


def _look(model: nn.Module, channels_last: bool) -> Iterator[_Plan | Left]:
    processors: dict[int, object] = {}  # what several modules share stays shared
    for name, module in model.named_modules():
        kind = type(module)
        for look in (_look_at_forward(name, module), _look_at_last_norm(name, module)):
            if look is not None:
                yield look
        if not isinstance(module, (Attention, AttentionModuleMixin)):
            continue
        if is_hooked(module):
            yield Left(name, kind.__name__, "it has hooks")
            continue
        old = module.processor
        new = processors.setdefault(id(old), adapted_processor(old))
        if isinstance(new, str):
            yield Left(name, kind.__name__, new)
        elif new is not None:
            operators = "scaled_dot_product_attention"
            yield _Plan(name, kind.__name__, operators, _setter(module, "processor", new))
    if channels_last and any(type(module) is ResnetBlock2D for module in model.modules()):
        plan = _look_at_memory(model)
        if plan is not None:
            yield plan


def _look_at_forward(name: str, module: nn.Module) -> _Plan | Left | None:
    kind = KINDS.get(type(module))
    if kind is None or has_ours(module):
        return None
    if isinstance(module, FeedForward) and type(module.net[0]) in (GEGLU, SwiGLU):
        return None  # which are changed themselves
    cls: Any = type(module)
    class_name = cls.__name__
    if is_hooked(module):
        return Left(name, class_name, "it has hooks")
    reason = kind.reason(module)
    if reason is None and not computes_the_same(cls):
        reason = "this version of diffusers computes something else"
    if reason is not None:
        return Left(name, class_name, reason)

    def do() -> Callable[[], None]:
        give_forward(module, kind)
        ours = module.__dict__["forward"]

        def undo() -> None:
            if module.__dict__.get("forward") is ours:
                del module.forward

        return undo

    return _Plan(name, class_name, kind.operators, do)


def _look_at_last_norm(name: str, module: nn.Module) -> _Plan | Left | None:
    """``conv_norm_out`` and ``conv_act``: the norm ends with SiLU, and nothing follows it."""
    if type(module) not in _WITH_LAST_NORM:
        return None
    norm: Any = module.conv_norm_out
    act: Any = module.conv_act
    name = f"{name}.conv_norm_out".lstrip(".")
    if norm is None or (isinstance(norm, GroupNorm) and norm.activation == "silu"):
        return None
    if type(norm) not in (nn.GroupNorm, GroupNorm):
        return Left(name, type(norm).__name__, "it is another norm")
    if type(act) is not nn.SiLU:
        return Left(name, type(norm).__name__, f"{type(act).__name__} follows it")
    if any(is_hooked(part) for part in (norm, act)):
        return Left(name, type(norm).__name__, "it has hooks")

    def do() -> Callable[[], None]:
        fused = GroupNorm(
            norm.num_groups,
            norm.num_channels,
            norm.eps,
            norm.affine,
            activation="silu",
            device="meta",
        )
        fused.weight, fused.bias = norm.weight, norm.bias
        undo_norm = _setter(module, "conv_norm_out", fused.train(norm.training))()
        undo_act = _setter(module, "conv_act", nn.Identity())()

        def undo() -> None:
            undo_norm()
            undo_act()

        return undo

    return _Plan(name, type(norm).__name__, "group_norm", do)


def _setter(module: nn.Module, attribute: str, new: Any) -> Callable[[], Callable[[], None]]:
    def do() -> Callable[[], None]:
        old = getattr(module, attribute)
        setattr(module, attribute, new)
        return _putter(module, attribute, new, old)

    return do


def _look_at_memory(model: nn.Module) -> _Plan | None:
    """Convolutions whose weights are stored with channels first."""
    store: Any = nn.Module.to  # a ModelMixin's own refuses some models
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    if all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
        return None

    def do() -> Callable[[], None]:
        store(model, memory_format=torch.channels_last)
        return undo

    def undo() -> None:
        store(model, memory_format=torch.contiguous_format)

    return _Plan("", type(model).__name__, "convolutions with channels last", do)


def _replace_norms(model: nn.Module, prefix: str, dry_run: bool) -> list[Change]:
    changes = []
    with redirect_stdout(StringIO()):  # a dry run's, which the report has
        replacements = replace_modules_(model, dry_run=dry_run)
    for replacement in replacements:
        parent, _, attribute = replacement.name.rpartition(".")
        undo = _putter(model.get_submodule(parent), attribute, replacement.new, replacement.old)
        name = ".".join(filter(None, (prefix, replacement.name)))
        operators = f"cudnn_ops.nn.{type(replacement.new).__name__}"
        changes.append(Change(name, type(replacement.old).__name__, operators, undo))
    return changes


def _putter(parent: nn.Module, attribute: str, new: Any, old: Any) -> Callable[[], None]:
    def undo() -> None:
        if getattr(parent, attribute) is new:
            setattr(parent, attribute, old)

    return undo
