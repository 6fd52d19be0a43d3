"""A vision transformer that loads the weights of torchvision's and timm's."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cudnn_ops.nn.conv import ConvAct2d
from cudnn_ops.nn.norm import LayerNorm
from cudnn_ops.nn.transformer import TransformerBlock
from cudnn_ops.ops.activation import Activation

#: Names in a state_dict of torchvision's, then of timm's, and here.
_NAMES = (
    (r"^conv_proj\.", "patches."),
    (r"^encoder\.pos_embedding$", "positions"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attention.qkv."),
    (r"\.self_attention\.out_proj\.", ".attention.o_proj."),
    (r"\.mlp\.(?:linear_1|0)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:linear_2|3)\.", ".mlp.fc2."),
    (r"^patch_embed\.proj\.", "patches."),
    (r"^cls_token$", "class_token"),
    (r"^pos_embed$", "positions"),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"^fc_norm\.", "norm."),
)
_PACKED = re.compile(r"(.*\.attention\.qkv)\.(weight|bias)$")


class VisionTransformer(nn.Module):
    """A classifier of images (Dosovitskiy et al., "An image is worth 16 x 16 words").

    A ``state_dict`` of ``torchvision.models.VisionTransformer`` loads into it, and one of timm's
    that has a class token and ``global_pool="token"``, or none and ``"avg"``, and nothing that
    later models add (registers, layer scale, QK-norm).

    Args:
        image_size: height and width of an image.
        patch_size: of a patch, which must divide it.
        dim: size of a token.
        depth: blocks.
        heads: of attention.
        hidden: size inside an MLP.
        classes: size of the output.
        channels: of an image.
        pool: what the classes are computed from: ``"class"``, a token of its own, or ``"mean"``,
            that of all patches.
        eps: added to the variance in the norms.
        activation: the MLPs'.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: patches that do not divide an image; an unknown ``pool``; sizes that do not fit.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import VisionTransformer
        >>> model = VisionTransformer(32, 8, dim=64, depth=2, heads=4, hidden=128, classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        hidden: int = 3072,
        classes: int = 1000,
        *,
        channels: int = 3,
        pool: Literal["class", "mean"] = "class",
        eps: float = 1e-6,
        activation: Activation = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(
                f"VisionTransformer: patch_size, {patch_size}, does not divide image_size, "
                f"{image_size}"
            )
        if pool not in ("class", "mean"):
            raise ValueError(f"VisionTransformer: pool must be 'class' or 'mean'; got {pool!r}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.image_size, self.pool = image_size, pool
        self.patches = ConvAct2d(channels, dim, patch_size, patch_size, **place)
        count = (image_size // patch_size) ** 2 + (pool == "class")
        self.class_token = (
            nn.Parameter(torch.zeros(1, 1, dim, **place)) if pool == "class" else None
        )
        self.positions = nn.Parameter(torch.empty(1, count, dim, **place).normal_(std=0.02))
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, heads, hidden, eps=eps, activation=activation, bias=True, **place)
            for _ in range(depth)
        )
        self.norm = LayerNorm(dim, eps=eps, **place)
        self.head = nn.Linear(dim, classes, **place)
        self.register_load_state_dict_pre_hook(_translate)

    def forward(self, images: Tensor) -> Tensor:
        """Classifies images.

        Args:
            images: [B, channels, image_size, image_size].

        Returns:
            Logits, [B, classes].

        Raises:
            ValueError: images of another size.
        """
        if images.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"VisionTransformer: images must be [B, C, {self.image_size}, {self.image_size}], "
                f"got {list(images.shape)}"
            )
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        # What is left out needs no norm: rows are normed one by one.
        pooled = self.norm(x[:, 0]) if self.pool == "class" else self.norm(x.mean(1))
        return self.head(pooled)


def _translate(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Renames what torchvision and timm call otherwise, and unpacks their projections."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        for theirs, ours in _NAMES:
            name = re.sub(theirs, ours, name)
        value = state_dict.pop(key)
        packed = _PACKED.match(name)
        if packed is None:
            state_dict[prefix + name] = value
            continue
        for part, rows in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
            state_dict[f"{prefix}{packed[1]}.{part}.{packed[2]}"] = rows
