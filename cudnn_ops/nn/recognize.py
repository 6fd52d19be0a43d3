"""Recognizing what modules and calls of a traced model compute, for fusing convolutions."""

from __future__ import annotations

import inspect
import operator

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cudnn_ops.nn.batch_norm import BatchNormAct
from cudnn_ops.nn.conv import ConvAct1d, ConvAct2d, ConvAct3d, _ConvAct
from cudnn_ops.nn.hooks import has_hooks
from cudnn_ops.ops.activation import Activation

_CONVS: dict[type[_ConvNd], type[_ConvAct]] = {
    nn.Conv1d: ConvAct1d,
    nn.Conv2d: ConvAct2d,
    nn.Conv3d: ConvAct3d,
}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Classes of this name, torchvision's and detectron2's: the statistics are buffers, as is the rest.
_FROZEN_NORM = "FrozenBatchNorm2d"
_STATISTICS = {"weight", "bias", "running_mean", "running_var"}
# torch.fx traces `x += y` as a sum that writes to nothing.
_ADDS = (operator.add, torch.add, "add", "add_")
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
#: Functions with an argument that says whether the model is being trained.
_DROPOUT_FUNCTIONS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    "stochastic_depth",  # torchvision's
}
#: Functions, methods and modules without arguments that matter.
_ACTIVATIONS: dict[object, Activation] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", nn.ReLU), "relu"),
    **dict.fromkeys((F.silu, nn.SiLU), "silu"),
    **dict.fromkeys((F.hardswish, nn.Hardswish), "hardswish"),
    F.relu6: "relu6",
}
_LEAKY_RELUS = (F.leaky_relu, F.leaky_relu_)
_CLAMPS = (torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_")
_HARDTANHS = (F.hardtanh, F.hardtanh_)
#: What else may follow a convolution as its activation, by the names of torch's functions.
_OTHERS = {
    *("sigmoid", "tanh", "elu", "celu", "selu", "mish", "prelu", "rrelu", "softplus", "glu"),
    *("softsign", "logsigmoid", "hardsigmoid", "threshold", "tanhshrink", "hardshrink"),
    *("leaky_relu", "hardtanh", "clamp", "clip"),
}


def counterpart(conv: nn.Module | None) -> type[_ConvAct] | None:
    """The type that replaces a convolution of torch, or of this package.

    A subclass is one if it computes what torch's does and has parameters of its own, as those have
    that do no more than fix some arguments.
    """
    if isinstance(conv, _ConvAct):
        return type(conv) if type(conv) in _CONVS.values() else None
    for base, new in _CONVS.items():
        if isinstance(conv, base):
            kind = type(conv)
            names = ("forward", "_conv_forward", "__call__", "weight", "bias")
            is_same = all(getattr(kind, n, None) is getattr(base, n, None) for n in names)
            return new if is_same and "weight" in conv._parameters else None
    return None


def is_norm(module: nn.Module | None, channels: int) -> bool:
    """Whether it is a batch norm of that many channels whose statistics do not change."""
    if module is None or has_hooks(module):
        return False
    is_ours = isinstance(module, BatchNormAct) and module.activation == "none"
    if type(module) in _NORMS or is_ours:
        assert isinstance(module, _BatchNorm)
        # Without them the batch's own statistics count, in eval mode too.
        is_known = module.running_mean is not None and module.running_var is not None
        return is_known and module.num_features == channels
    return is_frozen_norm(module) and module.get_buffer("running_mean").numel() == channels


def is_frozen_norm(module: nn.Module) -> bool:
    return (
        type(module).__name__ == _FROZEN_NORM
        and set(dict(module.named_buffers())) == _STATISTICS
        and not list(module.parameters())
        and isinstance(getattr(module, "eps", None), float)
    )


def is_add(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in _ADDS


def passes_on(node: fx.Node, module: nn.Module | None, of: fx.Node) -> bool:
    """Whether it is an identity in eval mode, such as dropout."""
    if not node.args or node.args[0] is not of:
        return False
    if module is not None:
        is_off = type(module) in _DROPOUTS and not module.training
        return (is_off or type(module) is nn.Identity) and not has_hooks(module)
    if not callable(node.target) or name_of(node) not in _DROPOUT_FUNCTIONS:
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False  # a function of that name with other arguments
    given.apply_defaults()
    return given.arguments.get("training") is False


def activation_of(node: fx.Node, module: nn.Module | None, of: fx.Node) -> Activation | None:
    """The activation by which a convolution can end that is computed of ``of``."""
    if not node.args or node.args[0] is not of:
        return None
    if node.op == "call_module":
        return None if module is None or has_hooks(module) else _of_module(module)
    if node.target in _ACTIVATIONS:
        return _ACTIVATIONS[node.target]
    if node.target is F.gelu:
        return _gelu(node.kwargs.get("approximate", "none"))
    # fx keeps what was written: by position, or by keyword, or not at all.
    if node.target in _LEAKY_RELUS:
        slope = _argument(node, 1, "negative_slope", 0.01)
        return "leaky_relu" if slope == 0.01 else None
    if node.target in _CLAMPS:
        return _clamp(_argument(node, 1, "min", None), _argument(node, 2, "max", None))
    if node.target in _HARDTANHS:
        return _clamp(_argument(node, 1, "min_val", -1), _argument(node, 2, "max_val", 1))
    return None


def is_other_activation(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it is one of torch's activations, with any arguments."""
    if module is not None:
        return type(module).__module__ == "torch.nn.modules.activation"
    return node.op in ("call_function", "call_method") and name_of(node).rstrip("_") in _OTHERS


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _of_module(module: nn.Module) -> Activation | None:
    if type(module) in _ACTIVATIONS:
        return _ACTIVATIONS[type(module)]
    if type(module) is nn.GELU:
        return _gelu(module.approximate)
    if type(module) is nn.LeakyReLU:
        return "leaky_relu" if module.negative_slope == 0.01 else None
    if type(module) in (nn.ReLU6, nn.Hardtanh):
        assert isinstance(module, nn.Hardtanh)
        return _clamp(module.min_val, module.max_val)
    return None


def _gelu(approximate: object) -> Activation:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _clamp(low: object, high: object) -> Activation | None:
    if isinstance(low, (int, float)) and low == 0:
        if high is None:
            return "relu"
        if isinstance(high, (int, float)) and high == 6:
            return "relu6"
    return None


def _argument(node: fx.Node, place: int, name: str, default: object) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
