"""The models of the benchmark `zoo`: random weights, sizes as they are published or cut to fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class Entry(NamedTuple):
    """A model to compile."""

    name: str
    library: str
    """What has to be installed."""
    make: Callable[[torch.device], nn.Module]
    """The model, with its weights drawn on a device: a CPU takes a minute for billions of them."""
    inputs: Callable[[torch.device], dict[str, Any]]
    result: Callable[[Any], Tensor]
    """The tensor of what the model returns that is compared, and that the loss is made of."""
    trains: bool = True


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _made(find: Callable[[], Callable[[], nn.Module]]) -> Callable[[torch.device], nn.Module]:
    """What `find` gives is called for the device: what it imports has its constants on the CPU."""

    def make(device: torch.device) -> nn.Module:
        build = find()
        with device:
            return build()

    return make


def _transformer(model: str, config: str, **sizes: Any) -> Callable[[torch.device], nn.Module]:
    def find() -> Callable[[], nn.Module]:
        hf = import_module("transformers")
        kind, settings = getattr(hf, model), getattr(hf, config)(**sizes)
        return partial(kind, settings)

    return _made(find)


def _tokens(batch: int, length: int, vocabulary: int, **more: Any) -> Callable[..., dict[str, Any]]:
    def inputs(device: torch.device) -> dict[str, Any]:
        return {"input_ids": torch.randint(vocabulary, (batch, length), device=device), **more}

    return inputs


def _images(batch: int, size: int = 224, name: str = "x") -> Callable[..., dict[str, Any]]:
    def inputs(device: torch.device) -> dict[str, Any]:
        return {name: torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)}

    return inputs


def _vision(name: str) -> Callable[[torch.device], nn.Module]:
    return _made(lambda: getattr(import_module("torchvision.models"), name))


def vision_transformer(device: torch.device) -> nn.Module:
    """It begins with a head of zeros, behind which all results are zero."""
    model: Any = _vision("vit_b_16")(device)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return cast(nn.Module, model)


def _timm(name: str) -> Callable[[torch.device], nn.Module]:
    return _made(lambda: partial(import_module("timm").create_model, name))


def _diffusion(model: str, **config: Any) -> Callable[[torch.device], nn.Module]:
    return _made(lambda: partial(getattr(import_module("diffusers"), model), **config))


def _random(*sizes: int, device: torch.device) -> Tensor:
    return torch.randn(*sizes, device=device, dtype=torch.bfloat16)


def _unet(batch: int, size: int, width: int) -> Callable[..., dict[str, Any]]:
    def inputs(device: torch.device) -> dict[str, Any]:
        return {
            "sample": _random(batch, 4, size, size, device=device),
            "timestep": torch.full((batch,), 500, device=device),
            "encoder_hidden_states": _random(batch, 77, width, device=device),
            "return_dict": False,
        }

    return inputs


def _whisper(device: torch.device) -> dict[str, Any]:
    return {
        "input_features": _random(8, 80, 3000, device=device),
        "decoder_input_ids": torch.randint(50000, (8, 128), device=device),
        "use_cache": False,
    }


def _t5(device: torch.device) -> dict[str, Any]:
    ids = torch.randint(32000, (16, 512), device=device)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :128], "use_cache": False}


def _latents(device: torch.device) -> dict[str, Any]:
    return {"z": _random(4, 4, 64, 64, device=device), "return_dict": False}


def _dit(device: torch.device) -> dict[str, Any]:
    return {
        "hidden_states": _random(32, 4, 32, 32, device=device),
        "timestep": torch.full((32,), 500, device=device),
        "class_labels": torch.randint(1000, (32,), device=device),
        "return_dict": False,
    }


def _decoder_of_vae(device: torch.device) -> nn.Module:
    make = _diffusion(
        "AutoencoderKL",
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
    )

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae: Any = make(device)

        def forward(self, z: Tensor, return_dict: bool) -> Any:
            return self.vae.decode(z, return_dict=return_dict)

    return Decoder()


_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_CAUSAL = {"use_cache": False}

ZOO: tuple[Entry, ...] = (
    Entry(
        "GPT-2 medium, 12 layers",
        "transformers",
        _transformer("GPT2LMHeadModel", "GPT2Config", n_embd=1024, n_head=16, n_layer=12),
        _tokens(8, 1024, 50000, **_CAUSAL),
        _first,
    ),
    Entry(
        "BERT base",
        "transformers",
        _transformer("BertModel", "BertConfig"),
        _tokens(64, 512, 30000),
        _first,
    ),
    Entry(
        "ModernBERT base",
        "transformers",
        _transformer("ModernBertModel", "ModernBertConfig"),
        _tokens(32, 1024, 50000),
        _first,
    ),
    Entry(
        "Qwen3, 8 layers",
        "transformers",
        _transformer(
            "Qwen3ForCausalLM",
            "Qwen3Config",
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=32000,
        ),
        _tokens(4, 4096, 32000, **_CAUSAL),
        _first,
    ),
    Entry(
        "Llama 3, 4 layers",
        "transformers",
        _transformer("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=4, **_LLAMA),
        _tokens(2, 4096, 32000, **_CAUSAL),
        _first,
    ),
    Entry(
        "Gemma 3, 8 layers",
        "transformers",
        _transformer(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=1,
            vocab_size=32000,
        ),
        _tokens(4, 4096, 32000, **_CAUSAL),
        _first,
    ),
    Entry(
        "OLMoE, 4 layers",
        "transformers",
        _transformer("OlmoeForCausalLM", "OlmoeConfig", num_hidden_layers=4, vocab_size=32000),
        _tokens(4, 2048, 32000, **_CAUSAL),
        _first,
    ),
    Entry(
        "gpt-oss, 4 layers",
        "transformers",
        _transformer(
            "GptOssForCausalLM",
            "GptOssConfig",
            num_hidden_layers=4,
            num_local_experts=32,
            vocab_size=32000,
        ),
        _tokens(2, 2048, 32000, **_CAUSAL),
        _first,
    ),
    Entry(
        "Whisper small",
        "transformers",
        _transformer(
            "WhisperModel",
            "WhisperConfig",
            d_model=768,
            encoder_layers=12,
            decoder_layers=12,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
        ),
        _whisper,
        _first,
    ),
    Entry(
        "T5 base",
        "transformers",
        _transformer(
            "T5Model",
            "T5Config",
            d_model=768,
            d_ff=2048,
            num_layers=12,
            num_heads=12,
            feed_forward_proj="gated-gelu",
        ),
        _t5,
        _first,
    ),
    Entry(
        "DINOv2 base",
        "transformers",
        _transformer("Dinov2Model", "Dinov2Config"),
        _images(64, name="pixel_values"),
        _first,
    ),
    Entry("ViT-B/16", "torchvision", vision_transformer, _images(128), _first),
    Entry("ResNet-50", "torchvision", _vision("resnet50"), _images(128), _first),
    Entry("ConvNeXt-B", "torchvision", _vision("convnext_base"), _images(64), _first),
    Entry("EfficientNet-B0", "torchvision", _vision("efficientnet_b0"), _images(128), _first),
    Entry("Swin-T", "torchvision", _vision("swin_t"), _images(64), _first),
    Entry("RegNetY-8GF", "torchvision", _vision("regnet_y_8gf"), _images(64), _first),
    Entry("MobileNetV3 large", "torchvision", _vision("mobilenet_v3_large"), _images(128), _first),
    Entry("EVA-02 base", "timm", _timm("eva02_base_patch14_224"), _images(64), _first),
    # In training torch.compile fails: inductor hands its attention's backward a bias whose last
    # dimension is not contiguous.
    Entry("CoAtNet-0", "timm", _timm("coatnet_0_rw_224"), _images(64), _first, trains=False),
    Entry(
        "SD 1.5 U-Net",
        "diffusers",
        _diffusion("UNet2DConditionModel", sample_size=64, cross_attention_dim=768),
        _unet(8, 64, 768),
        _first,
        trains=False,
    ),
    Entry("VAE decoder", "diffusers", _decoder_of_vae, _latents, _first, trains=False),
    Entry(
        "DiT-XL/2",
        "diffusers",
        _diffusion(
            "DiTTransformer2DModel",
            num_attention_heads=16,
            attention_head_dim=72,
            in_channels=4,
            out_channels=8,
            num_layers=28,
            sample_size=32,
        ),
        _dit,
        _first,
    ),
)
