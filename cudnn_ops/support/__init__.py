"""What cuDNN supports, on the GPU that is there or on one that a file describes."""

from cudnn_ops.support.device import (
    describe_device,
    devices,
    format_cudnn_version,
    offer_wheels,
    prepare,
)
from cudnn_ops.support.explanation import (
    CONVS,
    NORMS,
    Explanation,
    TensorSpec,
    conv_plan_keys,
    explain,
    meta_tensors,
    norm_plan_key,
    plan_key,
)

__all__ = [
    "CONVS",
    "NORMS",
    "Explanation",
    "TensorSpec",
    "conv_plan_keys",
    "describe_device",
    "devices",
    "explain",
    "format_cudnn_version",
    "meta_tensors",
    "norm_plan_key",
    "offer_wheels",
    "plan_key",
    "prepare",
]
