"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cudnn_ops.nn.gated import SwiGLU
from cudnn_ops.ops.activation import Activation, require_activation
from cudnn_ops.ops.gated import GATED
from cudnn_ops.ops.moe import moe_experts
from cudnn_ops.ops.moe_routing import Score, check_routing, moe_route

if TYPE_CHECKING:
    from typing_extensions import Self


class Experts(nn.Module):
    """The gated MLPs of a mixture of experts, by :func:`cudnn_ops.moe_experts`.

    Its keys are those of transformers: ``gate_up_proj`` [E, 2 * hidden, dim], of each expert first
    the gate, and ``down_proj`` [E, dim, hidden].

    Args:
        dim: size of a token.
        hidden: size inside each expert.
        num_experts: E.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import Experts
        >>> x, chosen = torch.randn(10, 64), torch.randint(8, (10, 2))
        >>> Experts(64, 96, 8)(x, chosen, torch.rand(10, 2)).shape
        torch.Size([10, 64])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        activation: Activation = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_activation(self, activation, GATED)
        self.activation = activation
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, dim, **place))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as those of ``nn.Linear`` are drawn."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[2] ** -0.5 if weight.shape[2] else 0.0
            nn.init.uniform_(weight, -bound, bound)

    @classmethod
    def of(cls, module: nn.Module, activation: Activation) -> Self:
        """Makes one with the parameters of another module, the parameters themselves."""
        experts = cls(1, 1, 1, activation=activation, device="meta")
        experts.gate_up_proj = module.get_parameter("gate_up_proj")
        experts.down_proj = module.get_parameter("down_proj")
        return experts.train(module.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, dim], and of each token its experts and their weights, [T, k], to [T, dim].

        The arguments have the names of transformers' experts. -1 stands for no expert.
        """
        if top_k_weights.dtype not in (hidden_states.dtype, torch.float32):
            top_k_weights = top_k_weights.float()
        out = moe_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            activation=self.activation,
        )
        return out.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """The sizes and the activation, for ``print``."""
        experts, dim, hidden = self.down_proj.shape
        return f"{dim}, {hidden}, {experts}, activation={self.activation}"


class Router(nn.Module):
    """Chooses the experts of each token: a linear layer and :func:`cudnn_ops.moe_route`.

    Its keys are those of transformers' routers: ``weight`` [E, dim] and, with a correction bias,
    ``e_score_correction_bias`` [E], a buffer in float32.

    Args:
        dim: size of a token.
        num_experts: E.
        top_k: how many experts a token has.
        correction_bias: whether experts are chosen with a bias, which is not trained by gradients.
        in_float32: compute the logits in float32, as DeepSeek-V3 and GLM-4.5 do.
        device: the parameters' device.
        dtype: the parameters' dtype.
        routing: further arguments of :func:`cudnn_ops.moe_route`, but for ``correction_bias``.

    Raises:
        ValueError: numbers that do not fit; an unknown score.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import Router
        >>> logits, weights, experts = Router(64, 8, 2)(torch.randn(10, 64))
        >>> logits.shape, weights.shape, experts.shape
        (torch.Size([10, 8]), torch.Size([10, 2]), torch.Size([10, 2]))
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        correction_bias: bool = False,
        in_float32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        super().__init__()
        score: Score = routing.get("score", "softmax")
        groups = routing.get("num_groups", 1), routing.get("top_groups", 1)
        check_routing(type(self).__name__, num_experts, top_k, score, *groups)
        self.top_k, self.in_float32, self.routing = top_k, in_float32, routing
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device) if correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as that of ``nn.Linear`` is drawn; the bias becomes 0."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, dim] to the logits [T, E], the weights and the experts [T, top_k]."""
        if self.in_float32:
            with torch.autocast(x.device.type, enabled=False):
                logits = nn.functional.linear(x.float(), self.weight.float())
        else:
            logits = nn.functional.linear(x, self.weight)
        bias = self.e_score_correction_bias
        weights, experts = moe_route(logits, self.top_k, correction_bias=bias, **self.routing)
        return logits, weights, experts

    def extra_repr(self) -> str:
        """The sizes and the options, for ``print``."""
        experts, dim = self.weight.shape
        options = "".join(f", {name}={value}" for name, value in self.routing.items())
        return f"{dim}, {experts}, top_k={self.top_k}{options}"


class MoE(nn.Module):
    r"""A mixture of experts: a router, gated MLPs of which each token runs a few, and shared ones.

    .. math::
        \mathrm{out} = \sum_j w_j E_{e_j}(x) + \sigma(g(x)) \, S(x)

    Its keys in a ``state_dict`` are those of transformers' Mixtral, Qwen-MoE, OLMoE, DeepSeek-V3
    and GLM-4.5: ``gate`` (:class:`Router`), ``experts`` (:class:`Experts`), ``shared_expert``
    (:class:`SwiGLU`) and ``shared_expert_gate``. ``load_state_dict`` also accepts
    ``shared_experts`` for the latter's name, and checkpoints with a key for each expert
    (``experts.0.w1.weight`` of Mixtral's, ``experts.0.gate_proj.weight`` of the others').

    Args:
        dim: size of a token.
        hidden: size inside each expert.
        num_experts: E.
        top_k: how many experts a token has.
        activation: of the experts, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        shared_hidden: size inside the MLP that every token goes through; None: there is none.
        shared_gate: whether its result is multiplied by a gate, as in Qwen2-MoE.
        device: the parameters' device.
        dtype: the parameters' dtype.
        routing: further arguments of :class:`Router`, and of :func:`cudnn_ops.moe_route`.

    Raises:
        ValueError: numbers that do not fit; an unknown score or activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import MoE
        >>> mixtral = MoE(64, 96, num_experts=8, top_k=2)
        >>> out, logits = mixtral(torch.randn(2, 10, 64), return_logits=True)
        >>> out.shape, logits.shape
        (torch.Size([2, 10, 64]), torch.Size([20, 8]))
    """

    shared_expert: SwiGLU | None
    shared_expert_gate: nn.Linear | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation = "silu",
        shared_hidden: int | None = None,
        shared_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        super().__init__()
        if shared_gate and shared_hidden is None:
            raise ValueError("MoE: shared_gate needs shared_hidden, the size of what it multiplies")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = Router(dim, num_experts, top_k, **routing, **place)
        self.experts = Experts(dim, hidden, num_experts, activation=activation, **place)
        self.shared_expert = self.shared_expert_gate = None
        if shared_hidden is not None:
            self.shared_expert = SwiGLU(dim, shared_hidden, activation=activation, **place)
        if shared_gate:
            self.shared_expert_gate = nn.Linear(dim, 1, bias=False, **place)
        self.register_load_state_dict_pre_hook(_rename)

    def forward(self, x: Tensor, *, return_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """[..., dim] to the same; with ``return_logits`` also the router's logits, [tokens, E]."""
        tokens = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        logits, weights, experts = self.gate(tokens)
        out = self.experts(tokens, experts, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(tokens).sigmoid() * shared
            out = out + shared
        out = out.reshape(x.shape)
        return (out, logits) if return_logits else out


def _rename(
    module: nn.Module, state: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Gives the keys of other checkpoints the names that they have here."""
    shared = f"{prefix}shared_experts."
    for key in [key for key in state if key.startswith(shared)]:
        state[f"{prefix}shared_expert.{key.removeprefix(shared)}"] = state.pop(key)
    assert isinstance(module, MoE)
    of_each = f"{prefix}experts."
    if f"{of_each}0.w1.weight" in state:
        names = ("w1", "w3", "w2")
    elif f"{of_each}0.gate_proj.weight" in state:
        names = ("gate_proj", "up_proj", "down_proj")
    else:
        return
    gates, ups, downs = (
        list(_of_experts(state, of_each, name, module.experts.down_proj.shape[0])) for name in names
    )
    halves = zip(gates, ups, strict=True)
    state[f"{of_each}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
    state[f"{of_each}down_proj"] = torch.stack(downs)


def _of_experts(state: dict[str, Any], prefix: str, name: str, count: int) -> Iterator[Tensor]:
    for expert in range(count):
        key = f"{prefix}{expert}.{name}.weight"
        if key not in state:
            raise ValueError(f"MoE: there are {count} experts, and the state has no {key}")
        yield state.pop(key)
