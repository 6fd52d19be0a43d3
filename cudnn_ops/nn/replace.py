"""Replacing a model's norms, gated MLPs, experts and transposed convolutions with ours."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from cudnn_ops.nn.batch_norm import BatchNormAct, InstanceNormAct
from cudnn_ops.nn.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from cudnn_ops.nn.gated import PROJECTIONS, PackedSwiGLU, SwiGLU
from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.nn.linear import MergedSwiGLU
from cudnn_ops.nn.merge import SharedProjection, shared_projections
from cudnn_ops.nn.mlp import MLP, LinearAct, is_linear, is_transposed
from cudnn_ops.nn.moe import Experts
from cudnn_ops.nn.norm import GroupNorm, LayerNorm, RMSNorm, UnitRMSNorm
from cudnn_ops.nn.norm_like import norm_counterpart
from cudnn_ops.ops.activation import ACTIVATIONS, Activation, activate
from cudnn_ops.ops.group_norm import NormActivation
from cudnn_ops.ops.moe import moe_experts

_TRANSPOSED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.ConvTranspose1d: ConvTranspose1d.of,
    nn.ConvTranspose2d: ConvTranspose2d.of,
    nn.ConvTranspose3d: ConvTranspose3d.of,
}
#: What is not swapped again.
_OURS = (
    *(ConvTranspose1d, ConvTranspose2d, ConvTranspose3d),
    *(RMSNorm, UnitRMSNorm, LayerNorm, GroupNorm, BatchNormAct, InstanceNormAct),
    *(SwiGLU, PackedSwiGLU, MergedSwiGLU, MLP, LinearAct, SharedProjection, Experts),
)


@dataclass(frozen=True)
class Replacement:
    """One module that :func:`replace_modules_` replaces."""

    name: str
    """Its name in the model: ``"layers.0.input_layernorm"``."""
    old: nn.Module
    new: nn.Module

    def __str__(self) -> str:
        centered = ", zero-centered" if getattr(self.new, "zero_centered", False) else ""
        return f"{self.name}: {type(self.old).__name__} -> {type(self.new).__name__}{centered}"


@dataclass(frozen=True)
class LeftAlone:
    """A module that looks replaceable and is not; a dry run prints it."""

    name: str
    old: nn.Module
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {type(self.old).__name__} is left alone: {self.reason}"


def replace_modules_(
    model: nn.Module, *, dry_run: bool = False, merge: bool = False
) -> list[Replacement]:
    """Replaces a model's norms, gated MLPs, experts and transposed convolutions, in place.

    A module is replaced if it has the parts of one of this package's modules, and if a copy of it
    computes the same on random inputs on the CPU, in eval and in training mode:

    - torch's ``RMSNorm``, ``LayerNorm`` and ``GroupNorm``;
    - torch's batch norms, ``SyncBatchNorm`` among them, and instance norms, and subclasses of
      ``BatchNorm2d`` with ReLU behind it or nothing (timm's);
    - torch's ``ConvTranspose1d`` to ``ConvTranspose3d``, whose results are then channels last in
      memory;
    - a subclass of ``GroupNorm`` with SiLU behind it or nothing (timm's; BiT's in transformers);
    - a module whose only parameter is a one-dimensional ``weight`` and that is an RMS norm,
      zero-centered or not (Llama, Qwen, Mistral, Gemma), or a layer norm without a bias (Cohere);
    - a module without parameters that is an RMS norm (Llama 4's for queries and keys);
    - a module with ``gate_proj``, ``up_proj`` and ``down_proj``, or with two ``nn.Linear`` of which
      the first computes gate and up in this order (Phi-3, GLM-4, ModernBERT), that is a gated MLP
      with SiLU or GELU;
    - a module whose parameters are ``gate_up_proj`` and ``down_proj`` of several experts and that
      is called with tokens, their experts and weights: a mixture's gated MLPs with SiLU or GELU
      (Mixtral, Qwen-MoE, OLMoE, DeepSeek-V3, GLM-4.5).

    Parameters stay the same tensors and keep their names. Modules with hooks are not replaced.

    With ``merge`` linear layers are merged as well:

    - the first two of ``gate_proj``, ``up_proj`` and ``down_proj`` become one product;
    - a module of two linear layers around an activation runs by :func:`cudnn_ops.mlp` (timm's and
      torchvision's MLPs, GPT-2's in transformers), if dropout is applied to its result or not at
      all;
    - a module of one linear layer and an activation runs by :func:`cudnn_ops.linear` (the first
      half of BERT's MLP in transformers);
    - ``q_proj``, ``k_proj`` and ``v_proj`` of one module, which must be plain ``nn.Linear`` of one
      input, are computed together when the first of them is called (transformers).

    The ``state_dict`` keeps its keys. What is merged into one product has new tensors for
    parameters, so merge before an optimizer is made; layers of which some are frozen, or that share
    a parameter with another module, are not merged.

    Args:
        model: its submodules are replaced, not the model itself.
        dry_run: print what would be replaced, and which similar modules would not be and why;
            replace nothing.
        merge: merge linear layers too, as above.

    Returns:
        What was, or would be, replaced.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import replace_modules_
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.RMSNorm(64))
        >>> done = replace_modules_(model)
        >>> type(model[1])
        <class 'cudnn_ops.nn.norm.RMSNorm'>
    """
    looked_at = list(_look(model, merge))
    found = [each for each in looked_at if isinstance(each, Replacement)]
    if dry_run:
        for each in (*found, *(each for each in looked_at if isinstance(each, LeftAlone))):
            print(each)
        return found
    for replacement in found:
        parent, _, attribute = replacement.name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement.new)
    return found


def _look(model: nn.Module, merge: bool) -> Iterator[Replacement | LeftAlone]:
    made: dict[nn.Module, nn.Module | str | None] = {}  # what is there twice is swapped for one
    tied = _tied(model) if merge else set()
    for name, module in model.named_modules(remove_duplicate=False):
        is_to_be_merged = merge and type(module) is SwiGLU
        if module is model or (isinstance(module, _OURS) and not is_to_be_merged):
            continue
        # Merged parameters are copies: what is tied to another one would not be any more.
        merges = merge and tied.isdisjoint(map(id, module.parameters()))
        if merges and module not in made:
            made |= _shared(module)
        if module not in made:
            made[module] = _counterpart(module, merge, merges)
        new = made[module]
        if isinstance(new, str):
            yield LeftAlone(name, module, new)
        elif new is not None:
            yield Replacement(name, module, new)


def _tied(model: nn.Module) -> set[int]:
    """The parameters that several modules have."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _shared(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each attention projection of a module what computes it together with the others."""
    found = shared_projections(module) or {}
    return {module.get_submodule(name): new for name, new in found.items()}


def _counterpart(module: nn.Module, merge: bool, merges: bool) -> nn.Module | str | None:
    """The replacement; or why there is none, if the module looks like one; else None.

    ``merge``: linear layers may be called in one; ``merges``: their parameters may be copied.
    """
    candidate = _candidate(module, merge, merges)
    if candidate is None:
        return None
    make, reason = candidate
    if has_hooks(module):
        return reason and "it has hooks"
    new = make()
    return reason if new is None else new.train(module.training)


#: How to make ours of a module that looks like it, and the reason to give if it is not that.
_Candidate = tuple[Callable[[], nn.Module | None], str | None]


def _candidate(module: nn.Module, merge: bool, merges: bool) -> _Candidate | None:
    if type(module) in _TRANSPOSED:
        return functools.partial(_TRANSPOSED[type(module)], module), "it is another convolution"
    if type(module) in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
        return functools.partial(_like_torch, module), "it is another norm"
    if isinstance(module, nn.GroupNorm):
        reason = "it is not a group norm of one argument, with SiLU or without"
        return functools.partial(_like_group_norm, module), reason
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return functools.partial(norm_counterpart, module), "it is another norm"
    parameters = dict(module.named_parameters())
    if not parameters:
        is_known = type(module).__module__.startswith("torch.nn") or any(module.children())
        return None if is_known else (functools.partial(_like_unit_norm, module), None)
    if set(parameters) == {"weight"} and parameters["weight"].dim() == 1:
        reason = "it is neither an RMS norm nor a layer norm"
        return functools.partial(_like_norm, module), reason
    names: tuple[str, ...] | None = _packed_projections(module)
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS):
        names = PROJECTIONS
    if names is not None:
        reason = "it is not down(act(gate) * up) by silu, gelu or gelu_tanh"
        return functools.partial(_like_gated_mlp, module, names, merges), reason
    layers = _linears(module) if merge else ()
    if len(layers) in (1, 2):
        return functools.partial(_like_layers, module, layers), None
    own = dict(module.named_parameters(recurse=False))
    if any(weight.dim() == 3 and "gate" in name for name, weight in own.items()):
        reason = "it is not gate_up_proj and down_proj of experts, by silu, gelu or gelu_tanh"
        return functools.partial(_like_experts, module), reason
    return None


def _packed_projections(module: nn.Module) -> tuple[str, ...] | None:
    """The names of two projections of which the first gives two inputs of the second."""
    names = _linears(module)
    layers = [getattr(module, name) for name in names]
    if [type(layer) for layer in layers] != [nn.Linear, nn.Linear]:
        return None
    wide, down = layers
    return names if wide.out_features == 2 * down.in_features else None


def _linears(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's linear layers, of one type; none if it has other parameters."""
    layers = {name: part for name, part in module.named_children() if is_linear(type(part))}
    owners = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    is_all = owners == set(layers) and len({type(layer) for layer in layers.values()}) == 1
    return tuple(layers) if is_all else ()


def _like_torch(module: nn.Module) -> LayerNorm | RMSNorm | GroupNorm:
    if isinstance(module, nn.RMSNorm):
        return _rms_norm(module.normalized_shape, module.eps, module.weight)
    if isinstance(module, nn.GroupNorm):
        return _group_norm(module)
    assert isinstance(module, nn.LayerNorm)
    layer = LayerNorm(list(module.normalized_shape), module.eps, device="meta")
    layer.weight, layer.bias = module.weight, module.bias
    return layer


def _group_norm(module: nn.GroupNorm, activation: NormActivation = "none") -> GroupNorm:
    sizes = module.num_groups, module.num_channels
    norm = GroupNorm(*sizes, module.eps, module.affine, activation=activation, device="meta")
    norm.weight, norm.bias = module.weight, module.bias
    return norm


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


def _computes(probe: nn.Module, x: Tensor, expected: Tensor, *others: Tensor) -> bool:
    """In training too: what drops something there is another module."""
    for is_training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                result = probe.train(is_training)(x, *others)
        except Exception:  # it wants something else
            return False
        if not (
            isinstance(result, Tensor)
            and result.shape == expected.shape
            and torch.allclose(result.float(), expected, rtol=1e-4, atol=1e-4)
        ):
            return False
    return True


def _small(*shape: int) -> Tensor:
    """Small values, so that eps shows."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-2


def _numbers(module: nn.Module) -> list[float]:
    """What may be the module's eps."""
    return list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, float)))


def _like_unit_norm(module: nn.Module) -> UnitRMSNorm | None:
    numbers = _numbers(module)
    probe = _probe(module, {}) if numbers else None
    if probe is None:
        return None
    inputs = (_small(3, 5, 8), _small(4, 16))  # of the last dimension, of any size
    for eps in numbers:
        normed = [x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() for x in inputs]
        if all(_computes(probe, x, out) for x, out in zip(inputs, normed, strict=True)):
            return UnitRMSNorm(eps)
    return None


def _like_norm(module: nn.Module) -> RMSNorm | LayerNorm | None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    size = (weight.numel(),)
    probe = _probe(module, {"weight": size})
    if probe is None:
        return None
    x = _small(3, *size)
    known = dict(probe.named_parameters())["weight"]
    for eps in _numbers(module):
        normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for zero_centered in (False, True):
            if _computes(probe, x, normed * (known + zero_centered)):
                return _rms_norm(size, eps, weight, zero_centered)
        if _computes(probe, x, nn.functional.layer_norm(x, size, known, None, eps)):
            layer = LayerNorm(list(size), eps, bias=False, device="meta")
            layer.weight = weight
            return layer
    return None


def _like_group_norm(module: nn.GroupNorm) -> GroupNorm | None:
    """Of a subclass, such as those of timm with an activation."""
    # Of more, one may be a mask, which is not there when it is tried.
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    size = (module.num_channels,)
    probe = _probe(module, {"weight": size, "bias": size})
    if probe is None or not {"weight", "bias"}.issuperset(module.state_dict()):
        return None
    x, own = _small(2, *size, 3, 2), dict(probe.named_parameters())
    weight, bias = own.get("weight"), own.get("bias")
    normed = nn.functional.group_norm(x, module.num_groups, weight, bias, module.eps)
    for activation in get_args(NormActivation):
        if _computes(probe, x, activate(normed, activation)):
            return _group_norm(module, activation)
    return None


class _AddOne(nn.Module):
    """Takes the place of dropout where that is looked for."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def _like_layers(module: nn.Module, names: tuple[str, ...]) -> MLP | LinearAct | None:
    """Of one layer, or of two around an activation; behind two of them may be dropout."""
    sizes = dict(zip(names, ((6, 64), (64, 5)), strict=False))
    parameters: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in sizes.items():
        is_other = is_transposed(type(getattr(module, name)))
        parameters[f"{name}.weight"] = (inputs, outputs) if is_other else (outputs, inputs)
        parameters[f"{name}.bias"] = (outputs,)
    probe = _probe(module, parameters)
    if probe is None:
        return None
    layers = [getattr(probe, name) for name in names]
    for layer, (_, outputs) in zip(layers, sizes.values(), strict=True):
        if is_transposed(type(layer)):
            layer.nf = outputs  # by which it shapes its result
    drops = [n for n, part in probe.named_children() if type(part) is nn.Dropout and part.p > 0]
    last = drops[0] if len(drops) == 1 and len(names) == 2 else None
    if last is not None:
        setattr(probe, last, _AddOne())
    # Of three dimensions, so that what flattens them shows.
    x = torch.randn(3, 11, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = layers[0](x)
        for activation in ACTIVATIONS:
            expected = activate(before, activation)
            if len(names) == 1:
                # Without an activation, it is as fast as it was.
                if activation != "none" and _computes(probe, x, expected):
                    return LinearAct.of(module, activation, names[0])
                continue
            expected = layers[1](expected) + (0 if last is None else 1)
            if _computes(probe, x, expected):
                return MLP.of(module, activation, (names[0], names[1]), last)
    return None


def _like_gated_mlp(
    module: nn.Module, names: tuple[str, ...], merges: bool
) -> SwiGLU | PackedSwiGLU | MergedSwiGLU | None:
    width, hidden = 6, 64
    *into, out = names
    rows = hidden if len(into) == 2 else 2 * hidden
    sizes: dict[str, tuple[int, ...]] = {f"{out}.weight": (width, hidden), f"{out}.bias": (width,)}
    for name in into:
        sizes |= {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}
    probe = _probe(module, sizes)
    if probe is None:
        return None
    x = torch.randn(33, width, generator=torch.Generator().manual_seed(1))
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    with torch.no_grad():
        gate, up = torch.cat([getattr(probe, name)(x) for name in into], -1).chunk(2, -1)
        for activation in activations:
            if not _computes(probe, x, getattr(probe, out)(activate(gate, activation) * up)):
                continue
            if merges and names == PROJECTIONS and MergedSwiGLU.can_be_of(module):
                return MergedSwiGLU.of_mlp(module, activation)
            kind = SwiGLU if len(into) == 2 else PackedSwiGLU
            return kind.of(module, activation, names)
    return None


def _like_experts(module: nn.Module) -> Experts | None:
    """Of all parameters of a module that is called with tokens, their experts and weights."""
    parameters = dict(module.named_parameters())
    if set(parameters) != {"gate_up_proj", "down_proj"}:
        return None
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    # Of whole multiples of 16 bytes, which torch's grouped product needs.
    count, width, hidden = down.shape[0], 8, 12
    if gate_up.shape != (count, 2 * down.shape[2], down.shape[1]):
        return None  # transposed, or of fewer
    sizes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (count, 2 * hidden, width),
        "down_proj": (count, width, hidden),
    }
    probe = _probe(module, sizes)
    if probe is None:
        return None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, width, generator=generator)
    chosen = torch.rand(33, count, generator=generator).topk(min(2, count)).indices
    weights = torch.rand(chosen.shape, generator=generator)
    own = [probe.get_parameter(name) for name in sizes]
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for activation in activations:
        with torch.no_grad():
            expected = moe_experts(x, chosen, weights, own[0], own[1], activation=activation)
        if _computes(probe, x, expected, chosen, weights):
            return Experts.of(module, activation)
    return None
