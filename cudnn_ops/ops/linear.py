"""Linear layers with their epilogues: public functions, fake and CPU kernels.

The CUDA kernels, the derivative and the autocast rule are in ``csrc/ops/linear``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cudnn_ops.ops.activation import (
    ACTIVATIONS,
    SLOPE,
    Activation,
    activate,
    before_activation,
    needs_before,
    slope,
    wide,
)
from cudnn_ops.ops.arguments import bind, refuse_wrong_types
from cudnn_ops.ops.call import fast
from cudnn_ops.ops.kernels import register

#: What a linear layer is made of, and by what: csrc/ops/linear/linear_choice.h says more.
LINEAR_STEPS = ("inference", "training", "hidden_gradient", "weight_gradient", "training_slope")
LINEAR_ENGINES = ("ours", "epilogue", "epilogue_sum", "graph")
#: What ``_mlp`` keeps for its backward: ``Keep`` in csrc/ops/linear/linear.h.
KEEP_NOTHING, KEEP_INPUT, KEEP_SLOPE = range(3)

_ops = torch.ops.cudnn_ops
_linear = fast(_ops.linear.default)
_mlp = fast(_ops.mlp.default)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    r"""A linear layer with what follows it.

    .. math::
        \mathrm{out} = \mathrm{act}(x W^\top + b) + r

    Replaces ``torch.nn.functional.linear`` by name. On a GPU all that follows the product is one
    kernel over its result, the epilogue of cuBLASLt's product, or one graph of cuDNN with the
    product, whichever was measured to be the fastest. The gradient through the activation and its
    sum for the bias are one kernel. Differentiable once.

    Args:
        input: [..., K] with any leading dimensions and strides: float16, bfloat16, float32 (in
            TF32 if ``torch.backends.cuda.matmul`` says so) or float64.
        weight: [N, K], in the input's dtype.
        bias: [N], in the input's dtype.
        activation: one of :data:`cudnn_ops.ops.activation.ACTIVATIONS`; ``"gelu_tanh"`` is GELU's
            tanh approximation.
        residual: of the output's shape and dtype, added after the activation.

    Returns:
        [..., N], contiguous.

    Raises:
        ValueError: shapes or devices that do not fit; an unknown activation.
        TypeError: an unsupported dtype, or several.
        NotImplementedError: the GPU is older than the A100.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight, bias = torch.randn(2, 10, 64), torch.randn(256, 64), torch.randn(256)
        >>> cudnn_ops.linear(x, weight, bias, activation="gelu").shape
        torch.Size([2, 10, 256])
    """
    try:
        return _linear(input, weight, bias, activation, residual)
    except RuntimeError:
        refuse_wrong_types(_ops.linear.default, locals())
        raise


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: Activation = "gelu",
    *,
    gated: bool = False,
) -> Tensor:
    r"""Two linear layers around an activation.

    .. math::
        \mathrm{out} = \mathrm{act}(x W_1^\top + b_1) W_2^\top + b_2

    With ``gated`` the first layer gives a gate and what it is multiplied with, and
    :math:`\mathrm{act}(\mathrm{gate}) \cdot \mathrm{up}` takes the activation's place (SwiGLU and
    GEGLU: Shazeer, "GLU variants improve transformer", equation 6). On a GPU the backward computes
    the gradient of the hidden layer through the activation, and its sum for ``b1``, in the product
    that it comes from or in one pass behind that, whichever was measured to be faster.
    Differentiable once.

    Args:
        x: [..., K], as the input of :func:`linear`.
        w1: [H, K], in the dtype of ``x``; if ``gated``, [2 H, K]: the rows of the gate, then those
            of what it is multiplied with.
        b1: with an element for each row of ``w1``, or None.
        w2: [N, H].
        b2: [N], or None.
        activation: as in :func:`linear`; if ``gated``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        gated: see above.

    Returns:
        [..., N], contiguous.

    Raises:
        ValueError: as :func:`linear`, and so are TypeError and NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, w1, w2 = torch.randn(2, 10, 64), torch.randn(256, 64), torch.randn(64, 256)
        >>> cudnn_ops.mlp(x, w1, None, w2, None, "gelu_tanh").shape
        torch.Size([2, 10, 64])
    """
    try:
        return _mlp(x, w1, b1, w2, b2, activation, gated)
    except RuntimeError:
        refuse_wrong_types(_ops.mlp.default, locals())
        raise


def _rows(input: Tensor, columns: int) -> Tensor:
    """Of the input's leading dimensions, with nothing in it."""
    return input.new_empty((*input.shape[:-1], columns))


def _linear_fake(*args: Any) -> tuple[Tensor, Tensor]:
    _ops._linear_check.default(*args[:-1])
    call = bind(_ops._linear.default, args, {})
    out = _rows(call.input, call.weight.shape[0])
    return out, out.new_empty(out.shape if keeps_before(call) else 0)


def is_by_before(activation: Activation, has_residual: bool) -> bool:
    """Whether a layer's derivative is computed from what its activation is of.

    Of a ReLU the result says enough, unless something is added to it.
    """
    return needs_before(activation) or (activation == "relu" and has_residual)


def keeps_before(call: SimpleNamespace) -> bool:
    """Whether ``_linear`` gives what the activation is of."""
    by_before = is_by_before(ACTIVATIONS[call.activation], call.residual is not None)
    return call.with_before and by_before


def _linear_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._linear_backward_check.default(*args[:-1])
    call = bind(_ops._linear_backward.default, args, {})
    weight = call.weight
    shapes = (call.input.shape, weight.shape, weight.shape[:1])
    of_input, of_weight, of_bias = _wanted(call.input, shapes, call.output_mask)
    return of_input, of_weight, of_bias


def _wanted(like: Tensor, shapes: Any, mask: Any) -> list[Tensor]:
    """A tensor of each shape; an empty one where it is not asked for."""
    return [like.new_empty(s if wanted else 0) for s, wanted in zip(shapes, mask, strict=True)]


def linear_in_torch(call: SimpleNamespace, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The results of ``_linear`` by torch's operators, computed in ``dtype``."""
    bias = None if call.bias is None else call.bias.to(dtype)
    before = F.linear(call.input.to(dtype), call.weight.to(dtype), bias)
    out = activate(before, ACTIVATIONS[call.activation])
    if call.residual is not None:
        out = out + call.residual
    kept = call.input.dtype
    # What nothing is done to would be one tensor twice.
    before = before.to(kept) if keeps_before(call) else call.input.new_empty(0)
    return out.to(kept).contiguous(), before.contiguous()


def _linear_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    _ops._linear_check.default(*args[:-1])
    call = bind(_ops._linear.default, args, {})
    return linear_in_torch(call, torch.promote_types(call.input.dtype, torch.float32))


def _linear_backward_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = _linear_backward_fake(*args)
    call = bind(_ops._linear_backward.default, args, {})
    kept = None if call.saved is None else wide(call.saved)
    grad = before_activation(wide(call.grad_out), kept, ACTIVATIONS[call.activation])
    _fill_gradients(results, call.output_mask, grad, call.input, call.weight)
    return results


def _fill_gradients(
    results: Any, mask: Any, grad: Tensor, input: Tensor, weight: Tensor | None
) -> None:
    """Writes those of a layer's input, weight and bias, from that of its result."""
    rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
    inputs = input.reshape(rows.shape[0], input.shape[-1])
    if mask[0] and weight is not None:
        results[0].copy_(grad @ wide(weight))
    if mask[1]:
        results[1].copy_(rows.t() @ wide(inputs))
    if mask[2]:
        results[2].copy_(rows.sum(0))


def _mlp_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._mlp_check.default(*args)
    call = bind(_ops._mlp.default, args, {})
    out = _rows(call.input, call.weight2.shape[0])
    hidden = _rows(call.input, call.weight2.shape[1])
    before = _rows(call.input, call.weight1.shape[0])
    return (
        out,
        hidden if call.keep else out.new_empty(0),
        before if call.keep and mlp_needs_before(call) else out.new_empty(0),
    )


def mlp_needs_before(call: SimpleNamespace) -> bool:
    """Whether the backward of ``_mlp`` needs what the activation is of, beside its result."""
    return call.gated or needs_before(ACTIVATIONS[call.activation])


def _mlp_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _ops._mlp_backward_check.default(*args[:-1])
    call = bind(_ops._mlp_backward.default, args, {})
    first, second = call.weight1.shape, call.weight2.shape
    shapes = (call.input.shape, first, first[:1], second, second[:1])
    return tuple(_wanted(call.input, shapes, call.output_mask))


def mlp_in_torch(call: SimpleNamespace, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``_mlp`` by torch's operators, computed in ``dtype``.

    The hidden layer is rounded, as the operator's.
    """

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    kept, name = call.input.dtype, ACTIVATIONS[call.activation]
    before = layer(call.input.to(dtype), call.weight1, call.bias1)
    if call.gated:
        before = before.to(kept).to(dtype)
        gate, up = before.chunk(2, -1)
        hidden = activate(gate, name) * up
    else:
        hidden = activate(before, name)
    hidden = hidden.to(kept).contiguous()
    out = layer(hidden.to(dtype), call.weight2, call.bias2).to(kept)
    if call.keep == KEEP_SLOPE and not call.gated:
        before = slope(before, name)
    nothing = call.input.new_empty(0)
    return (
        out.contiguous(),
        hidden if call.keep else nothing,
        before.to(kept) if call.keep and mlp_needs_before(call) else nothing.clone(),
    )


def _mlp_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops._mlp_check.default(*args)
    call = bind(_ops._mlp.default, args, {})
    return mlp_in_torch(call, torch.promote_types(call.input.dtype, torch.float32))


def _mlp_backward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _mlp_backward_fake(*args)
    call = bind(_ops._mlp_backward.default, args, {})
    mask, grad = call.output_mask, wide(call.grad_out)
    _fill_gradients((None, *results[3:]), (False, *mask[3:]), grad, call.hidden, None)
    grad = grad @ wide(call.weight2)
    if call.activation == SLOPE:
        grad = grad * wide(call.before)
    elif call.gated:
        name = ACTIVATIONS[call.activation]
        gate, up = wide(call.before).chunk(2, -1)
        halves = before_activation(grad * up, gate, name), grad * activate(gate, name)
        grad = torch.cat(halves, -1)
    else:
        saved = call.hidden if call.before is None else call.before
        grad = before_activation(grad, wide(saved), ACTIVATIONS[call.activation])
    _fill_gradients(results[:3], mask[:3], grad, call.input, call.weight1)
    return results


register("_linear", fake=_linear_fake, cpu=_linear_cpu)
register("_linear_backward", fake=_linear_backward_fake, cpu=_linear_backward_cpu)
register("_mlp", fake=_mlp_fake, cpu=_mlp_cpu)
register("_mlp_backward", fake=_mlp_backward_fake, cpu=_mlp_backward_cpu)
