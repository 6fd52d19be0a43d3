"""What patterns know of torch's functions: their arguments, and how models spell them.

One entry a computation, such as ``add`` for ``x + y``, ``torch.add(x, y)`` and ``x.add(y)``;
:mod:`cudnn_ops.compiler.nodes` reads graphs by them.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

_nn = torch._C._nn


class Operation(NamedTuple):
    """The arguments of a computation with their defaults, and what it is spelled as."""

    parameters: dict[str, Any]
    spellings: tuple[object, ...]


REQUIRED: Any = object()


def _operation(parameters: str, *spellings: object, **defaults: Any) -> Operation:
    names = {name: defaults.pop(name, REQUIRED) for name in parameters.split()}
    assert not defaults, defaults
    return Operation(names, spellings)


#: Names, where they begin with a dot, are those of methods.
OPERATIONS: dict[str, Operation] = {
    "add": _operation(
        "input other alpha", operator.add, torch.add, ".add", ".__add__", ".__radd__", alpha=1
    ),
    "sub": _operation("input other alpha", operator.sub, torch.sub, ".sub", ".__sub__", alpha=1),
    "mul": _operation("input other", operator.mul, torch.mul, ".mul", ".__mul__", ".__rmul__"),
    "addcmul": _operation("input tensor1 tensor2 value", torch.addcmul, ".addcmul", value=1),
    "div": _operation(
        "input other rounding_mode",
        *(operator.truediv, torch.div, torch.true_divide, ".div", ".true_divide", ".__truediv__"),
        rounding_mode=None,
    ),
    "pow": _operation("input exponent", operator.pow, torch.pow, ".pow", ".__pow__"),
    "square": _operation("input", torch.square, ".square"),
    "sqrt": _operation("input", torch.sqrt, ".sqrt"),
    "rsqrt": _operation("input", torch.rsqrt, ".rsqrt"),
    "reciprocal": _operation("input", torch.reciprocal, ".reciprocal"),
    "neg": _operation("input", operator.neg, torch.neg, ".neg", ".__neg__"),
    "mean": _operation(
        "input dim keepdim dtype", torch.mean, ".mean", dim=None, keepdim=False, dtype=None
    ),
    "var": _operation(
        "input dim unbiased keepdim correction",
        *(torch.var, ".var"),
        dim=None,
        unbiased=None,
        keepdim=False,
        correction=None,
    ),
    "max": _operation("input dim keepdim", torch.max, ".max", dim=None, keepdim=False),
    "amax": _operation("input dim keepdim", torch.amax, ".amax", dim=(), keepdim=False),
    "sigmoid": _operation("input", torch.sigmoid, F.sigmoid, ".sigmoid"),
    "tanh": _operation("input", torch.tanh, F.tanh, ".tanh"),
    "exp": _operation("input", torch.exp, ".exp"),
    "erf": _operation("input", torch.erf, torch.special.erf, ".erf"),
    "relu": _operation("input inplace", F.relu, torch.relu, ".relu", inplace=False),
    "relu6": _operation("input inplace", F.relu6, inplace=False),
    "hardtanh": _operation(
        "input min_val max_val inplace",
        *(F.hardtanh, _nn.hardtanh),
        min_val=-1.0,
        max_val=1.0,
        inplace=False,
    ),
    "clamp": _operation(
        "input min max", torch.clamp, torch.clip, ".clamp", ".clip", min=None, max=None
    ),
    "silu": _operation("input inplace", F.silu, _nn.silu, inplace=False),
    "hardswish": _operation("input inplace", F.hardswish, _nn.hardswish, inplace=False),
    "leaky_relu": _operation(
        "input negative_slope inplace",
        *(F.leaky_relu, _nn.leaky_relu),
        negative_slope=0.01,
        inplace=False,
    ),
    "gelu": _operation("input approximate", F.gelu, _nn.gelu, approximate="none"),
    "softmax": _operation(
        "input dim _stacklevel dtype",
        *(F.softmax, torch.softmax, torch.special.softmax, ".softmax"),
        dim=None,
        _stacklevel=3,
        dtype=None,
    ),
    "dropout": _operation(
        "input p training inplace", F.dropout, torch.dropout, p=0.5, training=True, inplace=False
    ),
    "masked_fill": _operation("input mask value", torch.masked_fill, ".masked_fill"),
    "where": _operation("condition input other", torch.where),
    "matmul": _operation(
        "input other",
        *(operator.matmul, torch.matmul, torch.bmm, torch.mm),
        *(".matmul", ".bmm", ".mm", ".__matmul__"),
    ),
    "baddbmm": _operation(
        "input batch1 batch2 beta alpha", torch.baddbmm, ".baddbmm", beta=1, alpha=1
    ),
    "linear": _operation("input weight bias", F.linear, _nn.linear, bias=None),
    "addmm": _operation("input mat1 mat2 beta alpha", torch.addmm, ".addmm", beta=1, alpha=1),
    "layer_norm": _operation(
        "input normalized_shape weight bias eps",
        *(F.layer_norm, torch.layer_norm),
        weight=None,
        bias=None,
        eps=1e-5,
    ),
    "rms_norm": _operation(
        "input normalized_shape weight eps", F.rms_norm, torch.rms_norm, weight=None, eps=None
    ),
    "group_norm": _operation(
        "input num_groups weight bias eps cudnn_enabled",
        *(F.group_norm, torch.group_norm),
        weight=None,
        bias=None,
        eps=1e-5,
        cudnn_enabled=True,
    ),
    "native_group_norm": _operation("input weight bias N C HxW group eps", torch.native_group_norm),
    "batch_norm": _operation(
        "input running_mean running_var weight bias training momentum eps",
        F.batch_norm,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    ),
    **{
        f"conv{dims}d": _operation(
            "input weight bias stride padding dilation groups",
            *(getattr(F, f"conv{dims}d"), getattr(torch, f"conv{dims}d")),
            bias=None,
            stride=1,
            padding=0,
            dilation=1,
            groups=1,
        )
        for dims in (1, 2, 3)
    },
    "max_pool2d": _operation(
        "input kernel_size stride padding dilation ceil_mode return_indices",
        *(F.max_pool2d, torch.max_pool2d),
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    ),
    "scaled_dot_product_attention": _operation(
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        F.scaled_dot_product_attention,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ),
    "multi_head_attention": _operation(
        "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v "
        "add_zero_attn dropout_p out_proj_weight out_proj_bias training key_padding_mask "
        "need_weights attn_mask use_separate_proj_weight q_proj_weight k_proj_weight "
        "v_proj_weight static_k static_v average_attn_weights is_causal",
        F.multi_head_attention_forward,
        training=True,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        use_separate_proj_weight=False,
        q_proj_weight=None,
        k_proj_weight=None,
        v_proj_weight=None,
        static_k=None,
        static_v=None,
        average_attn_weights=True,
        is_causal=False,
    ),
    "encoder_layer": _operation(
        "input embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first "
        "eps norm_weight_1 norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 "
        "ffn_weight_2 ffn_bias_2 mask mask_type",
        torch._transformer_encoder_layer_fwd,
        mask=None,
        mask_type=None,
    ),
    "transpose": _operation(
        "input dim0 dim1", torch.transpose, torch.swapaxes, ".transpose", ".swapaxes"
    ),
    "unsqueeze": _operation("input dim", torch.unsqueeze, ".unsqueeze"),
    "getitem": _operation("input index", operator.getitem, ".__getitem__"),
    "cat": _operation("tensors dim", torch.cat, torch.concat, dim=0),
    "stack": _operation("tensors dim", torch.stack, dim=0),
    "chunk": _operation("input chunks dim", torch.chunk, ".chunk", dim=0),
    "unbind": _operation("input dim", torch.unbind, ".unbind", dim=0),
    "narrow": _operation("input dim start length", torch.narrow, ".narrow"),
    "split": _operation("input size dim", torch.split, ".split", dim=0),
    "repeat_interleave": _operation(
        "input repeats dim", torch.repeat_interleave, ".repeat_interleave", dim=None
    ),
    "flatten": _operation(
        "input start_dim end_dim", torch.flatten, ".flatten", start_dim=0, end_dim=-1
    ),
    "unflatten": _operation("input dim sizes", torch.unflatten, ".unflatten"),
    "complex": _operation("real imag", torch.complex),
    "conj": _operation("input", torch.conj, ".conj"),
    "view_as_complex": _operation("input", torch.view_as_complex),
    "view_as_real": _operation("input", torch.view_as_real),
    "contiguous": _operation(
        "input memory_format", ".contiguous", memory_format=torch.contiguous_format
    ),
    "lt": _operation("input other", operator.lt, torch.lt, torch.less, ".lt", ".__lt__"),
    "gt": _operation("input other", operator.gt, torch.gt, torch.greater, ".gt", ".__gt__"),
    "and": _operation(
        "input other",
        *(operator.and_, torch.logical_and, torch.bitwise_and, ".logical_and", ".__and__"),
    ),
}
#: Calls that end in any number of sizes: ``x.view(2, 3)`` and ``x.view([2, 3])``.
WITH_SIZES = {
    **dict.fromkeys((".view", ".reshape", torch.reshape), "reshape"),
    **dict.fromkeys((".expand", torch.broadcast_to, ".broadcast_to"), "expand"),
    **dict.fromkeys((".permute", torch.permute), "permute"),
}
RENAMED = {"self": "input", "axis": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1"}
OTHER_NAMES = {"mul": {"value": "other"}, "split": {"split_size_or_sections": "size"}}
#: What writes to its first argument, and is otherwise the computation of that name.
IN_PLACE = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
    operator.iand: "and",
    F.relu_: "relu",
    torch.relu_: "relu",
    F.hardtanh_: "hardtanh",
    F.leaky_relu_: "leaky_relu",
}
