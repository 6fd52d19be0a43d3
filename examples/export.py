"""Compiles a model ahead of time; examples/cpp/run_package.cpp runs the result without Python."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cudnn_ops


def compile_package(
    model: nn.Module,
    example: tuple[torch.Tensor, ...],
    path: Path,
    dynamic_shapes: Any = None,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Writes a package of AOTInductor for the device that `model` is on, and returns its path."""
    # With gradients, norms would keep what their backward needs.
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=dynamic_shapes)
    if example[0].device.type == "cpu":
        # The kernels for CPUs are in Python; torch's own operators need none.
        program = program.run_decompositions(cudnn_ops.decompositions())
    return torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=inductor_configs
    )
