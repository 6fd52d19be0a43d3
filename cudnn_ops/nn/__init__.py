"""Modules for the operators, and functions that put them into an existing model.

``replace_modules_(model)`` recognizes modules by what they compute, not by their names::

    cudnn_ops.nn.replace_modules_(model, dry_run=True)  # prints what it would do
    cudnn_ops.nn.replace_modules_(model)

``fuse_conv_bn_act_(model)`` returns a model in which a convolution, its batch norm, the residual
and the activation are one call::

    fused = cudnn_ops.nn.fuse_conv_bn_act_(model.eval())

``fuse_bn_act_(model)`` returns one to train, in which a batch norm, the residual and the ReLU are
one call.
"""

from cudnn_ops.nn.attention import Attention, Cache
from cudnn_ops.nn.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    SyncBatchNorm,
)
from cudnn_ops.nn.chains import UnfusedActivation
from cudnn_ops.nn.conv import ConvAct1d, ConvAct2d, ConvAct3d
from cudnn_ops.nn.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from cudnn_ops.nn.fp8 import Fp8Linear, Fp8RMSNorm, Fp8SwiGLU, convert_to_fp8_
from cudnn_ops.nn.fuse import FusedConv, fuse_conv_bn_act_
from cudnn_ops.nn.fuse_norm import FusedNorm, fuse_bn_act_
from cudnn_ops.nn.gated import PackedSwiGLU, SwiGLU
from cudnn_ops.nn.linear import FusedQKV, MergedLinear, MergedSwiGLU
from cudnn_ops.nn.mlp import MLP, LinearAct
from cudnn_ops.nn.moe import Experts, MoE, Router
from cudnn_ops.nn.norm import GroupNorm, LayerNorm, RMSNorm, UnitRMSNorm
from cudnn_ops.nn.replace import Replacement, replace_modules_
from cudnn_ops.nn.transformer import CrossAttentionBlock, TransformerBlock
from cudnn_ops.nn.vision import VisionTransformer

__all__ = [
    "MLP",
    "Attention",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Cache",
    "ConvAct1d",
    "ConvAct2d",
    "ConvAct3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossAttentionBlock",
    "Experts",
    "Fp8Linear",
    "Fp8RMSNorm",
    "Fp8SwiGLU",
    "FusedConv",
    "FusedNorm",
    "FusedQKV",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LinearAct",
    "MergedLinear",
    "MergedSwiGLU",
    "MoE",
    "PackedSwiGLU",
    "RMSNorm",
    "Replacement",
    "Router",
    "SwiGLU",
    "SyncBatchNorm",
    "TransformerBlock",
    "UnfusedActivation",
    "UnitRMSNorm",
    "VisionTransformer",
    "convert_to_fp8_",
    "fuse_bn_act_",
    "fuse_conv_bn_act_",
    "replace_modules_",
]
