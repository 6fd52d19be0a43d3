"""Instance norm: a group norm with a group for each channel (csrc/ops/group_norm)."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import refuse_wrong_types
from cudnn_ops.ops.group_norm import NormActivation

_instance_norm_op = torch.ops.cudnn_ops.instance_norm.default


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: NormActivation = "none",
) -> Tensor:
    """Instance norm, with an activation; replaces ``torch.nn.functional.instance_norm`` by name.

    Each channel of each sample is normed over its positions, by the formula of :func:`group_norm`
    with a group for each channel (Ulyanov, Vedaldi and Lempitsky, "Instance normalization"). The
    running statistics, where they are given, change in place: they take over ``momentum`` of the
    mean over the batch of the instances' means and unbiased variances.

    Args:
        input: ``[N, C, ...]``, as in :func:`group_norm`.
        running_mean: ``[C]``; None: not kept.
        running_var: likewise, both or neither.
        weight: ``[C]``, in the input's dtype or float32; None stands for ones.
        bias: likewise; None stands for zeros.
        use_input_stats: False norms by the running statistics, as :func:`batch_norm` does.
        momentum: how much of the instances' statistics the running ones take over.
        eps: added to the variance.
        activation: ``"silu"`` or ``"none"``.

    Returns:
        A tensor of the input's shape, dtype and memory order.

    Raises:
        ValueError: shapes, devices or an activation that do not fit; one position, as in torch; no
            running statistics where ``use_input_stats`` is False.
        TypeError: an unsupported dtype; an argument of a wrong type.
        NotImplementedError: the GPU is older than the A100.

    Example:
        >>> import torch, cudnn_ops
        >>> x = torch.randn(2, 16, 8, 8)
        >>> out = cudnn_ops.instance_norm(x, activation="silu")
        >>> expected = torch.nn.functional.silu(torch.nn.functional.instance_norm(x))
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    try:
        return _instance_norm_op(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            use_input_stats,
            momentum,
            eps,
            activation=activation,
        )
    except RuntimeError:
        refuse_wrong_types(_instance_norm_op, locals())
        raise
