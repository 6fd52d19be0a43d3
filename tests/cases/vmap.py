"""Calls under vmap: the tensors of a sample, and the same by torch's own functions.

Those of attention are in cases/vmap_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import conv, conv_transpose, linear, rotary
from tests.cases.conv_transpose import TransposeCase
from tests.cases.rotary import RotaryCase

Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """A call of tensors by name."""

    name: str
    ours: Callable[..., Results]
    reference: Callable[..., Results]
    """By torch's functions, and by nothing of the package."""
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    """The tensors of a sample, in float64 where they are of numbers."""
    wanted: tuple[str, ...] = ()
    """What has a gradient."""
    wide: tuple[str, ...] = ()
    """What is float32 where the others are of fewer bits."""
    first: tuple[str, ...] = ()
    """Some names: subsets of these are batched. Of all, where there are none."""

    def __str__(self) -> str:
        return self.name

    def subsets(self) -> Iterator[tuple[str, ...]]:
        """Names that are batched together: any of them, and all."""
        names = tuple(self.draw(torch.Generator()))
        some = self.first or names
        for count in range(1, len(some) + 1):
            yield from combinations(some, count)
        if self.first:
            yield names

    def tensors(self, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
        """Those of a sample: another for each seed."""
        tensors = self.draw(torch.Generator().manual_seed(seed))

        def converted(name: str, tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.to(device)
            wide = torch.promote_types(dtype, torch.float32)
            return tensor.to(device, wide if name in self.wide else dtype)

        return {name: converted(name, tensor) for name, tensor in tensors.items()}


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def values(*shape: int, device: str = "cpu") -> Tensor:
    """The same at every call, in the dtype that tests have on a device."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    return randn(torch.Generator().manual_seed(sum(shape)), *shape).to(device, dtype)


def drawing(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {name: randn(generator, *shape) for name, shape in shapes.items()}


# Norms, gated activations, rotary embedding


def _norm(
    name: str,
    shape: tuple[int, ...],
    normalized: tuple[int, ...],
    wide: bool = False,
    **options: Any,
) -> Problem:
    is_layer, is_sum = "layer" in name, name.startswith("add")
    shapes = {"input": shape, "weight": normalized}
    if is_sum:
        shapes["residual"] = shape
    if is_layer:
        shapes["bias"] = normalized
    of_op = name.split("-")[0]

    def ours(**tensors: Tensor) -> Results:
        return getattr(cudnn_ops, of_op)(
            normalized_shape=normalized, eps=1e-5, **tensors, **options
        )

    def reference(
        input: Tensor,
        weight: Tensor,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Results:
        total = input if residual is None else input + residual
        factor = weight + 1 if options else weight
        dtype = torch.promote_types(total.dtype, factor.dtype)
        if is_layer:
            term = None if bias is None else bias.to(dtype)
            out = F.layer_norm(total.to(dtype), normalized, factor.to(dtype), term, 1e-5)
        else:
            out = F.rms_norm(total.to(dtype), normalized, factor.to(dtype), 1e-5)
        out = out.to(input.dtype)
        return (out, total) if is_sum else out

    return Problem(
        name, ours, reference, drawing(**shapes), tuple(shapes), ("weight", "bias") if wide else ()
    )


def _group_norm(name: str, shape: tuple[int, ...], groups: int, activation: str) -> Problem:
    is_sum = name.startswith("add")
    shapes = {"input": shape, "weight": shape[1:2], "bias": shape[1:2]}
    if is_sum:
        shapes["residual"] = shape

    def ours(**tensors: Tensor) -> Results:
        op = getattr(cudnn_ops, name.split("-")[0])
        return op(num_groups=groups, activation=activation, **tensors)

    def reference(
        input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
    ) -> Results:
        total = input if residual is None else input + residual
        out = F.group_norm(total, groups, weight, bias)
        out = F.silu(out) if activation == "silu" else out
        return (out, total) if is_sum else out

    return Problem(name, ours, reference, drawing(**shapes), tuple(shapes))


def _batch_norm(name: str, shape: tuple[int, ...], training: bool) -> Problem:
    vectors = ("weight", "bias") if training else ("running_mean", "running_var", "weight", "bias")
    shapes = {"input": shape, **dict.fromkeys(vectors, shape[1:2]), "residual": shape}

    def arguments(tensors: dict[str, Tensor]) -> dict[str, Any]:
        mean, var = (tensors.pop(name, None) for name in ("running_mean", "running_var"))
        var = None if var is None else var.square() + 0.5
        return {"running_mean": mean, "running_var": var, "training": training, **tensors}

    def ours(**tensors: Tensor) -> Results:
        return cudnn_ops.batch_norm(**arguments(tensors), activation="relu")

    def reference(**tensors: Tensor) -> Results:
        given = arguments(tensors)
        residual = given.pop("residual")
        return (F.batch_norm(**given) + residual).relu()

    wanted = tuple(name for name in shapes if "running" not in name)
    return Problem(name, ours, reference, drawing(**shapes), wanted)


def _adaptive_norm(name: str, shape: tuple[int, ...], kind: tuple[int, ...]) -> Problem:
    is_layer, is_sum = "layer" in name, name.startswith("gate")
    names = ("scale", "shift", *(["gate"] * is_sum))
    shapes = {"input": shape, **dict.fromkeys(names, kind), "weight": shape[-1:]}
    if is_sum:
        shapes["update"] = shape

    def ours(**tensors: Tensor) -> Results:
        out: Results = getattr(cudnn_ops, name.split("-")[0])(**tensors)
        return out

    def reference(
        input: Tensor,
        scale: Tensor,
        shift: Tensor,
        weight: Tensor,
        update: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Results:
        def beside(modulation: Tensor) -> Tensor:
            return modulation if len(kind) == len(shape) else modulation.unsqueeze(1)

        total = input
        if update is not None and gate is not None:
            total = input + beside(gate) * update
        if is_layer:
            out = F.layer_norm(total, shape[-1:], weight, None, 1e-6)
        else:
            out = F.rms_norm(total, shape[-1:], weight, 1e-6)
        out = out * (1 + beside(scale)) + beside(shift)
        return (out, total) if is_sum else out

    return Problem(name, ours, reference, drawing(**shapes), tuple(shapes))


def _without_weight(input: Tensor) -> Tensor:
    return cudnn_ops.rms_norm(input, (24,))


def _rotated(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = input.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return input * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _rotary(name: str, batch: int) -> Problem:
    shapes = {"input": (2, 3, 5, 8), "cos": (batch, 5, 8), "sin": (batch, 5, 8)}
    return Problem(name, cudnn_ops.rotary_embedding, _rotated, drawing(**shapes), ("input",))


def _draw_permutation(generator: torch.Generator) -> dict[str, Tensor]:
    experts = torch.randint(-1, 3, (4, 2), generator=generator)
    return {"input": randn(generator, 4, 6), "experts": experts}


def _permuted(input: Tensor, experts: Tensor) -> Tensor:
    """By a product with a matrix of zeros and ones."""
    groups = torch.where(experts >= 0, experts, 3).flatten()
    order = groups.argsort(stable=True)
    is_there = (groups < 3).to(input.dtype)
    ones = torch.eye(4, dtype=input.dtype, device=input.device).repeat_interleave(2, 0)
    return (ones * is_there.unsqueeze(1))[order] @ input


def _draw_sum(generator: torch.Generator) -> dict[str, Tensor]:
    positions = torch.randperm(6, generator=generator).view(3, 2).int()
    positions[0, 1] = -1 - positions[0, 1]
    weights = randn(generator, 3, 2)
    return {"rows": randn(generator, 6, 5), "positions": positions, "weights": weights}


def _combined(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    values = rows[positions.clamp(min=0).long()] * (positions >= 0).unsqueeze(2)
    return (values if weights is None else values * weights.unsqueeze(2)).sum(1)


def _draw_groups(generator: torch.Generator) -> dict[str, Tensor]:
    first = int(torch.randint(6, (), generator=generator))
    return {
        "input": randn(generator, 5, 6),
        "weight": randn(generator, 2, 4, 6),
        "offsets": torch.tensor([first, 5], dtype=torch.int32),
    }


def _rotary_both(name: str, case: RotaryCase) -> Problem:
    """Of queries and keys, in any order of the options."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
        made = rotary.draw(case, torch.float64, torch.float64, "cpu")
        return {n: t.detach().contiguous() for n, t in made.items() if t is not None}

    def ours(**tensors: Tensor) -> Results:
        outs = case.call({"key": None, "positions": None, **tensors})
        return outs if case.kv_heads is not None else outs[0]

    def reference(
        input: Tensor,
        cos: Tensor,
        sin: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Results:
        inputs = [input] if key is None else [input, key]
        outs = tuple(rotary.turned(case, x, cos, sin, positions) for x in inputs)
        return outs if case.kv_heads is not None else outs[0]

    inputs = ("input",) if case.kv_heads is None else ("input", "key")
    return Problem(name, ours, reference, draw, inputs)


_GATED = {"gate": (3, 5, 16), "up": (3, 5, 16)}

ROWS = [
    _norm("rms_norm", (3, 5, 24), (24,)),
    _norm("rms_norm-wide", (7, 24), (24,), wide=True),
    _norm("rms_norm-one_row", (24,), (24,)),
    _norm("rms_norm-zero_centered", (5, 2, 12), (2, 12), zero_centered=True),
    Problem(
        "rms_norm-no_weight",
        _without_weight,
        lambda input: F.rms_norm(input, (24,)),
        drawing(input=(4, 24)),
        ("input",),
    ),
    _norm("layer_norm", (3, 5, 24), (24,)),
    _norm("layer_norm-wide", (2, 5, 24), (5, 24), wide=True, zero_centered=True),
    _norm("add_rms_norm", (4, 24), (24,)),
    _norm("add_layer_norm", (2, 3, 24), (24,), zero_centered=True),
    _group_norm("group_norm", (2, 6, 5), 3, "none"),
    _group_norm("group_norm-silu", (3, 4, 3, 2), 1, "silu"),
    _group_norm("add_group_norm", (2, 6, 5), 2, "silu"),
    _batch_norm("batch_norm-training", (4, 3, 5), training=True),
    _batch_norm("batch_norm", (2, 3, 5, 2), training=False),
    Problem(
        "max_pool2d",
        lambda input: cudnn_ops.max_pool2d(input, (3, 2), 2, 1),
        lambda input: F.max_pool2d(input, (3, 2), 2, 1),
        drawing(input=(2, 3, 5, 6)),
        ("input",),
    ),
    _adaptive_norm("adaptive_layer_norm", (2, 5, 8), (2, 8)),
    _adaptive_norm("adaptive_rms_norm", (2, 5, 8), (1, 5, 8)),
    _adaptive_norm("gate_add_adaptive_layer_norm", (2, 5, 8), (2, 1, 8)),
    _adaptive_norm("gate_add_adaptive_rms_norm", (3, 5, 8), (3, 8)),
    Problem(
        "swiglu",
        cudnn_ops.swiglu,
        lambda gate, up: F.silu(gate) * up,
        drawing(**_GATED),
        ("gate", "up"),
    ),
    Problem(
        "geglu",
        cudnn_ops.geglu,
        lambda gate, up: F.gelu(gate) * up,
        drawing(**_GATED),
        ("gate", "up"),
    ),
    _rotary("rotary", 1),
    _rotary("rotary_of_each", 2),
    Problem(
        "moe_permute",
        lambda input, experts: cudnn_ops.moe_permute(input, experts, 3)[0],
        _permuted,
        _draw_permutation,
        ("input",),
    ),
    Problem("moe_combine", cudnn_ops.moe_combine, _combined, _draw_sum, ("rows", "weights")),
    Problem(
        "moe_combine_unweighted",
        cudnn_ops.moe_combine,
        _combined,
        lambda generator: {n: t for n, t in _draw_sum(generator).items() if n != "weights"},
        ("rows",),
    ),
    Problem(
        "grouped_linear",
        cudnn_ops.grouped_linear,
        lambda input, weight, offsets: torch.where(
            (torch.arange(5, device=input.device) < offsets[0]).unsqueeze(1),
            input @ weight[0].transpose(0, 1),
            input @ weight[1].transpose(0, 1),
        ),
        _draw_groups,
        ("input", "weight"),
    ),
    *(
        _rotary_both(f"rotary_{case.name}", case)
        for case in rotary.CASES
        if case.name in ("both", "part_neighbours", "positions", "sections", "everything")
    ),
]


# Convolutions


def _conv(name: str, case: conv.ConvCase, first: tuple[str, ...] = ()) -> Problem:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        seed = int(torch.randint(1000, (), generator=generator))
        made = conv.make(case, torch.float64, "cpu", seed)
        tensors = {n: t.detach().contiguous() for n, t in made.differentiable.items()}
        if "no_batch" in name:
            tensors |= {n: tensors[n][0] for n in ("input", "residual") if n in tensors}
        return tensors

    def ours(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        function = getattr(cudnn_ops, f"conv{case.dims}d")
        options = (case.stride, case.padding, case.dilation, case.groups)
        return function(
            input, weight, bias, *options, activation=case.activation, residual=residual
        )

    def reference(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        before = conv.torch_conv(case, input, weight, bias)
        return conv.activate(before if residual is None else before + residual, case.activation)

    names = tuple(draw(torch.Generator()))
    return Problem(name, ours, reference, draw, names, first=first)


def _transposed(name: str, case: TransposeCase, first: tuple[str, ...] = ()) -> Problem:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        seed = int(torch.randint(1000, (), generator=generator))
        made = conv_transpose.make(case, torch.float64, "cpu", seed)
        return {n: t.detach().contiguous() for n, t in made.differentiable.items()}

    def ours(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        function = getattr(cudnn_ops, f"conv_transpose{case.dims}d")
        options = {"activation": case.activation, "residual": residual}
        return function(input, weight, bias, *case.geometry, **options)

    def reference(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        before = conv_transpose.torch_transpose(case, input, weight, bias)
        return conv.activate(before if residual is None else before + residual, case.activation)

    names = tuple(draw(torch.Generator()))
    return Problem(name, ours, reference, draw, names, first=first)


_IMAGE = conv.ConvCase(2, 8, 16, (6, 5), (3, 3), (2, 1), (1, 1), (1, 1))
_TURNED = TransposeCase(2, 8, 4, (4, 3), (3, 2), (2, 1), (1, 0), (1, 0), 1, (1, 1))

CONVOLUTIONS = [
    _conv("conv2d", _IMAGE),
    _conv(
        "conv2d_relu",
        replace(_IMAGE, activation="relu", residual=True),
        ("input", "weight", "residual"),
    ),
    _conv("conv2d_silu", replace(_IMAGE, activation="silu", bias=False)),
    _conv("conv2d_groups", replace(_IMAGE, groups=2, dilation=(1, 2), padding=(1, 2))),
    _conv("conv2d_same", replace(_IMAGE, stride=(1, 1), padding="same", kernel=(2, 3))),
    _conv("conv2d_no_batch", replace(_IMAGE, residual=True), ("input", "weight", "bias")),
    _conv("conv1d", conv.ConvCase(2, 8, 8, (9,), (3,), (1,), (1,), (1,), activation="gelu")),
    _conv("conv1d_depthwise", conv.ConvCase(1, 8, 8, (9,), (4,), (1,), (3,), (1,), groups=8)),
    _conv("conv3d", conv.ConvCase(1, 8, 8, (3, 4, 5), (2, 3, 2), (1,) * 3, (1, 0, 1), (1,) * 3)),
    _transposed("conv_transpose2d", _TURNED),
    _transposed(
        "conv_transpose2d_relu",
        replace(_TURNED, activation="relu", residual=True),
        ("input", "weight", "residual"),
    ),
    _transposed("conv_transpose2d_silu", replace(_TURNED, groups=2, activation="silu")),
    _transposed(
        "conv_transpose1d",
        TransposeCase(2, 8, 4, (9,), (4,), (2,), (1,), (0,), 1, (1,), "gelu", bias=False),
    ),
]


# Linear layers


def _layer(name: str, case: linear.Case, first: tuple[str, ...] = ()) -> Problem:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        seed = int(torch.randint(1000, (), generator=generator))
        tensors, _ = linear.make(case, torch.float64, "cpu", seed)
        return {n: t.detach().contiguous() for n, t in tensors.items() if t is not None}

    names = tuple(draw(torch.Generator()))
    absent = ("bias", "residual") if isinstance(case, linear.LinearCase) else ("b1", "b2")

    def by(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda **tensors: function(case, {**dict.fromkeys(absent), **tensors})

    return Problem(name, by(linear.run), by(linear.formula), draw, names, first=first)


LAYERS = [
    _layer("linear", linear.LinearCase((2, 5), 8, 12)),
    _layer("linear_relu", linear.LinearCase((5,), 8, 12, "relu", residual=True)),
    _layer("linear_silu", linear.LinearCase((2, 3), 8, 12, "silu", bias=False, residual=True)),
    _layer("linear_one_row", linear.LinearCase((), 8, 12, "gelu_tanh")),
    _layer("mlp", linear.MlpCase((2, 3), 8, 12, 4, "gelu_tanh"), ("x", "w1", "b2")),
    _layer("mlp_relu", linear.MlpCase((5,), 8, 12, 4, "relu", bias=False)),
    _layer("mlp_gated", linear.MlpCase((7,), 16, 24, 8, "silu", gated=True, bias=False)),
]
