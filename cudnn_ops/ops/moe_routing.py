"""Which experts each token of a mixture goes to, and with what weights, in torch's operators.

They are small: of each token a number for each expert. Under ``torch.compile`` they are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from cudnn_ops.ops.activation import wide

Score = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SCORES: tuple[Score, ...] = get_args(Score)
#: Added to the sum that weights are divided by, as DeepSeek does; it shows only where all are 0.
_LEAST_SUM = 1e-20


def check_routing(
    owner: str, num_experts: int, top_k: int, score: str, num_groups: int, top_groups: int
) -> None:
    """Raises ValueError, in the name of ``owner``, for a choice that cannot be made."""
    if score not in SCORES:
        raise ValueError(f"{owner}: score must be one of {', '.join(SCORES)}, got {score!r}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"{owner}: top_k must be 1 to the number of experts, {num_experts}; got {top_k}"
        )
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"{owner}: num_groups must divide the {num_experts} experts, got {num_groups}"
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"{owner}: top_groups must be 1 to num_groups, {num_groups}; got {top_groups}"
        )
    if top_k > top_groups * (num_experts // num_groups):
        raise ValueError(
            f"{owner}: {top_groups} of {num_groups} groups have "
            f"{top_groups * (num_experts // num_groups)} experts, and top_k is {top_k}"
        )


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> tuple[Tensor, Tensor]:
    r"""Chooses the experts of each token, and their weights.

    Scores are computed in float32. Those of the ``top_k`` best experts, without the bias by which
    they are chosen, are the weights; divided by their sum with ``normalize``; times ``scale``.

    =====================  =====================================================================
    models                 arguments
    =====================  =====================================================================
    Mixtral                ``top_k=2``
    Qwen2-MoE, OLMoE       ``normalize=config.norm_topk_prob``
    gpt-oss                ``score="softmax_of_chosen"``
    DeepSeek-V2            ``normalize=False, scale=…, num_groups=…, top_groups=…, group_best=1``
    DeepSeek-V3, GLM-4.5   ``score="sigmoid", scale=…, correction_bias=…, num_groups=…,
                           top_groups=…``
    =====================  =====================================================================

    Args:
        logits: [..., E], the router's results.
        top_k: k, how many experts a token has.
        score: ``"softmax"`` over all experts; ``"softmax_of_chosen"``, over the experts that have
            the highest logits; or ``"sigmoid"``.
        normalize: divide the weights of a token by their sum.
        scale: what weights are multiplied by at the end.
        correction_bias: [E], added to the scores for the choice alone (Wang et al.,
            "Auxiliary-loss-free load balancing").
        num_groups: of the experts, in their order, as many in each.
        top_groups: experts are chosen from the best so many groups.
        group_best: what a group is judged by: the sum of its so many best scores.

    Returns:
        The weights, [..., k], float32 (float64 of such logits); and the experts, [..., k], int64,
        the one with the highest score first. Weights are differentiable.

    Raises:
        ValueError: numbers that do not fit; a bias of another shape; an unknown score.

    Example:
        >>> import torch, cudnn_ops
        >>> weights, experts = cudnn_ops.moe_route(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        >>> experts.tolist(), round(weights.sum().item(), 4)
        ([[1, 2]], 1.0)
    """
    num_experts = logits.shape[-1]
    check_routing("cudnn_ops.moe_route", num_experts, top_k, score, num_groups, top_groups)
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(
            f"cudnn_ops.moe_route: correction_bias must be [{num_experts}], got "
            f"{list(correction_bias.shape)}"
        )
    scores = wide(logits)
    if score == "softmax":
        scores = scores.softmax(-1)
    elif score == "sigmoid":
        scores = scores.sigmoid()
    choice = scores.detach()
    if correction_bias is not None:
        choice = choice + correction_bias
    if top_groups < num_groups:
        choice = _in_best_groups(choice, num_groups, top_groups, group_best)
    experts = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, experts)
    if score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return (weights if scale == 1.0 else weights * scale), experts


def _in_best_groups(choice: Tensor, num_groups: int, top_groups: int, group_best: int) -> Tensor:
    """Minus infinity for the experts of the other groups."""
    grouped = choice.unflatten(-1, (num_groups, -1))
    size = grouped.shape[-1]
    if not 1 <= group_best <= size:
        raise ValueError(
            f"cudnn_ops.moe_route: group_best must be 1 to {size}, the experts of a group; got "
            f"{group_best}"
        )
    best = grouped.topk(group_best, -1).values.sum(-1).topk(top_groups, -1).indices
    is_best = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(-2)


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor], top_k: int, mask: Tensor | None = None
) -> Tensor:
    r"""The auxiliary loss that is least where all experts have as many tokens.

    .. math::
        L = E \sum_e f_e P_e

    where :math:`f_e` is the number of tokens that choose expert e, over the number of tokens, and
    :math:`P_e` the mean of its probability (Fedus et al., "Switch Transformers", equations 4 to 6).
    It is ``load_balancing_loss_func`` of transformers.

    Args:
        logits: [..., E], of a router by ``"softmax"``, or those of several layers, whose tokens are
            counted together.
        top_k: how many experts a token has.
        mask: of the tokens, in the shape of the logits without E: 0 or False for those that do not
            count.

    Returns:
        A number, float32 (float64 of such logits). It is differentiable through :math:`P_e`.

    Raises:
        ValueError: a ``top_k`` that does not fit; a mask of another shape; no layers.

    Example:
        >>> import torch, cudnn_ops
        >>> cudnn_ops.load_balancing_loss(torch.eye(4) * 100, top_k=1)  # each to another one
        tensor(1.)
    """
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    if not layers:
        raise ValueError("cudnn_ops.load_balancing_loss: logits must be of a layer at least")
    num_experts = layers[0].shape[-1]
    check_routing("cudnn_ops.load_balancing_loss", num_experts, top_k, "softmax", 1, 1)
    counts = probabilities = tokens = torch.zeros((), device=layers[0].device)
    for layer in layers:
        if mask is not None and mask.shape != layer.shape[:-1]:
            raise ValueError(
                f"cudnn_ops.load_balancing_loss: mask must be {list(layer.shape[:-1])}, for "
                f"logits {list(layer.shape)}; got {list(mask.shape)}"
            )
        scores = wide(layer).flatten(0, -2).softmax(-1)
        counted = scores.new_ones(scores.shape[0]) if mask is None else mask.flatten().to(scores)
        chosen = scores.detach().topk(top_k, -1).indices.flatten()
        # Sums of whole numbers, the same in any order.
        of_layer = scores.new_zeros(num_experts)
        counts = counts + of_layer.scatter_add(0, chosen, counted.repeat_interleave(top_k))
        probabilities = probabilities + (scores * counted.unsqueeze(1)).sum(0)
        tokens = tokens + counted.sum()
    return num_experts * (counts / tokens * (probabilities / tokens)).sum()
