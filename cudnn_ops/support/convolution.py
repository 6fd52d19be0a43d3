"""What runs convolutions and transposed ones: graphs of cuDNN, kernels of ours, or of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS, needs_before
from cudnn_ops.ops.conv import as_list
from cudnn_ops.support.attempts import Attempt, Kind, Parts
from cudnn_ops.support.specs import TensorSpec, optional_tensor

_ops = torch.ops.cudnn_ops


#: What runs in one graph, by csrc's ConvFusion.
_FUSIONS = (
    "all",
    "the convolution, bias and residual",
    "the convolution and its bias",
    "the convolution",
)


def conv_parts(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    *,
    dims: int,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    **epilogue: Any,
) -> Parts:
    """A convolution, or both parts of its backward."""
    pads = padding if isinstance(padding, str) else as_list(padding)
    geometry = _ops._conv_geometry(dims, w, as_list(stride), pads, as_list(dilation), groups)
    return _convolution(kind, x, w, geometry, **epilogue)


def conv_transpose_parts(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    *,
    dims: int,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    **epilogue: Any,
) -> Parts:
    """A transposed convolution, or both parts of its backward."""
    lists = (as_list(numbers) for numbers in (stride, padding, output_padding, dilation))
    geometry = _ops._conv_transpose_geometry(dims, *lists, groups)
    return _convolution(kind, x, w, geometry, **epilogue)


def _convolution(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    geometry: Sequence[int],
    activation: str = "none",
    bias: TensorSpec | bool | None = None,
    residual: TensorSpec | bool | None = None,
) -> Parts:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    size = _ops._conv_size(x, w, None, None, geometry)
    added = optional_tensor(bias, "bias", size[1:2], x.dtype)
    total = optional_tensor(residual, "residual", size, x.dtype)
    _ops._conv_size(x, w, added, total, geometry)  # raises where they do not fit
    if kind.backward:
        return [_conv_gradient(x, w, geometry, is_of_weight) for is_of_weight in (False, True)]
    call = (x, w, added, total, geometry, ACTIVATIONS.index(activation))
    return [_conv_forward(call, kind.training and needs_before(activation))]


def _conv_gradient(
    x: Tensor, w: Tensor, geometry: Sequence[int], is_of_weight: bool
) -> Iterator[Attempt]:
    # The step is csrc's ConvStep: 0 is the forward, 1 the input's gradient, 2 the weight's.
    engine, why = _ops._conv_other_engine(x, w, None, None, geometry, 0, 1 + is_of_weight)
    if engine:
        yield Attempt(without_plan=why, engine=engine)
    else:
        yield Attempt(_ops._conv_backward_plan_key(x, w, geometry, is_of_weight), note=why)


def _conv_forward(call: tuple[Any, ...], with_before: bool) -> Iterator[Attempt]:
    """With less and less of the epilogue in the graph, as a call tries it."""
    engine, why = _ops._conv_other_engine(*call, 0)
    if engine:
        yield Attempt(without_plan=why, engine=engine)
        return
    bare = len(_FUSIONS) - 1
    for fusion in range(len(_FUSIONS)):
        reason = _ops._conv_bare_reason(*call, fusion)
        last = bare if reason else fusion
        words = _ops._conv_plan_key(*call, last, with_before)
        yield Attempt(words, fused=_FUSIONS[last], not_more=reason, note=why)
        if last == bare:
            return
