"""Kernels of the operators that are written in Python: on a CPU, and without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudnn_ops.ops.remembered import remembered


def register(name: str, *, fake: Callable[..., Any], cpu: Callable[..., Any]) -> None:
    """Registers the fake and the CPU kernel of an operator."""
    torch.library.register_fake(f"cudnn_ops::{name}", remembered(fake))
    torch.library.impl(f"cudnn_ops::{name}", "CPU", cpu)


def register_with_lse(name: str, *, fake: Callable[..., Any], cpu: Callable[..., Any]) -> None:
    """Registers those of ``name_with_lse``, and of ``name``, which is the first of its results."""

    def first_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: kernel(*args, **kwargs)[0]

    register(f"{name}_with_lse", fake=fake, cpu=cpu)
    register(name, fake=first_of(fake), cpu=first_of(cpu))
