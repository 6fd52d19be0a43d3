"""What computes in the place of modules of diffusers: a ``forward`` for each class.

Each reads the parameters of some of a module's parts, which it does not call, and calls the others.
A module that does not have these parts any more, because an adapter, a quantizer or a hook came,
computes as in diffusers.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import _chunked_feed_forward
from torch import Tensor, nn

import cudnn_ops
from cudnn_ops.ops.activation import Activation


def _fits(x: Tensor, *others: Tensor) -> bool:
    """Whether the operators accept the dtypes: autocast makes them one."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return True
    return all(other.dtype == x.dtype for other in others)


def _is_layer_norm(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm)


def modulate(norm: Any, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """``norm(x) * (1 + scale) + shift``, with modulations of as many dimensions as ``x``."""
    if not _fits(x, scale):
        out: Tensor = norm(x) * (1 + scale)
        return out if shift is None else out + shift
    if _is_layer_norm(norm) and shift is not None:
        return cudnn_ops.adaptive_layer_norm(
            x, scale, shift, weight=norm.weight, bias=norm.bias, eps=norm.eps
        )
    weight = getattr(norm, "weight", None)
    return cudnn_ops.adaptive_rms_norm(x, scale, shift, weight=weight, eps=norm.eps)


def gate_add_modulate(
    norm: Any, x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`modulate` of ``x + gate * update``, and that sum."""
    if not _fits(x, update, gate, scale):
        total = x + gate * update
        return norm(total) * (1 + scale) + shift, total
    return cudnn_ops.gate_add_adaptive_layer_norm(
        *(x, update, gate, scale, shift), weight=norm.weight, bias=norm.bias, eps=norm.eps
    )


def add_norm(norm: Any, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """The layer norm of ``x + update``, and that sum."""
    if not _fits(x, update):
        total = x + update
        return norm(total), total
    return cudnn_ops.add_layer_norm(
        update, x, norm.normalized_shape, norm.weight, norm.bias, norm.eps
    )


def _group_norm(norm: nn.GroupNorm, x: Tensor, activation: str = "silu") -> Tensor:
    return cudnn_ops.group_norm(
        x,
        norm.num_groups,
        norm.weight,
        norm.bias,
        norm.eps,
        activation=activation,  # type: ignore[arg-type]
    )


def resnet_block(self: Any, input_tensor: Tensor, temb: Tensor | None) -> Tensor:
    """``ResnetBlock2D``: norm and SiLU are one kernel."""
    hidden = _group_norm(self.norm1, input_tensor)
    resample = self.upsample if self.upsample is not None else self.downsample
    if resample is not None:
        input_tensor, hidden = resample(input_tensor), resample(hidden)
    hidden = self.conv1(hidden)
    if self.time_emb_proj is not None:
        temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
        temb = temb[:, :, None, None]
    if self.time_embedding_norm == "scale_shift":
        scale, shift = temb.chunk(2, dim=1)  # type: ignore[union-attr]
        hidden = _group_norm(self.norm2, hidden, "none") * (1 + scale) + shift
        hidden = self.nonlinearity(hidden)
    else:
        hidden = _group_norm(self.norm2, hidden if temb is None else hidden + temb)
    hidden = self.conv2(self.dropout(hidden))
    if self.conv_shortcut is not None:
        input_tensor = self.conv_shortcut(input_tensor)
    total = input_tensor + hidden
    return total if self.output_scale_factor == 1 else total / self.output_scale_factor


def ada_layer_norm(
    self: Any, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None
) -> Tensor:
    """``AdaLayerNorm`` of CogVideoX and OmniGen."""
    if self.emb is not None:
        temb = self.emb(timestep)
    shift, scale = self.linear(self.silu(temb)).chunk(2, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None])


def ada_layer_norm_zero(
    self: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``AdaLayerNormZero`` of DiT, Stable Diffusion 3 and Flux."""
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None]), *others


def ada_layer_norm_zero_single(
    self: Any, x: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    """``AdaLayerNormZeroSingle`` of Flux."""
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None]), gate


def ada_layer_norm_zero_x(
    self: Any, hidden_states: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    """``SD35AdaLayerNormZeroX``: two results of one norm."""
    parts = self.linear(self.silu(emb)).chunk(9, dim=1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = parts
    first = modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
    second = modulate(self.norm, hidden_states, scale2[:, None], shift2[:, None])
    return first, gate, shift_mlp, scale_mlp, gate_mlp, second, gate2


def ada_layer_norm_continuous(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    """``AdaLayerNormContinuous``, before the last layer of many transformers."""
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb.chunk(2, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None])


def lumina_rms_norm_zero(self: Any, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
    """``LuminaRMSNormZero``."""
    scale, gate, scale_mlp, gate_mlp = self.linear(self.silu(emb)).chunk(4, dim=1)
    return modulate(self.norm, x, scale[:, None], None), gate, scale_mlp, gate_mlp


def fp32_layer_norm(self: Any, inputs: Tensor) -> Tensor:
    """``FP32LayerNorm`` of Wan and others; the operator computes in float32 too."""
    parameters = [x for x in (self.weight, self.bias) if x is not None]
    if any(x.dtype not in (inputs.dtype, torch.float32) for x in parameters):
        out: Tensor = type(self).forward(self, inputs)
        return out
    return cudnn_ops.layer_norm(inputs, self.normalized_shape, self.weight, self.bias, self.eps)


def geglu(self: Any, hidden_states: Tensor) -> Tensor:
    """``GEGLU``: what is multiplied comes first."""
    up, gate = self.proj(hidden_states).chunk(2, dim=-1)
    return cudnn_ops.geglu(gate, up)


def swiglu(self: Any, hidden_states: Tensor) -> Tensor:
    """``SwiGLU``: likewise."""
    up, gate = self.proj(hidden_states).chunk(2, dim=-1)
    return cudnn_ops.swiglu(gate, up)


def _gelu(layer: Any) -> Activation:
    return "gelu_tanh" if layer.approximate == "tanh" else "gelu"


def feed_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """``FeedForward`` of two layers around GELU, with dropout behind them or none."""
    first, dropout, second, *behind = self.net
    layers = first.proj.weight, first.proj.bias, second.weight, second.bias
    if (self.training and dropout.p > 0) or not _fits(hidden_states, layers[0]):
        hidden_states = second(dropout(first(hidden_states)))
    else:
        hidden_states = cudnn_ops.mlp(hidden_states, *layers, _gelu(first))
    return behind[0](hidden_states) if behind else hidden_states


def _feed_forward_of(self: Any, ff: nn.Module, hidden: Tensor) -> Tensor:
    if self._chunk_size is None:
        out: Tensor = ff(hidden)
        return out
    return _chunked_feed_forward(ff, hidden, self._chunk_dim, self._chunk_size)


def joint_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """``JointTransformerBlock`` of Stable Diffusion 3."""
    more = joint_attention_kwargs or {}
    x, context = hidden_states, encoder_hidden_states
    normed, gate, shift_mlp, scale_mlp, gate_mlp, *second = self.norm1(x, emb=temb)
    of_context: list[Tensor] = []
    if self.context_pre_only:
        normed_context = self.norm1_context(context, temb)
    else:
        normed_context, *of_context = self.norm1_context(context, emb=temb)
    update, context_update = self.attn(
        hidden_states=normed, encoder_hidden_states=normed_context, **more
    )
    if self.use_dual_attention:
        x = x + gate[:, None] * update
        update, gate = self.attn2(hidden_states=second[0], **more), second[1]
    normed, x = gate_add_modulate(
        self.norm2, x, update, gate[:, None], scale_mlp[:, None], shift_mlp[:, None]
    )
    x = x + gate_mlp[:, None] * _feed_forward_of(self, self.ff, normed)
    if self.context_pre_only:
        return None, x
    gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in of_context)
    normed, context = gate_add_modulate(
        self.norm2_context, context, context_update, gate, scale_mlp, shift_mlp
    )
    return context + gate_mlp * _feed_forward_of(self, self.ff_context, normed), x


def flux_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """``FluxTransformerBlock``."""
    x, context = hidden_states, encoder_hidden_states
    normed, *of_image = self.norm1(x, emb=temb)
    normed_context, *of_context = self.norm1_context(context, emb=temb)
    update, context_update, *of_adapter = self.attn(
        hidden_states=normed,
        encoder_hidden_states=normed_context,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in of_image)
    normed, x = gate_add_modulate(self.norm2, x, update, gate, scale_mlp, shift_mlp)
    x = x + gate_mlp * self.ff(normed)
    if of_adapter:
        x = x + of_adapter[0]
    gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in of_context)
    normed, context = gate_add_modulate(
        self.norm2_context, context, context_update, gate, scale_mlp, shift_mlp
    )
    context = context + gate_mlp * self.ff_context(normed)
    if context.dtype == torch.float16:
        context = context.clip(-65504, 65504)
    return context, x


def basic_block(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Tensor | None = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
) -> Tensor:
    """``BasicTransformerBlock`` with layer norms, of U-Nets, or with adaptive ones, of DiT."""
    x, kind = hidden_states, self.norm_type
    if x.dim() != 3:
        out: Tensor = type(self).forward(
            *(self, x, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep),
            *(cross_attention_kwargs, class_labels, added_cond_kwargs),
        )
        return out
    more = cross_attention_kwargs or {}
    gate = shift_mlp = scale_mlp = gate_mlp = None
    if kind == "ada_norm_zero":
        normed, *parts = self.norm1(x, timestep, class_labels, hidden_dtype=x.dtype)
        gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in parts)
    elif kind == "ada_norm_single":
        table = self.scale_shift_table[None] + timestep.reshape(x.shape[0], 6, -1)  # type: ignore[union-attr]
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = table.chunk(6, dim=1)
        normed = modulate(self.norm1, x, scale, shift)
    else:
        normed = self.norm1(x)
    update = self.attn1(
        normed,
        encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
        attention_mask=attention_mask,
        **more,
    )
    if self.attn2 is not None:
        if kind == "layer_norm":
            normed, x = add_norm(self.norm2, x, update)
        else:
            x = update + x if gate is None else gate * update + x
            normed = x if kind == "ada_norm_single" else self.norm2(x)
        update = self.attn2(
            normed,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **more,
        )
        gate = None
    last = self.norm2 if kind == "ada_norm_single" else self.norm3
    if kind == "layer_norm":
        normed, x = add_norm(last, x, update)
    elif gate is None:
        x = update + x
        normed = modulate(last, x, scale_mlp, shift_mlp)  # type: ignore[arg-type]
    else:
        normed, x = gate_add_modulate(last, x, update, gate, scale_mlp, shift_mlp)  # type: ignore[arg-type]
    update = _feed_forward_of(self, self.ff, normed)
    return update + x if gate_mlp is None else gate_mlp * update + x
