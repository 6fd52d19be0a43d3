"""Rows, normed or gated, rounded to 8 bits, and products of them: public functions, kernels.

The CUDA kernels are in ``csrc/kernels/rows_fp8*``, the checks in ``csrc/ops/quantize/``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_ops.ops.activation import Activation, activate, wide
from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.kernels import register
from cudnn_ops.ops.norm import rms_in_torch
from cudnn_ops.ops.quantize import (
    QuantizedFp8,
    quantize_in_torch,
    round_to_fp8,
    scale_of,
)

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_rows_fp8_op = _ops._rows_fp8.default
_E4M3 = torch.float8_e4m3fn

#: In the order in which C++ counts them; activations are of a gate.
_PLAIN, _NORM = 0, 1
_GATED: dict[str, int] = {"silu": 2, "gelu": 3, "gelu_tanh": 4}
_ACTIVATIONS: dict[int, Activation] = {2: "silu", 3: "gelu", 4: "gelu_tanh"}


class RowsFp8(NamedTuple):
    """Rows of 8 bits: what :func:`linear_fp8` takes."""

    data: Tensor
    """Contiguous, of the input's shape: what was rounded."""
    descale: Tensor
    """float32 [..., 1], one number for each row; [1] where one scale was given."""
    amax: Tensor
    """float32, likewise: the largest magnitudes before they were scaled; NaN where a row holds
    one."""

    @property
    def shape(self) -> torch.Size:
        """Of ``data``: models ask their hidden states for it."""
        return self.data.shape


def quantize_rows_fp8(
    input: Tensor, scale: Tensor | None = None, *, dtype: torch.dtype = _E4M3
) -> RowsFp8:
    """Rounds rows to 8 bits by one kernel, each under a scale of its own or all under one.

    The rounding is that of :func:`quantize_fp8`. A row stays on the chip between its largest
    magnitude and its rounding, so that memory is read once either way; rows of more than 16384
    numbers of 16 bits are read twice, from a cache where they fit. Not differentiable.

    Args:
        input: [..., columns], float16, bfloat16 or float32; on a CPU also float64. Rows may be
            strided.
        scale: float32, one number for all rows; None: 448 / amax of each row (57344 / amax for
            ``float8_e5m2``).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The rounded rows, their descales and largest magnitudes.

    Raises:
        ValueError: a scale that does not fit.
        TypeError: an unsupported dtype.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> data, descale, amax = cudnn_ops.quantize_rows_fp8(torch.tensor([[1.0, -7.0], [0.5, 0]]))
        >>> amax.flatten(), data.float() * descale
        (tensor([7.0000, 0.5000]), tensor([[ 1.0000, -7.0000],
                [ 0.5000,  0.0000]]))
    """
    return _rounded("quantize_rows_fp8", input, None, None, scale, _PLAIN, 0.0, False, dtype)[0]


def rms_norm_fp8(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    scale: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype = _E4M3,
) -> RowsFp8:
    """:func:`rms_norm` over the last dimension and :func:`quantize_rows_fp8` of it, by one kernel.

    The norm is not rounded in between. Not differentiable.

    Args:
        input: as in :func:`quantize_rows_fp8`.
        weight: [columns], in the input's dtype or float32; None stands for ones.
        eps: as in :func:`rms_norm`.
        scale: as in :func:`quantize_rows_fp8`.
        zero_centered: as in :func:`rms_norm`.
        dtype: as in :func:`quantize_rows_fp8`.

    Returns:
        As :func:`quantize_rows_fp8`.

    Raises:
        ValueError: shapes, devices or a scale that do not fit.
        TypeError: an unsupported dtype.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> data, descale, _ = cudnn_ops.rms_norm_fp8(torch.randn(4, 64), torch.ones(64))
        >>> (data.float() * descale).square().mean(-1).round()
        tensor([1., 1., 1., 1.])
    """
    return _rounded("rms_norm_fp8", input, None, weight, scale, _NORM, eps, zero_centered, dtype)[0]


def add_rms_norm_fp8(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    scale: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype = _E4M3,
) -> tuple[RowsFp8, Tensor]:
    """:func:`rms_norm_fp8` of ``input + residual``, and that sum: the next residual.

    Args:
        input: as in :func:`rms_norm_fp8`.
        residual: of the input's shape and dtype.
        weight: as there, like all arguments below.
        eps: as there.
        scale: as there.
        zero_centered: as there.
        dtype: as there.

    Returns:
        As :func:`rms_norm_fp8`, and the sum in the input's dtype, of which the norm is.

    Raises:
        ValueError: as :func:`rms_norm_fp8`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> rows, total = cudnn_ops.add_rms_norm_fp8(x, residual)
        >>> torch.equal(total, x + residual)
        True
    """
    _require_tensor(residual, "add_rms_norm_fp8", "residual")
    return _rounded(
        "add_rms_norm_fp8", input, residual, weight, scale, _NORM, eps, zero_centered, dtype
    )


def swiglu_fp8(
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None = None,
    *,
    activation: Activation = "silu",
    dtype: torch.dtype = _E4M3,
) -> RowsFp8:
    """:func:`swiglu`, or GEGLU, and :func:`quantize_rows_fp8` of it, by one kernel.

    The product is not rounded in between. Not differentiable.

    Args:
        gate: as the input of :func:`quantize_rows_fp8`.
        up: of the gate's shape, dtype and device.
        scale: as there.
        activation: of the gate, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        dtype: as there.

    Returns:
        As :func:`quantize_rows_fp8`.

    Raises:
        ValueError: another activation; different shapes or devices; a scale that does not fit.
        TypeError: an unsupported dtype, or different dtypes.
        NotImplementedError: forward-mode derivatives.

    Example:
        >>> import torch, cudnn_ops
        >>> gate, up = torch.randn(4, 256).chunk(2, dim=-1)
        >>> cudnn_ops.swiglu_fp8(gate, up).descale.shape
        torch.Size([4, 1])
    """
    if activation not in _GATED:
        raise ValueError(
            f"cudnn_ops.swiglu_fp8: activation must be one of {', '.join(_GATED)}, got "
            f"{activation!r}"
        )
    _require_tensor(up, "swiglu_fp8", "up")
    return _rounded("swiglu_fp8", gate, up, None, scale, _GATED[activation], 0.0, False, dtype)[0]


def _require_tensor(value: Tensor, function: str, name: str) -> None:
    """What the operator would do without."""
    if not isinstance(value, Tensor):
        got = None if value is None else type(value).__name__
        raise TypeError(f"cudnn_ops.{function}: {name} must be a tensor, got {got}")


#: What functions call the arguments of their operator.
_NAMES = {"swiglu_fp8": {"input": "gate"}}


def _rounded(
    function: str,
    input: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    kind: int,
    eps: float | None,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[RowsFp8, Tensor]:
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    try:
        *rows, total = _rows_fp8_op(input, other, weight, scale, kind, eps, zero_centered, dtype)
    except RuntimeError:
        refuse_wrong_types(_rows_fp8_op, locals(), function, _NAMES.get(function))
        raise
    return RowsFp8(*rows), total


def linear_fp8(
    input: RowsFp8 | QuantizedFp8,
    weight: RowsFp8 | QuantizedFp8,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    r"""A linear layer on 8 bits, by ``torch._scaled_mm`` on a GPU.

    .. math::
        \mathrm{out}_{ij} = \mathrm{descale}^x_i \, \mathrm{descale}^w_j \; x_i \cdot w_j
            + \mathrm{bias}_j

    On a GPU the products are added up in the tensor cores' precision, the scaling is in float32,
    and compute capability 8.9 or newer is required; on a CPU both are in float32.

    Args:
        input: [..., inputs], ``float8_e4m3fn``, with a descale for each row or one for all:
            :class:`RowsFp8`, or what :func:`quantize_fp8` returns for the whole tensor.
        weight: [outputs, inputs], likewise, as :func:`quantize_rows_fp8` makes it of
            ``torch.nn.Linear.weight``. Inputs and outputs must be multiples of 16.
        bias: [outputs], in ``out_dtype``.
        out_dtype: bfloat16; float16 too if both descales are one number.

    Returns:
        [..., outputs], contiguous.

    Raises:
        ValueError: sizes, devices or descales that do not fit; sizes that are not multiples of 16.
        TypeError: a tensor without descales; another dtype.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(3, 64), torch.randn(32, 64)
        >>> rows = cudnn_ops.quantize_rows_fp8(x), cudnn_ops.quantize_rows_fp8(weight)
        >>> out = cudnn_ops.linear_fp8(*rows)
        >>> (out - x @ weight.T).norm() < 0.06 * out.norm()
        tensor(True)
    """
    _check_linear(input, weight, bias, out_dtype)
    x, w = input.data, weight.data
    rows = x.reshape(-1, x.shape[-1])
    of_input, of_weight = input.descale.reshape(-1, 1), weight.descale.reshape(1, -1)
    if x.device.type == "cuda":
        if of_input.numel() == 1 and of_weight.numel() == 1:
            of_input, of_weight = of_input.reshape(()), of_weight.reshape(())
        else:
            of_input = of_input.expand(rows.shape[0], 1).contiguous()
            of_weight = of_weight.expand(1, w.shape[0]).contiguous()
        out = torch._scaled_mm(
            rows,
            w.t(),
            scale_a=of_input,
            scale_b=of_weight,
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=True,
        )
    else:
        product = (rows.float() @ w.float().t()) * of_input * of_weight
        out = (product if bias is None else product + bias.float()).to(out_dtype)
    return out.reshape(*x.shape[:-1], w.shape[0])


def _check_linear(
    input: RowsFp8 | QuantizedFp8,
    weight: RowsFp8 | QuantizedFp8,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    _check_rows(input, "input", input)
    _check_rows(weight, "weight", input)
    x, w = input.data, weight.data
    is_one_scale = input.descale.numel() == 1 and weight.descale.numel() == 1
    allowed = (torch.bfloat16, torch.float16) if is_one_scale else (torch.bfloat16,)
    if out_dtype not in allowed:
        raise TypeError(
            "cudnn_ops.linear_fp8: out_dtype must be bfloat16, or float16 where both descales are "
            f"one number; got {out_dtype}"
        )
    if w.dim() != 2 or x.shape[-1] != w.shape[1] or w.shape[0] % 16 or w.shape[1] % 16:
        raise ValueError(
            "cudnn_ops.linear_fp8: weight must be [outputs, inputs], multiples of 16, for an input "
            f"{tuple(x.shape)}; got {tuple(w.shape)}"
        )
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(
            f"cudnn_ops.linear_fp8: bias must be a tensor or None, got {type(bias).__name__}"
        )
    if bias.shape != w.shape[:1] or bias.dtype != out_dtype or bias.device != x.device:
        raise ValueError(
            f"cudnn_ops.linear_fp8: bias must be [{w.shape[0]}] in {out_dtype} on {x.device}; got "
            f"{tuple(bias.shape)} in {bias.dtype} on {bias.device}"
        )


def _check_rows(rows: RowsFp8 | QuantizedFp8, name: str, input: RowsFp8 | QuantizedFp8) -> None:
    if not isinstance(rows, RowsFp8 | QuantizedFp8):
        got = f"a tensor of {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(
            f"cudnn_ops.linear_fp8: {name} must be numbers of 8 bits with their descales, as "
            f"cudnn_ops.quantize_rows_fp8 makes them (RowsFp8); got {got}"
        )
    data, descale = rows.data, rows.descale
    if data.dtype != _E4M3:
        raise TypeError(
            f"cudnn_ops.linear_fp8: {name} must be float8_e4m3fn (cudnn_ops.quantize_rows_fp8 "
            f"makes it); got {data.dtype}"
        )
    if data.dim() == 0 or data.device != input.data.device:
        raise ValueError(
            f"cudnn_ops.linear_fp8: {name} must have a dimension, and be on {input.data.device} as "
            f"the input is; got {tuple(data.shape)} on {data.device}"
        )
    count = data.shape[:-1].numel()
    if (
        descale.dtype != torch.float32
        or descale.device != data.device
        or (descale.numel() != 1 and descale.numel() != count)
    ):
        raise ValueError(
            f"cudnn_ops.linear_fp8: the descale of {name} must be float32 on {data.device}, one "
            f"number or {count}, one for each row; got {descale.dtype} {tuple(descale.shape)} on "
            f"{descale.device}"
        )


_Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _rows_fp8_fake(*args: Any) -> _Results:
    _ops._rows_fp8_check.default(*args)
    call = bind(_rows_fp8_op, args, {})
    input = call.input
    sizes = 1 if call.scale is not None else (*input.shape[:-1], 1)
    descale, amax = (input.new_empty(sizes, dtype=torch.float32) for _ in range(2))
    has_sum = call.kind == _NORM and call.other is not None
    total = input.new_empty(input.shape if has_sum else 0)
    return input.new_empty(input.shape, dtype=call.dtype), descale, amax, total


def rows_fp8_in_torch(*args: Any) -> _Results:
    """The results of ``_rows_fp8`` by torch's operators."""
    call = bind(_rows_fp8_op, args, {})
    x, total = call.input, call.input.new_empty(0)
    if call.kind == _NORM:
        if call.other is not None:
            x = total = (x + call.other).contiguous()
        x, _ = rms_in_torch(wide(x), (-1,), call.weight, call.eps, call.zero_centered)
    elif call.kind != _PLAIN:
        # In float64: GELU of numbers far below 0 has no digits left in torch's float32.
        x = activate(x.double(), _ACTIVATIONS[call.kind]) * call.other.double()
    x = x.float().contiguous()
    if call.scale is not None:
        return *quantize_in_torch(x, call.scale, None, call.dtype), total
    sizes = (*x.shape[:-1], 1)
    amax = x.abs().amax(-1, keepdim=True) if x.shape[-1] > 0 else x.new_zeros(sizes)
    scale = scale_of(amax, call.dtype)
    return round_to_fp8(x * scale, call.dtype), scale.reciprocal(), amax, total


def _rows_fp8_cpu(*args: Any) -> _Results:
    _ops._rows_fp8_check.default(*args)
    return rows_fp8_in_torch(*args)


register("_rows_fp8", fake=_rows_fp8_fake, cpu=_rows_fp8_cpu)
