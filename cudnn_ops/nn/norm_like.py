"""This package's batch and instance norms in place of torch's, and of subclasses of these."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cudnn_ops.nn.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAct,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    SyncBatchNorm,
)
from cudnn_ops.ops.activation import activate
from cudnn_ops.ops.batch_norm import BatchNormActivation

_BATCH_NORMS: dict[type[_BatchNorm], type[BatchNormAct]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
_OTHERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.SyncBatchNorm: SyncBatchNorm.of,
    nn.InstanceNorm1d: InstanceNorm1d.of,
    nn.InstanceNorm2d: InstanceNorm2d.of,
    nn.InstanceNorm3d: InstanceNorm3d.of,
}
#: Sizes behind the channels.
_POSITIONS = {nn.BatchNorm1d: (5,), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 3, 2)}


def norm_counterpart(module: nn.Module) -> nn.Module | None:
    """What computes the same as a batch or instance norm, with its parameters and statistics.

    None where there is nothing. A subclass has one if a copy of it computes the same on the CPU, in
    training and in eval mode, by its statistics and those that it keeps.
    """
    if type(module) in _OTHERS:
        return _OTHERS[type(module)](module)
    for base, kind in _BATCH_NORMS.items():
        if not isinstance(module, base):
            continue
        if type(module) is base:
            return kind.of(module)
        activation = _activation_of(module, base)
        return None if activation is None else kind.of(module, activation)
    return None


def _activation_of(module: _BatchNorm, base: type[_BatchNorm]) -> BatchNormActivation | None:
    # Of more arguments, one may be a mask, which is not there when it is tried.
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    stock = base(module.num_features, module.eps, module.momentum)
    if not set(module.state_dict()) <= set(stock.state_dict()):
        return None
    activations: tuple[BatchNormActivation, ...] = get_args(BatchNormActivation)
    for activation in activations:
        if _computes(module, base, activation):
            return activation
    return None


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _computes(module: _BatchNorm, base: type[_BatchNorm], activation: BatchNormActivation) -> bool:
    generator = torch.Generator().manual_seed(0)
    channels = module.num_features
    memo: dict[int, object] = {}
    for _, parameter in module.named_parameters():
        values = _draw(generator, channels)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for name, buffer in module.named_buffers():
        is_count = name == "num_batches_tracked"
        memo[id(buffer)] = torch.tensor(3) if is_count else _draw(generator, channels).abs()
    x = _draw(generator, 4, channels, *_POSITIONS[base]) * 1e-2  # small, so that eps shows
    try:
        probe = copy.deepcopy(module, memo)
        stock = base(
            *(channels, module.eps, module.momentum, module.affine, module.track_running_stats)
        )
        stock.load_state_dict(probe.state_dict())
        for is_training in (True, False):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = probe.train(is_training)(x.clone())
                expected = activate(stock.train(is_training)(x), activation)
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                return False
        return all(
            torch.allclose(mine.float(), other.float())
            for mine, other in zip(
                probe.state_dict().values(), stock.state_dict().values(), strict=True
            )
        )
    except Exception:  # what cannot be tried is not known
        return False
