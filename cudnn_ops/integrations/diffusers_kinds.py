"""The classes of diffusers that have a ``forward`` of ours, and how to give them one.

Each is tried once on small modules of its class, against diffusers' own: what another version of
diffusers computes otherwise is left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from diffusers.models import attention as blocks
from diffusers.models import normalization as norms
from diffusers.models.activations import GEGLU, GELU, SwiGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from torch import Tensor, nn

from cudnn_ops.integrations import diffusers_blocks as ours
from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.nn.norm import GroupNorm, LayerNorm, RMSNorm

_Types = tuple[type[nn.Module], ...]
_GROUP: _Types = (nn.GroupNorm, GroupNorm)
_LAYER: _Types = (nn.LayerNorm, LayerNorm, norms.FP32LayerNorm)
_RMS: _Types = (norms.RMSNorm, nn.RMSNorm, RMSNorm)
_SILU: _Types = (nn.SiLU,)
#: A module to try, and its arguments.
Trial = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True)
class Kind:
    """A class of diffusers."""

    cls: type[nn.Module]
    forward: Callable[..., Any]
    """Ours, with the module first."""
    operators: str
    """By which it computes."""
    parts: dict[str, _Types]
    """The parts that ours does not call, and of which types they may be."""
    trials: Callable[[], list[Trial]]
    refuses: Callable[[Any], str | None] = lambda module: None
    """Why one of this class has other options than ours; None if it has not."""

    def reason(self, module: nn.Module) -> str | None:
        """Why ours would not compute the same, or would miss what was put into the module."""
        for name, types in self.parts.items():
            part = _part(module, name)
            if part is None:
                continue
            if type(part) not in types:
                return f"its {name} is {_described(part)}"
            if is_hooked(part):
                return f"its {name} has hooks"
        return self.refuses(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether others have put hooks onto it, or a ``forward``, as accelerate's hooks do."""
    return has_hooks(module) or ("forward" in module.__dict__ and not has_ours(module))


def has_ours(module: nn.Module) -> bool:
    """Whether it has a ``forward`` of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, "of_cudnn_ops", False)


def _part(module: nn.Module, path: str) -> nn.Module | None:
    part: Any = module
    for name in path.split("."):
        part = part[int(name)] if name.isdigit() else getattr(part, name, None)
        if part is None:
            return None
    assert isinstance(part, nn.Module)
    return part


def _described(part: nn.Module) -> str:
    name = type(part).__name__
    return f"{name} of {type(part).__module__.partition('.')[0]}"


def give_forward(module: nn.Module, kind: Kind) -> None:
    """Makes a module compute by ours. ``del module.forward`` ends it."""
    cls: Any = kind.cls
    module.forward = MethodType(_forward_of(cls), module)


@functools.cache
def _forward_of(cls: type[Any]) -> Callable[..., Any]:
    kind = KINDS[cls]
    known = list(inspect.signature(kind.forward).parameters)[1:]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Adapters, quantizers and hooks may have come since.
        is_known = len(args) <= len(known) and all(name in known for name in kwargs)
        if not is_known or kind.reason(self) is not None:
            return cls.forward(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    forward.of_cudnn_ops = True  # type: ignore[attr-defined]
    return forward


@functools.cache
def computes_the_same(cls: type[Any]) -> bool:
    """Whether ours gives what diffusers' gives on small modules of the class."""
    kind = KINDS[cls]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            return all(_agrees(kind, *trial) for trial in kind.trials())
    except Exception:  # another version's classes have other arguments
        return False


def _agrees(kind: Kind, module: nn.Module, args: tuple[Any, ...]) -> bool:
    module = module.to(torch.float32).eval()
    for parameter in module.parameters():
        parameter.normal_(std=0.3)
    args = tuple(x.float() if _is_real(x) else x for x in args)
    if kind.reason(module) is not None:
        return False
    expected, found = module(*args), kind.forward(module, *args)
    one = isinstance(expected, Tensor)
    pairs = zip((expected,) if one else expected, (found,) if one else found, strict=True)
    return all(
        theirs is mine if theirs is None else torch.allclose(theirs, mine, rtol=1e-4, atol=1e-4)
        for theirs, mine in pairs
    )


def _is_real(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tokens(*sizes: int) -> Tensor:
    return torch.randn(2, *(sizes or (5, 8)))


def _resnet_blocks() -> list[Trial]:
    sizes: dict[str, Any] = {"in_channels": 8, "groups": 2, "temb_channels": 4}
    image, time = _tokens(8, 4, 4), _tokens(4)
    made: list[Trial] = [
        (ResnetBlock2D(**sizes), (image, time)),
        (ResnetBlock2D(**sizes, out_channels=12, output_scale_factor=2.0), (image, time)),
        (ResnetBlock2D(**sizes, time_embedding_norm="scale_shift", up=True), (image, time)),
        (ResnetBlock2D(**sizes, skip_time_act=True, down=True), (image, time)),
        (ResnetBlock2D(**{**sizes, "temb_channels": None}), (image, None)),
    ]
    return made


def _trial(make: Callable[[], nn.Module], *args: Any) -> Callable[[], list[Trial]]:
    return lambda: [(make(), tuple(arg() if callable(arg) else arg for arg in args))]


def _joint_blocks() -> list[Trial]:
    make = functools.partial(blocks.JointTransformerBlock, 8, 2, 4, qk_norm="rms_norm")
    return [
        (make(context_pre_only=is_last, use_dual_attention=is_dual), (*_pair(), _tokens(8)))
        for is_last, is_dual in ((False, False), (True, False), (False, True))
    ]


def _pair() -> tuple[Tensor, Tensor]:
    return _tokens(), _tokens(3, 8)


def _basic_blocks() -> list[Trial]:
    make = functools.partial(blocks.BasicTransformerBlock, 8, 2, 4)
    x, context = _pair()
    zero = make(norm_type="ada_norm_zero", num_embeds_ada_norm=10, norm_elementwise_affine=False)
    single = make(norm_type="ada_norm_single", norm_elementwise_affine=False, cross_attention_dim=8)
    times, labels = torch.tensor([1, 2]), torch.tensor([3, 4])
    return [
        (make(cross_attention_dim=8), (x, None, context)),
        (make(activation_fn="gelu"), (x,)),
        (zero, (x, None, None, None, times, None, labels)),
        (single, (x, None, context, None, _tokens(48))),
    ]


def _basic_refuses(block: Any) -> str | None:
    if block.norm_type not in ("layer_norm", "ada_norm_zero", "ada_norm_single"):
        return f"its norm_type is {block.norm_type!r}"
    if block.pos_embed is not None or hasattr(block, "fuser"):
        return "it has embeddings of positions or a fuser"
    return None


def _basic_parts() -> dict[str, _Types]:
    # `norm1` of `ada_norm_zero` is called.
    return {
        "norm1": (
            *_LAYER,
            norms.AdaLayerNormZero,
            norms.AdaLayerNorm,
            norms.AdaLayerNormContinuous,
        ),
        "norm2": (*_LAYER, norms.AdaLayerNorm, norms.AdaLayerNormContinuous),
        "norm3": (*_LAYER, norms.AdaLayerNormContinuous, norms.AdaLayerNorm),
    }


def _no_bias(module: Any) -> str | None:
    norm = module.norm
    is_layer = isinstance(norm, nn.LayerNorm)
    has_bias = not is_layer and getattr(norm, "bias", None) is not None
    return "its RMS norm has a bias" if has_bias else None


def _feed_forwards() -> list[Trial]:
    make = functools.partial(blocks.FeedForward, 8, dropout=0.1)
    return [
        (make(activation_fn="gelu"), (_tokens(),)),
        (make(activation_fn="gelu-approximate", final_dropout=True), (_tokens(),)),
    ]


def _continuous() -> list[Trial]:
    make = functools.partial(norms.AdaLayerNormContinuous, 8, 8)
    return [
        (make(), (_tokens(), _tokens(8))),
        (make(elementwise_affine=False, eps=1e-6), (_tokens(), _tokens(8))),
        (make(norm_type="rms_norm"), (_tokens(), _tokens(8))),
    ]


def _flux_blocks() -> list[Trial]:
    return [(FluxTransformerBlock(8, 2, 4), (*_pair(), _tokens(8)))]


def _zero() -> list[Trial]:
    make, args = norms.AdaLayerNormZero, (None, None, None, _tokens(8))
    return [
        (make(8), (_tokens(), *args)),
        (make(8, norm_type="fp32_layer_norm", bias=False), (_tokens(), *args)),
    ]


_NORM_LAYER = {"norm": _LAYER}
_ADAPTIVE = "adaptive_layer_norm"
_GATED = "gate_add_adaptive_layer_norm"

KINDS: dict[type[nn.Module], Kind] = {
    kind.cls: kind
    for kind in (
        Kind(
            ResnetBlock2D,
            ours.resnet_block,
            "group_norm",
            {"norm1": _GROUP, "norm2": _GROUP, "nonlinearity": _SILU},
            _resnet_blocks,
        ),
        Kind(
            blocks.BasicTransformerBlock,
            ours.basic_block,
            f"add_layer_norm, {_ADAPTIVE}",
            _basic_parts(),
            _basic_blocks,
            _basic_refuses,
        ),
        Kind(
            blocks.JointTransformerBlock,
            ours.joint_block,
            _GATED,
            {"norm2": _LAYER, "norm2_context": _LAYER},
            _joint_blocks,
        ),
        Kind(
            FluxTransformerBlock,
            ours.flux_block,
            _GATED,
            {"norm2": _LAYER, "norm2_context": _LAYER},
            _flux_blocks,
        ),
        Kind(
            norms.AdaLayerNorm,
            ours.ada_layer_norm,
            _ADAPTIVE,
            _NORM_LAYER,
            _trial(
                lambda: norms.AdaLayerNorm(8, output_dim=16, chunk_dim=1),
                _tokens,
                None,
                lambda: _tokens(8),
            ),
            lambda norm: None if norm.chunk_dim == 1 else "its modulation is of the whole batch",
        ),
        Kind(norms.AdaLayerNormZero, ours.ada_layer_norm_zero, _ADAPTIVE, _NORM_LAYER, _zero),
        Kind(
            norms.AdaLayerNormZeroSingle,
            ours.ada_layer_norm_zero_single,
            _ADAPTIVE,
            _NORM_LAYER,
            _trial(lambda: norms.AdaLayerNormZeroSingle(8), _tokens, lambda: _tokens(8)),
        ),
        Kind(
            norms.SD35AdaLayerNormZeroX,
            ours.ada_layer_norm_zero_x,
            _ADAPTIVE,
            _NORM_LAYER,
            _trial(lambda: norms.SD35AdaLayerNormZeroX(8), _tokens, lambda: _tokens(8)),
        ),
        Kind(
            norms.AdaLayerNormContinuous,
            ours.ada_layer_norm_continuous,
            _ADAPTIVE,
            {"norm": (*_LAYER, *_RMS)},
            _continuous,
            _no_bias,
        ),
        Kind(
            norms.LuminaRMSNormZero,
            ours.lumina_rms_norm_zero,
            "adaptive_rms_norm",
            {"norm": _RMS},
            _trial(lambda: norms.LuminaRMSNormZero(8, 1e-6, True), _tokens, lambda: _tokens(8)),
            _no_bias,
        ),
        Kind(
            norms.FP32LayerNorm,
            ours.fp32_layer_norm,
            "layer_norm",
            {},
            _trial(lambda: norms.FP32LayerNorm(8), _tokens),
        ),
        Kind(GEGLU, ours.geglu, "geglu", {}, _trial(lambda: GEGLU(8, 16), _tokens)),
        Kind(
            SwiGLU,
            ours.swiglu,
            "swiglu",
            {"activation": _SILU},
            _trial(lambda: SwiGLU(8, 16), _tokens),
        ),
        Kind(
            blocks.FeedForward,
            ours.feed_forward,
            "mlp",
            {
                "net.0": (GELU,),
                "net.0.proj": (nn.Linear,),
                "net.1": (nn.Dropout,),
                "net.2": (nn.Linear,),
            },
            _feed_forwards,
        ),
    )
}
