"""Small models of diffusers with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn


def _vae() -> nn.Module:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
    )


def make_unet(**more: Any) -> nn.Module:
    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            **more,
        }
    )


def _sdxl() -> nn.Module:
    return make_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=8 + 6 * 4,
    )


def _dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    )


def _sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _flux() -> nn.Module:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


def _wan() -> nn.Module:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=8,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=16,
    )


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def _denoising() -> dict[str, Tensor]:
    return {
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": draw(2, 7, 16),
    }


def _unet_inputs() -> dict[str, Any]:
    seen = torch.ones(2, 7)
    seen[1, 4:] = 0
    return {"sample": draw(2, 4, 8, 8), "encoder_attention_mask": seen, **_denoising()}


def _sdxl_inputs() -> dict[str, Any]:
    more = {"text_embeds": draw(2, 8), "time_ids": torch.arange(12.0).view(2, 6)}
    return {"sample": draw(2, 4, 8, 8), "added_cond_kwargs": more, **_denoising()}


def _dit_inputs() -> dict[str, Any]:
    numbers = {"timestep": torch.tensor([3, 500]), "class_labels": torch.tensor([3, 5])}
    return {"hidden_states": draw(2, 4, 8, 8), **numbers}


def _sd3_inputs() -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, 8, 8), "pooled_projections": draw(2, 8), **_denoising()}


def _flux_inputs() -> dict[str, Any]:
    ids = {"img_ids": torch.arange(27.0).view(9, 3), "txt_ids": torch.zeros(7, 3)}
    pooled = draw(2, 8)
    inputs = {"hidden_states": draw(2, 9, 4), "pooled_projections": pooled, **ids, **_denoising()}
    # A thousand times as many are exact in bfloat16 too.
    return inputs | {"timestep": torch.tensor([0.25, 0.5])}


def _wan_inputs() -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, 2, 8, 8), **_denoising()}


#: As the dispatcher names them; with what is added before a norm.
_OF_UNETS = {"sdpa", "group_norm", "gated", "norm", "norm of a sum"}
_OF_DIT = {"sdpa", "mlp", "adaptive_norm", "adaptive_norm of a sum"}
#: How to make each model and its inputs, and the operators that it must call.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], set[str]]] = {
    "vae": (_vae, lambda: {"sample": draw(2, 3, 16, 16)}, {"sdpa", "group_norm"}),
    "unet": (make_unet, _unet_inputs, _OF_UNETS),
    "sdxl": (_sdxl, _sdxl_inputs, _OF_UNETS),
    "dit": (_dit, _dit_inputs, _OF_DIT),
    "sd3": (_sd3, _sd3_inputs, {*_OF_DIT, "norm"}),
    "wan": (_wan, _wan_inputs, {"sdpa", "mlp", "norm"}),
    "flux": (_flux, _flux_inputs, {*_OF_DIT, "norm", "rotary"}),
}


def make(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for parameter in model.parameters():  # some are zeros
        nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.15)
    return model.to(device, dtype)


def make_inputs(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return moved(MODELS[name][1]())
