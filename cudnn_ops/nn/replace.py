"""Swapping a model's norms and gated MLPs for those of this package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cudnn_ops.nn.gated import PROJECTIONS, SwiGLU
from cudnn_ops.nn.norm import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Replacement:
    """One module that :func:`replace_modules_` swaps."""

    name: str
    """Where it is in the model: ``"layers.0.input_layernorm"``."""
    old: nn.Module
    new: nn.Module

    def __str__(self) -> str:
        centered = ", zero-centered" if getattr(self.new, "zero_centered", False) else ""
        return f"{self.name}: {type(self.old).__name__} -> {type(self.new).__name__}{centered}"


def replace_modules_(model: nn.Module, *, dry_run: bool = False) -> list[Replacement]:
    """Swaps a model's norms and gated MLPs for those of this package, in place.

    A module is swapped if it has the parts of one of ours, and if a copy of it computes the same on
    random numbers on the CPU: torch's ``RMSNorm`` and ``LayerNorm``; any module whose only
    parameter is a one-dimensional ``weight`` and that is an RMS norm, zero-centered or not (those
    of Llama, Qwen, Mistral, Gemma); any with ``gate_proj``, ``up_proj`` and ``down_proj`` that is a
    gated MLP by SiLU or GELU. Parameters stay the same tensors and keep their names. Modules with
    hooks are left alone.

    Args:
        model: itself is not swapped, what is in it is.
        dry_run: print what would be swapped, and swap nothing.

    Returns:
        What was, or would be, swapped.
    """
    found = list(_replacements(model))
    for replacement in found:
        if dry_run:
            print(replacement)
            continue
        parent, _, attribute = replacement.name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement.new)
    return found


def _replacements(model: nn.Module) -> Iterator[Replacement]:
    made: dict[nn.Module, nn.Module] = {}  # a module that is there twice is swapped for one
    for name, module in model.named_modules(remove_duplicate=False):
        if module is model or isinstance(module, (RMSNorm, LayerNorm, SwiGLU)):
            continue
        if module not in made:
            new = None if has_hooks(module) else _counterpart(module)
            if new is None:
                continue
            made[module] = new.train(module.training)
        yield Replacement(name, module, made[module])


def has_hooks(module: nn.Module) -> bool:
    """Whether something of a user's runs when it does; nobody else may take its place then."""
    return any(
        getattr(module, name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def _counterpart(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.LayerNorm:
        layer = LayerNorm(list(module.normalized_shape), module.eps, device="meta")
        layer.weight, layer.bias = module.weight, module.bias
        return layer
    if type(module) is nn.RMSNorm:
        return _rms_norm(module.normalized_shape, module.eps, module.weight)
    parameters = dict(module.named_parameters())
    if set(parameters) == {"weight"} and parameters["weight"].dim() == 1:
        return _like_rms_norm(module)
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS):
        return _like_gated_mlp(module)
    return None


def _rms_norm(
    shape: tuple[int, ...], eps: float | None, weight: nn.Parameter, zero_centered: bool = False
) -> RMSNorm:
    norm = RMSNorm(shape, eps, zero_centered=zero_centered, device="meta")
    norm.weight = weight
    return norm


def _probe(module: nn.Module, sizes: dict[str, tuple[int, ...]]) -> nn.Module | None:
    """A copy on the CPU in float32 with small parameters of these sizes; None if it has none."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        if name not in sizes:
            return None
        values = torch.randn(sizes[name], generator=generator)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception:  # what cannot be copied is not known
        return None


def _computes(probe: nn.Module, x: Tensor, expected: Tensor) -> bool:
    try:
        with torch.no_grad():
            result = probe(x)
    except Exception:  # it wants something else
        return False
    return (
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and torch.allclose(result.float(), expected, rtol=1e-4, atol=1e-4)
    )


def _like_rms_norm(module: nn.Module) -> RMSNorm | None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    probe = _probe(module, {"weight": (weight.numel(),)})
    if probe is None:
        return None
    # Small values, so that eps shows.
    x = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(1)) * 1e-2
    known = dict(probe.named_parameters())["weight"]
    numbers = {n: v for n, v in vars(module).items() if isinstance(v, float)}
    for eps in dict.fromkeys(numbers.values()):
        normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for zero_centered in (False, True):
            if _computes(probe, x, normed * (known + zero_centered)):
                return _rms_norm((weight.numel(),), eps, weight, zero_centered)
    return None


def _like_gated_mlp(module: nn.Module) -> SwiGLU | None:
    width, hidden = 6, 10
    sizes = {
        "gate_proj.weight": (hidden, width),
        "up_proj.weight": (hidden, width),
        "down_proj.weight": (width, hidden),
        "gate_proj.bias": (hidden,),
        "up_proj.bias": (hidden,),
        "down_proj.bias": (width,),
    }
    probe = _probe(module, sizes)
    if probe is None:
        return None
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    gate, up, down = (getattr(probe, name) for name in PROJECTIONS)
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda value: nn.functional.gelu(value, approximate="tanh"),
    }
    with torch.no_grad():
        for name, activation in activations.items():
            if _computes(probe, x, down(activation(gate(x)) * up(x))):
                return SwiGLU.of(module, name)
    return None
