"""Modules of the operators, and putting them into a model that exists.

``replace_modules_(model)`` swaps what it knows by what it computes, not by its name::

    cudnn_ops.nn.replace_modules_(model, dry_run=True)  # says what it would do
    cudnn_ops.nn.replace_modules_(model)
"""

from cudnn_ops.nn.gated import SwiGLU
from cudnn_ops.nn.norm import LayerNorm, RMSNorm
from cudnn_ops.nn.replace import Replacement, replace_modules_

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "Replacement",
    "SwiGLU",
    "replace_modules_",
]
