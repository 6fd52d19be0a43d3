"""The operators that can be asked about: one table, for every question about their plans.

:func:`~cudnn_ops.support.explain`, ``plan_requests``, ``python -m cudnn_ops`` and the support
tables all start here. An entry says which arguments a question accepts, which of them a plan
depends on, and which plans a call would build.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.ops.batch_norm import BatchNormActivation, batch_norm
from cudnn_ops.ops.conv import conv1d, conv2d, conv3d
from cudnn_ops.ops.conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d
from cudnn_ops.ops.linear import linear, mlp
from cudnn_ops.ops.mxfp8 import sdpa_mxfp8
from cudnn_ops.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from cudnn_ops.ops.paged import paged_attention
from cudnn_ops.ops.sdpa import scaled_dot_product_attention
from cudnn_ops.ops.sdpa_fp8 import sdpa_fp8
from cudnn_ops.ops.sdpa_fp8_backward import sdpa_fp8_backward
from cudnn_ops.ops.varlen import varlen_attention
from cudnn_ops.ops.varlen_fp8 import varlen_attention_fp8
from cudnn_ops.support.attempts import Attempt, Kind, Parts, one_plan
from cudnn_ops.support.attention import (
    attention_fp8_backward_parts,
    attention_fp8_parts,
    attention_mxfp8_parts,
    attention_parts,
    packed_fp8_parts,
    packed_parts,
    paged_parts,
)
from cudnn_ops.support.convolution import conv_parts, conv_transpose_parts
from cudnn_ops.support.linear import linear_parts, mlp_parts
from cudnn_ops.support.specs import (
    TensorSpec,
    meta_tensor,
    optional_tensor,
)

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class Operator:
    """One operator: its arguments, and its plans."""

    name: str
    function: Callable[..., Any]
    """The public function: its arguments are a question's."""
    operands: tuple[str, ...]
    """Those of its arguments that a question calls q, k and v."""
    plans: Callable[..., Parts]
    """Given a :class:`Kind`, the operands and the options that have an effect."""
    required: int = 1
    """How many operands a question must give; a later one that is None is like the one before."""
    without_effect: tuple[str, ...] = ()
    """Arguments that one plan serves whatever they are."""
    questions: tuple[str, ...] = ()
    """What can be asked beside its arguments."""
    training: str = "with_lse"
    """The name under which a question asks for the forward that a backward follows."""
    has_backward: bool = True
    is_backward: bool = False
    has_exact: bool = True
    """Whether there are plans of exactly the shapes given, beside polymorphic ones."""
    has_polymorphic: bool = False

    @property
    def accepted(self) -> list[str]:
        """Names of the options of a question, in the order of the function's arguments."""
        names = [*inspect.signature(self.function).parameters, *self.questions]
        if not self.is_backward and self.training not in names:
            names.append(self.training)
        return [name for name in names if name not in self.operands]

    def take_operands(self, given: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """The operands, where some may stand among the options under their own names.

        Raises:
            TypeError: one is given twice, or the first one not at all.
            ValueError: another one is missing.
        """
        result = list(given)
        for index, name in enumerate(self.operands):
            if name not in options:
                continue
            if result[index] is not None:
                raise TypeError(f"{self.name} got {name} twice: it is {'qkv'[index]}")
            result[index] = options.pop(name)
        for index, name in enumerate(self.operands[: self.required]):
            if result[index] is None:
                error = TypeError if index == 0 else ValueError
                raise error(f"{self.name} needs {'qkv'[index]}, the {name}")
        return result[: len(self.operands)]

    def with_effect(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that a plan depends on.

        Raises:
            TypeError: one that the operator does not accept; the message has those that it does.
        """
        accepted = self.accepted
        for name in options:
            if name not in accepted:
                near = difflib.get_close_matches(name, accepted, 1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise TypeError(
                    f"{self.name} has no argument {name}{hint} It accepts {', '.join(accepted)}"
                )
        return {name: value for name, value in options.items() if name not in self.without_effect}

    def parts(self, kind: Kind, operands: Sequence[Any], options: dict[str, Any]) -> Parts:
        """The attempts of each part of a call; nothing is built yet."""
        options = self.with_effect(options)
        kind = kind._replace(
            backward=self.is_backward, training=bool(options.pop(self.training, kind.training))
        )
        tensors: list[Tensor] = []
        for spec, name in zip(operands, "qkv", strict=False):
            tensors.append(tensors[-1] if spec is None else meta_tensor(spec, name))
        return self.plans(kind, *tensors, **options)


def _norm(
    kind: Kind,
    x: Tensor,
    *,
    is_layer: bool,
    normalized_shape: Sequence[int] | None = None,
    weight: TensorSpec | torch.dtype | bool | None = True,
    bias: TensorSpec | torch.dtype | bool | None = None,
    zero_centered: bool = False,
) -> Parts:
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape
    words = _ops._norm_plan_key(
        x,
        shape,
        weight=optional_tensor(weight, "weight", shape, x.dtype),
        bias=optional_tensor(bias, "bias", shape, x.dtype),
        is_layer=is_layer,
        zero_centered=zero_centered,
        with_stats=kind.training,
        backward=kind.backward,
    )
    return one_plan(words)


def _batch_norm(
    kind: Kind,
    x: Tensor,
    *,
    running_mean: TensorSpec | torch.dtype | bool | None = True,
    running_var: TensorSpec | torch.dtype | bool | None = True,
    weight: TensorSpec | torch.dtype | bool | None = None,
    bias: TensorSpec | torch.dtype | bool | None = None,
    residual: TensorSpec | bool | None = None,
    activation: BatchNormActivation = "none",
    channels_last: bool = False,
) -> Parts:
    known = get_args(BatchNormActivation)
    if activation not in known:
        raise ValueError(f"activation must be one of {', '.join(known)}, got {activation!r}")
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    vectors = {"running_mean": running_mean, "running_var": running_var}
    vectors |= {"weight": weight, "bias": bias}
    # The gradient is that of training: by running statistics no plan computes it.
    is_training = kind.training or kind.backward
    words, engine, reason = _ops._batch_norm_plan_key(
        x,
        *(
            optional_tensor(spec, name, x.shape[1:2], torch.float32)
            for name, spec in vectors.items()
        ),
        optional_tensor(residual, "residual", x.shape, x.dtype),
        0.1,
        1e-5,
        ACTIVATIONS.index(activation),
        is_training,
        kind.backward,
    )
    if not reason:
        return one_plan(words)
    return [iter([Attempt(without_plan=reason, engine=engine)])]


def _families() -> Iterator[Operator]:
    yield Operator(
        "sdpa",
        scaled_dot_product_attention,
        ("query", "key", "value"),
        attention_parts,
        without_effect=("scale", "enable_gqa", "rng_state"),
        questions=("grad_mask",),
        has_polymorphic=True,
    )
    yield Operator(
        "sdpa_fp8",
        sdpa_fp8,
        ("query", "key", "value"),
        attention_fp8_parts,
        without_effect=("descale_q", "descale_k", "descale_v", "scale_o", "scale"),
        has_backward=False,
    )
    yield Operator(
        "sdpa_fp8_backward",
        sdpa_fp8_backward,
        ("query", "key", "value"),
        attention_fp8_backward_parts,
        without_effect=(
            *("out", "lse", "descale_q", "descale_k", "descale_v", "descale_o", "descale_do"),
            *("scale_dp", "scale"),
        ),
        has_backward=False,
        is_backward=True,
    )
    yield Operator(
        "sdpa_mxfp8",
        sdpa_mxfp8,
        ("query", "key", "value"),
        attention_mxfp8_parts,
        without_effect=("descale_q", "descale_k", "descale_v", "scale"),
        has_backward=False,
    )
    yield Operator(
        "varlen_attention",
        varlen_attention,
        ("q", "k", "v"),
        packed_parts,
        without_effect=("softmax_scale", "rng_state"),
        has_exact=False,
        has_polymorphic=True,
    )
    yield Operator(
        "varlen_attention_fp8",
        varlen_attention_fp8,
        ("q", "k", "v"),
        packed_fp8_parts,
        without_effect=("descale_q", "descale_k", "descale_v", "scale_o", "softmax_scale"),
        has_backward=False,
        has_exact=False,
        has_polymorphic=True,
    )
    yield Operator(
        "paged_attention",
        paged_attention,
        ("query", "key_cache", "value_cache"),
        paged_parts,
        required=2,
        without_effect=("scale", "seq_lens_kv", "descale_k", "descale_v", "plan", "out"),
        has_backward=False,
        has_exact=False,
        has_polymorphic=True,
    )
    for function in (rms_norm, layer_norm, add_rms_norm, add_layer_norm):
        yield Operator(
            function.__name__,
            function,
            ("input",),
            partial(_norm, is_layer=function in (layer_norm, add_layer_norm)),
            without_effect=("eps", "residual"),
            training="with_stats",
        )
    yield Operator(
        "batch_norm",
        batch_norm,
        ("input",),
        _batch_norm,
        without_effect=("momentum", "eps"),
        questions=("channels_last",),
        training="training",
    )
    convolutions: list[tuple[Callable[..., Parts], list[Callable[..., Tensor]]]] = [
        (conv_parts, [conv1d, conv2d, conv3d]),
        (conv_transpose_parts, [conv_transpose1d, conv_transpose2d, conv_transpose3d]),
    ]
    for plans, functions in convolutions:
        for dims, convolution in enumerate(functions, 1):
            yield Operator(
                convolution.__name__,
                convolution,
                ("input", "weight"),
                partial(plans, dims=dims),
                required=2,
                training="with_before",
            )
    yield Operator(
        "linear",
        linear,
        ("input", "weight"),
        linear_parts,
        required=2,
        questions=("graph",),
        training="with_before",
    )
    yield Operator(
        "mlp",
        mlp,
        ("x", "w1", "w2"),
        mlp_parts,
        required=3,
        questions=("graph",),
        training="with_saved",
    )


def _table() -> Iterator[Operator]:
    for operator in _families():
        yield operator
        if operator.has_backward:
            yield replace(operator, name=f"{operator.name}_backward", is_backward=True)


#: Every operator that can be asked about, by its name; a backward is one of its own.
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _table()}

#: Those of rows.
NORMS = tuple(op for op in OPERATORS if "norm" in op and not op.startswith("batch_norm"))
CONVS = tuple(op for op in OPERATORS if op.startswith("conv"))


def find_operator(op: str) -> Operator:
    """The entry of the table.

    Raises:
        ValueError: there is none; the message has all names.
    """
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(OPERATORS)}, got {op!r}")
    return OPERATORS[op]
