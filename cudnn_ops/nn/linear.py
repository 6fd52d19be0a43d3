"""Projections of one input as one product."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cudnn_ops.nn.gated import PROJECTIONS
from cudnn_ops.nn.hooks import is_plain_linear
from cudnn_ops.nn.mlp import adds_in_product, project
from cudnn_ops.ops.activation import Activation, require_activation
from cudnn_ops.ops.gated import GATED
from cudnn_ops.ops.linear import linear, mlp
from cudnn_ops.ops.rotary import rotary_embedding_qk

if TYPE_CHECKING:
    from typing_extensions import Self


def _shared_facts(layer: nn.Linear) -> tuple[object, ...]:
    """What layers must have in common to be merged."""
    weight, bias = layer.weight, layer.bias
    is_learned = weight.requires_grad, bias is not None and bias.requires_grad
    return layer.in_features, bias is None, weight.dtype, weight.device, is_learned


def size_mismatch(key: str, given: Tensor, own: Tensor) -> str:
    """What torch's modules say of a tensor that is to be loaded and has another shape."""
    return (
        f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, the "
        f"shape in current model is {own.shape}."
    )


class MergedLinear(nn.Module):
    """Linear layers of one input, computed as one product and saved as layers of their own.

    The module has one ``weight`` and, if any, one ``bias``: those of the layers, one behind the
    other. In its ``state_dict`` stand those of each layer under its name, so that checkpoints of
    models with separate layers load, and are written.

    Args:
        in_features: size of the input.
        outputs: size of each layer's output, by the layer's name.
        bias: whether the layers have one.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import MergedLinear
        >>> layers = MergedLinear(64, {"query": 32, "key": 16})
        >>> [part.shape[-1] for part in layers(torch.randn(2, 64))]
        [32, 16]
        >>> list(layers.state_dict())
        ['query.weight', 'query.bias', 'key.weight', 'key.bias']
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.outputs = in_features, dict(outputs)
        rows = sum(self.outputs.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As of ``torch.nn.Linear``."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def of(cls, layers: Mapping[str, nn.Linear]) -> Self:
        """Makes one of copies of layers with one input, by their names.

        Raises:
            ValueError: layers of different inputs, dtypes or devices, or of which some have a bias,
                or some are frozen.
        """
        merged = cls.__new__(cls)
        MergedLinear._take(merged, layers)
        return merged

    def _take(self, layers: Mapping[str, nn.Linear]) -> None:
        given = list(layers.values())
        if len(set(map(_shared_facts, given))) != 1:
            raise ValueError(
                f"{type(self).__name__}: layers to be merged must have the same input, dtype and "
                f"device, and all or none of them a bias, or be frozen; got "
                f"{', '.join(map(str, given))}"
            )
        first = given[0]
        MergedLinear.__init__(
            self,
            first.in_features,
            {name: one.out_features for name, one in layers.items()},
            bias=first.bias is not None,
            device="meta",
            dtype=first.weight.dtype,
        )
        for name, parameter in list(self.named_parameters(recurse=False)):
            parts = [getattr(one, name) for one in given]
            merged = torch.cat([part.detach() for part in parts])
            assert merged.shape == parameter.shape
            setattr(self, name, nn.Parameter(merged, requires_grad=parts[0].requires_grad))
        self.train(first.training)

    def product(self, x: Tensor) -> Tensor:
        """[..., in_features] to all outputs, side by side."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Any:
        """[..., in_features] to the output of each layer: views of one tensor."""
        return self.product(x).split(list(self.outputs.values()), dim=-1)

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """The rows of each layer, by its name."""
        parts = parameter.split(list(self.outputs.values()))
        return dict(zip(self.outputs, parts, strict=True))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        parameters = dict(self.named_parameters(recurse=False))
        kept = {n: p if keep_vars else p.detach() for n, p in parameters.items()}
        parts = {name: self.parts(parameter) for name, parameter in kept.items()}
        for layer in self.outputs:
            for name, of_layers in parts.items():
                destination[f"{prefix}{layer}.{name}"] = of_layers[layer]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        parameters = dict(self.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            parts = {f"{prefix}{n}.{name}": part for n, part in self.parts(parameter).items()}
            absent = [key for key in parts if key not in state_dict]
            if absent:
                missing_keys += absent
                continue
            wrong = [key for key, part in parts.items() if state_dict[key].shape != part.shape]
            if wrong:
                error_msgs += [size_mismatch(key, state_dict[key], parts[key]) for key in wrong]
                continue
            loaded = [state_dict[key] for key in parts]
            if local_metadata.get("assign_to_params_buffers", False):
                merged = nn.Parameter(torch.cat(loaded), parameter.requires_grad)
                setattr(self, name, merged)
            else:
                with torch.no_grad():
                    parameter.copy_(torch.cat([new.to(parameter.device) for new in loaded]))
        known = {f"{layer}.{name}" for layer in self.outputs for name in parameters}
        for key in state_dict if strict else ():
            rest = key.removeprefix(prefix)
            is_mine = key.startswith(prefix) and rest.partition(".")[0] not in self._modules
            if is_mine and rest not in known:
                unexpected_keys.append(key)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"in_features={self.in_features}, outputs={self.outputs}, bias={self.bias is not None}"
        )


class FusedQKV(MergedLinear):
    """Queries, keys and values of attention by one product.

    The results are views of its output, which attention, QK-norm and rotary embedding read where
    they are. Its keys in a ``state_dict`` are those of separate layers.

    Args:
        in_features: size of the input.
        heads: of the queries.
        kv_heads: of keys and of values; None stands for as many as of the queries.
        head_dim: size of a head; None stands for ``in_features / heads``.
        bias: whether the layers have one.
        names: of the three layers.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: the input cannot be split into that many heads.

    Example:
        >>> import torch, cudnn_ops
        >>> from cudnn_ops.nn import FusedQKV
        >>> projection = FusedQKV(64, heads=8, kv_heads=2)
        >>> q, k, v = projection(torch.randn(2, 10, 64))
        >>> q.shape, k.shape
        (torch.Size([2, 8, 10, 8]), torch.Size([2, 2, 10, 8]))
        >>> attend = cudnn_ops.scaled_dot_product_attention
        >>> attend(q, k, v, is_causal=True, enable_gqa=True).shape
        torch.Size([2, 8, 10, 8])
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if head_dim is None:
            if in_features % heads:
                raise ValueError(
                    f"FusedQKV: in_features, {in_features}, is no multiple of heads, {heads}; "
                    "head_dim says how large a head is"
                )
            head_dim = in_features // heads
        kv_heads = heads if kv_heads is None else kv_heads
        counts = (heads, kv_heads, kv_heads)
        outputs = {name: n * head_dim for name, n in zip(names, counts, strict=True)}
        super().__init__(in_features, outputs, bias, device=device, dtype=dtype)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, **rotary: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projects tokens, and turns queries and keys by their positions.

        Args:
            x: [B, S, in_features].
            cos: [B or 1, S, head_dim]; with ``sin``, queries and keys are turned by
                :func:`cudnn_ops.rotary_embedding`, in one kernel for both.
            sin: likewise.
            **rotary: options of :func:`cudnn_ops.rotary_embedding`; they may allow other shapes of
                ``cos`` and ``sin``.

        Returns:
            Queries [B, heads, S, head_dim]; keys and values [B, kv_heads, S, head_dim].
        """
        # Split as tokens, for whose gradients one pass puts whole rows beside each other.
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in super().forward(x)
        )
        if cos is not None and sin is not None:
            query, key = rotary_embedding_qk(query, key, cos, sin, **rotary)
        return query, key, value


class MergedSwiGLU(MergedLinear):
    """A gated MLP whose gate and up are one product, by :func:`cudnn_ops.mlp`.

    Its keys in a ``state_dict`` are those of :class:`SwiGLU` and of Llama's MLP: ``gate_proj``,
    ``up_proj`` and ``down_proj``. A layer that is put in the place of ``down_proj``, or that has
    hooks, is called as it is.

    Args:
        in_features: size of the input and the output.
        hidden_features: size between them.
        bias: whether the projections have one.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import MergedSwiGLU, SwiGLU
        >>> mlp = MergedSwiGLU(64, 192)
        >>> _ = mlp.load_state_dict(SwiGLU(64, 192).state_dict())
        >>> mlp(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    down_proj: nn.Module

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: Activation = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_activation(self, activation, GATED)
        outputs = dict.fromkeys(PROJECTIONS[:2], hidden_features)
        super().__init__(in_features, outputs, bias, device=device, dtype=dtype)
        self.activation = activation
        self.down_proj = nn.Linear(hidden_features, in_features, bias, device, dtype)

    @staticmethod
    def can_be_of(module: nn.Module) -> bool:
        """Whether another module's gate and up can be merged: plain layers, alike."""
        layers = [getattr(module, name) for name in PROJECTIONS[:2]]
        if not all(map(is_plain_linear, layers)):
            return False
        return len({(one.weight.shape, _shared_facts(one)) for one in layers}) == 1

    @classmethod
    def of_mlp(cls, module: nn.Module, activation: Activation) -> Self:
        """Makes one of another module's three projections: of the last one itself."""
        merged = cls.__new__(cls)
        merged._take({name: getattr(module, name) for name in PROJECTIONS[:2]})
        merged.activation = activation
        merged.down_proj = module.get_submodule("down_proj")
        return merged.train(module.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Computes the MLP.

        Args:
            x: [..., in_features].
            residual: of the same shape, added to the result; in 16 bits, where no gradient is
                needed, in the last product.

        Returns:
            [..., in_features].
        """
        down = self.down_proj
        is_apart = residual is not None and adds_in_product(x, residual)
        if is_apart or not is_plain_linear(down):
            gate, up = self.product(x).chunk(2, dim=-1)
            return project(down, GATED[self.activation](gate, up), residual)
        assert isinstance(down, nn.Linear)
        weights = (self.weight, self.bias, down.weight, down.bias)
        out = mlp(x, *weights, self.activation, gated=True)
        return out if residual is None else residual + out
