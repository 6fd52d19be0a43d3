"""The patterns, in the order in which they are looked for; a file each."""

from __future__ import annotations

from cudnn_ops.compiler.pattern import Pattern
from cudnn_ops.compiler.patterns.adaptive_norm import AdaptiveNorm
from cudnn_ops.compiler.patterns.attention import Attention
from cudnn_ops.compiler.patterns.attention_by_matmul import AttentionByMatmul
from cudnn_ops.compiler.patterns.batch_norm import BatchNorm
from cudnn_ops.compiler.patterns.convolution import Convolution
from cudnn_ops.compiler.patterns.encoder_layer import EncoderLayer
from cudnn_ops.compiler.patterns.gated import Gated
from cudnn_ops.compiler.patterns.group_norm import GroupNorm
from cudnn_ops.compiler.patterns.layer_norm import LayerNorm
from cudnn_ops.compiler.patterns.linear import Linear, Mlp
from cudnn_ops.compiler.patterns.max_pool import MaxPool
from cudnn_ops.compiler.patterns.multi_head_attention import MultiHeadAttention
from cudnn_ops.compiler.patterns.rms_norm import RmsNorm
from cudnn_ops.compiler.patterns.rotary import Rotary, RotaryQk

PATTERNS: tuple[Pattern, ...] = (
    AttentionByMatmul(),
    Attention(),
    MultiHeadAttention(),
    EncoderLayer(),
    # Before norms, which take a sum that they are of.
    RotaryQk(),
    Rotary(),
    # Before the norms that it is made of.
    AdaptiveNorm(),
    # Before RMS norm, which it is of numbers whose mean is 0.
    LayerNorm(),
    RmsNorm(),
    # Before what takes its SiLU (gated activations) or the sum that it is of (convolutions).
    GroupNorm(),
    Gated(),
    Convolution(),
    # Behind convolutions, after which it has its channels last.
    BatchNorm(),
    MaxPool(),
    Mlp(),
    Linear(),
)
