"""Gated activations: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/gated*``, the derivative in ``csrc/ops/gated.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from cudnn_ops.ops.activation import Activation, activate, before_activation, wide
from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
_swiglu = fast(_ops.swiglu.default)
_geglu = fast(_ops.geglu.default)

#: In the order in which C++ counts them.
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")


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
        return _swiglu(gate, up)
    except RuntimeError:
        refuse_wrong_types(_ops.swiglu.default, locals())
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
        return _geglu(gate, up, approximate=approximate)
    except RuntimeError:
        refuse_wrong_types(_ops.geglu.default, locals())
        raise


#: By the name of the activation.
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
}


def _gated_fake(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    _ops._gated_check.default(gate, up, activation)
    return gate.new_empty(gate.shape)


def _gated_backward_fake(
    grad_out: Tensor, gate: Tensor, up: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    _ops._gated_backward_check.default(grad_out, gate, up, activation)
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def gated_in_torch(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """The result of ``_gated`` by torch's operators."""
    product = activate(wide(gate), _ACTIVATIONS[activation]) * wide(up)
    return product.to(gate.dtype).contiguous()


def _gated_cpu(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    _ops._gated_check.default(gate, up, activation)
    return gated_in_torch(gate, up, activation)


def _gated_in_place_cpu(gate: Tensor, up: Tensor, activation: int) -> None:
    gate.copy_(_gated_cpu(gate, up, activation))


def _gated_backward_cpu(
    grad_out: Tensor, gate: Tensor, up: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = _gated_backward_fake(grad_out, gate, up, activation)
    x, grad, name = wide(gate), wide(grad_out), _ACTIVATIONS[activation]
    grad_gate.copy_(before_activation(grad * wide(up), x, name))
    return grad_gate, grad_up.copy_(grad * activate(x, name))


register("_gated", fake=_gated_fake, cpu=_gated_cpu)
register("_gated_", fake=_ops._gated_check.default, cpu=_gated_in_place_cpu)
register("_gated_backward", fake=_gated_backward_fake, cpu=_gated_backward_cpu)
