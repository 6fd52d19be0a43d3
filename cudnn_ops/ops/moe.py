"""Mixture of experts: public functions, fake and CPU kernels.

The CUDA kernels are in ``csrc/kernels/moe*``, the derivatives and the autocast rule in
``csrc/ops/moe``. Which experts a token goes to is chosen in ``moe_routing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_ops.ops.activation import Activation, wide
from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.gated import GATED
from cudnn_ops.ops.kernels import register

_ops = torch.ops.cudnn_ops
#: To look up an overload takes a tenth of a microsecond.
_moe_permute_op = _ops.moe_permute.default
_moe_combine_op = _ops.moe_combine.default
_grouped_linear_op = _ops.grouped_linear.default


def moe_permute(
    input: Tensor, expert_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Copies tokens to the rows of their experts: all rows of an expert lie one behind the other.

    Within an expert, rows are in the order of ``expert_indices``. They are sorted by counting, in
    one or two kernels of this package, and copied by another one: nothing waits for the GPU, and
    results are the same in every run. Differentiable in the input, any number of times; the
    gradient of a token is the sum of those of its rows, added in float32.

    Args:
        input: [T, D] with any strides, float16, bfloat16 or float32; on a CPU also float64.
        expert_indices: [T, k], the experts of each token: int32 or int64, from 0 to
            ``num_experts - 1``, or -1 for none, of which nothing is computed (a token of another
            process's experts, padding). On a GPU they are checked only with
            ``CUDNN_OPS_CHECK=1``, which waits for the GPU; there every other number stands for
            none, too.
        num_experts: E, at most 2048.

    Returns:
        The rows [T * k, D], in the input's dtype, contiguous, behind those of the last expert
        zeros, one for each -1; where the rows of each expert end, int32 [E], as
        :func:`grouped_linear` reads it; and where the rows of each token are, int32 [T, k], as
        :func:`moe_combine` reads it: a row that no expert computes is numbered ``-1 - row``.

    Raises:
        ValueError: shapes or devices that do not fit; experts that there are not; more than 2048
            experts.
        TypeError: unsupported dtypes.

    Example:
        >>> import torch, cudnn_ops
        >>> tokens, experts = torch.arange(3.0)[:, None], torch.tensor([[1], [0], [1]])
        >>> rows, offsets, positions = cudnn_ops.moe_permute(tokens, experts, 2)
        >>> rows.flatten().tolist(), offsets.tolist(), positions.flatten().tolist()
        ([1.0, 0.0, 2.0], [1, 3], [1, 0, 2])
    """
    try:
        return _moe_permute_op(input, expert_indices, num_experts)
    except RuntimeError:
        refuse_wrong_types(_moe_permute_op, locals())
        raise


def moe_combine(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The weighted sum of each token's rows.

    .. math::
        \mathrm{out}_t = \sum_j w_{tj} \, \mathrm{rows}_{p_{tj}}

    Computed in float32 in the order of j, with one kernel in each direction: the backward gives the
    gradients of the rows and of the weights in one pass. Differentiable once.

    Args:
        rows: [T * k, D] with any strides, float16, bfloat16 or float32; on a CPU also float64.
        positions: [T, k], int32: those that :func:`moe_permute` returned. A negative one adds
            nothing, and its row is not read.
        weights: [T, k], in the dtype of the rows or in float32; None stands for 1.

    Returns:
        [T, D] in the dtype of the rows, contiguous.

    Raises:
        ValueError: shapes or devices that do not fit; positions that there are not (on a GPU
            checked only with ``CUDNN_OPS_CHECK=1``).
        TypeError: unsupported dtypes.

    Example:
        >>> import torch, cudnn_ops
        >>> rows, positions = torch.tensor([[1.0], [10.0]]), torch.tensor([[1, 0]]).int()
        >>> cudnn_ops.moe_combine(rows, positions, torch.tensor([[0.5, 2.0]]))
        tensor([[7.]])
    """
    try:
        return _moe_combine_op(rows, positions, weights)
    except RuntimeError:
        refuse_wrong_types(_moe_combine_op, locals())
        raise


def grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    r"""A linear layer for each group of rows, ``input[group] @ weight[group].T``.

    On a GPU, in bfloat16, it is torch's grouped product (``torch.nn.functional.grouped_mm``), also
    for both gradients, if inputs and outputs are multiples of 8, tensors start at multiples of 16
    bytes and there are less than 1024 groups: nothing waits for the GPU where torch has a kernel
    (compute capability 9.0 and 10.0 at least). Everything else is a product for each group, for
    which the host waits for the offsets: float16 and float32, of which torch has no grouped
    kernels, and odd sizes; in a CUDA graph these are refused. Autocast converts to its lower
    precision, as for torch's products. Differentiable once.

    Args:
        input: [R, K] with any strides, float16, bfloat16 or float32; on a CPU also float64.
        weight: [G, N, K] in the input's dtype.
        offsets: [G], int32, where the rows of each group end, rising, at most R: the offsets of
            :func:`moe_permute`. On a GPU they are checked only with ``CUDNN_OPS_CHECK=1``.

    Returns:
        [R, N], contiguous. Rows behind the last group belong to none: they are zeros on a CPU, and
        on a GPU have any content, as their gradients; :func:`moe_combine` does not read them.

    Raises:
        ValueError: shapes or devices that do not fit; offsets that do not rise.
        TypeError: an unsupported dtype, or several.
        NotImplementedError: a CUDA graph of a call for which the host has to wait.

    Example:
        >>> import torch, cudnn_ops
        >>> x, weight = torch.randn(5, 8), torch.randn(2, 16, 8)
        >>> out = cudnn_ops.grouped_linear(x, weight, torch.tensor([2, 5]).int())
        >>> torch.allclose(out[:2], x[:2] @ weight[0].T, atol=1e-5)
        True
    """
    try:
        return _grouped_linear_op(input, weight, offsets)
    except RuntimeError:
        refuse_wrong_types(_grouped_linear_op, locals())
        raise


def moe_experts(
    input: Tensor,
    expert_indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "silu",
) -> Tensor:
    r"""Gated MLPs of a mixture of experts, for tokens whose experts are chosen.

    .. math::
        \mathrm{out}_t = \sum_j w_{tj} \, D_{e} (\mathrm{act}(G_{e} x_t) \cdot U_{e} x_t), \quad
        e = e_{tj}

    It is :func:`moe_permute`, :func:`grouped_linear` to gate and up, :func:`swiglu`,
    :func:`grouped_linear` and :func:`moe_combine`. Differentiable once.

    Args:
        input: [T, D].
        expert_indices: [T, k], as for :func:`moe_permute`: of :func:`moe_route`, say.
        weights: [T, k], in the input's dtype or in float32.
        gate_up: [E, 2 * H, D], of each expert first the gate, then up, as in transformers.
        down: [E, D, H].
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.

    Returns:
        [T, D], contiguous; under autocast in its lower precision.

    Raises:
        ValueError: as those; an unknown activation; a ``gate_up`` that has no two halves, or other
            experts than ``down``.
        TypeError: as those, and so is NotImplementedError.

    Example:
        >>> import torch, cudnn_ops
        >>> x, logits = torch.randn(10, 16), torch.randn(10, 4)
        >>> weights, experts = cudnn_ops.moe_route(logits, 2)
        >>> gate_up, down = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
        >>> cudnn_ops.moe_experts(x, experts, weights, gate_up, down).shape
        torch.Size([10, 16])
    """
    if activation not in GATED:
        raise ValueError(
            f"cudnn_ops.moe_experts: activation must be one of {', '.join(GATED)}, got "
            f"{activation!r}"
        )
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape[0] == down.shape[0]
    if not fits or gate_up.shape[1] != 2 * down.shape[2]:
        raise ValueError(
            "cudnn_ops.moe_experts: gate_up must be [experts, 2 * hidden, D] and down [experts, D, "
            f"hidden]; got {list(gate_up.shape)} and {list(down.shape)}"
        )
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # before there are k rows of each token
        input = input.to(torch.get_autocast_dtype(kind))
    rows, offsets, positions = moe_permute(input, expert_indices, gate_up.shape[0])
    gate, up = grouped_linear(rows, gate_up, offsets).chunk(2, -1)
    out = grouped_linear(GATED[activation](gate, up), down, offsets)
    return moe_combine(out, positions, weights)


def _moe_permute_fake(
    input: Tensor, expert_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    _ops._moe_permute_check.default(input, expert_indices, num_experts)
    tokens, count = expert_indices.shape
    return (
        input.new_empty((tokens * count, input.shape[1])),
        input.new_empty((num_experts,), dtype=torch.int32),
        input.new_empty((tokens, count), dtype=torch.int32),
    )


def moe_permute_in_torch(
    input: Tensor, expert_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``_moe_permute`` by torch's operators."""
    experts = expert_indices.flatten()
    has_expert = (experts >= 0) & (experts < num_experts)
    groups = torch.where(has_expert, experts, num_experts)
    places = torch.arange(groups.shape[0], device=input.device)
    # No two are equal: ONNX has no stable sort.
    order = (groups.long() * groups.shape[0] + places).sort().indices
    numbers = torch.arange(num_experts, device=input.device)
    counts = (groups.unsqueeze(1) == numbers).sum(0)
    positions = torch.zeros_like(places).scatter(0, order, places)
    rows = input[order // expert_indices.shape[1]] if expert_indices.shape[1] else input[order]
    rows = torch.where(has_expert[order].unsqueeze(1), rows, 0)
    positions = torch.where(has_expert, positions, -1 - positions)
    return (
        rows.to(input.dtype),
        counts.cumsum(0).to(torch.int32),
        positions.to(torch.int32).reshape(expert_indices.shape),
    )


def _moe_permute_cpu(
    input: Tensor, expert_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    _ops._moe_permute_check.default(input, expert_indices, num_experts)
    return moe_permute_in_torch(input, expert_indices, num_experts)


def _moe_combine_fake(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    _ops._moe_combine_check.default(rows, positions, weights)
    return rows.new_empty((positions.shape[0], rows.shape[1]))


def moe_combine_in_torch(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """The result of ``_moe_combine`` by torch's operators."""
    is_there = (positions >= 0).unsqueeze(2)
    values = wide(rows)[positions.clamp(min=0).flatten().long()].unflatten(0, positions.shape)
    if weights is not None:
        values = values * weights.to(values.dtype).unsqueeze(2)
    return torch.where(is_there, values, 0).sum(1).to(rows.dtype)


def _moe_combine_cpu(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    _ops._moe_combine_check.default(rows, positions, weights)
    if rows.shape[0] == 0:  # of which there is none to look up
        return rows.new_zeros((positions.shape[0], rows.shape[1]))
    return moe_combine_in_torch(rows, positions, weights)


def _moe_combine_backward_fake(
    grad_out: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    weights: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    _ops._moe_combine_backward_check.default(grad_out, rows, positions, weights, output_mask)
    of_rows = (positions.shape[0] * positions.shape[1], grad_out.shape[1])
    of_weights = tuple(positions.shape)
    dtype = torch.float32 if weights is None else weights.dtype
    return (
        grad_out.new_empty(of_rows if output_mask[0] else 0),
        grad_out.new_empty(of_weights if output_mask[1] else 0, dtype=dtype),
    )


def _moe_combine_backward_cpu(
    grad_out: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    weights: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    grad_rows, grad_weights = _moe_combine_backward_fake(
        grad_out, rows, positions, weights, output_mask
    )
    is_there = positions >= 0
    places = torch.where(is_there, positions, -1 - positions).long()
    grads = wide(grad_out).unsqueeze(1)
    if output_mask[0]:
        factor = is_there if weights is None else weights.masked_fill(~is_there, 0)
        values = (factor.to(grads.dtype).unsqueeze(2) * grads).masked_fill(~is_there[..., None], 0)
        grad_rows.zero_()[places.flatten()] = values.flatten(0, 1).to(grad_rows.dtype)
    if output_mask[1] and rows is not None:
        products = (wide(rows)[places.flatten()].unflatten(0, positions.shape) * grads).sum(2)
        grad_weights.copy_(products.masked_fill(~is_there, 0))
    return grad_rows, grad_weights


def _grouped_linear_fake(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    _ops._grouped_linear_check.default(input, weight, offsets)
    return input.new_empty((input.shape[0], weight.shape[1]))


def grouped_linear_in_torch(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The result of ``_grouped_linear`` by torch's operators, without a look at the offsets.

    Every group's product is computed of all rows, for runtimes without a product of groups.
    """
    place = torch.arange(input.shape[0], device=input.device).unsqueeze(1)
    out = input.new_zeros((input.shape[0], weight.shape[1]))
    for group in range(weight.shape[0]):
        start = offsets[group - 1] if group else 0
        is_of_group = (place >= start) & (place < offsets[group])
        out = torch.where(is_of_group, input @ weight[group].t(), out)
    return out


def _parts(offsets: Tensor) -> list[tuple[int, slice]]:
    """The groups that have rows, and which."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    pairs = enumerate(zip(starts, ends, strict=True))
    return [(group, slice(start, end)) for group, (start, end) in pairs if start < end]


def _grouped_linear_cpu(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = _grouped_linear_fake(input, weight, offsets).zero_()
    for group, rows in _parts(offsets):
        out[rows] = wide(input[rows]) @ wide(weight[group]).t()
    return out


def _grouped_linear_backward_fake(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    _ops._grouped_linear_backward_check.default(grad_out, input, weight, offsets, output_mask)
    return (
        input.new_empty(input.shape if output_mask[0] else 0),
        input.new_empty(weight.shape if output_mask[1] else 0),
    )


def _grouped_linear_backward_cpu(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    results = _grouped_linear_backward_fake(grad_out, input, weight, offsets, output_mask)
    grad_input, grad_weight = (result.zero_() for result in results)
    for group, rows in _parts(offsets):
        grad = wide(grad_out[rows])
        if output_mask[0]:
            grad_input[rows] = (grad @ wide(weight[group])).to(input.dtype)
        if output_mask[1]:
            grad_weight[group] = (grad.t() @ wide(input[rows])).to(input.dtype)
    return grad_input, grad_weight


register("_moe_permute", fake=_moe_permute_fake, cpu=_moe_permute_cpu)
register("_moe_combine", fake=_moe_combine_fake, cpu=_moe_combine_cpu)
register("_moe_combine_backward", fake=_moe_combine_backward_fake, cpu=_moe_combine_backward_cpu)
register("_grouped_linear", fake=_grouped_linear_fake, cpu=_grouped_linear_cpu)
register(
    "_grouped_linear_backward",
    fake=_grouped_linear_backward_fake,
    cpu=_grouped_linear_backward_cpu,
)
