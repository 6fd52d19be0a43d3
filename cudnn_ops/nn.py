"""Modules: torch's norms on cuDNN, a gated MLP, and putting them into a model that exists.

``replace_modules_(model)`` swaps what it knows by what it computes, not by its name::

    cudnn_ops.nn.replace_modules_(model, dry_run=True)  # says what it would do
    cudnn_ops.nn.replace_modules_(model)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cudnn_ops.ops.gated import geglu, swiglu
from cudnn_ops.ops.norm import layer_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` on :func:`cudnn_ops.rms_norm`; the same arguments and state_dict keys.

    Args:
        zero_centered: the factor is ``1 + weight``, as in Gemma; weights then begin as zeros.
    """

    def __init__(self, *args: object, zero_centered: bool = False, **kwargs: object) -> None:
        """Takes the arguments of ``torch.nn.RMSNorm``, and ``zero_centered``."""
        self.zero_centered = zero_centered
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Sets the weight so that it changes nothing."""
        super().reset_parameters()
        if self.zero_centered and self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., normalized_shape] to the same."""
        return rms_norm(
            x, self.normalized_shape, self.weight, self.eps, zero_centered=self.zero_centered
        )


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`cudnn_ops.layer_norm`; the same arguments and keys."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., normalized_shape] to the same."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """A gated MLP, ``down(act(gate(x)) * up(x))``, with the product in one kernel.

    Its keys are those of Llama's MLP: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        in_features: of the input and the output.
        hidden_features: between them.
        bias: whether the three projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: another activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the three projections."""
        super().__init__()
        if activation not in _GATED:
            raise ValueError(f"activation is one of {', '.join(_GATED)}, got {activation!r}")
        self.activation = activation

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(rows, columns, bias=bias, device=device, dtype=dtype)

        self.gate_proj = linear(in_features, hidden_features)
        self.up_proj = linear(in_features, hidden_features)
        self.down_proj = linear(hidden_features, in_features)

    @classmethod
    def of(cls, mlp: nn.Module, activation: str) -> SwiGLU:
        """One with the projections of another module, the modules themselves."""
        gated = cls(1, 1, activation=activation, device="meta")
        for name in _PROJECTIONS:
            setattr(gated, name, getattr(mlp, name))
        gated.train(mlp.training)
        return gated

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to the same."""
        product = _GATED[self.activation](self.gate_proj(x), self.up_proj(x))
        return self.down_proj(product)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
}


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
            new = None if _has_hooks(module) else _counterpart(module)
            if new is None:
                continue
            made[module] = new.train(module.training)
        yield Replacement(name, module, made[module])


def _has_hooks(module: nn.Module) -> bool:
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
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in _PROJECTIONS):
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
    gate, up, down = (getattr(probe, name) for name in _PROJECTIONS)
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
