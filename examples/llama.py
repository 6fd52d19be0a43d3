"""A small Llama-style decoder whose attention function is injected; only the model belongs here.

It trains on windows of text (`forward`, `loss`), and serves requests from a cache (`serve`).

Shapes: B batch, S sequence, H query heads, K key/value heads, D head size, W width, V vocabulary,
T tokens of several requests, one behind the other.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Anything with the signature of F.scaled_dot_product_attention.
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; `width` is the residual stream's, `sequence` the longest context."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    sequence: int
    vocabulary: int = 256

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """SwiGLU's inner width: 8/3 of the width, so its three matrices cost a plain MLP's two."""
        return -(-8 * self.width // 3 // 64) * 64


class Rotary(nn.Module):
    """Rotary position embedding: turns each pair of channels by an angle set by the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig, base: float = 10_000.0) -> None:
        super().__init__()
        pairs = torch.arange(config.head_size // 2) / (config.head_size // 2)
        angles = torch.outer(torch.arange(config.sequence), base**-pairs)[:, None]  # [S, 1, D/2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, S, heads, D] to the same shape and dtype; or [T, heads, D] with `positions` [T]."""
        rows = slice(x.shape[1]) if positions is None else positions
        cos, sin = self.cos[rows], self.sin[rows]
        first, second = x.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        # The float32 angles promote; attention kernels want the activations' own dtype back.
        return torch.cat(turned, dim=-1).type_as(x)


class SelfAttention(nn.Module):
    """Causal grouped-query attention around the injected attention function."""

    def __init__(self, config: LlamaConfig, rotary: Rotary, attention: Attention) -> None:
        super().__init__()
        self.rotary, self.attention = rotary, attention
        self.head_size = config.head_size
        kv_width = config.kv_heads * config.head_size
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., W] to query [..., H, D], key and value [..., K, D], without positions."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size))
            for project in (self.query, self.key, self.value)
        )
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] to [B, S, W]."""
        query, key, value = self.project(x)
        # Transposed views keep the [B, S, H, D] memory: neither side of attention copies.
        mixed = self.attention(
            self.rotary(query).transpose(1, 2),
            self.rotary(key).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )  # [B, H, S, D]
        return self.out(mixed.transpose(1, 2).flatten(2))

    def serve(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """[T, W] to [T, W]; `attend` is this layer's and finds the earlier tokens itself."""
        query, key, value = self.project(x)
        mixed = attend(self.rotary(query, positions), self.rotary(key, positions), value)
        return self.out(mixed.flatten(1))


class SwiGLU(nn.Module):
    """The gated feed-forward network, [B, S, W] to [B, S, W]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-normalised layer, [B, S, W] to [B, S, W]."""

    def __init__(self, config: LlamaConfig, rotary: Rotary, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = SelfAttention(config, rotary, attention)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def serve(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """[T, W] to [T, W], as SelfAttention.serve."""
        x = x + self.attention.serve(self.attention_norm(x), positions, attend)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Token ids [B, S] to float32 logits [B, S, V]; S is at most `config.sequence`.

    Parameters are float32. On a GPU the forward pass runs under bf16 autocast.
    """

    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(
            *(Block(config, rotary, attention) for _ in range(config.layers))
        )
        self.norm = nn.RMSNorm(config.width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 * config.width**-0.5)
        for name, weight in self.named_parameters():
            # What is added to the residual stream starts small, whatever the depth.
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, std=0.5 * (2 * config.layers * weight.shape[1]) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            x = self.norm(self.blocks(self.embedding(tokens)))
            # The output projection is tied to the embedding.
            return F.linear(x, self.embedding.weight).float()

    def serve(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attention) -> Tensor:
        """Float32 logits [requests, V] of tokens [T], as `cudnn_ops.generation.Model` says.

        Computes in the parameters' dtype: under autocast each step would cast all of them anew.
        """
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)  # nn.Sequential does not tell
            x = block.serve(x, positions, partial(attend, layer))
        return F.linear(self.norm(x[last]), self.embedding.weight).float()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean next-token cross entropy in nats over token windows [B, S + 1]."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def save(self, path: Path) -> None:
        """Writes sizes and weights into a file that `load` reads."""
        torch.save({"config": asdict(self.config), "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: Path, attention: Attention) -> "Llama":
        """The model that `save` wrote, on the CPU."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(LlamaConfig(**saved["config"]), attention)
        model.load_state_dict(saved["weights"])
        return model
