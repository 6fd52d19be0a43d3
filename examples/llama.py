"""A small Llama-style decoder whose operators are injected; only the model belongs here.

It trains on windows of text (`forward`, `loss`), and serves requests from a cache (`serve`).

Shapes: B batch, S sequence, H query heads, K key/value heads, D head size, W width, V vocabulary,
T tokens of several requests, one behind the other.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Anything with the signature of F.scaled_dot_product_attention.
Attention = Callable[..., Tensor]


class Operators(NamedTuple):
    """What the model computes by, but for products of matrices. None of it has parameters.

    All but `attention` have the signatures of cudnn_ops, as far as the model uses them.
    """

    attention: Attention
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotary_embedding_qk: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def named(cls, name: str) -> "Operators":
        """Those of "cudnn_ops", or the stock ones of "torch"."""
        if name == "torch":
            return cls(
                F.scaled_dot_product_attention,
                _torch_rms_norm,
                _torch_add_rms_norm,
                _torch_swiglu,
                _torch_rotary_embedding_qk,
            )
        # Imported on demand: PyTorch's alone need no build of cudnn_ops.
        import cudnn_ops

        return cls(
            cudnn_ops.scaled_dot_product_attention,
            cudnn_ops.rms_norm,
            cudnn_ops.add_rms_norm,
            cudnn_ops.swiglu,
            cudnn_ops.rotary_embedding_qk,
        )


def _torch_rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor) -> Tensor:
    # PyTorch's fused norm wants both in one dtype.
    return F.rms_norm(x.to(weight.dtype), shape, weight)


def _torch_add_rms_norm(
    x: Tensor, residual: Tensor, shape: tuple[int, ...], weight: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms_norm(total, shape, weight), total


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _torch_rotary_embedding_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]  # for all heads

    def turn(x: Tensor) -> Tensor:
        first, second = x.split(rotary_dim // 2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        # The float32 angles promote; attention kernels want the activations' own dtype back.
        return torch.cat(turned, dim=-1).type_as(x)

    return turn(query), turn(key)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; `width` is the residual stream's, `sequence` the longest context.

    `mlp_width` is SwiGLU's inner width. By default its three matrices cost what a plain MLP's two
    do: 8/3 of the width.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    sequence: int
    vocabulary: int = 256
    mlp_width: int | None = None

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.width // 3 // 64) * 64


class Rotary(nn.Module):
    """Rotary position embedding: turns each pair of channels by an angle set by the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig, operators: Operators, base: float = 10_000.0) -> None:
        super().__init__()
        self.operators, self.head_size = operators, config.head_size
        pairs = torch.arange(config.head_size // 2) / (config.head_size // 2)
        angles = torch.outer(torch.arange(config.sequence), base**-pairs)  # [S, D/2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both [B, H, S, D] to the same shapes and dtypes; `positions` are int64 [B or 1, S]."""
        cos, sin = self.cos, self.sin
        if positions is None:
            cos, sin = (rows[None, : query.shape[2]] for rows in (cos, sin))
        return self.operators.rotary_embedding_qk(
            query, key, cos, sin, rotary_dim=self.head_size, positions=positions
        )


class SelfAttention(nn.Module):
    """Causal grouped-query attention around the injected operator."""

    def __init__(self, config: LlamaConfig, rotary: Rotary, operators: Operators) -> None:
        super().__init__()
        self.rotary, self.operators = rotary, operators
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
        # Transposed views keep the [B, S, H, D] memory: neither side of attention copies.
        query, key, value = (tensor.transpose(1, 2) for tensor in self.project(x))
        query, key = self.rotary(query, key)
        mixed = self.operators.attention(
            query, key, value, is_causal=True, enable_gqa=True
        )  # [B, H, S, D]
        return self.out(mixed.transpose(1, 2).flatten(2))

    def serve(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """[T, W] to [T, W]; `attend` is this layer's and finds the earlier tokens itself."""
        query, key, value = self.project(x)
        turned = self.rotary(
            *(tensor.transpose(0, 1)[None] for tensor in (query, key)), positions[None]
        )
        mixed = attend(*(tensor[0].transpose(0, 1) for tensor in turned), value)
        return self.out(mixed.flatten(1))


class Norm(nn.RMSNorm):
    """RMS norm over the width by the injected operators."""

    def __init__(self, config: LlamaConfig, operators: Operators) -> None:
        super().__init__(config.width)
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        return self.operators.rms_norm(x, self.normalized_shape, self.weight)

    def of_sum(self, update: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `update + x`, and that sum."""
        return self.operators.add_rms_norm(update, x, self.normalized_shape, self.weight)


class SwiGLU(nn.Module):
    """The gated feed-forward network, [B, S, W] to [B, S, W]."""

    def __init__(self, config: LlamaConfig, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operators.swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    """One pre-normalised layer, [B, S, W] to [B, S, W]."""

    def __init__(self, config: LlamaConfig, rotary: Rotary, operators: Operators) -> None:
        super().__init__()
        self.attention_norm = Norm(config, operators)
        self.attention = SelfAttention(config, rotary, operators)
        self.feed_forward_norm = Norm(config, operators)
        self.feed_forward = SwiGLU(config, operators)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x, self.attention(self.attention_norm(x)))

    def serve(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """[T, W] to [T, W], as SelfAttention.serve."""
        return self.rest(x, self.attention.serve(self.attention_norm(x), positions, attend))

    def rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention, whose result is `mixed`."""
        normed, x = self.feed_forward_norm.of_sum(mixed, x)
        return x + self.feed_forward(normed)


class Llama(nn.Module):
    """Token ids [B, S] to float32 logits [B, S, V]; S is at most `config.sequence`.

    Parameters are float32. On a GPU the forward pass runs under bf16 autocast, and
    the residual stream is bf16.
    """

    def __init__(self, config: LlamaConfig, operators: Operators) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config, operators)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(
            *(Block(config, rotary, operators) for _ in range(config.layers))
        )
        self.norm = Norm(config, operators)
        # Of the embedding's weight, to which the output projection is tied.
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 * config.width**-0.5)
        for name, weight in self.named_parameters():
            # What is added to the residual stream starts small, whatever the depth.
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, std=0.5 * (2 * config.layers * weight.shape[1]) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            x = self.embedding(tokens)
            if tokens.is_cuda:
                # Autocast leaves it float32. The layers add to it what is bf16.
                x = x.bfloat16()
            x = self.norm(self.blocks(x))
            return self.project(x, self.embedding.weight).float()

    def serve(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attention) -> Tensor:
        """Float32 logits [requests, V] of tokens [T], as `cudnn_ops.generation.Model` says.

        Computes in the parameters' dtype: under autocast each step would cast all of them anew.
        """
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)  # nn.Sequential does not tell
            x = block.serve(x, positions, partial(attend, layer))
        return self.project(self.norm(x[last]), self.embedding.weight).float()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean next-token cross entropy in nats over token windows [B, S + 1]."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def save(self, path: Path) -> None:
        """Writes sizes and weights into a file that `load` reads."""
        torch.save({"config": asdict(self.config), "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: Path, operators: Operators) -> "Llama":
        """The model that `save` wrote, on the CPU."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(LlamaConfig(**saved["config"]), operators)
        model.load_state_dict(saved["weights"])
        return model
