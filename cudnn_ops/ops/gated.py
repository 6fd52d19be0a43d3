"""Gated activations: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/gated*``, the derivative in ``csrc/ops/gated.cpp``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops.arguments import refuse_wrong_types

_ops = torch.ops.cudnn_ops


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""SwiGLU, :math:`\mathrm{gate} \cdot \sigma(\mathrm{gate}) \cdot \mathrm{up}`.

    (Shazeer, "GLU variants improve transformer", equation 6.) Computed in float32, with one kernel
    in each direction. Differentiable once.

    Args:
        gate: any shape and strides, float16, bfloat16 or float32; on a CPU also float64. Strided
            rows, such as the halves of one projection, are read without a copy.
        up: of the gate's shape, dtype and device.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ValueError: different shapes or devices.
        TypeError: an unsupported dtype, or different dtypes.

    Example:
        >>> import torch, cudnn_ops
        >>> gate, up = torch.randn(4, 256).chunk(2, dim=-1)  # halves of one projection
        >>> cudnn_ops.swiglu(gate, up).shape
        torch.Size([4, 128])
    """
    try:
        return _ops.swiglu.default(gate, up)
    except RuntimeError:
        refuse_wrong_types(_ops.swiglu.default, gate, up)
        raise


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    r"""GEGLU, :math:`\mathrm{gelu}(\mathrm{gate}) \cdot \mathrm{up}`.

    (Shazeer, "GLU variants improve transformer", equation 6.)

    Args:
        gate: as in :func:`swiglu`.
        up: as there.
        approximate: ``"tanh"`` for GELU's tanh approximation, as in ``torch.nn.functional.gelu``.

    Returns:
        As :func:`swiglu`.

    Raises:
        ValueError: as :func:`swiglu`, and so is TypeError; another ``approximate``.

    Example:
        >>> import torch, cudnn_ops
        >>> gate, up = torch.randn(4, 128), torch.randn(4, 128)
        >>> out = cudnn_ops.geglu(gate, up, approximate="tanh")
        >>> expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        >>> torch.allclose(out, expected, atol=1e-6)
        True
    """
    try:
        return _ops.geglu.default(gate, up, approximate=approximate)
    except RuntimeError:
        refuse_wrong_types(_ops.geglu.default, gate, up, approximate)
        raise


def _gated_fake(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    _ops._gated_check.default(gate, up, activation)
    return gate.new_empty(gate.shape)


def _gated_backward_fake(
    grad_out: Tensor, gate: Tensor, up: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    _ops._gated_backward_check.default(grad_out, gate, up, activation)
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _activate(gate: Tensor, activation: int) -> Tensor:
    if activation == 0:
        return F.silu(gate)
    return F.gelu(gate, approximate="none" if activation == 1 else "tanh")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _gated_cpu(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    out = _gated_fake(gate, up, activation)
    return out.copy_(_activate(_wide(gate), activation) * _wide(up))


def _gated_backward_cpu(
    grad_out: Tensor, gate: Tensor, up: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    results = _gated_backward_fake(grad_out, gate, up, activation)
    x, grad = _wide(gate), _wide(grad_out)
    of_activation = grad * _wide(up)
    if activation == 0:
        of_gate = torch.ops.aten.silu_backward(of_activation, x)
    else:
        approximate = "none" if activation == 1 else "tanh"
        of_gate = torch.ops.aten.gelu_backward(of_activation, x, approximate=approximate)
    results[0].copy_(of_gate)
    results[1].copy_(grad * _activate(x, activation))
    return results


torch.library.register_fake("cudnn_ops::_gated", _gated_fake)
torch.library.register_fake("cudnn_ops::_gated_backward", _gated_backward_fake)
torch.library.impl("cudnn_ops::_gated", "CPU", _gated_cpu)
torch.library.impl("cudnn_ops::_gated_backward", "CPU", _gated_backward_cpu)
