"""What a module has beside its forward, which whoever computes in its place would not run."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, which a replacement would not run."""
    return any(
        getattr(module, name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module does no more than torch's linear layer."""
    return type(module) is nn.Linear and not has_hooks(module)
