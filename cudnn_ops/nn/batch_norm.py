"""Torch's batch and instance norms on this package's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from cudnn_ops.ops.activation import activate, require_activation
from cudnn_ops.ops.batch_norm import BatchNormActivation, batch_norm
from cudnn_ops.ops.group_norm import NormActivation
from cudnn_ops.ops.instance_norm import instance_norm
from cudnn_ops.ops.sync_batch_norm import sync_batch_norm

if TYPE_CHECKING:
    from typing_extensions import Self


class BatchNormAct(_BatchNorm):
    """What the modules here share; each is also one of torch's."""

    activation: BatchNormActivation

    def __init__(
        self, *args: object, activation: BatchNormActivation = "none", **kwargs: object
    ) -> None:
        """Accepts the arguments of torch's module, and ``activation``."""
        require_activation(self, activation, get_args(BatchNormActivation))
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.activation = activation

    @classmethod
    def of(cls, norm: _BatchNorm, activation: BatchNormActivation = "none") -> Self:
        """Makes one with the parameters and the statistics of torch's, which both then have.

        Args:
            norm: a batch norm of torch's.
            activation: of the new one.
        """
        made = cls(
            *(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats),
            **cls._own_arguments(norm),
            activation=activation,
            device="meta",
        )
        made.weight, made.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        return made.train(norm.training)

    @classmethod
    def _own_arguments(cls, norm: _BatchNorm) -> dict[str, Any]:
        """What the class has beside torch's five."""
        return {}

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """[N, C, ...] to the same.

        Args:
            input: as in :func:`cudnn_ops.batch_norm`.
            residual: of the input's shape and dtype, added before the activation.
        """
        self._check_input_dim(input)
        is_training = self.training or self.running_mean is None
        is_tracking = not self.training or self.track_running_stats
        return self._norm(
            *(input, residual),
            self.running_mean if is_tracking else None,
            self.running_var if is_tracking else None,
            is_training,
            self._count_batch(),
        )

    def _count_batch(self) -> float:
        """How much of a batch's statistics the running ones take over; counts it in training."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _norm(
        self,
        input: Tensor,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        is_training: bool,
        momentum: float,
    ) -> Tensor:
        return batch_norm(
            *(input, running_mean, running_var, self.weight, self.bias),
            *(is_training, momentum, self.eps),
            residual=residual,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        ending = "" if self.activation == "none" else f", activation={self.activation}"
        return super().extra_repr() + ending


class BatchNorm1d(BatchNormAct, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` on :func:`cudnn_ops.batch_norm`; the same arguments and keys.

    Args:
        activation: ``"relu"`` or ``"none"``, of the norm and the residual; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import BatchNorm1d
        >>> BatchNorm1d(64, activation="relu")(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """


class BatchNorm2d(BatchNormAct, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` on :func:`cudnn_ops.batch_norm`; the same arguments and keys.

    Args:
        activation: ``"relu"`` or ``"none"``, of the norm and the residual; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import BatchNorm2d
        >>> x = torch.randn(8, 64, 7, 7)
        >>> BatchNorm2d(64, activation="relu")(x, residual=x).shape
        torch.Size([8, 64, 7, 7])
    """


class BatchNorm3d(BatchNormAct, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` on :func:`cudnn_ops.batch_norm`; the same arguments and keys.

    Args:
        activation: ``"relu"`` or ``"none"``, of the norm and the residual; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import BatchNorm3d
        >>> BatchNorm3d(64)(torch.randn(2, 64, 3, 7, 7)).shape
        torch.Size([2, 64, 3, 7, 7])
    """


class SyncBatchNorm(BatchNormAct):
    """``torch.nn.SyncBatchNorm`` on this package's operators, on CPUs too; the same arguments.

    In training the statistics are those of the batches of all processes of the group, which may
    have different sizes; each process has its own gradients of weight and bias, which
    ``DistributedDataParallel`` adds up. Without a process group it is a batch norm. It is no
    subclass of torch's, which ``DistributedDataParallel`` refuses on CPUs.

    Args:
        process_group: the processes; None stands for all.
        activation: ``"relu"`` or ``"none"``, of the norm and the residual; by keyword.

    Raises:
        ValueError: another activation.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import SyncBatchNorm
        >>> SyncBatchNorm(64, activation="relu")(torch.randn(8, 64, 7, 7)).shape
        torch.Size([8, 64, 7, 7])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """Accepts the arguments of ``torch.nn.SyncBatchNorm``, and ``activation``."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **kwargs)
        self.process_group = process_group

    @classmethod
    def _own_arguments(cls, norm: _BatchNorm) -> dict[str, Any]:
        return {"process_group": getattr(norm, "process_group", None)}

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replaces all batch norms of a module, torch's and this package's, by ones of this class.

        Args:
            module: a batch norm, or what has some; changed in place.
            process_group: of the new ones.

        Returns:
            The module, or what it is replaced by.
        """
        if isinstance(module, _BatchNorm):
            activation = module.activation if isinstance(module, BatchNormAct) else "none"
            made = cls.of(module, activation)
            made.process_group = process_group
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module

    def _norm(
        self,
        input: Tensor,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        is_training: bool,
        momentum: float,
    ) -> Tensor:
        group = self.process_group
        if is_training and self.training and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD if group is None else group
        else:
            group = None
        if group is None or dist.get_world_size(group) == 1:
            given = (input, residual, running_mean, running_var, is_training, momentum)
            return super()._norm(*given)
        # Autocast mixes dtypes; the sum is then one of torch's.
        if residual is not None and residual.dtype != input.dtype:
            activation: BatchNormActivation = "none"
            out = self._sync(input, None, running_mean, running_var, momentum, group, activation)
            return activate(out + residual, self.activation)
        statistics = (running_mean, running_var, momentum)
        return self._sync(input, residual, *statistics, group, self.activation)

    def _sync(
        self,
        input: Tensor,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        group: dist.ProcessGroup,
        activation: BatchNormActivation,
    ) -> Tensor:
        return sync_batch_norm(
            *(input, running_mean, running_var, self.weight, self.bias, momentum, self.eps),
            group=group,
            residual=residual,
            activation=activation,
        )


class InstanceNormAct(_InstanceNorm):
    """What the modules below share; each is also one of torch's."""

    activation: NormActivation

    def __init__(
        self, *args: object, activation: NormActivation = "none", **kwargs: object
    ) -> None:
        """Accepts the arguments of torch's module, and ``activation``."""
        require_activation(self, activation, get_args(NormActivation))
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.activation = activation

    @classmethod
    def of(cls, norm: _InstanceNorm) -> Self:
        """Makes one with the parameters and the statistics of torch's, which both then have.

        Args:
            norm: an instance norm of torch's.
        """
        made = cls(
            *(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats),
            device="meta",
        )
        made.weight, made.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        return made.train(norm.training)

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        """What torch's module calls with a batch."""
        return instance_norm(
            *(input, self.running_mean, self.running_var, self.weight, self.bias),
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        ending = "" if self.activation == "none" else f", activation={self.activation}"
        return super().extra_repr() + ending


class InstanceNorm1d(InstanceNormAct, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` on :func:`cudnn_ops.instance_norm`; the same arguments and keys.

    Args:
        activation: ``"silu"`` or ``"none"``, of the norm; by keyword.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import InstanceNorm1d
        >>> InstanceNorm1d(64, activation="silu")(torch.randn(2, 64, 9)).shape
        torch.Size([2, 64, 9])
    """


class InstanceNorm2d(InstanceNormAct, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` on :func:`cudnn_ops.instance_norm`; the same arguments and keys.

    Args:
        activation: ``"silu"`` or ``"none"``, of the norm; by keyword.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import InstanceNorm2d
        >>> InstanceNorm2d(64, affine=True)(torch.randn(2, 64, 7, 7)).shape
        torch.Size([2, 64, 7, 7])
    """


class InstanceNorm3d(InstanceNormAct, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` on :func:`cudnn_ops.instance_norm`; the same arguments and keys.

    Args:
        activation: ``"silu"`` or ``"none"``, of the norm; by keyword.

    Example:
        >>> import torch
        >>> from cudnn_ops.nn import InstanceNorm3d
        >>> InstanceNorm3d(64)(torch.randn(2, 64, 3, 7, 7)).shape
        torch.Size([2, 64, 3, 7, 7])
    """
