"""What cuDNN supports, on the live GPU or on one that a file describes."""

from cudnn_ops.support.device import (
    describe_device,
    devices,
    format_cudnn_version,
    offer_wheels,
    prepare,
)
from cudnn_ops.support.explanation import Explanation, explain, plan_key
from cudnn_ops.support.operators import CONVS, NORMS, OPERATORS
from cudnn_ops.support.specs import TensorSpec, meta_tensors

__all__ = [
    "CONVS",
    "NORMS",
    "OPERATORS",
    "Explanation",
    "TensorSpec",
    "describe_device",
    "devices",
    "explain",
    "format_cudnn_version",
    "meta_tensors",
    "offer_wheels",
    "plan_key",
    "prepare",
]
