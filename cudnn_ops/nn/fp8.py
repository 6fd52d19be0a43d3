"""Linear layers of 8 bits for inference, and putting them into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cudnn_ops.nn.gated import PROJECTIONS, SwiGLU
from cudnn_ops.nn.hooks import has_hooks, is_plain_linear
from cudnn_ops.nn.norm import RMSNorm
from cudnn_ops.nn.replace import Replacement, replace_modules_
from cudnn_ops.ops.rows_fp8 import (
    RowsFp8,
    linear_fp8,
    quantize_rows_fp8,
    rms_norm_fp8,
    swiglu_fp8,
)

if TYPE_CHECKING:
    from typing_extensions import Self

#: What cuBLAS wants of sizes.
_MULTIPLE = 16
#: The parts of a layer whose norms are read by linear layers alone.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_OF_NORM = ("q_proj", "k_proj", "v_proj")


class Fp8Linear(nn.Module):
    """A linear layer on 8 bits, by :func:`cudnn_ops.linear_fp8`; for inference.

    The parameters are those of ``torch.nn.Linear``, in 16 bits or more, and so is the
    ``state_dict``. At the first call the weight is rounded, each row under a scale of its own, and
    kept beside them; again where the weight has changed since, which compiled code does not look
    for: call it once before compiling. The result has no derivative.

    Args:
        in_features: size of the input, a multiple of 16.
        out_features: size of the output, a multiple of 16.
        bias: whether there is one.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: a size that is no multiple of 16.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import Fp8Linear
        >>> with torch.no_grad():
        ...     Fp8Linear(64, 32, dtype=torch.bfloat16)(torch.randn(2, 64).bfloat16()).shape
        torch.Size([2, 32])
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device, dtype))

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """Makes one of a linear layer, with the same parameters."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(layer)
        return made.train(layer.training)

    def _take(self, layer: nn.Linear) -> None:
        sizes = layer.in_features, layer.out_features
        if any(size % _MULTIPLE for size in sizes):
            raise ValueError(
                "cudnn_ops.nn.Fp8Linear: in_features and out_features must be multiples of "
                f"{_MULTIPLE}, got {sizes[0]} and {sizes[1]}"
            )
        self.in_features, self.out_features = sizes
        self.weight, self.bias = layer.weight, layer.bias
        self._rounded: RowsFp8 | None = None
        self._rounded_of: tuple[int, int] | None = None

    def rounded_weight(self) -> RowsFp8:
        """The weight of 8 bits, rounded where it has changed since the last call."""
        if torch.compiler.is_compiling():  # which knows neither address nor version
            return self._rounded or quantize_rows_fp8(self.weight.detach())
        version = self.weight.data_ptr(), self.weight._version
        if self._rounded is None or self._rounded_of != version:
            self._rounded = quantize_rows_fp8(self.weight.detach())
            self._rounded_of = version
        return self._rounded

    def forward(self, x: Tensor | RowsFp8) -> Tensor:
        """[..., in_features], or rows of 8 bits, to [..., out_features] in the weight's dtype."""
        rows = x if isinstance(x, RowsFp8) else quantize_rows_fp8(x)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        return linear_fp8(rows, self.rounded_weight(), bias).to(self.weight.dtype)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class Fp8RMSNorm(nn.Module):
    """An RMS norm whose result is rows of 8 bits, for :class:`Fp8Linear` and :class:`Fp8SwiGLU`.

    Args:
        norm: the norm of the last dimension in whose place it is; its weight is this one's.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import Fp8RMSNorm, RMSNorm
        >>> Fp8RMSNorm(RMSNorm(64))(torch.randn(2, 64)).data.dtype
        torch.float8_e4m3fn
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps, self.zero_centered = norm.weight, norm.eps, norm.zero_centered

    def forward(self, x: Tensor) -> RowsFp8:
        """[..., size] to the same in 8 bits, with a scale for each row."""
        return rms_norm_fp8(x, self.weight, self.eps, zero_centered=self.zero_centered)


class Fp8SwiGLU(nn.Module):
    """A gated MLP of 8 bits, whose gated activation is rounded where it is computed.

    Its keys are those of :class:`SwiGLU`, ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        mlp: the MLP in whose place it is, of plain linear layers; its parameters are this one's.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import Fp8SwiGLU, SwiGLU
        >>> with torch.no_grad():
        ...     Fp8SwiGLU(SwiGLU(64, 192).bfloat16())(torch.randn(2, 64).bfloat16()).shape
        torch.Size([2, 64])
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: SwiGLU) -> None:
        super().__init__()
        self.activation = mlp.activation
        for name in PROJECTIONS:
            setattr(self, name, Fp8Linear.of(getattr(mlp, name)))

    def forward(self, x: Tensor | RowsFp8) -> Tensor:
        """[..., in_features], or rows of 8 bits, to [..., in_features]."""
        rows = x if isinstance(x, RowsFp8) else quantize_rows_fp8(x)
        gated = swiglu_fp8(self.gate_proj(rows), self.up_proj(rows), activation=self.activation)
        return self.down_proj(gated)


def convert_to_fp8_(model: nn.Module) -> list[Replacement]:
    """Makes the layers of a decoder compute their linear layers in 8 bits, in place; for inference.

    After :func:`replace_modules_`, every module of the parts ``input_layernorm``, ``self_attn``,
    ``post_attention_layernorm`` and ``mlp``, and no others, as in Llama, Mistral and Qwen 2 and 3
    of transformers, becomes one whose norms and gated activations are rounded in the kernels that
    compute them: with an RMS norm for each norm, a gated MLP, and plain ``q_proj``, ``k_proj``,
    ``v_proj`` and ``o_proj`` in ``self_attn``. Sizes must be multiples of 16. What differs is left
    as it is, and so are embeddings, the last norm and the head. Attention itself stays in 16 bits.

    The ``state_dict`` keeps its keys and tensors. Weights of 8 bits are made at the first call and
    kept beside those of 16. The model then has no derivative: call it under ``torch.no_grad()``.

    Args:
        model: its submodules are replaced.

    Returns:
        What was replaced by modules of 8 bits.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import convert_to_fp8_
        >>> convert_to_fp8_(torch.nn.Sequential(torch.nn.Linear(64, 64)))  # no decoder
        []
    """
    replace_modules_(model)
    layers = [(name, module) for name, module in model.named_modules() if _is_layer(module)]
    done = []
    for name, layer in layers:
        prefix = f"{name}." if name else ""
        changes: dict[str, nn.Module] = {
            f"self_attn.{part}": Fp8Linear.of(layer.get_submodule(f"self_attn.{part}"))
            for part in (*_OF_NORM, "o_proj")
        }
        for part in ("input_layernorm", "post_attention_layernorm"):
            changes[part] = Fp8RMSNorm(layer.get_submodule(part))
        changes["mlp"] = Fp8SwiGLU(layer.get_submodule("mlp"))
        for part, new in changes.items():
            old = layer.get_submodule(part)
            parent, _, attribute = part.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, new.train(old.training))
            done.append(Replacement(prefix + part, old, new))
    return done


def _is_layer(module: nn.Module) -> bool:
    """Whether all parts of a module are known, and read each other as they do in Llama."""
    children = dict(module.named_children())
    if set(children) != _LAYER or has_hooks(module):
        return False
    attention, mlp = children["self_attn"], children["mlp"]
    norms = children["input_layernorm"], children["post_attention_layernorm"]
    if any(type(norm) is not RMSNorm or len(norm.normalized_shape) != 1 for norm in norms):
        return False
    if type(mlp) is not SwiGLU or any(map(has_hooks, (*norms, mlp, attention))):
        return False
    linears = [getattr(attention, name, None) for name in (*_OF_NORM, "o_proj")]
    linears += [getattr(mlp, name) for name in PROJECTIONS]
    return all(
        isinstance(layer, nn.Linear)
        and is_plain_linear(layer)
        and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
        for layer in linears
    )
